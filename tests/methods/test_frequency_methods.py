"""The frequency methods against transformers, the published numbers and exact arithmetic."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding

from rope_ext.errors import OptionError, RopeExtError
from rope_ext.methods import (
    ABF,
    NTK,
    PI,
    BaseTruncation,
    DynamicNTK,
    DynamicYaRN,
    FrequencyMethod,
    LongRoPE,
    NTKByParts,
    PRoPE,
    ReRoPE,
    Resonance,
    Rope,
    YaRN,
    build_method,
)
from tests.helpers.methods import VARIANTS, table

LLAMA2 = Rope.geometric(base=1e4, dim=128, length=4096)
LLAMA3 = Rope.geometric(base=5e5, dim=128, length=8192)


HEADS = list(itertools.product((32, 64, 80, 128, 256), (1.0, 0.5, 0.25)))
SCALES = list(itertools.product((1e4, 5e5, 1e6), (1.5, 2.0, 4.0, 8.0, 32.0), (512, 4096, 8192)))
# Every ninth scale with each head, beginning elsewhere, so that every scale meets a head or two.
CASES = [(*head, *scale) for i, head in enumerate(HEADS) for scale in SCALES[i % 9 :: 9]]
# transformers computes in float32: b ** x is off by |x| ln(b) 2^-25, 6e-7 at the largest base.
RTOL = 1e-6
# A float32 share g near 0 is off by 6e-8, and (1 - g) theta / 32 + g theta by 32 times that.
RTOL_OF = {"llama3": 3e-6, "yarn-untruncated": 3e-6}


@functools.cache
def llama_config(head_dim: int, length: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=length,
    )


def theirs(
    parameters: dict[str, Any],
    rope: Rope,
    partial: float = 1.0,
    lengths: Sequence[int] | None = None,
) -> tuple[torch.Tensor, float]:
    """What plain transformers computes from ``rope_parameters``: ``inv_freq`` and its scaling.

    With ``lengths`` of sequences one row for each of them.
    """
    # The dynamic type takes the trained length from max_position_embeddings.
    scale = 1 if parameters["rope_type"] == "dynamic" else parameters.get("factor", 1)
    config = llama_config(round(rope.dim / partial), math.ceil(scale * rope.length))
    config.rope_parameters = {
        "rope_theta": rope.base,
        "partial_rotary_factor": partial,
        **parameters,
    }
    config.validate_rope()
    if parameters["rope_type"] == "default":  # Llama's own ignores partial_rotary_factor
        return GPTNeoXRotaryEmbedding.compute_default_rope_parameters(config)
    compute = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    if lengths is None:
        return compute(config)
    rows = [compute(config, seq_len=length) for length in lengths]
    return torch.stack([inv_freq for inv_freq, _ in rows]), rows[0][1]


def assert_same(
    ours: torch.Tensor, reference: torch.Tensor, case: object = "", rtol: float = RTOL
) -> None:
    # A pair that never rotates is exported as 1e-30 and less.
    torch.testing.assert_close(
        reference.double(), ours, rtol=rtol, atol=1e-29, msg=lambda text: f"{text}\n{case}"
    )


@pytest.mark.every
@pytest.mark.parametrize("variant", VARIANTS)
def test_rope_parameters_give_transformers_the_same_embedding(variant: str) -> None:
    for head_dim, partial, rope_theta, factor, length in CASES:
        rope = Rope.geometric(rope_theta, int(head_dim * partial), length)
        method = VARIANTS[variant](factor, rope)
        parameters = method.rope_parameters(rope)
        json.dumps(parameters, allow_nan=False)  # what config.json can hold
        inv_freq, scaling = theirs(parameters, rope, partial)
        case = f"{head_dim=} {partial=} {rope_theta=} {factor=} {length=}"
        assert_same(method.inv_freq(rope), inv_freq, case, RTOL_OF.get(variant, RTOL))
        assert method.attention_scaling(rope) == pytest.approx(scaling, rel=1e-9), case


@pytest.mark.parametrize("alpha", ["transformers", "ratio"])
def test_dynamic_ntk_equals_transformers_at_every_length(alpha: str) -> None:
    for head_dim, partial, rope_theta, factor, trained in CASES:
        rope = Rope.geometric(rope_theta, int(head_dim * partial), trained)
        method = DynamicNTK(factor=factor, alpha=alpha)
        lengths = [trained // 2, trained, trained + 1, math.ceil(factor * trained)]
        ours = method.inv_freq_at(rope, torch.tensor(lengths, dtype=torch.float64))
        inv_freq, _ = theirs(method.rope_parameters(rope), rope, partial, lengths)
        assert_same(ours, inv_freq, f"{head_dim=} {partial=} {rope_theta=} {factor=} {trained=}")


def test_longrope_equals_transformers_below_and_above_the_trained_length() -> None:
    for head_dim, partial, rope_theta, factor, trained in CASES:
        rope = Rope.geometric(rope_theta, int(head_dim * partial), trained)
        method = LongRoPE(
            factor=factor, long_factor=table(factor, rope), short_factor=table(1.1, rope)
        )
        assert method.is_dynamic
        ours = method.inv_freq_at(rope, torch.tensor([trained, trained + 1.0]))
        parameters = method.rope_parameters(rope)
        del parameters["attention_factor"]  # so that transformers computes its own
        inv_freq, scaling = theirs(parameters, rope, partial, [trained, trained + 1])
        assert_same(ours, inv_freq, f"{head_dim=} {partial=} {rope_theta=} {factor=} {trained=}")
        assert method.attention_scaling(rope) == pytest.approx(scaling, rel=1e-9)


@pytest.mark.parametrize("options", [{"beta_fast": 16, "beta_slow": 2}, {"attention_factor": 1.3}])
def test_yarn_options_mean_what_they_mean_in_transformers(options: dict[str, float]) -> None:
    method = YaRN(factor=8, **options)
    inv_freq, scaling = theirs(method.rope_parameters(LLAMA3), LLAMA3)
    assert_same(method.inv_freq(LLAMA3), inv_freq)
    assert method.attention_scaling(LLAMA3) == pytest.approx(scaling, rel=1e-9)


@pytest.mark.parametrize("p", [0.1, 0.25, 0.3, 0.5, 0.7, 0.75, 1.0])
@pytest.mark.parametrize("dim", [32, 64, 80, 128, 256])
def test_p_rope_equals_transformers_proportional(dim: int, p: float) -> None:
    rope = Rope.geometric(1e6, dim, 4096)
    # Here partial_rotary_factor is the share p of a fully rotary head.
    inv_freq, _ = theirs({"rope_type": "proportional", "partial_rotary_factor": p}, rope)
    assert_same(PRoPE(factor=4, p=p).inv_freq(rope), inv_freq)


def test_yarn_ramp_runs_from_pair_20_to_46_on_llama2() -> None:
    # 64 ln(4096 / (32 2 pi)) / ln(1e4) = 20.944 and 64 ln(4096 / (2 pi)) / ln(1e4) = 45.027
    kept = YaRN(factor=4).kept(LLAMA2)
    assert (kept[:21] == 1).all() and (kept[46:] == 0).all()
    for pair in range(21, 46):
        assert kept[pair] == pytest.approx((46 - pair) / 26, abs=1e-15)
    fractional = YaRN(factor=4, truncate=False).kept(LLAMA2)
    assert fractional[20] == 1 and fractional[46] == 0
    assert fractional[21] == pytest.approx((45.027 - 21) / (45.027 - 20.944), abs=1e-4)
    assert fractional[45] == pytest.approx((45.027 - 45) / (45.027 - 20.944), abs=1e-4)


def test_yarn_paper_ramp_is_linear_in_rotations() -> None:
    # r_20 = 4096 / (2 pi) * 10 ** (-4 * 20 / 64) = 36.66, r_32 = 6.519, r_46 = 0.8695
    kept = YaRN(factor=4, ramp="rotations").kept(LLAMA2)
    assert kept[20] == 1 and kept[46] == 0
    assert kept[32] == pytest.approx((6.519 - 1) / 31, abs=1e-4)


def test_yarn_blends_frequencies_or_wavelengths() -> None:
    # Pair 33 lies in the middle of the ramp: half of 1 and half of 1/4, or half of 1 and of 4.
    theta = LLAMA2.inv_freq
    arithmetic = YaRN(factor=4).inv_freq(LLAMA2) / theta
    harmonic = theta / YaRN(factor=4, blend="harmonic").inv_freq(LLAMA2)
    assert arithmetic[33] == pytest.approx(0.625) and harmonic[33] == pytest.approx(2.5)
    kept = YaRN(factor=4).kept(LLAMA2)
    torch.testing.assert_close(harmonic, (1 - kept) * 4 + kept)


def test_ntk_base_for_llama2_and_factor_8_is_82684() -> None:
    # 1e4 * 8 ** (128 / 126)
    assert NTK(factor=8).rope_parameters(LLAMA2)["rope_theta"] == pytest.approx(82684, abs=1)


@pytest.mark.parametrize(("factor", "alpha"), [(2, 3), (4, 13), (8, 57)])
def test_dynamic_ntk_at_the_full_context_has_alpha_s2_minus_s_plus_1(
    factor: float, alpha: float
) -> None:
    scale = DynamicNTK(factor=factor).base_scale(LLAMA2, torch.tensor([factor * 4096.0]))
    assert scale ** (126 / 128) == pytest.approx(alpha, rel=1e-6)


def test_dynamic_yarn_is_yarn_with_the_ratio_as_factor() -> None:
    method = DynamicYaRN(factor=8, beta_fast=16, truncate=False)
    lengths = torch.tensor([4096, 6144, 12288, 32768], dtype=torch.float64)
    inv_freq = method.inv_freq_at(LLAMA2, lengths)
    scaling = method.attention_scaling_at(LLAMA2, lengths)
    for row, factor in enumerate([1, 1.5, 3, 8]):
        yarn = YaRN(factor=factor, beta_fast=16, truncate=False)
        torch.testing.assert_close(inv_freq[row], yarn.inv_freq(LLAMA2), rtol=1e-15, atol=0)
        assert scaling[row] == pytest.approx(yarn.attention_scaling(LLAMA2), rel=1e-15)


@pytest.mark.parametrize("method", [DynamicNTK(factor=8), DynamicYaRN(factor=8)], ids=repr)
def test_dynamic_methods_leave_short_sequences_as_they_were(method: FrequencyMethod) -> None:
    lengths = torch.tensor([1, 2048, 4096], dtype=torch.float64)
    for row in method.inv_freq_at(LLAMA2, lengths):
        torch.testing.assert_close(row, LLAMA2.inv_freq, rtol=1e-15, atol=0)
    assert (method.attention_scaling_at(LLAMA2, lengths) == 1).all()


def test_base_truncation_has_the_three_regions_of_the_release() -> None:
    # Pair 45 turns once in 4080 tokens, pair 59 in 30 600, pair 60 in 35 300 (8 * 4096 = 32 768).
    inv_freq = BaseTruncation(factor=4).inv_freq(LLAMA2)
    assert torch.equal(inv_freq[:46], LLAMA2.inv_freq[:46])
    constant = torch.full((14,), 2 * math.pi / (4096 * 16), dtype=torch.float64)
    torch.testing.assert_close(inv_freq[46:60], constant, rtol=1e-15, atol=0)
    assert (inv_freq[60:] == 0).all()


@pytest.mark.parametrize("on", ["yarn", "pi", "ntk", "llama3", NTKByParts(factor=8, beta=16)])
def test_resonance_rounds_wavelengths_to_whole_tokens(on: str | FrequencyMethod) -> None:
    method = Resonance(factor=8, on=on)
    wavelength = 2 * math.pi / method.inv_freq(LLAMA2)
    inner = 2 * math.pi / method.on.inv_freq(LLAMA2)
    torch.testing.assert_close(wavelength, inner.round(), rtol=1e-14, atol=0)
    assert wavelength[0] == pytest.approx(6 if on != "pi" else 50)  # 2 pi, 16 pi
    assert method.attention_scaling(LLAMA2) == method.on.attention_scaling(LLAMA2)


def test_abf_takes_a_base_or_the_smallest_useful_one() -> None:
    given_base = ABF(factor=8, base=5e5)
    torch.testing.assert_close(given_base.inv_freq(LLAMA2), Rope.geometric(5e5, 128, 1).inv_freq)
    # 0.0424 * 32768 ** 1.628, arXiv 2405.14591
    assert ABF(factor=8).new_base(LLAMA2) == pytest.approx(9.52e5, rel=1e-3)


@st.composite
def extensions(draw: st.DrawFn) -> tuple[float, Rope]:
    """A factor that is a whole length over the trained one, and a trained embedding."""
    length = draw(st.integers(64, 200_000))
    target = draw(st.integers(length, 64 * length))
    rope_theta = draw(st.floats(1e3, 1e8))
    return target / length, Rope.geometric(rope_theta, 2 * draw(st.integers(2, 128)), length)


@settings(deadline=None, max_examples=40)
@given(extensions())
def test_every_map_is_finite_ordered_and_positive(extension: tuple[float, Rope]) -> None:
    factor, rope = extension
    for variant, make in VARIANTS.items():
        inv_freq = make(factor, rope).inv_freq(rope)
        assert inv_freq.dtype == torch.float64 and inv_freq.shape == (rope.dim // 2,), variant
        assert inv_freq.isfinite().all(), variant
        assert (inv_freq[1:] <= inv_freq[:-1] * (1 + 1e-12)).all(), variant
        stops_slow_pairs = variant in ("base_truncation", "p_rope", "clipped")
        assert (inv_freq >= 0 if stops_slow_pairs else inv_freq > 0).all(), variant


# Not bounded by theta / s: dynamic_ntk (its alpha exceeds s), abf and longrope (free numbers),
# base_truncation, p_rope and clipped (zeros), resonance (rounds 2 pi to 6, faster than trained).


@pytest.mark.every
@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("pi", {}, ["pi needs factor=..."]),
        ("pi", {"fator": 4}, ["no option 'fator'; did you mean 'factor'? Options: factor"]),
        ("yarn", {"ramp": "linear"}, ["ramp='linear'", "'index' or 'rotations'"]),
        ("yarn", {"beta_slow": 32}, ["beta_fast=32.0", "greater than 32"]),
        ("yarn", {"factor": 0.5}, ["factor=0.5", "greater than 1"]),
        ("dynamic_yarn", {"length": 0}, ["length=0", "a whole number of at least 1"]),
        ("swan", {"every": 3, "start": 3}, ["start=3", "less than every=3"]),
        ("dpe", {"scales": []}, ["scales=[]", "a list of whole numbers"]),
        (
            "dynamic_ntk",
            {"mode": "growing", "alpha": "ratio"},
            ["alpha='ratio'", "'transformers' with mode='growing'"],
        ),
        ("longrope", {"long_factor": 4}, ["long_factor=4", "a list of positive numbers"]),
        ("resonance", {"on": PI(factor=2)}, ["factor=4", "the factor of on, 2"]),
        (
            "resonance",
            {"on": "dynamic_yarn"},
            ["on='dynamic_yarn' changes with the sequence", "length=...", "such as 'yarn'"],
        ),
    ],
    ids=str,
)
def test_bad_options_name_the_value_and_the_cure(
    name: str, options: dict[str, Any], parts: list[str]
) -> None:
    if options and "fator" not in options:
        options = {"factor": 4, **options}
    with pytest.raises(RopeExtError) as error:
        build_method(name, **options)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("factor", "length", "target"), [(1.1, 1500, 1650), (1.5, 33, 50), (4, 4096, 16384)]
)
def test_a_target_length_is_rounded_up_but_not_for_the_error_of_a_product(
    factor: float, length: int, target: int
) -> None:
    rope = Rope.geometric(base=1e4, dim=16, length=length)
    assert PI(factor=factor).target_length(rope) == target


@pytest.mark.parametrize("option", ["long_factor", "short_factor"])
def test_longrope_table_must_have_one_number_per_pair(option: str) -> None:
    tables = {"long_factor": [1.0] * 64, "short_factor": [1.0] * 64, option: [1.0] * 48}
    method = LongRoPE(factor=4, **tables)
    for use in (method.inv_freq, method.rope_parameters):
        with pytest.raises(OptionError, match=f"{option} has 48 numbers.* 64 rotary pairs; give"):
            use(LLAMA2)


def test_options_of_other_classes_are_checked_by_annotations_that_are_strings() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Own(PI):
        name = "own"
        flag: bool = True

    assert Own(factor=4).flag
    with pytest.raises(OptionError, match="own: flag='x' is not valid"):
        Own(factor=4, flag="x")


def test_a_signature_shows_types_without_their_limits() -> None:
    shown = inspect.signature(YaRN)
    assert str(shown).startswith("(*, factor: float, ")
    assert shown.parameters["beta_fast"].annotation is float
    assert "Annotated" not in str(shown)
    assert "window" in inspect.signature(ReRoPE).parameters


def test_yarn_ramp_ends_at_the_last_column_as_in_transformers() -> None:
    """With so small a base, the pair with ``beta_slow`` rotations would be behind all of them."""
    rope = Rope.geometric(base=10.0, dim=16, length=64)
    kept = YaRN(factor=4, beta_slow=0.01).kept(rope)
    torch.testing.assert_close(kept, 1 - torch.arange(8, dtype=torch.float64) / 15)


@pytest.mark.parametrize("name", ["dynamic_yarn", "dynamic_ntk"])
@pytest.mark.parametrize("length", [100, 1000])
def test_a_fixed_length_is_what_a_dynamic_method_reaches(name: str, length: int) -> None:
    """Frequencies for 100 tokens do not reach those of the factor, and those for 1000 do."""
    rope = Rope.geometric(base=1e4, dim=16, length=64)
    assert build_method(name, factor=4).target_length(rope) == 256
    method = build_method(name, factor=4, length=length)
    assert method.target_length(rope) == length
    assert torch.equal(method.inv_freq(rope), method.frequencies(rope, length))
