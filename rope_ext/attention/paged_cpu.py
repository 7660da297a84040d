"""Attention of single queries on paged caches on CPUs, for decoding: loops that numba compiles.

As in :mod:`rope_ext.attention.paged`, a key is cached once, under the rotation of the method's last
band, and is read from its page once per step. Bands that need another rotation rotate it in the
processor's cache. Needs numba, which vLLM installs.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from rope_ext.attention.call import RotatedBand, Rotation
from rope_ext.methods.geometry import extent

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of caches that the kernel reads."""
SPAN = 1024
"""Most keys of a part, which one thread computes: the result depends on no number of threads."""
_SIZE = 32
"""Keys that are copied into the processor's first cache at once."""
# Sums may be reordered, which vectorises them; numbers that are not finite stay as they are.
_SUMS = {"reassoc", "contract", "nsz", "arcp"}
_jit: Any = numba.njit(fastmath=_SUMS, error_model="numpy", nogil=True)


@dataclass(frozen=True)
class Queries:
    """Single queries of a step, and all that their positions decide; the same for all layers."""

    requests: Tensor  # the request of each query, int64, [queries]
    parts: np.ndarray  # query, band, first and last key of each part, int64, [parts, 4]
    of_query: np.ndarray  # first part of each query, and their number, int64, [queries + 1]
    # Rotations of queries in each band, with the scale, [bands, queries, 1, pairs].
    cos: Tensor
    sin: Tensor
    # Further rotations of cached keys in each band by position, float32, [positions, pairs].
    key_cos: tuple[np.ndarray, ...]
    key_sin: tuple[np.ndarray, ...]
    rotates_keys: np.ndarray  # whether the band rotates its keys, bool, [bands]

    @classmethod
    def from_bands(
        cls,
        requests: Sequence[int],
        positions: Sequence[int],
        bands: Sequence[RotatedBand],
        pairs: int,
        scales: Tensor,
    ) -> "Queries":
        """Split what each query sees into parts.

        Args:
            requests: the request of each query.
            positions: position of each query in its request, from 0.
            bands: rotations of these queries, and of all keys by position.
            pairs: columns of a head, divided by 2.
            scales: factor of the logits of each query, ``[queries]``.
        """
        parts: list[tuple[int, int, int, int]] = []
        of_query = [0]
        for query, position in enumerate(positions):
            for number, band in enumerate(bands):
                keys = extent(band.geometry, 1, position + 1)
                for first in range(keys.start, keys.stop, SPAN):
                    parts.append((query, number, first, min(first + SPAN, keys.stop)))
            of_query.append(len(parts))
        queries = [_table(band.query, len(positions), pairs) for band in bands]
        length = max(positions, default=0) + 1
        keys_of = [_table(band.key, 1 if band.key is None else length, pairs) for band in bands]
        return cls(
            requests=torch.tensor(requests, dtype=torch.int64),
            parts=np.array(parts, dtype=np.int64).reshape(-1, 4),
            of_query=np.array(of_query, dtype=np.int64),
            cos=(torch.stack([cos for cos, _ in queries]) * scales[:, None])[:, :, None],
            sin=(torch.stack([sin for _, sin in queries]) * scales[:, None])[:, :, None],
            key_cos=tuple(cos.numpy() for cos, _ in keys_of),
            key_sin=tuple(sin.numpy() for _, sin in keys_of),
            rotates_keys=np.array([band.key is not None for band in bands]),
        )


