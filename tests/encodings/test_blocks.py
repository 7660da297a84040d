"""Logits by content and distance: the kernel in blocks, and the dense oracle."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from rope_ext.attention import bands
from rope_ext.attention import dispatch as attention
from rope_ext.attention.call import Call, Pairs, RotatedBand
from rope_ext.encodings import Heads
from rope_ext.encodings.scores import Block, Scores
from rope_ext.methods import Rope, build_method
from rope_ext.methods.geometry import Distance
from tests.helpers.bands import dense
from tests.helpers.encodings import ALL

ROPE = Rope.geometric(1e4, 16, 64)
NAMES = ["mixed", "fire", "dape", "cope", "shaw", "deberta", "transformer_xl"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Mixed(Scores):
    """Every part of the interface in one formula."""

    def logits(self, block: Block) -> torch.Tensor:
        weight = self.learned["weight"].to(block.content)
        seen = block.content.masked_fill(~block.visible, 0)
        mixed = torch.einsum("bhij,hg->bgij", seen, weight)
        return block.content + 0.3 * mixed + block.distance * weight[0, 0] * block.scale

    def more(self, weights: torch.Tensor, block: Block) -> torch.Tensor:
        far = (weights * block.distance).sum(-1, keepdim=True)
        return far * self.learned["value"].to(weights)


def scores(name: str, learned: dict[str, torch.Tensor]) -> Scores | None:
    if name == "mixed":
        return Mixed(learned=learned)
    return build_method(ALL[name].name, **ALL[name].options).scores(4, ROPE, learned)


@pytest.mark.every
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("queries", "last"), [(50, None), (37, 13), (1, None), (1, 30)])
def test_blocks_are_the_oracle(name: str, queries: int, last: int | None, monkeypatch) -> None:
    """Values, and gradients of everything that has one, however long the blocks."""
    monkeypatch.setattr(bands, "ROWS", 10)
    generator = torch.Generator().manual_seed(0)
    begun = {"weight": torch.empty(4, 4), "value": torch.empty(12)}
    if name != "mixed":
        made = build_method(ALL[name].name, **ALL[name].options)
        begun = made.initial(Heads(4, 16, 12), ROPE)
    shapes = [(2, 4, queries, 16), (2, 2, 50, 16), (2, 2, 50, 12), (4,)]
    shapes += [value.shape for value in begun.values()]
    given = [torch.randn(size, generator=generator) for size in shapes]
    given[4:] = [
        x.abs() if key in ("r1", "r2") else x for key, x in zip(begun, given[4:], strict=True)
    ]
    found = []
    for dtype, attend in (
        (torch.float32, attention.attend),
        (torch.float64, bands.attend),
        (torch.float64, dense),
    ):
        tensors = [x.detach().to(dtype, copy=True).requires_grad_() for x in given]
        *qkv, sinks = tensors[:4]
        call = Call(
            [RotatedBand(Distance(0, last), None, None)],
            Pairs(slice(0, 8), slice(8, 16)),
            0.25,
            start=3,
            sinks=sinks,
            temperature=torch.linspace(1, 2, queries, dtype=dtype),
            scores=scores(name, dict(zip(begun, tensors[4:], strict=True))),
        )
        out = attend(*qkv, call)
        grads = torch.autograd.grad(out.sin().sum(), tensors, materialize_grads=True)
        found.append([out, *grads])
    for ours, again, right in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), right, atol=2e-3, rtol=1e-3)  # float32
        torch.testing.assert_close(again, right)
