"""``temperature="ssmax"``: a number for every head, which is part of the model and can be trained.

The oracle is attention in float64 with dense logits, each multiplied by the formula of its head.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM

import rope_ext
from tests.helpers.models import LENGTH, tiny_llama
from tests.helpers.positions import (
    CACHES,
    EXACT,
    FAMILIES,
    METHODS,
    by_formula,
    logits,
)
from tests.helpers.promises import (
    an_adapter_trains_it_along,
    decodes_as_it_reads,
    documents_are_apart,
    generates_as_it_recomputes,
    learns,
    rows_are_as_alone,
    sees_nothing_later,
)

NAME = "rope_ext_temperature"
MADE: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 4},
    "dynamic_yarn": {"factor": 4, "length": 4 * LENGTH},
    "self_extend": {"factor": 4, **METHODS["self_extend"]},
    "rerope": {"factor": 4, **METHODS["rerope"]},
    "rope": {"bias": "alibi"},
    "nope": {},
}
"""A frequency method, one that follows sequences, two position methods and two encodings."""


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if f".{NAME}." in n}


def randomized(model: nn.Module, seed: int = 5) -> nn.Module:
    """Under a patch whose scales are all different, and some below 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in parameters(model).values():
            value.copy_(torch.rand(value.shape, generator=generator) * 4 - 1)
    return model


def patch(
    model: nn.Module, name: str = "yarn", length: int | None = None, **more: Any
) -> nn.Module:
    """``length``: of the temperature, not of the method; None: the trained length."""
    temperature = rope_ext.SSMax(length=length)
    return randomized(rope_ext.patch(model, name, temperature=temperature, **MADE[name], **more))


def tau(i: int, s: float, length: int = LENGTH) -> float:
    return 1 + s * max(0.0, math.log(i + 1) / math.log(length) - 1)


def factors(model: nn.Module, tokens: int) -> list[torch.Tensor]:
    """Of every layer: float64, ``[heads, tokens]``."""
    return [
        torch.tensor([[tau(i, s) for i in range(tokens)] for s in value.tolist()]).double()
        for value in parameters(model).values()
    ]


# --- the formula ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, 1.0, 2.5])
def test_the_initial_temperature_is_its_formula(scale: float) -> None:
    t = torch.arange(300, dtype=torch.float64)
    made = rope_ext.SSMax(length=LENGTH, scale=scale)
    assert made.at(t).tolist() == pytest.approx([tau(i, scale) for i in range(300)], rel=1e-12)
    assert (1 + scale * made.growth(t)).tolist() == pytest.approx(made.at(t).tolist(), rel=1e-12)


def test_beyond_the_trained_length_it_is_scalable_softmax() -> None:
    """Of 2501.19399: ``n ** (s z)``, and with a bias ``exp((s ln n + b) z)``."""
    for scale in (1.0, 1.7):
        s, b = scale / math.log(LENGTH), 1 - scale
        for n in (LENGTH, 100, 1000):
            assert tau(n - 1, scale) == pytest.approx(s * math.log(n) + b)
    z, n = 0.3, 200
    assert math.exp(tau(n - 1, 1.0) * z) == pytest.approx(n ** (z / math.log(LENGTH)))


