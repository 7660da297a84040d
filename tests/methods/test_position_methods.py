"""The position methods against their papers' formulas, written out for single pairs of tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rope_ext
from rope_ext.methods import NTK, Map, PositionMethod, Rope, build_method
from tests.helpers.distances import FORMULAS, formula

LLAMA2 = Rope.geometric(base=1e4, dim=128, length=4096)


def constants(method: PositionMethod) -> dict[str, Any]:
    others = {"log_n", "attention_factor", "temperature", "published"}
    others |= {"factor"} if method.name != "jet_long" else set()
    return {k: v for k, v in method.options().items() if k not in others and v is not None}


def at(to: Map, t: torch.Tensor) -> torch.Tensor:
    return to(t) if callable(to) else torch.full_like(t, to)


def distances(method: PositionMethod, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the bands make of every query and key, and how many bands show the pair."""
    t = torch.arange(tokens)
    found = torch.full((tokens, tokens), math.inf, dtype=torch.float64)
    count = torch.zeros(tokens, tokens, dtype=torch.int64)
    for band in method.bands():
        seen = band.geometry.sees(t[:, None], t)
        away = at(band.query, t.double())[:, None] - at(band.key, t.double())
        found = torch.where(seen, away, found)
        count += seen
    return found, count


sizes = st.integers(1, 40)
METHODS = st.one_of(
    st.builds(rope_ext.ReRoPE, factor=st.just(4), window=sizes),
    st.builds(rope_ext.LeakyReRoPE, factor=st.just(4), window=sizes, k=st.floats(1, 50)),
    st.builds(rope_ext.SelfExtend, factor=st.just(4), window=sizes, group=st.integers(1, 12)),
    st.builds(rope_ext.JetLong, factor=st.floats(1.01, 9), window=sizes, step=sizes),
    st.builds(
        lambda local, more: rope_ext.DualChunk(factor=4, chunk=local + more, local=local),
        st.integers(1, 20),
        st.integers(1, 20),
    ),
    st.builds(
        lambda window, more: rope_ext.STRING(shift=window + more, window=window),
        st.integers(1, 20),
        st.integers(0, 20),
    ),
    st.builds(
        lambda length, head, mapped, tail: rope_ext.LaMPE(
            factor=4, length=length + mapped, head=head, mapped=mapped, tail=tail
        ),
        *(sizes,) * 4,
    ),
    st.builds(rope_ext.LMInfinite, factor=st.just(4), window=sizes, sinks=st.integers(0, 12)),
)


@settings(max_examples=75, deadline=None)
@given(method=METHODS, tokens=st.integers(1, 90))
def test_every_pair_is_seen_once_at_the_distance_of_the_paper(
    method: PositionMethod, tokens: int
) -> None:
    method = method.resolved(LLAMA2)  # every constant is given: nothing may change
    right = formula(method.name, torch.arange(tokens), **constants(method))
    found, count = distances(method, tokens)
    assert torch.equal(count, (right < math.inf).long())
    torch.testing.assert_close(found, right, rtol=0, atol=1e-10)


@pytest.mark.every
@pytest.mark.parametrize(
    ("name", "factor", "length", "right"),
    [
        ("rerope", 4, 4096, {"window": 2048}),
        ("rerope", 16, 4096, {"window": 2048}),
        ("rerope", 4, 64, {"window": 32}),
        ("leaky_rerope", 4, 4096, {"window": 512, "k": 15872 / 3584}),
        ("leaky_rerope", 8, 512, {"window": 64, "k": 4032 / 448}),
        ("self_extend", 2, 4096, {"window": 1024, "group": 5}),  # 7168 / 1706.67 = 4.2
        ("self_extend", 8, 512, {"window": 128, "group": 19}),  # 3968 / 213.33 = 18.6
        ("self_extend", 4, 4096, {"window": 1024, "group": 10}),  # 9.0, and it is to stay below
        ("jet_long", 4, 32768, {"factor": 4, "window": 2048, "step": 32768}),
        ("jet_long", 2.5, 512, {"factor": 2.5, "window": 128, "step": 512}),
        # Llama 3 at its 8192: 0.7574 / (1 + exp(2.4666 - 0.8596 s)) trained lengths
        ("lampe", 4, 8192, {"length": 32768, "head": 1024, "mapped": 4501, "tail": 200}),
        ("lampe", 8, 512, {"length": 4096, "head": 64, "mapped": 383, "tail": 12}),
        ("dual_chunk", 4, 4096, {"chunk": 3072, "local": 512}),
        ("dual_chunk", 4, 64, {"chunk": 48, "local": 8}),
        ("string", 1, 4096, {"shift": 1366, "window": 128}),
        ("string", 1.5, 4096, {"shift": 2176, "window": 128}),  # 6144 - 4096 + 128
        ("string", 1, 64, {"shift": 22, "window": 4}),
        ("lm_infinite", 4, 4096, {"window": 4096, "sinks": 10}),
    ],
)
def test_defaults_follow_from_factor_and_trained_length(name, factor, length, right) -> None:
    rope = Rope.geometric(base=1e4, dim=128, length=length)
    method = build_method(name, factor=factor).resolved(rope)
    assert constants(method) == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize(
    ("factor", "scales"), [(16, (4, 4, 2, 16, 32, 32, 16, 128)), (5, (2, 2, 1, 5, 10, 10, 5, 40))]
)
def test_dpe_on_llama3_has_the_published_group_sizes_rounded_up(factor, scales) -> None:
    llama3 = Rope.geometric(base=5e5, dim=128, length=8192)
    assert build_method("dpe", factor=factor).resolved(llama3).scales == scales


