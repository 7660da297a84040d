"""Pictures: the numbers behind them, against hand-computed cases."""

from __future__ import annotations

import math

import pytest
import torch

import rope_ext
from rope_eval.plots.pictures import bias_at, decay_at, rotates
from rope_ext.methods import Rope

ROPE = Rope.geometric(10000, 16, 128)  # 8 pairs; the first 3 turn fully: 128, 40.5, 12.8, 4.05
SHORT = Rope.geometric(1e4, 16, 64)
AT = torch.tensor([0.0, 1.0, 40.0, 199.0], dtype=torch.float64)


def test_decay() -> None:
    none = torch.zeros(1, dtype=torch.float64)
    assert decay_at(ROPE, rope_ext.RoPE(), 512, none).item() == 16  # twice the pairs
    at = torch.tensor([5.0, 40.0], dtype=torch.float64)
    by_hand = [2 * sum(math.cos(x * 10 ** (-i / 2)) for i in range(8)) for x in (5, 40)]
    assert decay_at(ROPE, rope_ext.RoPE(), 512, at).tolist() == pytest.approx(by_hand)
    assert decay_at(ROPE, rope_ext.PI(factor=4), 512, 4 * at).tolist() == pytest.approx(by_hand)
    near, far = decay_at(ROPE, rope_ext.ReRoPE(factor=4, window=5), 512, at).tolist()
    assert near == far == pytest.approx(by_hand[0])


def test_what_is_added_by_hand() -> None:
    alibi = bias_at(SHORT, rope_ext.ALiBi(), 2, 200, AT)
    assert alibi.tolist() == [[-d * m for d in AT.tolist()] for m in (2**-4, 2**-8)]
    assert bias_at(SHORT, rope_ext.NoPE(), 2, 200, AT).tolist() == [[0, 0, 0, 0]]


def test_encodings_that_turn_decay_as_they_turn() -> None:
    """XPos fades; 3D-RPE rotates within chunks of 10, and by an angle for each chunk."""
    at = torch.tensor([0.0, 5.0, 12.0], dtype=torch.float64)
    pairs = [(10000.0 ** (-i / 8), (i / 8 + 0.4) / 1.4) for i in range(8)]
    by_hand = [
        2 * sum(zeta ** (d / 512) * math.cos(d * theta) for theta, zeta in pairs)
        for d in at.tolist()
    ]
    assert decay_at(SHORT, rope_ext.XPos(), 200, at).tolist() == pytest.approx(by_hand)
    chunked = rope_ext.RPE3D(chunk=10, base=100.0)  # the last of 26 tokens is the 6th of chunk 2
    by_hand = []
    for n in (25, 20, 13):
        angle = 100.0**-2 - 100.0 ** -(n // 10)
        by_hand.append(2 * sum(math.cos((5 - n % 10) * theta - angle) for theta, _ in pairs))
    assert decay_at(SHORT, chunked, 26, at).tolist() == pytest.approx(by_hand)
    assert rotates(SHORT, chunked) and rotates(SHORT, rope_ext.XPos())
