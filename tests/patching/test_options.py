"""Options that no method can follow, or that extend nothing, are refused and leave no trace."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

import rope_ext
from rope_ext.methods import all_methods, build_method
from tests.families.checks import changed, snapshot
from tests.helpers.models import LENGTH, tiny_llama

TABLE = {"longrope": {"long_factor": [2.0] * 8}}
NAMES = [cls.name for cls in all_methods()]


def refused(model: torch.nn.Module, method: Any, **options: Any) -> str:
    """What is said, after the model is found to be as it was."""
    before = snapshot(model)
    with pytest.raises(rope_ext.RopeExtError) as error:
        rope_ext.patch(model, method, **{"factor": 4, **options})
    assert changed(before, snapshot(model)) == set()
    return str(error.value)


# --- what extends nothing ------------------------------------------------------------------------

IDLE: list[tuple[str, dict[str, Any], list[str]]] = [
    ("dual_chunk", {"chunk": 512}, ["chunk=512", "distances of at most 64, or leave chunk out"]),
    ("lm_infinite", {"window": 512}, ["window=512", "distances of at most 64"]),
    ("self_extend", {"group": 1}, ["group=1", "or leave group out"]),
    ("self_extend", {"window": 65, "group": 9}, ["window=65, group=9"]),
    ("rerope", {"window": 256}, ["window=256", "or leave window out"]),
    ("leaky_rerope", {"k": 1}, ["k=1 ", "or leave k out"]),
    ("leaky_rerope", {"window": 65, "k": 50}, ["window=65, k=50"]),
    ("string", {"factor": 1.5, "shift": 66}, ["shift=66", "or leave shift out"]),
    ("string", {"factor": 1.5, "shift": 30, "window": 30}, ["leave shift, window out"]),
    ("longrope", {"long_factor": [1.0] * 8}, ["no frequency becomes smaller"]),
    ("yarn", {"beta_fast": 1e-3, "beta_slow": 1e-4}, ["no frequency becomes smaller"]),
    ("dynamic_yarn", {"length": LENGTH}, ["length=64", "no frequency becomes smaller"]),
    ("base_truncation", {"upper": 0}, ["no frequency becomes smaller"]),
    ("p_rope", {"p": 1}, ["no frequency becomes smaller"]),
    ("pi", {"factor": 1 + 1e-12}, ["factor=1.000000000001 would not extend anything"]),
    ("abf", {"base": 1e4}, ["no frequency becomes smaller"]),
    ("abf", {"base": 100}, ["base 100 is smaller than the trained base 10000"]),
    ("resonance", {"on": rope_ext.PRoPE(factor=4, p=1)}, ["no frequency becomes smaller"]),
]


@pytest.mark.parametrize(("name", "options", "parts"), IDLE, ids=str)
def test_options_that_extend_nothing_are_refused_with_valid_ones(name, options, parts) -> None:
    said = refused(tiny_llama(), name, **options)
    assert all(part in said for part in (*parts, name)), said


@pytest.mark.parametrize(
    ("name", "options", "reached"),
    [
        # 5 + (N - 1 - 5) / 3 <= 64, and 64 tokens are passed 64 tokens apart
        ("leaky_rerope", {"window": 5, "k": 3}, 183),
        ("string", {"factor": 1.5, "shift": 20, "window": 10}, 75),  # N - 1 - 10 <= 64
    ],
)
def test_what_reaches_less_than_its_factor_says_so(caplog, model, name, options, reached) -> None:
    with caplog.at_level("WARNING", "rope_ext"):
        rope_ext.patch(model, name, **{"factor": 4, **options})
    assert f"up to {reached} tokens only" in caplog.text
    assert f"up to {reached} tokens only" in str(rope_ext.describe(model))


def test_position_options_count_from_the_length_of_the_map_beneath(model) -> None:
    under = rope_ext.NTK(factor=2)
    rope_ext.patch(model, "rerope", factor=2, window=100, frequency=under)
    rope_ext.unpatch(model)
    assert "128 trained tokens" in refused(model, "rerope", factor=2, window=129, frequency=under)


@pytest.mark.parametrize(
    "factor", [10**400, 2.0**31, Decimal(4), np.bool_(True), torch.tensor(4.0)], ids=repr
)
def test_factors_that_are_no_number_of_times_are_refused(factor: Any) -> None:
    for name in NAMES:
        said = rf"{name}: factor=.* is not valid; .*(at least|at most|greater than)"
        with pytest.raises(rope_ext.OptionError, match=said):
            build_method(name, factor=factor, **TABLE.get(name, {}))


def test_a_tokenizer_must_be_one_and_nothing_is_patched_otherwise(model) -> None:
    assert "tokenizer='gpt2' is not valid" in refused(model, "yarn", factor=4, tokenizer="gpt2")


@pytest.mark.parametrize("length", [0, 1, -5, True, 64.0, "64", 2**31, 10**30])
def test_a_trained_length_must_be_a_number_of_tokens(model, length: Any) -> None:
    said = refused(model, "yarn", original_max_position_embeddings=length)
    assert f"original_max_position_embeddings={length!r}" in said
    assert "at least 2, or None" in said or "at most 2147483647 tokens" in said
