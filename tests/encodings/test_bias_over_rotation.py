"""A bias added to a rotation that stays: under yarn, under rerope, under none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import rope_ext
from rope_ext.patching import current_patch
from tests.families.checks import changed, snapshot
from tests.helpers.biases import FORMULAS, parameters, patch
from tests.helpers.models import tiny_llama
from tests.helpers.positions import (
    EXACT,
    FAMILIES,
    Family,
    by_formula,
    decoded,
    logits,
)
from tests.helpers.scored import SCORED

OVER = {  # what stays, and the effective distances of it
    "rope": ({}, {"window": 999, "log_n": None}),
    "yarn": ({"factor": 4}, {"window": 999, "log_n": None}),
    "yarn, log_n": ({"factor": 4, "temperature": "log_n"}, {"window": 999}),
    "rerope": ({"factor": 4, "window": 5}, {"window": 5}),
}


@contextmanager
def right(
    model: nn.Module, family: Family, over: str, bias: str, learned: dict
) -> Iterator[nn.Module]:
    """``model``, not patched, with the bias on top of what stays, dense and in float64."""

    def added(module: nn.Module, d: torch.Tensor) -> torch.Tensor | None:
        own = f".{module.layer_idx}."
        of_layer = {n.split(".")[-1]: p for n, p in learned.items() if own in n or bias == "t5"}
        return FORMULAS[bias](d, model.config.num_attention_heads, of_layer)

    method = rope_ext.YaRN(factor=4) if over.startswith("yarn") else None
    under = nullcontext() if method is None else rope_ext.patched(model, method, **family.options)
    tokens = torch.arange(90)[None]
    with under, by_formula(model, family, "rerope", tokens, bias=added, **OVER[over][1]):
        yield model


def biased(model: nn.Module, over: str, bias: str, **options: object) -> nn.Module:
    return patch(model, over.split(",")[0], bias=bias, **OVER[over][0], **options)


SLOW = [pytest.mark.slow]
CASES = [
    ("llama", "rerope", "t5"),
    pytest.param("llama", "yarn", "alibi", marks=SLOW),
    pytest.param("llama", "rope", "t5", marks=SLOW),
    pytest.param("llama", "yarn, log_n", "kerple_log", marks=SLOW),
    *(
        pytest.param(kind, over, bias, marks=SLOW)
        for kind in ("qwen3", "mistral", "gemma2 scaled", "gpt_neox", "gpt_oss scaled")
        for over, bias in (("rope", "kerple_power"), ("yarn", "t5"), ("rerope", "alibi"))
    ),
]


@pytest.mark.parametrize(("kind", "over", "bias"), CASES)
def test_logits_and_gradients_are_those_of_the_dense_bias(kind, over, bias, ids) -> None:
    family = FAMILIES[kind]
    model, plain = family.model(), family.model()
    biased(model, over, bias, **family.options)
    learned = parameters(model)
    with right(plain, family, over, bias, learned):
        want = plain(ids).logits
    found = model(ids).logits
    torch.testing.assert_close(found, want, **EXACT)
    if learned:
        values = list(learned.values())
        of_both = [torch.autograd.grad(x.sin().sum(), values) for x in (found, want)]
        for one, other in zip(*of_both, strict=True):  # sums over 16,000 pairs
            torch.testing.assert_close(one, other, atol=2e-3, rtol=1e-3)


def test_a_bias_may_hide_distances(monkeypatch: pytest.MonkeyPatch, ids) -> None:
    """As the reference, which asks no kernel what a row has that sees nothing of a tile."""
    own = rope_ext.ALiBi.bias

    def bias(self: rope_ext.ALiBi, distance: torch.Tensor, *given: object) -> torch.Tensor:
        return own(self, distance, *given).masked_fill(distance >= 10, -torch.inf)

    monkeypatch.setattr(rope_ext.ALiBi, "bias", bias)
    for dtype in (torch.float32, torch.float64):
        slow, fast = (
            patch(
                tiny_llama().to(dtype), "rerope", bias="alibi", factor=4, window=20, kernel=kernel
            )
            for kernel in ("reference", "flash")
        )
        want = logits(slow, ids)
        torch.testing.assert_close(logits(fast, ids), want, **EXACT)
        torch.testing.assert_close(decoded(fast, ids, [40, *[1] * 50]), want, **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("over", ["yarn", "rerope"])
def test_fire_which_asks_where_a_query_is_goes_over_a_rotation(over: str, ids) -> None:
    model, plain = tiny_llama(), tiny_llama()
    torch.manual_seed(0)
    rope_ext.patch(model, over, bias=rope_ext.FIRE(threshold=20), **OVER[over][0])
    learned = parameters(model)

    def scores(module: nn.Module, *given: torch.Tensor) -> torch.Tensor:
        own = f".{module.layer_idx}."
        of_layer = {n.split(".")[-1]: p.double() for n, p in learned.items() if own in n}
        return SCORED["fire"](of_layer, *given, {"threshold": 20.0})

    method = rope_ext.YaRN(factor=4)
    under = rope_ext.patched(plain, method) if over == "yarn" else nullcontext()
    tokens = torch.arange(90)[None]
    with (
        under,
        by_formula(plain, FAMILIES["llama"], "rerope", tokens, scores=scores, **OVER[over][1]),
    ):
        want = logits(plain, ids)
    torch.testing.assert_close(logits(model, ids), want, **EXACT)
    torch.testing.assert_close(decoded(model, ids, [40, 1, 1, 48]), want, **EXACT)


@pytest.mark.parametrize(
    "over", ["yarn", *(pytest.param(name, marks=SLOW) for name in ("rope", "rerope"))]
)
def test_saved_reloaded_described_and_taken_back(over: str, ids, tmp_path, capfd) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path)  # which writes into the configuration
    before, plain = snapshot(model), logits(model, ids)
    biased(model, over, "t5")
    want = logits(model, ids)
    shown = str(rope_ext.describe(model))
    assert f"by {over}(" in shown and "bias: t5, added to the logits there" in shown
    record = current_patch(model).record
    assert "bias='t5'" in record.call()
    model.save_pretrained(tmp_path)
    with pytest.raises(Exception, match="unknown to plain transformers"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    again = rope_ext.from_pretrained(tmp_path)
    assert torch.equal(logits(again, ids), want)
    assert current_patch(again).record.same(record)
    assert "unexpected" not in "".join(capfd.readouterr()).lower()
    rope_ext.unpatch(model)
    assert changed(before, snapshot(model)) == set() and torch.equal(logits(model, ids), plain)


@pytest.mark.slow
def test_a_bias_and_layers_go_together(ids) -> None:
    family = Family("llama", mapped=(1,))
    model, plain = family.model(), family.model()
    patch(model, "rope", bias="t5", layers=[1])
    with right(plain, family, "rope", "t5", parameters(model)):
        want = logits(plain, ids)
    torch.testing.assert_close(logits(model, ids), want, **EXACT)
    assert list(parameters(model)) == ["model.rope_ext_bias.beta"]
