"""Encodings, biases and temperatures of encoders, which read texts in both directions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.t5.modeling_t5 import T5Attention

import rope_ext
from tests.helpers.both_directions import (
    CLOSE,
    FAMILIES,
    Layer,
    attention_modules,
    encoder,
    in_both_directions,
    states,
    tokens,
    whole,
)
from tests.helpers.models import LENGTH
from tests.helpers.positions import padded

Learned = dict[str, torch.Tensor]


def slopes(heads: int) -> torch.Tensor:
    return 2.0 ** (-8 / heads * torch.arange(1, heads + 1, dtype=torch.float64))


def alibi(seen: Layer, learned: Learned) -> torch.Tensor:
    return seen.logits - slopes(seen.query.shape[1])[:, None, None] * seen.distance.abs()


def t5(seen: Layer, learned: Learned) -> torch.Tensor:
    table = torch.cat((learned["beta"], learned["ahead"]), 1)
    given = {"bidirectional": True, "num_buckets": 8, "max_distance": 20}
    bucket = T5Attention._relative_position_bucket(-seen.distance[:, 0], **given)
    return seen.logits + table[:, bucket].movedim(1, 0)


def kerple_log(seen: Layer, learned: Learned) -> torch.Tensor:
    r1, r2 = (learned[name][:, None, None] for name in ("r1", "r2"))
    return seen.logits - r1 * torch.log(1 + r2 * seen.distance.abs())


def kerple_power(seen: Layer, learned: Learned) -> torch.Tensor:
    r1, r2 = (learned[name][:, None, None] for name in ("r1", "r2"))
    return seen.logits - r1 * seen.distance.abs() ** r2


def sandwich(seen: Layer, learned: Learned) -> torch.Tensor:
    heads = seen.query.shape[1]
    frequencies = 10000.0 ** (-2 * torch.arange(1, 65, dtype=torch.float64) / 128)
    total = torch.cos(seen.distance[..., None] * frequencies).sum(-1) - 64
    return seen.logits + total / (8 / heads * torch.arange(1.0, heads + 1))[:, None, None]


def at_distance(table: torch.Tensor, later: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """Rows of tables (``[..., distances, columns]``), from distance 0 and from 1 on."""
    of_earlier = table[..., distance.clamp(0, table.shape[-2] - 1), :]
    of_later = later[..., (-distance - 1).clamp(0, later.shape[-2] - 1), :]
    return torch.where((distance >= 0)[..., None], of_earlier, of_later)


def shaw(seen: Layer, learned: Learned) -> tuple[torch.Tensor, torch.Tensor]:
    of_key, of_value = (
        at_distance(learned[name], learned[f"{name}_ahead"], seen.distance[:, 0])
        for name in ("key", "value")
    )
    more = torch.einsum("bhid,bijd->bhij", seen.query, of_key)
    return seen.logits + seen.scale * more, of_value


def deberta(seen: Layer, learned: Learned) -> torch.Tensor:
    of_key, of_query = (
        at_distance(learned[name], learned[f"{name}_ahead"], seen.distance[0, 0])
        for name in ("key", "query")
    )
    more = torch.einsum("bhid,hijd->bhij", seen.query, of_key)
    more = more + torch.einsum("bhjd,hijd->bhij", seen.key, of_query)
    return (seen.logits + seen.scale * more) / math.sqrt(3)


def transformer_xl(seen: Layer, learned: Learned) -> torch.Tensor:
    r, u, v = (learned[name] for name in ("r", "u", "v"))
    pairs = r.shape[-1] // 2
    frequencies = 10000.0 ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
    angle = seen.distance[0, 0, ..., None] * frequencies
    places = torch.einsum("hdw,ijw->hijd", r, torch.cat((angle.sin(), angle.cos()), -1))
    more = torch.einsum("bhid,hijd->bhij", seen.query + v[:, None], places)
    return seen.logits + seen.scale * (more + (u[:, None] @ seen.key.mT))


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "alibi": (alibi, {}),
    "t5": (t5, {"num_buckets": 8, "max_distance": 20}),
    "kerple_log": (kerple_log, {}),
    "kerple_power": (kerple_power, {}),
    "sandwich": (sandwich, {}),
    "shaw": (shaw, {"clip": 7}),
    "deberta": (deberta, {"clip": 7}),
    "transformer_xl": (transformer_xl, {}),
    "nope": (lambda seen, learned: seen.logits, {}),
}


def randomized(model: nn.Module) -> list[Learned]:
    """Give the learned parameters other values; returns those of every layer, in float64."""
    found = []
    with torch.no_grad():
        for number, module in enumerate(attention_modules(model)):
            holder = getattr(module, "rope_ext_bias", getattr(model, "rope_ext_bias", None))
            own = dict(holder.named_parameters()) if holder is not None else {}
            generator = torch.Generator().manual_seed(0 if holder is None else number)
            if getattr(model, "rope_ext_bias", None) is None or number == 0:
                for value in own.values():
                    value.copy_(0.1 + torch.rand(value.shape, generator=generator))
            found.append({name: value.detach().double() for name, value in own.items()})
    return found


def oracle(
    model: nn.Module, ids: torch.Tensor, name: str | None, learned: list[Learned], formula: Any
) -> torch.Tensor:
    of_module = dict(zip(attention_modules(model), learned, strict=True))
    places = torch.arange(ids.shape[1])[None]

    def scores(seen: Layer) -> Any:
        return formula(seen, of_module[seen.module])

    with in_both_directions(model, name, places, 0 * places, scores=scores):
        return states(model, ids)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("family", ["EuroBertModel", *FAMILIES])
def test_encodings_equal_their_formula_in_both_directions(name: str, family: str) -> None:
    formula, options = CASES[name]
    model, ids = whole(family).double(), tokens(60)[None]
    with rope_ext.patched(model, name, factor=2, **options):
        learned = randomized(model)
        found = states(model, ids)
    wanted = oracle(model, ids, "unturned", learned, formula)
    torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("name", ["alibi", "t5", "kerple_log"])
def test_a_bias_is_added_to_the_rotation(name: str) -> None:
    formula, options = CASES[name]
    model, ids = encoder().double(), tokens(60)[None]
    bias = rope_ext.T5(**options) if name == "t5" else name
    with rope_ext.patched(model, "rope", bias=bias):
        learned = randomized(model)
        found = states(model, ids)
    wanted = oracle(model, ids, None, learned, formula)
    torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("name", ["alibi", "t5", "shaw", "sinusoidal"])
def test_a_padded_or_packed_text_is_the_text_alone(name: str) -> None:
    model = encoder()
    rope_ext.patch(model, name, factor=2)
    randomized(model)
    texts = [tokens(50), tokens(23, 1)]
    for side in ("left", "right"):
        ids, mask, _ = padded(texts, side)
        found = states(model, ids, attention_mask=mask)
        for row, text in enumerate(texts):
            alone = states(model, text[None])[0]
            torch.testing.assert_close(found[row][mask[row] == 1], alone, **CLOSE)
    number = torch.tensor([0] * 50 + [1] * 23)  # both in one row, kept apart by a mask
    given = {"attention_mask": (number[:, None] == number)[None, None]}
    given["position_ids"] = torch.cat([torch.arange(50), torch.arange(23)])[None]
    found = states(model, torch.cat(texts)[None], **given)[0]
    for part, text in zip(found.split([50, 23]), texts, strict=True):
        torch.testing.assert_close(part, states(model, text[None])[0], **CLOSE)


@pytest.mark.parametrize("name", ["t5", "shaw", "kerple_log"])
def test_learned_parameters_have_the_gradients_of_the_formula(name: str) -> None:
    _, options = CASES[name]
    model, ids = encoder().double(), tokens(40)[None]
    rope_ext.patch(model, name, factor=2, **options)
    randomized(model)
    parameters = [value for path, value in model.named_parameters() if "rope_ext" in path]
    weights = torch.randn(40, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def loss() -> torch.Tensor:
        return (model(ids)[0] * weights[:, : model.config.hidden_size]).sum()

    found = torch.autograd.grad(loss(), parameters)
    step = 1e-3  # norms compute in float32
    for value, grad in zip(parameters, found, strict=True):
        with torch.no_grad():
            flat, where = value.view(-1), int(grad.abs().argmax())
            flat[where] += step
            more = loss()
            flat[where] -= 2 * step
            less = loss()
            flat[where] += step
        expected = float(more - less) / (2 * step)
        assert float(grad.flatten()[where]) == pytest.approx(expected, rel=1e-2)


def test_log_n_counts_the_tokens_of_the_text() -> None:
    model, ids = encoder().double(), tokens(90)[None]
    places = torch.arange(90)[None]
    with in_both_directions(model, None, places, 0 * places, log_n=LENGTH):
        wanted = states(model, ids)
    with rope_ext.patched(model, "rope", temperature="log_n"):
        torch.testing.assert_close(states(model, ids), wanted, **CLOSE)
    with rope_ext.patched(model, "rope", temperature="ssmax"):  # starts from log_n
        torch.testing.assert_close(states(model, ids), wanted, **CLOSE)


@pytest.mark.parametrize("temperature", ["log_n", "llama4", "ssmax"])
def test_temperatures_change_nothing_within_the_trained_length(temperature: str) -> None:
    model, ids = encoder(), tokens(LENGTH)[None]
    wanted = states(model, ids)
    with rope_ext.patched(model, "rope", temperature=temperature):
        torch.testing.assert_close(states(model, ids), wanted, **CLOSE)


def test_learned_parameters_for_later_keys_are_needed(ids) -> None:
    from tests.helpers.models import tiny_llama

    model = rope_ext.patch(tiny_llama(), "t5", factor=2)
    with pytest.raises(rope_ext.UnsupportedModelError, match="earlier keys"), torch.no_grad():
        model(ids, is_causal=False)


def test_logits_of_your_own_are_refused_unless_they_are_made_for_later_keys() -> None:
    from rope_ext.encodings import Encoding

    class Own(Encoding):
        name = "own_logits"

        def logits(self, block: Any, learned: Any) -> torch.Tensor:
            return block.content - block.distance

    with pytest.raises(rope_ext.UnsupportedModelError, match="earlier keys"):
        rope_ext.patch(encoder(), Own(factor=2))
