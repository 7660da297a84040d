"""A refused replacement, and a block with another patch, leave no trace on the patch before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LogitsProcessor

import rope_ext
from tests.helpers.models import tiny_llama

PATCHES: dict[str, dict[str, Any]] = {
    "growing": {"method": "dynamic_ntk", "mode": "growing"},
    "dynamic_ntk": {"method": "dynamic_ntk"},
    "dynamic_yarn": {"method": "dynamic_yarn"},
    "longrope": {
        "method": "longrope",
        "long_factor": [1.0 + 0.5 * i for i in range(8)],
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
    },
    "start tokens": {
        "method": "longrope",
        "long_factor": [1.0 + 0.5 * i for i in range(8)],
        "start_tokens": 4,
    },
    "yarn": {"method": "yarn", "temperature": "log_n"},
    "rerope": {"method": "rerope"},
    "bias": {"method": "yarn", "bias": "kerple_power"},
    "learned": {"method": "learned", "length": 200},
}


def refused(model: nn.Module) -> None:
    with pytest.raises(rope_ext.OptionError):
        rope_ext.patch(model, "longrope", factor=4, long_factor=[1.0, 2.0], replace=True)


def refused_late(model: nn.Module) -> None:
    """When the layers of the model are known already."""
    with pytest.raises(rope_ext.OptionError, match="choose among"):
        rope_ext.patch(model, "fire", layers=[7], replace=True)


def another(model: nn.Module) -> None:
    with rope_ext.patched(model, "rerope", factor=2, replace=True):
        model(torch.arange(3, 90)[None])


def nested(model: nn.Module) -> None:
    with contextlib.suppress(KeyError), rope_ext.patched(model, "yarn", factor=2, replace=True):
        refused(model)
        another(model)
        raise KeyError


def grown(model: nn.Module) -> None:
    with rope_ext.patched(model, "dynamic_ntk", factor=8, mode="growing", replace=True):
        model(torch.arange(3, 120)[None])


@pytest.fixture(scope="module")
def right() -> dict[str, torch.Tensor]:
    """What a model says that nothing interrupted, by its patch."""
    return {}


INTERRUPTED = [refused, refused_late, another, nested, grown]


def make(patch: str) -> nn.Module:
    options = PATCHES[patch]
    factor = {} if patch == "learned" else {"factor": 4}
    torch.manual_seed(0)
    return rope_ext.patch(tiny_llama(), **factor, **options)


@torch.no_grad()
def said(patch: str, ids: torch.Tensor, interrupt: Callable[[nn.Module], Any]) -> torch.Tensor:
    """A prompt beyond the trained length, and what follows with the cache that it filled."""
    model = make(patch)
    first = model(ids[:, :90])
    cache = first.past_key_values
    interrupt(model)
    fresh = [model(ids[:, :70]).logits]  # by frequencies that have grown for more
    rest = [model(token, past_key_values=cache).logits for token in ids[:, 90:94].split(1, dim=1)]
    return torch.cat((first.logits, *fresh, *rest, model(ids[:, :70]).logits), 1)


@pytest.mark.parametrize("interrupt", INTERRUPTED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("patch", PATCHES)
def test_the_model_goes_on_as_if_nothing_had_happened(ids, patch: str, interrupt, right) -> None:
    if patch not in right:
        right[patch] = said(patch, ids, lambda model: None)
    assert torch.equal(said(patch, ids, interrupt), right[patch])


class Interrupt(LogitsProcessor):
    """Between two tokens."""

    def __init__(self, model: nn.Module, interrupt: Callable[[nn.Module], Any]) -> None:
        self.model, self.interrupt = model, interrupt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.interrupt(self.model)
        return scores


@pytest.mark.parametrize("interrupt", [refused, another], ids=lambda f: f.__name__)
@pytest.mark.parametrize("patch", ["growing", "dynamic_yarn", "rerope"])
def test_a_generation_under_way_goes_on_as_well(ids, patch: str, interrupt) -> None:
    def generated(interrupt: Callable[[nn.Module], Any]) -> torch.Tensor:
        model = make(patch)
        given = {"max_new_tokens": 6, "do_sample": False, "output_logits": True}
        given["return_dict_in_generate"] = True
        processors = [Interrupt(model, interrupt)]
        return torch.stack(model.generate(ids[:, :70], logits_processor=processors, **given).logits)

    assert torch.equal(generated(interrupt), generated(lambda model: None))


@pytest.mark.parametrize("interrupt", [refused, refused_late], ids=lambda f: f.__name__)
def test_a_refusal_takes_no_random_numbers(interrupt) -> None:
    model = make("bias")
    before = torch.get_rng_state()
    interrupt(model)
    assert torch.equal(torch.get_rng_state(), before)
