"""Frequencies that a cast rounded before the patch are built again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import rope_ext
from tests.families.checks import changed, snapshot
from tests.helpers.models import tiny_llama
from tests.helpers.positions import logits

CASTS: dict[str, Callable[[nn.Module], Any]] = {
    "bfloat16, float": lambda m: m.bfloat16().float(),
    "half, bfloat16, float": lambda m: m.half().bfloat16().float(),  # rounds more than either
    "bfloat16, half, bfloat16, double, float": lambda m: (
        m.bfloat16().half().bfloat16().double().float()
    ),
    "bfloat16": lambda m: m.bfloat16(),
}
PATCHES: dict[str, dict[str, Any]] = {
    "yarn": {},
    "yarn with a bias": {"method": "yarn", "bias": "alibi"},
    "dynamic_yarn": {},
    "growing": {"method": "dynamic_ntk", "mode": "growing"},
    "rerope": {},
    "rerope over ntk": {"method": "rerope", "frequency": rope_ext.NTK(factor=2)},
}


def untouched() -> nn.Module:
    """A model with frequencies that each of these casts rounds in another way."""
    return tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 1e6})


def as_trained(model: nn.Module, cast: Callable[[nn.Module], Any]) -> nn.Module:
    """What the cast makes of ``model``, with the frequencies as they were before it."""
    before = {k: v.clone() for k, v in model.named_buffers() if k.endswith("inv_freq")}
    cast(model)
    for name, value in before.items():
        path, _, last = name.rpartition(".")
        model.get_submodule(path)._buffers[last] = value
    return model


CASES = [*((cast, "yarn") for cast in CASTS), *(("bfloat16, float", patch) for patch in PATCHES)]


@pytest.mark.every
@pytest.mark.parametrize(("cast", "patch"), CASES)
def test_a_model_that_was_cast_is_patched_as_if_its_frequencies_were_not(
    cast: str, patch: str, ids
) -> None:
    options = {"method": patch, "factor": 4, **PATCHES[patch]}
    right = rope_ext.patch(as_trained(untouched(), CASTS[cast]), **options)
    model = untouched()
    CASTS[cast](model)
    before = snapshot(model)
    rope_ext.patch(model, **options)
    assert torch.equal(logits(model, ids), logits(right, ids))
    assert any("had rounded them" in note for note in rope_ext.describe(model).notes)
    assert not any("had rounded them" in note for note in rope_ext.describe(right).notes)
    rope_ext.unpatch(model)
    assert not changed(before, snapshot(model))


@pytest.mark.parametrize("method", ["yarn", "rerope"])
@pytest.mark.parametrize("cast", ["bfloat16", "half, bfloat16, float"])
def test_what_was_left_or_refused_comes_back_after_a_cast(method: str, cast: str) -> None:
    """Also the frequencies of layers that the patch does not change."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    model = Gemma3ForCausalLM(
        Gemma3TextConfig(**sizes, **layers, **heads, max_position_embeddings=64)
    )
    rope_ext.patch(model, method, factor=4)
    CASTS[cast](model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with rope_ext.unpatched(model):
        pass
    with rope_ext.patched(model, "pi", factor=2, replace=True):
        pass
    with pytest.raises(rope_ext.OptionError):
        rope_ext.patch(model, "string", factor=40, replace=True)
    assert not changed(before, dict(model.named_buffers()))


@pytest.mark.parametrize(
    "values",
    [torch.linspace(1, 0.01, 8), 2.0 ** -torch.arange(8)],
    ids=["not representable", "representable"],
)
@pytest.mark.parametrize("double", [False, True])
def test_frequencies_that_somebody_put_there_stay(values: torch.Tensor, double: bool) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.rotary_emb.inv_freq.copy_(values)
    if double:
        model.double()
    rope_ext.patch(model, "rerope", factor=4)
    assert torch.equal(model.model.rotary_emb.inv_freq, values.float())
    assert not any("rounded" in note for note in rope_ext.describe(model).notes)


@pytest.mark.parametrize(
    "values", [torch.linspace(1, 0.01, 8), 10050 ** -torch.arange(0, 1, 1 / 8)]
)
def test_such_frequencies_are_not_replaced_by_the_trained_ones_after_a_cast(values) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.rotary_emb.inv_freq.copy_(values)
    model.bfloat16()
    before = copy.deepcopy(snapshot(model))
    with pytest.raises(rope_ext.UnsupportedModelError, match=r"other values.*float32"):
        rope_ext.patch(model, "yarn", factor=4)
    assert not changed(before, snapshot(model))