CAPACITY = {
    # Every distance that is used was trained, at the target length and (these two) at any.
    "rerope": (1.01, 64.0),
    "dual_chunk": (1.01, 64.0),
    "leaky_rerope": (1.01, 64.0),
    "self_extend": (1.01, 64.0),
    "jet_long": (1.01, 64.0),
    "string": (1.0, 1.87),
}


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(sorted(CAPACITY)), length=st.integers(16, 300), share=st.floats(0, 1))
def test_no_distance_within_the_extended_context_is_untrained(name, length, share: float) -> None:
    least, most = CAPACITY[name]
    rope = Rope.geometric(base=1e4, dim=16, length=length)
    method = build_method(name, factor=least + share * (most - least)).resolved(rope)
    last = method.target_length(rope) - 1
    largest = max(FORMULAS[name](last, n, **constants(method)) for n in range(last + 1))
    assert largest < length
    if name == "self_extend":
        w, group, target = method.window, method.group, method.target_length(rope)
        assert w + (target - w) / group <= 2 * length / 3 + 1e-9
        assert group == 1 or w + (target - w) / (group - 1) > 2 * length / 3 - 1e-9  # the smallest
    if name == "leaky_rerope" and last > 10 * length:
        assert largest > length - 1.2  # nothing of the trained range is left unused


@settings(max_examples=30, deadline=None)
@given(method=METHODS, length=st.integers(2, 60), factor=st.floats(1.01, 4))
def test_the_reach_is_the_longest_text_of_trained_distances(method, length, factor: float) -> None:
    rope, method = Rope.geometric(base=1e4, dim=16, length=length), replace(method, factor=factor)
    target = method.target_length(rope)
    found = formula(method.name, torch.arange(target), **constants(method.resolved(LLAMA2)))
    largest = found.masked_fill(found == math.inf, 0).amax(1).cummax(0).values
    right = int((largest <= length + 1e-6).sum())  # the cap of a window as long counts
    try:
        assert method.reached(rope) == right
    except rope_ext.OptionError as error:
        assert right <= length + 1 or "smaller" in str(error)
        assert length < target and method.name in str(error)


@pytest.mark.parametrize("cls", [rope_ext.SelfExtend, rope_ext.DPE])
def test_published_takes_the_default_temperature_away(cls: type) -> None:
    t = torch.tensor([0, 4095, 16777215], dtype=torch.float64)  # 4096 squared, less one
    found = cls(factor=2).query_scaling(t, LLAMA2)
    torch.testing.assert_close(found, torch.tensor([1, 1, 2.0]).double(), rtol=1e-12, atol=0)
    assert cls(factor=2, published=True).query_scaling(t, LLAMA2) is None
    assert cls(factor=2, published=True) == cls(factor=2, temperature=1)
    assert cls(factor=2, published=True, temperature="log_n") == cls(factor=2, temperature="log_n")


UNFIT: list[tuple[str, dict[str, Any], str]] = [
    ("leaky_rerope", {"window": 4096}, r"window=4096 .*smaller than the trained length.*4096"),
    ("self_extend", {"window": 2731}, r"window=2731 .*two thirds of the trained length"),
    ("dpe", {"groups": [32, 31]}, r"groups=\(32, 31\) .*make up all 64"),
    ("dpe", {"scales": [2] * 65}, r"scales=.*at most 64 numbers"),
    ("lampe", {"mapped": 16384}, r"mapped=16384 .*below length=16384"),
    ("dual_chunk", {"chunk": 512}, r"local=512 .*smaller than chunk=512"),
    ("string", {"shift": 100, "window": 101, "factor": 1}, r"window=101 .*at most shift=100"),
    ("string", {"factor": 4}, r"factor=4 .*at most 1.96, unless shift is given.*'rerope'"),
]


@pytest.mark.parametrize(("name", "given", "message"), UNFIT)
def test_options_that_do_not_go_with_the_trained_length_are_refused(name, given, message) -> None:
    method = build_method(name, **{"factor": 4, **given})
    with pytest.raises(rope_ext.OptionError, match=message):
        method.resolved(LLAMA2)


def test_only_frequency_methods_go_under_a_position_method(model) -> None:
    for under, message in (
        (rope_ext.ReRoPE(factor=2), "must be a frequency method"),
        ("ntk", r"NTK\(factor=2\)"),
        (rope_ext.DynamicNTK(factor=2), "length=TOKENS"),
    ):
        with pytest.raises(rope_ext.OptionError, match=message):
            rope_ext.patch(model, "rerope", factor=4, frequency=under)
    with pytest.raises(rope_ext.OptionError, match="leave one of them out"):
        rope_ext.patch(model, "yarn", factor=4, frequency=NTK(factor=2))
    with pytest.raises(rope_ext.OptionError, match="'reference'"):
        rope_ext.patch(model, "rerope", factor=4, kernel="fast")


def test_a_window_that_extends_nothing_is_refused_with_the_distance_in_use() -> None:
    with pytest.raises(rope_ext.OptionError, match="distances up to 100;"):
        rope_ext.ReRoPE(factor=4, window=100).reached(Rope.geometric(base=1e4, dim=16, length=64))
