"""A cache goes on under the patch that it was filled under, and after a reset under any."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, StaticCache

import rope_ext
from rope_ext.stale import Refusal
from tests.families.checks import changed, snapshot
from tests.families.zoo import tiny_model
from tests.helpers.models import tiny_llama
from tests.helpers.positions import EXACT, logits

PATCHES: dict[str, dict[str, Any] | None] = {
    "unpatched": None,
    "yarn": {"method": "yarn"},
    "another factor": {"method": "yarn", "factor": 2},
    "pi": {"method": "pi"},
    "temperature": {"method": "yarn", "temperature": "log_n"},
    "layers": {"method": "yarn", "layers": [1]},
    "bias": {"method": "yarn", "bias": "alibi"},
    "growing": {"method": "dynamic_ntk", "mode": "growing"},
    "dynamic_yarn": {"method": "dynamic_yarn"},
    "rerope": {"method": "rerope"},
    "nope": {"method": "nope"},
}
CACHES: dict[str, Callable[..., Any]] = {
    "dynamic": DynamicCache,
    "static": partial(StaticCache, max_cache_len=160),
}
TURNS = list(zip(PATCHES, itertools.cycle(CACHES.values())))  # every patch, and every cache often


def put(model: nn.Module, patch: str) -> nn.Module:
    """Have the patch of that name, and no other, on ``model``."""
    options = PATCHES[patch]
    if options is not None:
        factor = {} if options["method"] == "nope" else {"factor": 4}
        rope_ext.patch(model, replace=True, **(factor | options))
    elif hasattr(model.model, "_rope_ext"):
        rope_ext.unpatch(model)
    return model


@pytest.mark.parametrize(("before", "make"), TURNS)
def test_a_cache_is_refused_under_every_other_patch_until_it_is_reset(
    ids, before: str, make: Callable[..., Any]
) -> None:
    model = put(tiny_llama(), before)
    right = logits(model, ids)
    cache = make(config=model.config)
    logits(model, ids[:, :90], past_key_values=cache)
    for after in set(PATCHES) - {before}:
        put(model, after)
        with pytest.raises(rope_ext.CacheError, match="start with an empty cache"):
            logits(model, ids[:, 90:91], past_key_values=cache)
    put(model, before)
    rest = logits(model, ids[:, 90:], past_key_values=cache)
    if before not in ("growing", "dynamic_yarn"):  # which a longer sequence changes
        torch.testing.assert_close(rest, right[:, 90:], **EXACT)


@pytest.mark.parametrize(("before", "make"), TURNS)
def test_a_cache_that_was_reset_is_an_empty_one(ids, before: str, make) -> None:
    model = put(tiny_llama(), before)
    cache = make(config=model.config)
    for after in ("unpatched", "yarn", "bias", "dynamic_yarn", "rerope"):  # one of each kind
        logits(model, ids[:, :90], past_key_values=cache)
        cache.reset()
        put(model, after)
        fresh = make(config=model.config)
        for piece in ids[:, :120].split([100, 1, 19], dim=1):
            right = logits(model, piece, past_key_values=fresh)
            assert torch.equal(logits(model, piece, past_key_values=cache), right)
        cache.reset()
        put(model, before)


@pytest.mark.parametrize("after", ["unpatched", "yarn", "dynamic_yarn", "rerope"])
def test_layers_that_were_reset_one_by_one_and_a_cache_cropped_to_nothing(ids, after: str) -> None:
    for before in ("yarn", "dynamic_yarn", "rerope"):
        for make in CACHES.values():
            model = put(tiny_llama(), before)
            cache = make(config=model.config)
            logits(model, ids[:, :40], past_key_values=cache)
            put(model, after)
            for layer in cache.layers:
                layer.reset() if isinstance(cache, StaticCache) else layer.crop(-40)
            right = logits(model, ids)
            said = logits(model, ids[:, :60], past_key_values=cache)
            rest = logits(model, ids[:, 60:], past_key_values=cache)
            if after != "dynamic_yarn":
                torch.testing.assert_close(torch.cat((said, rest), 1), right, **EXACT)


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("after", ["unpatched", "yarn", "dynamic_yarn", "rerope"])
def test_caches_with_sliding_layers_are_reset(make, after: str) -> None:
    ids = torch.arange(3, 103)[None]
    for before in ("yarn", "rerope"):
        model = put(tiny_model("gemma3_text"), before)
        cache, fresh = (make(config=model.config) for _ in range(2))
        logits(model, ids[:, :50], past_key_values=cache)
        put(model, after)
        with pytest.raises(rope_ext.CacheError) if before != after else nullcontext():
            logits(model, ids[:, 50:51], past_key_values=cache)
        cache.reset()
        for piece in ids.split([60, 1, 39], dim=1):
            right = logits(model, piece, past_key_values=fresh)
            assert torch.equal(logits(model, piece, past_key_values=cache), right)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("when", ["before", "after"])
def test_copies_are_refused_as_well(ids, copied: Callable[[Any], Any], when: str) -> None:
    model = put(tiny_llama(), "yarn")
    cache = DynamicCache(config=model.config)
    logits(model, ids[:, :90], past_key_values=cache)
    if when == "before":
        cache = copied(cache)
    put(model, "unpatched")
    if when == "after":
        cache = copied(cache)
    with pytest.raises(rope_ext.CacheError, match=r"rotation of YaRN.*not patched"):
        logits(model, ids[:, 90:], past_key_values=cache)


def test_the_caches_of_other_models_go_on(ids) -> None:
    model, other = tiny_llama(), tiny_llama()
    right = logits(other, ids)
    cache = DynamicCache(config=other.config)
    logits(other, ids[:, :90], past_key_values=cache)
    put(model, "yarn")
    put(model, "rerope")
    said = logits(other, ids[:, 90:100], past_key_values=cache)
    put(model, "unpatched")
    said = torch.cat((said, logits(other, ids[:, 100:], past_key_values=cache)), 1)
    torch.testing.assert_close(said, right[:, 90:], **EXACT)


def hooked(model: nn.Module) -> bool:
    return any(isinstance(hook, Refusal) for hook in model.model._forward_pre_hooks.values())


def test_nothing_is_left_on_a_model_when_its_caches_are_gone(ids) -> None:
    gc.collect()
    model = tiny_llama()
    before = snapshot(model)
    cache = model(ids[:, :90]).past_key_values
    put(model, "yarn")
    assert hooked(model)
    put(model, "unpatched")
    assert not hooked(model)  # it is again what the cache was filled under
    put(model, "yarn")
    del cache
    logits(model, ids[:, :9])
    assert not hooked(model)
    cache = model(ids[:, :90]).past_key_values
    put(model, "unpatched")
    assert hooked(model)
    cache.reset()
    logits(model, ids[:, :9])
    assert not changed(before, snapshot(model))


def calls_of_a_step(model: Any, ids: torch.Tensor) -> list[str]:
    """Functions of this package that are called in the second step after a prompt."""
    cache, called = model(ids[:, :90]).past_key_values, []

    def seen(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and "rope_ext/" in frame.f_code.co_filename:
            called.append(frame.f_code.co_name)

    with torch.no_grad():
        model(ids[:, 90:91], past_key_values=cache)
        sys.setprofile(seen)
        try:
            model(ids[:, 91:92], past_key_values=cache)
        finally:
            sys.setprofile(None)
    return called


def test_no_call_is_added_to_a_step_under_a_fixed_map(ids) -> None:
    """Beside those that other patches of this process have left on functions of transformers."""
    assert calls_of_a_step(put(tiny_llama(), "yarn"), ids) == calls_of_a_step(tiny_llama(), ids)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "before",
    [pytest.param(x, marks=SLOW) for x in ("dynamic_yarn", "rerope")],
)
def test_graphs_refuse_a_cache_too(ids, before: str, no_graphs) -> None:
    """Also one that would serve both: nothing but numbers in a buffer may have changed."""
    model = put(tiny_llama(num_hidden_layers=1), before)
    compiled = torch.compile(model, backend="eager")
    cache = StaticCache(config=model.config, max_cache_len=160)
    logits(compiled, ids[:, :90], past_key_values=cache)
    logits(compiled, ids[:, 90:91], past_key_values=cache)
    for after in ("pi", "another factor", "unpatched"):
        if after != before:
            put(model, after)
            with pytest.raises(rope_ext.CacheError, match="start with an empty cache"):
                logits(compiled, ids[:, 91:92], past_key_values=cache)


@pytest.mark.parametrize("prompt", [40, 1])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=SLOW) for name in ("unpatched", "dynamic_yarn", "rerope")],
)
def test_a_cache_that_was_reset_begins_again_in_a_whole_graph(
    ids, name: str, prompt: int, no_graphs
) -> None:
    model = put(tiny_llama(num_hidden_layers=1), "rerope" if name == "dynamic_yarn" else "yarn")
    cache = StaticCache(config=model.config, max_cache_len=160)
    logits(model, ids[:, :50], past_key_values=cache)
    cache.reset()
    put(model, name)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        fresh = StaticCache(config=model.config, max_cache_len=160)
        for piece in ids[:, : prompt + 2].split([prompt, 1, 1], dim=1):
            right = logits(model, piece, past_key_values=fresh)
            said = logits(compiled, piece, past_key_values=cache)
            torch.testing.assert_close(said, right, **EXACT)
        cache.reset()


@SLOW
@pytest.mark.parametrize("name", ["dynamic_yarn", "rerope"])
def test_a_cache_that_another_model_filled_after_the_reset_is_refused(ids, name: str, no_graphs):
    model = put(tiny_llama(num_hidden_layers=1), name)
    cache = StaticCache(config=model.config, max_cache_len=160)
    for run in (model, torch.compile(model, backend="eager", fullgraph=True)):
        logits(model, ids[:, :50], past_key_values=cache)
        cache.reset()
        logits(tiny_llama(num_hidden_layers=1), ids[:, :50], past_key_values=cache)
        with pytest.raises((rope_ext.CacheError, RuntimeError), match="start with an empty cache"):
            logits(run, ids[:, 50:60], past_key_values=cache)
        cache.reset()


def test_a_mark_for_another_model_breaks_no_graph(ids, no_graphs) -> None:
    model, other = tiny_llama(num_hidden_layers=1), tiny_llama(num_hidden_layers=1)
    older = other(ids[:, :5]).past_key_values  # makes the patched model check its caches
    put(model, "yarn")
    cache = StaticCache(config=model.config, max_cache_len=160)
    logits(model, ids[:, :50], past_key_values=cache)
    put(other, "pi")
    assert hooked(model) and older.get_seq_length() == 5
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    said = logits(compiled, ids[:, 50:51], past_key_values=cache)
    torch.testing.assert_close(said, logits(model, ids[:, :51])[:, 50:], **EXACT)


def test_hooks_are_in_the_same_order_for_dynamo(ids) -> None:
    """It finds them by their place in the dict, which prepending to an ordered one leaves alone."""
    model, cache = put(tiny_llama(num_hidden_layers=1), "rerope"), DynamicCache()
    logits(model, ids[:, :50], past_key_values=cache)
    put(model, "dynamic_yarn")
    hooks = model.model._forward_pre_hooks
    assert len(hooks) > 1 and list(dict.keys(hooks)) == list(hooks)
