"""Pictures: the numbers behind them against hand-computed cases, and that something is drawn."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import rope_ext
from rope_eval.plots import methods as panels
from rope_eval.plots import pictures
from rope_eval.plots.attention import (
    by_distance,
    choose_windows,
    octaves,
)
from rope_eval.plots.methods import decay_at
from rope_ext.methods import Rope
from rope_ext.saving import checkpoints as models
from tests.helpers.checkpoint import TRAINED, save_checkpoint

ROPE = Rope.geometric(10000, 16, 128)  # 8 pairs; the first 3 turn fully: 128, 40.5, 12.8, 4.05
TEXT = [Path(__file__)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("tiny")))


def test_decay() -> None:
    none = torch.zeros(1, dtype=torch.float64)
    assert decay_at(ROPE, rope_ext.RoPE(), 512, none).item() == 16  # twice the pairs
    at = torch.tensor([5.0, 40.0], dtype=torch.float64)
    by_hand = [2 * sum(math.cos(x * 10 ** (-i / 2)) for i in range(8)) for x in (5, 40)]
    assert decay_at(ROPE, rope_ext.RoPE(), 512, at).tolist() == pytest.approx(by_hand)
    assert decay_at(ROPE, rope_ext.PI(factor=4), 512, 4 * at).tolist() == pytest.approx(by_hand)
    near, far = decay_at(ROPE, rope_ext.ReRoPE(factor=4, window=5), 512, at).tolist()
    assert near == far == pytest.approx(by_hand[0])


METHODS = [rope_ext.YaRN(factor=4), rope_ext.ReRoPE(factor=4)]


# --- pictures of a model with weights ------------------------------------------------------------


def measured(monkeypatch, kind: str, checkpoint: str, path: Path) -> tuple[dict, Any]:
    """The lines of a picture, and what its panel gets to draw."""
    found, drawn = [], pictures.KINDS[kind]

    def spy(axes: object, *given: Any) -> None:
        found.extend(given)
        drawn.draw(axes, *given)

    monkeypatch.setitem(pictures.KINDS, kind, replace(drawn, draw=spy))
    pictures.draw(kind, checkpoint, METHODS, path, text=TEXT, windows=2)
    _, lines, length, what = found
    assert length == 4 * TRAINED
    return lines, what


def test_attention_is_that_of_the_model_under_each_method(
    monkeypatch, checkpoint: str, tmp_path: Path
) -> None:
    lines, found = measured(monkeypatch, "attention", checkpoint, tmp_path / "one.png")
    model, tokenizer = models.load_model(checkpoint), models.load_tokenizer(checkpoint)
    text, edges = choose_windows(tokenizer, TEXT, 4 * TRAINED, 2), octaves(TRAINED, 4 * TRAINED)
    assert list(found) == [*lines, panels.TRAINED]
    seen = [by_distance(model, text.at(4 * TRAINED), edges)]
    for method in METHODS:
        with rope_ext.patched(model, method):
            seen.append(by_distance(model, text.at(4 * TRAINED), edges))
    seen.append(by_distance(model, text.at(TRAINED), edges[:-2]))
    for shown, right in zip(found.values(), seen, strict=True):
        assert shown.shares.equal(right.shares) and shown.edges == right.edges
    assert not torch.allclose(seen[0].shares, seen[1].shares, atol=1e-3)
