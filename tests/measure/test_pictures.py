"""Pictures: the numbers behind them against hand-computed cases, and that something is drawn."""

from __future__ import annotations

import math

import pytest
import torch

import rope_ext
from rope_eval.plots.methods import decay_at
from rope_ext.methods import Rope

ROPE = Rope.geometric(10000, 16, 128)  # 8 pairs; the first 3 turn fully: 128, 40.5, 12.8, 4.05


def test_decay() -> None:
    none = torch.zeros(1, dtype=torch.float64)
    assert decay_at(ROPE, rope_ext.RoPE(), 512, none).item() == 16  # twice the pairs
    at = torch.tensor([5.0, 40.0], dtype=torch.float64)
    by_hand = [2 * sum(math.cos(x * 10 ** (-i / 2)) for i in range(8)) for x in (5, 40)]
    assert decay_at(ROPE, rope_ext.RoPE(), 512, at).tolist() == pytest.approx(by_hand)
    assert decay_at(ROPE, rope_ext.PI(factor=4), 512, 4 * at).tolist() == pytest.approx(by_hand)
    near, far = decay_at(ROPE, rope_ext.ReRoPE(factor=4, window=5), 512, at).tolist()
    assert near == far == pytest.approx(by_hand[0])
