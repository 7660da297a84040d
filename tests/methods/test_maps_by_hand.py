"""The maps of 2024 to 2026 with numbers worked out by hand, and against what they reduce to."""

from __future__ import annotations

import math

import pytest
import torch

import rope_ext
from rope_ext.methods import Rope

LLAMA3 = Rope.geometric(base=5e5, dim=128, length=8192)


def divided(method: rope_ext.FrequencyMethod, rope: Rope = LLAMA3) -> list[float]:
    """What every pair is divided by."""
    return (rope.inv_freq / method.inv_freq(rope)).tolist()


def test_mrrope_multiplies_the_radices_of_the_paper() -> None:
    # 64 ln(1303.8 / 32) / ln(5e5) = 18.08 and 64 ln(1303.8) / ln(5e5) = 34.98
    low, high = 18, 35
    for mode, exponents in (
        ("pro", [2 * (1 + d - low) / ((1 + high - low) * (high - low)) for d in range(low, high)]),
        ("uni", [1 / (high - low)] * (high - low)),
    ):
        found = divided(rope_ext.MrRoPE(factor=16, mode=mode))
        assert found[: low + 1] == [1] * (low + 1)
        for j in range(low, high):
            assert found[j] == pytest.approx(math.prod(16**e for e in exponents[: j - low]), 1e-12)
        assert found[high:] == pytest.approx([16] * 29, 1e-12)
    pro = divided(rope_ext.MrRoPE(factor=16))
    assert pro[26] == pytest.approx(16 ** (8 * 9 / (17 * 18)), rel=1e-12)
    assert rope_ext.MrRoPE(factor=16).attention_scaling(LLAMA3) == 0.1 * math.log(16) + 1


def test_mrrope_keeps_the_fastest_pair_where_none_turns_often() -> None:
    rope = Rope.geometric(base=1e4, dim=8, length=64)  # 10.2, 1.02, 0.1 and 0.01 turns
    assert divided(rope_ext.MrRoPE(factor=8), rope) == pytest.approx([1, 2, 8, 8], rel=1e-12)
    slow = Rope.geometric(base=1e4, dim=8, length=5)
    assert divided(rope_ext.MrRoPE(factor=8), slow) == pytest.approx([1, 8, 8, 8], rel=1e-12)


def test_longrope2_has_the_published_critical_pair_and_ntk_below_it() -> None:
    found = divided(rope_ext.LongRoPE2(factor=16))  # of 35 pairs with a full turn 30
    assert found[15] == pytest.approx(4, rel=1e-12) and found[:1] == [1]
    assert found[30:] == pytest.approx([16] * 34, rel=1e-12) and found[29] < 15
    stretched = divided(rope_ext.LongRoPE2(factor=16, critical=10, stretch=1.5))
    assert stretched[5] == pytest.approx(24**0.5, rel=1e-12)
    assert stretched[10:] == pytest.approx([24] * 54, rel=1e-12)
    last = rope_ext.LongRoPE2(factor=16, critical=63).inv_freq(LLAMA3)
    torch.testing.assert_close(last, rope_ext.NTK(factor=16).inv_freq(LLAMA3), rtol=1e-13, atol=0)
    every = rope_ext.LongRoPE2(factor=16, critical=0).inv_freq(LLAMA3)
    assert torch.equal(every, rope_ext.PI(factor=16).inv_freq(LLAMA3))
    scaling = rope_ext.LongRoPE2(factor=16).attention_scaling(LLAMA3)
    assert scaling == pytest.approx(math.sqrt(1 + 4 / 13))  # 16 = 2^4, 8192 = 2^13


def test_longrope2_takes_a_table_instead_of_a_critical_pair() -> None:
    table = [1 + 0.5 * i for i in range(64)]
    assert divided(rope_ext.LongRoPE2(factor=16, long_factor=table)) == pytest.approx(table)
    with pytest.raises(rope_ext.OptionError, match=r"critical=30 .*None where long_factor"):
        rope_ext.LongRoPE2(factor=16, long_factor=table, critical=30)
    short = rope_ext.LongRoPE2(factor=16, long_factor=table[:48])
    with pytest.raises(rope_ext.OptionError, match=r"longrope2: long_factor has 48 numbers.* 64"):
        short.inv_freq(LLAMA3)


def test_clipped_lets_the_slowest_pairs_fade_out() -> None:
    rope = Rope.geometric(base=1e4, dim=8, length=64)
    for factor in (1, 8):  # which changes nothing
        kept = rope_ext.Clipped(factor=factor, pairs=3).inv_freq(rope) / rope.inv_freq
        right = torch.tensor([1, 1, 0.5, 0], dtype=torch.float64)
        torch.testing.assert_close(kept, right, rtol=0, atol=1e-15)
    kept = rope_ext.Clipped(factor=8).inv_freq(LLAMA3) / LLAMA3.inv_freq
    assert int((kept == 1).sum()) == 45 and kept[-1] == 0  # 44, and the first of the 20
    assert kept[54] == pytest.approx((1 + math.cos(math.pi * 10 / 19)) / 2, rel=1e-12)


def test_dpe_has_the_published_groups_of_llama_3() -> None:
    method = rope_ext.DPE(factor=16).resolved(LLAMA3)
    assert method.scales == (4, 4, 2, 16, 32, 32, 16, 128)  # of the authors' example
    assert method.groups == (8,) * 8 and method.window == 1024
    assert rope_ext.DPE(factor=8).resolved(LLAMA3).scales == (2, 2, 1, 8, 16, 16, 8, 64)
    given = rope_ext.DPE(factor=1, scales=[2, 32, 32, 2, 2, 2, 2, 1]).resolved(LLAMA3)
    assert given.groups == (8,) * 8 and given.reached(LLAMA3) == 8192  # as for Llama 3.1
    assert rope_ext.DPE(factor=4, scales=[2, 3, 4]).resolved(LLAMA3).groups == (22, 21, 21)


def test_dpe_reaches_as_far_as_its_slow_pairs() -> None:
    rope = Rope.geometric(base=1e4, dim=8, length=64)  # 10.2, 1.02, 0.1 and 0.01 turns
    reached = rope_ext.DPE(factor=4, window=8, scales=[1, 1, 4, 2]).reached(rope)
    # The first two turn all the way round; of the last, m // 2 + 4 stays within 64 to m = 121.
    assert reached == 122
    with pytest.raises(rope_ext.OptionError, match=r"scales=\(4, 4, 4, 1\).*extends nothing on 64"):
        rope_ext.DPE(factor=4, window=8, scales=[4, 4, 4, 1]).reached(rope)


@pytest.mark.parametrize(("length", "mapped"), [(8192, 1036), (16384, 1993), (131072, 6204)])
def test_lampe_maps_to_what_the_authors_fitted(length: int, mapped: int) -> None:
    # 6204.41 / (1 + exp(2.46664 - 1.049310e-4 l)); ours is rounded to four digits
    method = rope_ext.LaMPE(factor=length / 8192).resolved(LLAMA3)
    assert method.mapped == pytest.approx(mapped, abs=1) and method.length == length
    assert rope_ext.LaMPE(factor=4, length=5000).resolved(LLAMA3).mapped == 1536
