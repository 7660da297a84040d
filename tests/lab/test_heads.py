"""Scales by heads: what they multiply, and the entropies that they are chosen by."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

import rope_ext
from lab.benchmarks.calibration import BOX, CHECKPOINTS
from lab.benchmarks.heads import QUERIES, SCALES, TRAINED, by_entropy, entropies, scaled
from rope_ext.methods import build_method


@pytest.fixture(params=CHECKPOINTS)
def model(request: pytest.FixtureRequest) -> Iterator[torch.nn.Module]:
    made = AutoModelForCausalLM.from_pretrained(BOX / request.param, dtype=torch.float32)
    yield made.eval().requires_grad_(False)


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 256, (1, count), generator=torch.Generator().manual_seed(seed))


def test_entropies_are_those_of_the_weights_of_transformers(model: torch.nn.Module) -> None:
    ids = tokens(TRAINED + 100)
    found = entropies(model, [ids[0].tolist()])[..., 0]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(input_ids=ids, use_cache=False, output_attentions=True).attentions
    last = torch.stack(weights)[:, 0, :, -QUERIES:].double()
    expected = -(last * last.clamp(min=1e-300).log()).sum(-1).mean(-1)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=0)


def test_scales_by_entropy_bring_it_back(model: torch.nn.Module) -> None:
    method = build_method("self_extend", factor=2, temperature=1.0)
    windows = [tokens(2 * TRAINED, seed)[0].tolist() for seed in (3, 4)]
    inside = [window[:TRAINED] for window in windows]
    target = entropies(model, inside)[..., 0]
    scales = by_entropy(model, method, windows, inside)
    with rope_ext.patched(model, method):
        before = entropies(model, windows)[..., 0]
        with scaled(model, scales):
            after = entropies(model, windows)[..., 0]
    reached = (scales > 0) & (scales < SCALES[-1])
    assert reached.sum() > 3
    assert (after - target)[reached].abs().max() < 0.1
    assert (before - target)[reached].abs().max() > 0.3