def test_a_new_patch_is_log_n_and_leaves_the_trained_length_alone(ids) -> None:
    for name, options in MADE.items():
        model = tiny_llama()
        with rope_ext.patched(model, name, temperature="log_n", **options):
            right = logits(model, ids)
        with rope_ext.patched(model, name, temperature=1.0, attention_factor=1, **options):
            none = logits(model, ids)
        with rope_ext.patched(model, name, temperature="ssmax", **options):
            torch.testing.assert_close(logits(model, ids), right, **EXACT)
        given = {"temperature": rope_ext.SSMax(scale=0), "attention_factor": 1}
        with rope_ext.patched(model, name, **given, **options):
            assert torch.equal(logits(model, ids), none)
        # Whatever is learned, a text of the trained length is read as without it.
        with rope_ext.patched(model, name, temperature=1.0, **options):
            short = logits(model, ids[:, :LENGTH])
        assert torch.equal(logits(patch(model, name), ids[:, :LENGTH]), short)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scale": -1}, "scale=-1 is not valid; it must be a finite number of at least 0"),
        ({"scale": 101}, "at most 100"),
        ({"length": 1}, "length=1 is not valid"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(rope_ext.OptionError, match=message):
        rope_ext.SSMax(**given)


# --- in a model ----------------------------------------------------------------------------------


class Dense:
    """Llama's attention in float64, with every query multiplied by the factor of its head."""

    def __init__(self, factors: list[torch.Tensor]) -> None:
        self.factors = factors

    def __call__(self, module, query, key, value, attention_mask, scaling, **kwargs):
        groups = query.shape[1] // key.shape[1]
        q, k, v = (x.double() for x in (query, key, value))
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        tokens = q.shape[2]
        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        logits = q @ k.mT * scaling * self.factors[module.layer_idx][..., None]
        out = logits.masked_fill(hidden, -1e30).softmax(-1) @ v
        return out.transpose(1, 2).to(value.dtype), None


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_frequency_method_multiplies_every_head_by_its_own(ids, implementation: str) -> None:
    model = tiny_llama()
    model.set_attn_implementation(implementation)
    patch(model)
    found, by_head = logits(model, ids), factors(model, ids.shape[1])
    rope_ext.patch(model, "yarn", factor=4, replace=True)
    AttentionInterface.register("dense_by_head", Dense(by_head))
    model.set_attn_implementation("dense_by_head")
    torch.testing.assert_close(found, logits(model, ids), **EXACT)


@pytest.mark.parametrize("kernel", ["flash", "reference"])
@pytest.mark.parametrize("kind", ["llama", "smollm3", "gpt_oss"])
def test_a_position_method_multiplies_every_head_by_its_own(kind: str, kernel: str, ids) -> None:
    family, name = FAMILIES[kind], "self_extend"
    model, ids = family.model(), ids[:, :90]
    told = {"original_max_position_embeddings": LENGTH, "attention_factor": 1, "kernel": kernel}
    found = logits(patch(model, name, **told, **family.options), ids)
    layers = range(model.config.num_hidden_layers) if family.mapped is None else family.mapped
    by_head = dict(zip(layers, factors(model, 90), strict=True))
    rope_ext.unpatch(model)

    def scores(module: nn.Module, query: Any, logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        return logits * by_head[module.layer_idx][..., None]

    positions = torch.arange(90)[None].expand(2, -1)
    with by_formula(model, family, name, positions, log_n=None, scores=scores, **METHODS[name]):
        torch.testing.assert_close(found, logits(model, ids), **EXACT)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", MADE)
def test_cached_steps_equal_recomputation(name: str, cache: str, ids) -> None:
    decodes_as_it_reads(patch(tiny_llama(), name), cache, ids[:, :90], (70, 1, 18, 1))


@pytest.mark.parametrize("name", ["yarn", "self_extend", "nope"])
def test_rows_documents_and_generation_count_from_their_own_beginning(name: str, ids) -> None:
    model = patch(tiny_llama(), name, length=8)
    for side in ("left", "right"):
        rows_are_as_alone(model, side, ids[:, :90], with_positions=True)
    documents_are_apart(model, ids[:1, :90], (60, 30))
    sees_nothing_later(model, ids[:, :90])
    generates_as_it_recomputes(model, ids[:, :30])


# --- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["yarn", "self_extend"])
def test_an_optimizer_trains_it(name: str, ids) -> None:
    model = patch(tiny_llama(), name, length=8)
    learns(model, parameters(model), ids, tokens=60, lr=0.5)


@pytest.mark.parametrize("name", ["yarn", "self_extend"])
def test_an_adapter_trains_it_along(name: str, ids, tmp_path) -> None:
    def patched(base: nn.Module) -> nn.Module:
        return rope_ext.patch(base, name, temperature="ssmax", **MADE[name])

    names = an_adapter_trains_it_along(tiny_llama(), patched, [NAME], ids, tmp_path)
    assert len(names) == tiny_llama().config.num_hidden_layers


# --- the way back, copies, saving ----------------------------------------------------------------


@pytest.mark.parametrize("name", MADE)
def test_reloaded_to_the_bit(name: str, ids, tmp_path: Path, capfd) -> None:
    model = patch(tiny_llama(), name)
    model.save_pretrained(tmp_path)
    again = rope_ext.from_pretrained(tmp_path)
    assert torch.equal(logits(again, ids), logits(model, ids))
    assert "unexpected" not in "".join(capfd.readouterr()).lower()
    with pytest.raises(Exception, match="unknown to plain transformers"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
