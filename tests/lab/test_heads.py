"""Scales by heads: what they multiply, and the entropies that they are chosen by."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

import rope_ext
from lab.benchmarks.calibration import BOX, CHECKPOINTS
from lab.benchmarks.heads import (
    QUERIES,
    SCALES,
    TRAINED,
    by_entropy,
    entropies,
    learned,
    scaled,
)
from rope_eval.forward import score
from rope_eval.tune.fitness import Prompt
from rope_ext.methods import build_method


@pytest.fixture(params=CHECKPOINTS)
def model(request: pytest.FixtureRequest) -> Iterator[torch.nn.Module]:
    made = AutoModelForCausalLM.from_pretrained(BOX / request.param, dtype=torch.float32)
    yield made.eval().requires_grad_(False)


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 256, (1, count), generator=torch.Generator().manual_seed(seed))


def table(model: torch.nn.Module, value: float) -> torch.Tensor:
    config = model.config
    return torch.full((config.num_hidden_layers, config.num_attention_heads), value)


@torch.no_grad()
def logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("name", ["yarn", "self_extend"])
def test_the_same_scale_for_every_head_is_log_n(model: torch.nn.Module, name: str) -> None:
    ids = tokens(TRAINED + 200)
    with rope_ext.patched(model, name, factor=4, temperature=rope_ext.LogN(scale=1.5)):
        expected = logits(model, ids)
    with rope_ext.patched(model, name, factor=4, temperature=1.0):
        with scaled(model, table(model, 1.5)):
            torch.testing.assert_close(logits(model, ids), expected, atol=5e-4, rtol=0)
        assert (logits(model, ids) - expected)[:, TRAINED + 1 :].abs().max() > 0.01


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


def test_learning_lowers_the_loss_and_trains_nothing_else(model: torch.nn.Module) -> None:
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    method = build_method("yarn", factor=2, temperature=1.0)
    window = tokens(TRAINED + 64, 5)[0].tolist()

    prompt = Prompt("text", tuple(tokens(TRAINED + 64, 6)[0].tolist()), 5)

    def loss(scales: torch.Tensor) -> float:
        rows = (window, 64), (list(prompt.ids), prompt.count)
        with rope_ext.patched(model, method), scaled(model, scales):
            return sum(float(score(model, [row], tail)[0].mean()) for row, tail in rows)

    scales = learned(model, method, [window], [prompt], steps=6)
    assert loss(scales) < loss(torch.zeros_like(scales))
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in before.items())
