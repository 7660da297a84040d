"""Options that no method can follow, or that extend nothing, are refused and leave no trace."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import rope_ext
from rope_eval.systems import beyond
from rope_ext.method_options import checked_methods
from rope_ext.methods import Rope, all_methods, build_method
from rope_ext.patching import current_patch
from tests.families.checks import changed, snapshot
from tests.families.zoo import tiny_model
from tests.helpers.models import LENGTH, tiny_llama

TABLE = {"longrope": {"long_factor": [2.0] * 8}}
NAMES = [cls.name for cls in all_methods()]
WITHIN = ("abf", "string", "dpe", "lampe")  # of use with a factor of 1


def refused(model: torch.nn.Module, method: Any, **options: Any) -> str:
    """What is said, after the model is found to be as it was."""
    before = snapshot(model)
    with pytest.raises(rope_ext.RopeExtError) as error:
        rope_ext.patch(model, method, **{"factor": 4, **options})
    assert changed(before, snapshot(model)) == set()
    return str(error.value)


# --- what extends nothing ------------------------------------------------------------------------

IDLE: list[tuple[str, dict[str, Any], list[str]]] = [
    ("dual_chunk", {"chunk": 512}, ["chunk=512", "a chunk of at most", "chunk=48"]),
    ("dual_chunk", {"chunk": 65}, ["chunk=65", "distances up to 65"]),
    ("lm_infinite", {"window": 512}, ["window=512", "at most the trained length", "window=64"]),
    ("self_extend", {"group": 1}, ["group=1", "a group of at least 2", "group=10"]),
    ("self_extend", {"window": 65, "group": 9}, ["window=65, group=9", "below the trained"]),
    ("rerope", {"window": 256}, ["window=256", "at most the trained length", "window=32"]),
    ("rerope", {"window": 65}, ["window=65"]),
    ("rerope", {"window": 10**9}, ["window=1000000000"]),
    ("leaky_rerope", {"k": 1}, ["k=1 ", "k above 1", "k=4.4"]),
    ("leaky_rerope", {"window": 65, "k": 50}, ["window=65, k=50"]),
    ("string", {"factor": 1.5, "shift": 66}, ["shift=66", "a shift of at most"]),
    ("string", {"factor": 1.5, "shift": 30, "window": 30}, ["a smaller window", "shift=36"]),
    ("string", {"factor": 1, "shift": 64}, ["shift=64", "shift=22"]),
    ("longrope", {"long_factor": [1.0] * 8}, ["no frequency becomes smaller"]),
    ("longrope", {"long_factor": [0.5] * 8}, ["no frequency becomes smaller"]),
    ("longrope", {"long_factor": [1.0] * 8, "attention_factor": 1.3}, ["no frequency"]),
    ("yarn", {"beta_fast": 1e-3, "beta_slow": 1e-4}, ["no frequency becomes smaller"]),
    ("dynamic_yarn", {"beta_fast": 1e-3, "beta_slow": 1e-4}, ["no frequency"]),
    ("dynamic_yarn", {"length": LENGTH}, ["length=64", "no frequency becomes smaller"]),
    ("dynamic_ntk", {"length": 10}, ["length=10", "no frequency becomes smaller"]),
    ("ntk_by_parts", {"alpha": 0, "beta": 1e-9}, ["no frequency becomes smaller"]),
    ("llama3", {"low_freq_factor": 1e-9, "high_freq_factor": 1e-8}, ["no frequency"]),
    ("base_truncation", {"upper": 0}, ["no frequency becomes smaller"]),
    ("base_truncation", {"upper": 0.1, "lower": 0, "constant": 0.2}, ["no frequency"]),
    ("p_rope", {"p": 1}, ["no frequency becomes smaller"]),
    ("pi", {"factor": 1 + 1e-12}, ["factor=1.000000000001 would not extend anything"]),
    ("rerope", {"factor": 1 + 1e-12}, ["factor=1.000000000001 would not extend anything"]),
    ("abf", {"base": 1e4}, ["no frequency becomes smaller"]),
    ("abf", {"base": 100}, ["base 100 is smaller than the trained base 10000"]),
    ("resonance", {"on": rope_ext.PRoPE(factor=4, p=1)}, ["no frequency becomes smaller"]),
]


@pytest.mark.parametrize(("name", "options", "parts"), IDLE, ids=str)
def test_options_that_extend_nothing_are_refused_with_valid_ones(name, options, parts) -> None:
    said = refused(tiny_llama(), name, **options)
    assert all(part in said for part in (*parts, name)), said


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHIN])
def test_a_factor_of_one_is_refused_also_of_an_object(model, name: str) -> None:
    for method in (name, build_method(name, factor=1, **TABLE.get(name, {}))):
        options = {"factor": 1, **TABLE.get(name, {})} if method is name else {}
        with pytest.raises(rope_ext.OptionError, match="factor=1 would not extend anything"):
            rope_ext.patch(model, method, **options)


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


@pytest.mark.parametrize("name", ["rerope", "dual_chunk", "lm_infinite", "leaky_rerope"])
def test_what_keeps_its_promise_says_nothing(caplog, model, name: str) -> None:
    with caplog.at_level("WARNING", "rope_ext"):
        rope_ext.patch(model, name, factor=4)
    assert "only" not in caplog.text.replace("loads it", "")


def test_position_options_count_from_the_length_of_the_map_beneath(model) -> None:
    under = rope_ext.NTK(factor=2)
    rope_ext.patch(model, "rerope", factor=2, window=100, frequency=under)
    rope_ext.unpatch(model)
    said = refused(model, "rerope", factor=2, window=129, frequency=under)
    assert "128 trained tokens" in said and "window=64" in said


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("falcon", {"alibi": True}, "alibi=True"),
        ("smollm3", {"no_rope_layers": [0, 0]}, "use_rope"),
    ],
)
def test_a_model_whose_rotation_is_turned_off_has_nothing_to_extend(family, overrides, reason):
    model = tiny_model(family, **overrides)
    for method in ("yarn", "rerope"):
        said = refused(model, method)
        assert "does not rotate" in said and reason in said
    rope_ext.patch(tiny_model(family), "yarn", factor=4)


@pytest.mark.parametrize("name", ["ntk", "dynamic_ntk"])
def test_a_base_means_nothing_to_a_lone_pair(name: str) -> None:
    assert "does not depend on the base" in refused(tiny_llama(head_dim=2), name)


# --- numbers of any kind -------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "factor", [1e308, 10**40, 10**400, 2.0**31, Decimal(4), np.bool_(True), torch.tensor(4.0)]
)
def test_factors_that_are_no_number_of_times_are_refused(name: str, factor: Any) -> None:
    with pytest.raises(
        rope_ext.OptionError, match=rf"{name}: factor=.* is not valid; .*at (least|most)"
    ):
        build_method(name, factor=factor, **TABLE.get(name, {}))


@pytest.mark.parametrize("name", NAMES)
def test_a_context_of_more_tokens_than_can_be_counted_is_refused(name: str) -> None:
    method = build_method(name, factor=4e6, **TABLE.get(name, {}))
    with pytest.raises(rope_ext.OptionError, match=r"2048 trained tokens .*by a factor of 1048575"):
        method.target_length(Rope.geometric(1e4, 16, 2048))
    assert method.target_length(Rope.geometric(1e4, 16, 500)) == 2_000_000_000


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int8, np.int64, Fraction])
def test_numbers_of_other_libraries_are_taken_as_python_has_them(model, kind: type) -> None:
    ours = rope_ext.patch(tiny_llama(), "self_extend", factor=4, window=16, group=10)
    whole = np.int32 if kind in (np.float32, np.float64, Fraction) else kind
    options = {"factor": kind(4), "window": whole(16), "group": whole(10)}
    rope_ext.patch(model, "self_extend", **options, original_max_position_embeddings=whole(64))
    assert current_patch(model).record.same(current_patch(ours).record)
    json.dumps(current_patch(model).record.to_json())
    table = build_method("longrope", factor=kind(4), long_factor=[kind(2)] * 8)
    assert table == rope_ext.LongRoPE(factor=4, long_factor=[2] * 8)
    json.dumps(table.options())


@pytest.mark.parametrize("length", [0, 1, -5, True, 64.0, "64", 2**31, 10**30])
def test_a_trained_length_must_be_a_number_of_tokens(model, length: Any) -> None:
    said = refused(model, "yarn", original_max_position_embeddings=length)
    assert f"original_max_position_embeddings={length!r}" in said and "2 to 2147483647" in said


@pytest.mark.parametrize("value", [np.ones(3), torch.ones(3), [], {}, 2, 1j], ids=repr)
@pytest.mark.parametrize("option", ["precise", "kernel", "sliding_layers"])
def test_a_choice_is_refused_whatever_it_is(model, option: str, value: Any) -> None:
    assert f"{option}=" in refused(model, "yarn", **{option: value})
    for name, choice in (("yarn", "ramp"), ("yarn", "blend"), ("dynamic_ntk", "alpha")):
        assert f"{choice}=" in refused(model, name, **{choice: value})


@pytest.mark.parametrize(
    "overrides",
    [
        {"max_position_embeddings": 1},
        {"max_position_embeddings": 10**12},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0.5}},
    ],
    ids=str,
)
def test_a_configuration_of_no_rotary_embedding_is_refused(overrides: dict[str, Any]) -> None:
    assert "LlamaModel" in refused(tiny_llama(**overrides), "yarn")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("longrope", {"long_factor": [1e-20] + [2.0] * 7}),
        ("base_truncation", {"constant": 1e6}),
    ],
)
def test_frequencies_that_no_position_can_be_told_by_are_refused(model, name, options) -> None:
    assert "half a circle per token" in refused(model, name, **options)


# --- before the weights --------------------------------------------------------------------------


def test_evaluators_refuse_a_factor_that_extends_nothing_before_any_weights() -> None:
    with pytest.raises(rope_ext.OptionError, match=r"yarn: factor=1 would .*--option yarn\.factor"):
        checked_methods(["yarn"], 4.0, {"yarn": {"factor": 1}})
    assert checked_methods(["string"], 4.0, {"string": {"factor": 1}})["string"]["factor"] == 1


@pytest.mark.parametrize("name", ["string", "rerope"])
@pytest.mark.parametrize("force", [False, True])
def test_evaluators_refuse_what_no_model_of_that_length_can_do(name: str, force: bool) -> None:
    options = {"string": {}, "rerope": {"rerope": {"window": 600}}}[name]
    methods = checked_methods([name], 4.0, options)
    with pytest.raises(rope_ext.OptionError, match=name):
        list(beyond(methods, [1024], {"some/model": 512}, force))
    under = {"rerope": {"factor": 4.0, "window": 600, "frequency": rope_ext.NTK(factor=2)}}
    assert list(beyond(under, [1024], {"some/model": 512}, force)) == []
