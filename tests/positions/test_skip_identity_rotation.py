"""Layers whose own turn would turn nothing are spared it, and nobody else notices."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

import rope_ext
from tests.helpers.models import tiny_llama
from tests.helpers.positions import EXACT, decoded, logits

NAME = "apply_rotary_pos_emb"


@pytest.fixture
def rotations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The cosines that Llama's function is called with."""
    own, seen = getattr(modeling_llama, NAME), []

    def apply(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        seen.append(cos)
        return own(q, k, cos, sin, unsqueeze_dim)

    monkeypatch.setattr(modeling_llama, NAME, apply)
    return seen


@pytest.mark.parametrize("name", ["rerope", "alibi", "nope", "fire"])
def test_nothing_is_turned_by_nothing(name: str, rotations: list, monkeypatch, ids) -> None:
    model = rope_ext.patch(tiny_llama(), name, factor=4)
    rotations.clear()
    spared = logits(model, ids)
    assert not rotations
    torch.testing.assert_close(decoded(model, ids, [40, *[1] * 50]), spared, **EXACT)
    assert not rotations
    another = getattr(modeling_llama, NAME).__wrapped__
    monkeypatch.setattr(modeling_llama, NAME, another)  # by a package that comes later
    assert torch.equal(logits(model, ids), spared)
    assert len(rotations) == len(model.model.layers)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "self_extend", "factor": 4},
        {"method": "3d_rpe", "factor": 4},
        {"method": "rerope", "factor": 4, "attention_factor": 1.2},
        {"method": "rerope", "factor": 4, "layers": (1,)},
    ],
)
def test_what_turns_something_is_turned(options: dict, rotations: list, ids) -> None:
    function = getattr(modeling_llama, NAME)
    model = rope_ext.patch(tiny_llama(), **options)
    assert getattr(modeling_llama, NAME) is function
    rotations.clear()
    logits(model, ids)
    assert len(rotations) == len(model.model.layers)


def test_the_function_is_wrapped_once_and_others_do_not_notice(rotations: list, ids) -> None:
    plain, model = tiny_llama(), rope_ext.patch(tiny_llama(), "rerope", factor=4)
    function, right = getattr(modeling_llama, NAME), logits(model, ids)
    rope_ext.patch(tiny_llama(), "alibi", factor=4)
    assert getattr(modeling_llama, NAME) is function
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        rotations.clear()
        assert torch.equal(logits(same, ids), right)
        assert not rotations
    rope_ext.unpatch(model)
    assert torch.equal(logits(model, ids), logits(plain, ids))
    assert len(rotations) == 2 * len(plain.model.layers)


def test_what_another_package_puts_there_for_a_time_is_not_wrapped_for_good(monkeypatch) -> None:
    def spared() -> Callable:
        rope_ext.patch(tiny_llama(), "rerope", factor=4)
        return getattr(modeling_llama, NAME)

    function = spared()
    with monkeypatch.context() as patches:
        patches.setattr(modeling_llama, NAME, lambda q, k, cos, sin: function(q, k, cos, sin))
        assert spared() is not function
    assert getattr(modeling_llama, NAME) is function
    assert spared() is function


def by_name(query: Any, key: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return OWN(query, key, cos, sin, unsqueeze_dim)


def with_more(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return tuple(2 * x for x in OWN(q, k, cos, sin, unsqueeze_dim))


OWN = inspect.unwrap(getattr(modeling_llama, NAME))


@pytest.mark.parametrize("function", [by_name, with_more])
def test_a_function_that_is_another_stays(function: Callable, monkeypatch, ids) -> None:
    monkeypatch.setattr(modeling_llama, NAME, function)
    model = rope_ext.patch(tiny_llama(), "rerope", factor=4)
    assert getattr(modeling_llama, NAME) is function
    torch.testing.assert_close(decoded(model, ids, [40, *[1] * 50]), logits(model, ids), **EXACT)
