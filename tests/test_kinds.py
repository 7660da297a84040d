"""Every method answers every question, and every kind of method puts itself in force."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import rope_ext
from rope_ext.apply import APPLY
from rope_ext.methods import Method, Rope, all_encodings, all_methods
from rope_ext.options import Options
from rope_ext.patching import current_patch

ROPE = Rope.geometric(base=1e4, dim=128, length=4096)
GIVEN = {"longrope": {"long_factor": [4.0] * 64}, "string": {"factor": 1.9}}
METHODS = [cls(**{"factor": 4, **GIVEN.get(cls.name, {})}) for cls in all_methods()]
LENGTH = 7500  # tokens, more than trained and within the reach of every method


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_what_a_kind_does_not_change_is_as_trained(method: Method) -> None:
    distance = torch.arange(0, LENGTH, 37, dtype=torch.float64)
    used = method.distances(ROPE, LENGTH, distance)
    if method.kind == "frequency":
        assert torch.equal(used, distance) and method.span(ROPE, LENGTH).tolist() == [LENGTH]
        assert method.query_scaling(distance, ROPE) is None and not method.replaces_attention
        assert method.resolved(ROPE) == method
    else:
        assert torch.equal(method.frequencies(ROPE, LENGTH), ROPE.inv_freq)
        assert method.start_tokens == 0
        assert used.shape == ((*distance.shape, 64) if method.name == "dpe" else distance.shape)
        span = method.span(ROPE, LENGTH)
        assert (
            (used.nan_to_num(0).amax(0) < span).all()
            and span.min() < LENGTH
            and method.replaces_attention
        )


def test_every_kind_of_method_can_be_put_in_force() -> None:
    assert {cls.kind for cls in [*all_methods(), *all_encodings(), rope_ext.RoPE]} == set(APPLY)


@pytest.mark.parametrize("name", ["yarn", "dynamic_ntk", "rerope"])
def test_a_patch_is_whole_when_it_is_made(model, name: str) -> None:
    rope_ext.patch(model, name, factor=4, kernel="reference")
    state = current_patch(model)
    assert state.options == Options(kernel="reference")
    assert state.record.resolved == state.method
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.method = None