def _table(rotation: Rotation, count: int, pairs: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of ``count`` tokens, float32, ``[count, pairs]``."""
    if rotation is None:
        cos = torch.ones(count, pairs, dtype=torch.float32)
        return cos, torch.zeros_like(cos)
    cos, sin = (x.float().expand(count, pairs).contiguous() for x in rotation)
    return cos, sin


def attend(query: Tensor, cache: Tensor, pages: Tensor, queries: Queries) -> Tensor:
    """Return the attention of single queries, float32, ``[queries, heads, columns]``.

    Args:
        query: ``[queries, heads, columns]``; the halves of a head are its pairs.
        cache: keys and values side by side, as the last band rotates keys; a dtype of
            :data:`DTYPES`, ``[pages, key heads, slots, 2 * columns]``.
        pages: pages of every request, int32, ``[requests, most pages]``.
        queries: where the queries are.
    """
    count, heads, columns = query.shape
    kv_heads = cache.shape[1]
    first, second = query.float().chunk(2, dim=-1)
    cos = queries.cos
    sin = queries.sin
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    by_key = rotated.view(len(rotated), count, kv_heads, heads // kv_heads, columns)
    out = torch.empty(by_key.shape[1:], dtype=torch.float32)
    _start_threads()
    # Set for the thread of the caller only.
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
    _attend(
        by_key.numpy(),
        (cache.view(torch.uint16) if cache.dtype == torch.bfloat16 else cache).numpy(),
        pages.numpy(),
        queries.requests.numpy(),
        queries.parts,
        queries.of_query,
        queries.key_cos,
        queries.key_sin,
        queries.rotates_keys,
        out.numpy(),
    )
    return out.view(count, heads, columns)


@functools.cache
def _start_threads() -> None:
    """Start numba's threads, those of torch where both found the same OpenMP library.

    numba starts one for each processor, and makes that the number of threads of torch, too.
    """
    count = torch.get_num_threads()
    numba.set_num_threads(1)
    if torch.get_num_threads() != count:
        torch._C.set_num_threads(count)  # an engine may have replaced torch.set_num_threads


@numba.njit(fastmath=_SUMS, error_model="numpy", parallel=True)
def _attend(
    query: Any,
    cache: Any,
    pages: Any,
    requests: Any,
    parts: Any,
    of_query: Any,
    cos: Any,
    sin: Any,
    rotates: Any,
    out: Any,
) -> None:
    """Fill ``out``, ``[queries, key heads, groups, columns]``; every part has its own softmax."""
    _, count, kv_heads, groups, columns = query.shape
    logits = np.empty((len(parts), kv_heads, groups, 2), np.float32)  # highest, and sum
    sums = np.empty((len(parts), kv_heads, groups, columns), np.float32)
    for index in numba.prange(len(parts) * kv_heads):
        part = index // kv_heads
        head = index % kv_heads
        number, band, first, last = parts[part]
        _part(
            query[band, number, head],
            cache,
            head,
            pages[requests[number]],
            first,
            last,
            cos[band],
            sin[band],
            rotates[band],
            logits[part, head],
            sums[part, head],
        )
    for number in range(count):
        _merge(logits, sums, of_query[number], of_query[number + 1], out[number])


@_jit
def _merge(logits: Any, sums: Any, first: Any, last: Any, out: Any) -> None:
    """Merge the parts of a query by their log-sum-exps."""
    for head in range(out.shape[0]):
        for group in range(out.shape[1]):
            highest = np.float32(-np.inf)
            for part in range(first, last):
                highest = max(highest, logits[part, head, group, 0])
            total = np.float32(0)
            out[head, group] = 0
            for part in range(first, last):
                factor = np.float32(math.exp(logits[part, head, group, 0] - highest))
                total += factor * logits[part, head, group, 1]
                for column in range(out.shape[2]):
                    out[head, group, column] += factor * sums[part, head, group, column]
            for column in range(out.shape[2]):
                out[head, group, column] /= total


@_jit
def _part(
    query: Any,
    cache: Any,
    head: Any,
    pages: Any,
    first: Any,
    last: Any,
    cos: Any,
    sin: Any,
    rotates: Any,
    logits: Any,
    sums: Any,
) -> None:
    """Compute one part for the heads of one key head: an online softmax over blocks of keys."""
    groups, columns = query.shape
    slots = cache.shape[2]
    bits = np.empty((2, _SIZE, columns), np.uint32)  # keys and values
    keys = bits[0].view(np.float32)
    values = bits[1].view(np.float32)
    weights = np.empty((groups, _SIZE), np.float32)
    exponents = np.empty(_SIZE, np.int32)
    logits[:, 0] = -np.inf
    logits[:, 1] = 0
    sums[:] = 0
    while first < last:
        page = pages[first // slots]
        slot = first % slots
        count = min(min(_SIZE, slots - slot), last - first)
        for key in range(count):
            cached = cache[page, head, slot + key]
            _copy(cached[:columns], bits[0, key], keys[key])
            _copy(cached[columns:], bits[1, key], values[key])
            if rotates:
                _rotate(keys[key], cos[first + key], sin[first + key])
        for group in range(groups):
            for key in range(count):
                logit = np.float32(0)
                for column in range(columns):
                    logit += query[group, column] * keys[key, column]
                weights[group, key] = logit
            _weigh(weights[group], count, logits[group], sums[group], exponents)
            _add(weights[group], count, values, sums[group])
        first += count


def _copy(cached: Any, bits: Any, floats: Any) -> None:
    """Copy keys and values to ``floats``, of which ``bits`` is another view."""


@numba.extending.overload(_copy, jit_options={"error_model": "numpy"}, inline="always")
def _copy_dtype(cached: Any, bits: Any, floats: Any) -> Any:
    if cached.dtype == numba.types.float32:

        def copy(cached: Any, bits: Any, floats: Any) -> None:
            for column in range(len(cached)):
                floats[column] = cached[column]

        return copy

    def widen(cached: Any, bits: Any, floats: Any) -> None:
        for column in range(len(cached)):  # bfloat16 is the upper half of a float32
            bits[column] = np.uint32(cached[column]) << np.uint32(16)

    return widen


@_jit
def _rotate(key: Any, cos: Any, sin: Any) -> None:
    pairs = len(cos)
    first = key[:pairs]
    second = key[pairs:]
    for pair in range(pairs):
        a = first[pair]
        b = second[pair]
        first[pair] = a * cos[pair] - b * sin[pair]
        second[pair] = b * cos[pair] + a * sin[pair]


@_jit
def _weigh(weights: Any, count: Any, logits: Any, sums: Any, bits: Any) -> None:
    """Turn the logits of a block into weights relative to the highest logit so far."""
    highest = logits[0]
    for key in range(count):
        highest = max(highest, weights[key])
    if highest > logits[0]:
        factor = np.float32(math.exp(logits[0] - highest))
        logits[0] = highest
        logits[1] *= factor
        for column in range(len(sums)):
            sums[column] *= factor
    powers = bits.view(np.float32)
    for key in range(count):  # two loops, which are vectorised
        fraction, exponent = _exp(weights[key] - highest)
        weights[key] = fraction
        bits[key] = (exponent + np.int32(127)) << np.int32(23)  # 2 to this power as a float32
    total = np.float32(0)
    for key in range(count):
        weight = weights[key] * powers[key]
        weights[key] = weight
        total += weight
    logits[1] += total


@_jit
def _exp(x: Any) -> Any:
    """Return two numbers, ``f`` and ``n``, with ``exp(x) = f 2**n``, for ``x`` up to 0.

    The polynomial is that of Cephes; math.exp would be called for one number at a time.
    """
    x = max(x, np.float32(-87))  # 2**n is no subnormal number
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    rest = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    polynomial = np.float32(1.9875691500e-4)
    polynomial = polynomial * rest + np.float32(1.3981999507e-3)
    polynomial = polynomial * rest + np.float32(8.3334519073e-3)
    polynomial = polynomial * rest + np.float32(4.1665795894e-2)
    polynomial = polynomial * rest + np.float32(1.6666665459e-1)
    polynomial = polynomial * rest + np.float32(5.0000001201e-1)
    return polynomial * rest * rest + rest + np.float32(1), np.int32(n)


@_jit
def _add(weights: Any, count: Any, values: Any, sums: Any) -> None:
    """Add the weighted values of a block, four at a time, so that sums are stored less often."""
    fours = count // 4 * 4
    for key in range(0, fours, 4):
        for column in range(len(sums)):
            sums[column] += (
                weights[key] * values[key, column]
                + weights[key + 1] * values[key + 1, column]
                + weights[key + 2] * values[key + 2, column]
                + weights[key + 3] * values[key + 3, column]
            )
    for key in range(fours, count):
        for column in range(len(sums)):
            sums[column] += weights[key] * values[key, column]
