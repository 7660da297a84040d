"""Keys that stay turned from step to step: right whatever is done to the cache, and no work."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Cache, DynamicCache

from rope_ext.attention import flash, sizes
from rope_ext.attention.call import Call, Pairs, RotatedBand
from rope_ext.attention.step import Columns, Step
from rope_ext.methods.geometry import Distance, Sinks
from rope_ext.position.tables import RotationTable
from tests.helpers.models import tiny_llama
from tests.helpers.positions import EXACT, decoded, logits, patch


class Numbers(TorchDispatchMode):
    """Counts the numbers that operations make, beside copies of the cache and attention."""

    made = 0

    def __torch_dispatch__(self, operation: Any, types: Any, given: tuple = (), named: Any = None):
        out = operation(*given, **(named or {}))
        name = operation.name()
        if not (operation.is_view or name.startswith(("aten::cat", "aten::_scaled_dot_product"))):
            self.made += out.numel() if isinstance(out, torch.Tensor) else 0
        return out


@pytest.mark.parametrize("name", ["rerope", "self_extend", "lm_infinite"])
def test_a_step_turns_no_key_twice(name: str, ids) -> None:
    def made(window: int) -> int:
        model = patch(tiny_llama(), name, window=window)
        cache = DynamicCache(config=model.config)
        decoded(model, ids[:, :60], [59, 1], cache)
        with Numbers() as numbers:
            logits(model, ids[:, 60:61], past_key_values=cache)
        return numbers.made

    assert made(8) == made(40)


def other_tokens(cache: Cache) -> None:
    cache.crop(-3)


def rows_by_the_cache(cache: Cache) -> None:
    cache.reorder_cache(torch.tensor([1, 0]))


def rows_by_hand(cache: Cache) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.flip(0), layer.values.flip(0)


def rows_in_place(cache: Cache) -> None:
    for layer in cache.layers:
        for x in (layer.keys, layer.values):
            x.copy_(x.flip(0))


def all_tokens(cache: Cache) -> None:
    cache.reset()  # which in transformers 5.17 leaves as many keys, of zeros
    cache.crop(-cache.get_seq_length())


def nothing(cache: Cache) -> None:
    pass


@pytest.mark.parametrize("name", ["self_extend", pytest.param("dpe", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("change", "kept", "rows"),
    [
        (nothing, 50, [0, 1]),
        (other_tokens, 47, [0, 1]),
        (all_tokens, 0, [0, 1]),
        (rows_by_the_cache, 50, [1, 0]),
        (rows_by_hand, 50, [1, 0]),
        (rows_in_place, 50, [1, 0]),
    ],
)
def test_keys_are_turned_anew_where_the_cache_was_changed(
    name: str, change: Callable, kept: int, rows: list[int], ids
) -> None:
    model = patch(tiny_llama(), name)
    cache = DynamicCache(config=model.config)
    decoded(model, ids[:, :50], [45, *[1] * 5], cache)
    with torch.no_grad():
        change(cache)
    tokens = torch.cat((ids[rows, :kept], ids.flip(1)[:, :12]), 1)
    said = decoded(model, tokens[:, kept:], [1] * 12, cache)
    torch.testing.assert_close(said, logits(model, tokens)[:, kept:], **EXACT)


def shared_layers(cache: Cache) -> Cache:
    fork = copy.copy(cache)
    fork.layers = [copy.copy(layer) for layer in cache.layers]
    return fork


@pytest.mark.parametrize(
    "fork", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache)), shared_layers]
)
def test_a_copy_goes_on_by_itself(fork: Callable, ids) -> None:
    """One after the other, token by token, and each in a thread."""
    model = patch(tiny_llama(), "self_extend")
    cache = DynamicCache(config=model.config)
    decoded(model, ids[:, :50], [45, *[1] * 5], cache)
    ways = [ids[:, 50:58], ids.flip(1)[:, 50:58]]
    right = [logits(model, torch.cat((ids[:, :50], way), 1))[:, 50:] for way in ways]
    caches, said = [cache, fork(cache)], [[], []]
    for i in range(4):
        for one, way, heard in zip(caches, ways, said, strict=True):
            heard.append(logits(model, way[:, i : i + 1], past_key_values=one))
    with ThreadPoolExecutor(2) as threads:
        rest = threads.map(lambda one, way: decoded(model, way[:, 4:], [1] * 4, one), caches, ways)
        said = [torch.cat((*heard, more), 1) for heard, more in zip(said, rest, strict=True)]
    torch.testing.assert_close(said, right, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_steps_are_what_the_kernel_of_many_tokens_computes(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With columns that do not turn, groups of heads, a sink, a bias, and memory that runs out."""
    monkeypatch.setattr(sizes, "SPARE_KEYS", 5)
    make = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, 40, 10, generator=make, dtype=torch.float64).to(dtype)
        for heads in (4, 2, 2)
    )
    sinks = torch.randn(4, generator=make).to(dtype)
    bias = torch.randn(4, 40, generator=make).to(torch.promote_types(dtype, torch.float32))
    pairs, pair = Pairs(slice(0, 4, 1), torch.tensor([9, 8, 7, 6])), torch.arange(4)
    inv_freq = torch.tensor([1.0, 0.3, 0.1, 0.01], dtype=torch.float64)

    def rotations(to: Any) -> RotationTable:
        return RotationTable(to, 0.0, inv_freq, pair)

    bands = [
        (Sinks(3, 9), rotations(9.0), rotations(lambda t: t / 2)),
        (Distance(0, 9), rotations(lambda t: t), rotations(lambda t: t)),
    ]
    wide, cpu = torch.promote_types(dtype, torch.float32), torch.device("cpu")
    rings: dict = {}
    for keys in range(20, 41):
        given = query[:, :, keys - 1 : keys], key[:, :, :keys], value[:, :, :keys]
        made = Step.from_bands(bands, 0, keys, 1.25, Columns.from_pairs(pairs, 10), pairs, dtype)
        turned = [
            RotatedBand(seen, q.between(keys - 1, keys, cpu, wide), k.between(0, keys, cpu, wide))
            for seen, q, k in bands
        ]
        call = Call(turned, pairs, 0.5, temperature=torch.tensor([1.25]), sinks=sinks, bias=bias)
        right = flash.attend(*given, call).transpose(1, 2)
        close = {"atol": {torch.bfloat16: 2e-2}.get(dtype, 1e-5), "rtol": 0}  # of numbers below 2
        by_slot = bias[:, :keys].flip(1)
        for kept in (None, rings):
            found = made.attend(*given, 0.5, sinks, by_slot, kept)
            torch.testing.assert_close(found, right, **close)
