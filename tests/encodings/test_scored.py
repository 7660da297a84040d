"""Encodings whose logits are more than a bias by distance: the papers' formulas, exactly."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import rope_ext
from rope_ext.attention import bands, reference
from rope_ext.attention import dispatch as attention
from rope_ext.attention.call import Block, Call, Pairs, RotatedBand, Scores
from rope_ext.methods.geometry import Distance
from tests.helpers.biases import parameters
from tests.helpers.models import tiny_llama
from tests.helpers.positions import EXACT, FAMILIES, logits
from tests.helpers.promises import (
    an_adapter_trains_it_along,
    is_saved_and_taken_out,
)
from tests.helpers.scored import SIZES, dense, patch

KINDS = ["llama", "qwen3", "mistral", "gemma2 scaled", "gpt_neox", "gpt_oss"]
SLOW = [pytest.mark.slow]


def fast(*names: str) -> list:
    """All names of :data:`SIZES`, those that are not given as slow tests."""
    return [pytest.param(name, marks=[] if name in names else SLOW) for name in SIZES]


@dataclass(frozen=True, eq=False, kw_only=True)
class Mixed(Scores):
    """Every part of the interface in one formula."""

    def logits(self, block: Block) -> torch.Tensor:
        weight = self.learned["weight"].to(block.content)
        seen = block.content.masked_fill(~block.visible, 0)
        mixed = torch.einsum("bhij,hg->bgij", seen, weight)
        return block.content + mixed + block.distance * weight[0, 0] * block.scale

    def more(self, weights: torch.Tensor, block: Block) -> torch.Tensor:
        far = (weights * block.distance).sum(-1, keepdim=True)
        return far * self.learned["value"].to(weights)


@pytest.mark.parametrize(
    ("band", "queries"),
    [(Distance(0, None), 50), (Distance(0, 13), 37), (Distance(0, None), 1)],
)
def test_blocks_are_the_oracle(band: Distance, queries: int, monkeypatch) -> None:
    """Values, and gradients of everything that has one, however long the blocks."""
    monkeypatch.setattr(bands, "ROWS", 10)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, queries, 16), (2, 2, 50, 16), (2, 2, 50, 12), (4,), (4, 4), (12,)]
    given = [torch.randn(size, generator=generator) for size in shapes]
    found = []
    for dtype, attend in (
        (torch.float32, attention.attend),
        (torch.float64, bands.attend),
        (torch.float64, reference.attend),
    ):
        tensors = [x.detach().to(dtype, copy=True).requires_grad_() for x in given]
        *qkv, sinks, weight, value = tensors
        call = Call(
            [RotatedBand(band, None, None)],
            Pairs(slice(0, 8), slice(8, 16)),
            0.25,
            start=3,
            sinks=sinks,
            scores=Mixed(learned={"weight": 0.3 * weight, "value": value}),
        )
        out = attend(*qkv, call)
        found.append([out, *torch.autograd.grad(out.sin().sum(), tensors)])
    for ours, again, right in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), right, atol=1e-4, rtol=1e-4)  # float32
        torch.testing.assert_close(again, right)


@pytest.mark.parametrize("name", fast("dape v2", "cope", "fire"))
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=SLOW if kind != "llama" else []) for kind in KINDS]
)
def test_logits_and_gradients_are_those_of_the_paper(kind: str, name: str, ids) -> None:
    family = FAMILIES[kind]
    model, plain = family.model(), family.model()
    patch(model, name, **family.options)
    learned = parameters(model)
    with dense(plain, family, name, torch.arange(90)[None], learned):
        right = plain(ids).logits
    found = model(ids).logits
    torch.testing.assert_close(found, right, **EXACT)
    of_both = [torch.autograd.grad(x.sin().sum(), list(learned.values())) for x in (found, right)]
    for one, other in zip(*of_both, strict=True):  # sums over 16,000 pairs
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3)
    assert (found - logits(plain, ids)).abs().max() > 0.01


@pytest.mark.parametrize("name", fast("cope"))
def test_it_is_trained_saved_reloaded_and_taken_out(name: str, ids, tmp_path) -> None:
    model = tiny_llama()
    before, plain = dict(model.state_dict()), logits(model, ids)
    patch(model, name)
    learned = {key: value.detach().clone() for key, value in parameters(model).items()}
    optimizer = torch.optim.SGD(list(parameters(model).values()), lr=0.01)
    losses = []
    for _ in range(2):
        loss = model(ids[:, :60], labels=ids[:, :60]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] < losses[0]
    moved = {key for key, x in parameters(model).items() if not torch.equal(learned[key], x)}
    still = {key for key in learned if key.endswith("second_bias")}  # changes no weight
    assert moved >= set(learned) - still
    is_saved_and_taken_out(model, before, plain, ids, tmp_path)


@pytest.mark.slow
def test_an_adapter_can_train_it_along(ids, tmp_path) -> None:
    names = an_adapter_trains_it_along(
        tiny_llama(), lambda base: patch(base, "cope"), ["rope_ext_bias"], ids, tmp_path
    )
    assert len([name for name in names if name.endswith("table")]) == 2


@pytest.mark.parametrize("name", fast("fire"))
def test_half_precision_and_autocast_are_close(name: str, ids) -> None:
    """Weights are computed in float32: bfloat16 rounds by 1/256, a few times over."""
    model = patch(tiny_llama(), name)
    want = logits(model, ids)
    size = want.abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        found = model(ids).logits
        found.float().sum().backward()
    assert (found.float() - want).abs().max() < 0.1 * size
    assert (logits(model.to(torch.bfloat16), ids).float() - want).abs().max() < 0.1 * size


@pytest.mark.parametrize(("name", "options"), [("cope", {}), ("fire", {"threshold": 8})])
def test_second_derivatives_are_right(name: str, options: dict, ids) -> None:
    tokens = ids[:1, :20]

    def gradient(kernel: str, move: float, again: bool = False) -> tuple:
        model = rope_ext.patch(tiny_llama(), name, kernel=kernel, **options).double()
        begin = model.get_input_embeddings()(tokens).detach()
        x = (begin + move * begin.roll(1)).requires_grad_()
        loss = model(inputs_embeds=x).logits.logsumexp(-1).sum()
        (g,) = torch.autograd.grad(loss, x, create_graph=again)
        return g, x, begin.roll(1)

    torch.manual_seed(0)
    g, x, way = gradient("auto", 0.0, again=True)
    (found,) = torch.autograd.grad((g * way).sum(), x)
    sides = []
    for move in (1e-3, -1e-3):  # norms are computed in float32
        torch.manual_seed(0)  # fire draws its parameters
        sides.append(gradient("auto", move)[0])
    want = (sides[0] - sides[1]) / 2e-3
    torch.testing.assert_close(found, want, rtol=0, atol=0.02 * float(want.abs().max()))
