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

CASTS: dict[str, Callable[[nn.Module], Any]] = {
    "bfloat16, float": lambda m: m.bfloat16().float(),
    "half, float": lambda m: m.half().float(),
    "bfloat16, half, bfloat16, double, float": lambda m: (
        m.bfloat16().half().bfloat16().double().float()
    ),
    "bfloat16": lambda m: m.bfloat16(),
}
PATCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": ("yarn", {}),
    "bias": ("yarn", {"bias": "alibi"}),
    "dynamic_yarn": ("dynamic_yarn", {}),
    "growing": ("dynamic_ntk", {"mode": "growing"}),
    "rerope": ("rerope", {}),
    "rerope over ntk": ("rerope", {"frequency": "ntk"}),
}


def is_frequency(name: str) -> bool:
    return name.endswith("inv_freq")


def as_trained(model: nn.Module, cast: Callable[[nn.Module], Any]) -> nn.Module:
    """What the cast makes of ``model``, with the frequencies as they were before it."""
    before = {k: v.clone() for k, v in model.named_buffers() if is_frequency(k)}
    cast(model)
    for name, value in before.items():
        path, _, last = name.rpartition(".")
        model.get_submodule(path)._buffers[last] = value
    return model


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).logits


def same(cast: Callable[[nn.Module], Any], make: Callable[[], nn.Module], ids, **patch) -> None:
    """A model that was cast and then patched is one whose frequencies no cast has touched."""
    right = rope_ext.patch(as_trained(make(), cast), **patch)
    model = make()
    cast(model)
    before = snapshot(model)
    rope_ext.patch(model, **patch)
    assert torch.equal(logits(model, ids), logits(right, ids))
    assert any("had rounded them" in note for note in rope_ext.describe(model).notes)
    assert not any("had rounded them" in note for note in rope_ext.describe(right).notes)
    rope_ext.unpatch(model)
    assert not changed(before, snapshot(model))


@pytest.mark.parametrize("cast", CASTS)
def test_every_cast_is_noticed(ids, cast: str) -> None:
    same(CASTS[cast], tiny_llama, ids, method="yarn", factor=4)


@pytest.mark.parametrize("patch", PATCHES)
def test_every_kind_of_patch_takes_the_frequencies_as_trained(ids, patch: str) -> None:
    method, more = PATCHES[patch]
    if "frequency" in more:
        more = {"frequency": rope_ext.NTK(factor=2)}
    same(CASTS["bfloat16, float"], tiny_llama, ids, method=method, factor=4, **more)


@pytest.mark.parametrize("method", ["yarn", "rerope"])
@pytest.mark.parametrize("cast", ["bfloat16", "half, float"])
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


def test_such_frequencies_are_not_replaced_by_the_trained_ones_after_a_cast() -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.rotary_emb.inv_freq.copy_(torch.linspace(1, 0.01, 8))
    model.bfloat16()
    before = copy.deepcopy(snapshot(model))
    with pytest.raises(rope_ext.UnsupportedModelError, match=r"other values.*float32"):
        rope_ext.patch(model, "yarn", factor=4)
    assert not changed(before, snapshot(model))
