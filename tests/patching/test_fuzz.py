"""Whatever is asked of it, only RopeExtError comes out, and a model that was refused is as before.

Every example is the same in every run (``derandomize``).
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rope_ext
from rope_ext.methods import all_methods
from rope_ext.patching import current_patch
from rope_ext.saving.adapters import Sidecar
from rope_ext.saving.record import Record, record_of
from tests.families.checks import changed, snapshot
from tests.helpers.models import LENGTH, tiny_llama

PAIRS = 8
CLASSES = {cls.name: cls for cls in all_methods()}
IDS = torch.randint(3, 128, (1, 80), generator=torch.Generator().manual_seed(1))


def fuzz(examples: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


NUMBERS = st.one_of(
    st.integers(-3, 600),
    st.floats(0.01, 40),
    st.sampled_from([0, 1, 2, 8, 63, 64, 65, 128, 2**31 - 1, 2**31, 2**63, 10**30, 10**400]),
    st.sampled_from([0.0, -0.0, 1.0, 1 + 1e-12, 1e-320, 1e-30, 1e-9, 1e9, 1e30, 1e38, 1e308]),
)
ODD = st.sampled_from(
    [
        *(None, True, False, math.nan, math.inf, -math.inf, "4", "", b"4", 1j),
        *((), [], [1.0] * PAIRS, [2.0] * (PAIRS - 1), {}, {"name": "yarn"}, {1}, object()),
        *(np.float32(4), np.float16(np.inf), np.int64(4), np.uint8(3), np.bool_(True)),
        *(np.array(4), np.array([2.0] * PAIRS), Decimal(4), Fraction(9, 2), Fraction(10**400)),
        *(torch.tensor(4), torch.ones(PAIRS), lambda x: x, rope_ext.YaRN(factor=4), rope_ext.YaRN),
    ]
)
TABLES = st.lists(
    st.one_of(st.floats(1, 8), NUMBERS, ODD), min_size=PAIRS - 1, max_size=PAIRS + 1
) | st.lists(st.floats(0.5, 8), min_size=PAIRS, max_size=PAIRS)
GROUPS = st.lists(st.integers(1, 8), min_size=1, max_size=PAIRS)
MAPS = st.sampled_from([*CLASSES, rope_ext.PI(factor=4), rope_ext.ReRoPE(factor=4)])
OF_FIELDS = {"on": MAPS, "long_factor": TABLES, "short_factor": TABLES} | {
    "groups": GROUPS,
    "scales": GROUPS,
}
WORDS = st.sampled_from(
    ["transformers", "ratio", "fixed", "growing", "index", "rotations", "harmonic", "pro", "uni"]
)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, dict[str, Any]]:
    """A method by name or as a class, and options of it, mostly of a kind that could be meant."""
    name = draw(st.sampled_from(sorted(CLASSES)))
    options: dict[str, Any] = {}
    for field in dataclasses.fields(CLASSES[name]):
        if field.name == "factor":
            options["factor"] = draw(st.one_of(st.floats(1, 16), st.floats(1, 16), NUMBERS, ODD))
        elif field.name == "long_factor" or draw(st.booleans()):
            kind = OF_FIELDS.get(field.name)
            if kind is None:
                kind = WORDS if isinstance(field.default, str) else NUMBERS
            kind = st.booleans() if isinstance(field.default, bool) else kind
            options[field.name] = draw(st.one_of(kind, kind, kind, ODD))
    return name, options


FRONT = st.fixed_dictionaries(
    {},
    optional={
        "original_max_position_embeddings": st.one_of(NUMBERS, ODD),
        "frequency": st.one_of(MAPS, ODD, st.just(rope_ext.NTK(factor=2))),
        "precise": st.one_of(st.booleans(), ODD),
        "sliding_layers": st.one_of(st.sampled_from(["auto", "keep", "scale"]), ODD),
        "kernel": st.one_of(st.sampled_from(["auto", "reference"]), ODD),
    },
)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_llama()


def attempt(model: torch.nn.Module, call: tuple[Any, dict], front: dict, asked: str) -> None:
    """Patch, and run what was accepted; either way the model is then as before."""
    name, options = call
    before = snapshot(model)
    try:
        rope_ext.patch(model, name, **options, **front)
    except rope_ext.RopeExtError as error:
        assert len(str(error)) > 20, asked
    else:
        state = current_patch(model)
        assert state.length < state.target_length or state.method.allows_factor_one, asked
        json.dumps(state.record.to_json(), allow_nan=False)
        assert Record.from_json(json.loads(json.dumps(state.record.to_json())), "x").same(
            state.record
        ), asked
        with torch.no_grad():
            assert model(IDS).logits.isfinite().all(), asked
        rope_ext.unpatch(model)
    assert changed(before, snapshot(model)) == set(), asked


def options_survive(examples: int, model: torch.nn.Module) -> None:
    @fuzz(examples)
    @given(call=calls(), front=st.one_of(st.just({}), FRONT))
    def check(call: tuple[str, dict[str, Any]], front: dict[str, Any]) -> None:
        attempt(model, call, front, f"{call} {front}")

    check()


def test_any_options_are_followed_or_refused(model) -> None:
    options_survive(60, model)


@pytest.mark.slow
def test_any_of_many_options_are_followed_or_refused(model) -> None:
    options_survive(250, model)


# --- records, sidecars, configurations -----------------------------------------------------------

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=5), st.just(math.nan)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


def places(data: Any, path: tuple = ()) -> list[tuple]:
    """Where anything can be put instead, everywhere in nested ``data``."""
    pairs = data.items() if isinstance(data, dict) else ()
    if isinstance(data, list):
        pairs = enumerate(data[:2])
    return [path, *(spot for key, part in pairs for spot in places(part, (*path, key)))]


@st.composite
def spoilt(draw: st.DrawFn, whole: Any) -> Any:
    """``whole`` with up to three parts replaced, left out or added to."""
    data = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from([spot for spot in places(data) if spot] or [("x",)]))
        holder = data
        for key in path:
            holder = holder[key]
        action = draw(st.sampled_from(["replace", "replace", "drop", "add"]))
        if action == "drop":
            del holder[last]
        elif action == "add" and isinstance(holder, dict):
            holder[draw(st.sampled_from(["name", "on", "factor", "_attn_implementation", "x"]))] = (
                draw(JSON)
            )
        else:
            holder[last] = draw(st.one_of(JSON, st.sampled_from([*CLASSES, CLASSES["yarn"].name])))
        if not isinstance(data, dict) or not data:
            break
    return data


def of(name: str, **options: Any) -> dict[str, Any]:
    return rope_ext.patch(tiny_llama(), name, factor=4, **options).config.rope_ext


RECORDS = {
    "rerope": lambda: of("rerope", frequency=rope_ext.NTK(factor=2)),
    "resonance": lambda: of("resonance", on="pi", precise=True),
    "longrope": lambda: of("longrope", long_factor=[2.0] * PAIRS, short_factor=[1.0] * PAIRS),
}


def records_survive(examples: int, name: str) -> None:
    data, model = RECORDS[name](), tiny_llama()
    fresh, before = copy.deepcopy(model.config), snapshot(model)

    @fuzz(examples)
    @given(data=spoilt(data))
    def check(data: Any) -> None:
        config = copy.deepcopy(fresh)
        config.rope_ext = data
        try:
            record = record_of(config)
        except rope_ext.RecordError:
            return
        if record is None:
            return
        own = set(vars(config))
        record.restore(config)
        assert set(vars(config)) <= own | set(record.config)
        assert config.hidden_size == 64 and config.model_type == "llama"
        try:
            rope_ext.patch(model, record.method, **record.arguments)
        except rope_ext.RopeExtError:
            pass
        else:
            rope_ext.unpatch(model)
        assert changed(before, snapshot(model)) == set()

    check()


@pytest.mark.parametrize("name", RECORDS)
def test_any_record_is_followed_or_refused(name: str) -> None:
    records_survive(20, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDS)
def test_any_of_many_records_is_followed_or_refused(name: str) -> None:
    records_survive(120, name)


def test_any_sidecar_is_read_or_refused(tmp_path_factory) -> None:
    path = Path(tmp_path_factory.mktemp("sidecar"), "rope_ext.json")
    model = rope_ext.patch(tiny_llama(), "rerope", factor=4)
    whole = Sidecar.from_patch(current_patch(model)).to_json()

    @fuzz(60)
    @given(data=st.one_of(JSON, spoilt(json.loads(json.dumps(whole)))))
    def check(data: Any) -> None:
        path.write_text(json.dumps(data))
        try:
            sidecar = Sidecar.read(str(path))
        except rope_ext.RecordError:
            return
        fault = sidecar.fault(model)
        assert fault is None or isinstance(fault, str)

    check()


@pytest.mark.parametrize("method", ["yarn", "dynamic_ntk", "self_extend"])
def test_any_rotary_configuration_is_extended_or_refused(method: str) -> None:
    whole = {"rope_type": "default", "rope_theta": 1e4, "max_position_embeddings": LENGTH}
    model = tiny_llama()
    fresh = dict(vars(model.config))

    @fuzz(25)
    @given(
        data=(
            st.fixed_dictionaries({"rope_theta": NUMBERS, "max_position_embeddings": NUMBERS})
            | spoilt(whole)
        ).filter(lambda data: "nan" not in repr(data))  # a snapshot finds NaN changed always
    )
    def check(data: dict[str, Any]) -> None:
        length = data.pop("max_position_embeddings", LENGTH)
        # As somebody edits it by hand; the frequencies are built already.
        vars(model.config).update(rope_parameters=data, max_position_embeddings=length)
        before = snapshot(model)
        try:
            rope_ext.patch(model, method, factor=4)
        except rope_ext.RopeExtError:
            pass
        else:
            rope_ext.unpatch(model)
        assert changed(before, snapshot(model)) == set()
        vars(model.config).clear()
        vars(model.config).update(copy.deepcopy(fresh))

    check()
