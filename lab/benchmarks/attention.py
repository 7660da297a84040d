"""Attention in bands, and RoPE with torch's causal attention: calls for the benchmarks to time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from lab.benchmarks.measuring import COLUMNS, NATIVE, Measured, ratios, tensors
from rope_ext.attention import decode as decode_kernel
from rope_ext.attention import dispatch as attention
from rope_ext.attention.call import Call, Pairs, RotatedBand, Rotation, each_table
from rope_ext.methods.geometry import ChunkGap, Distance

HEADS = 8
LAYERS = 16
"""Layers of a decoding step, each with its own keys; what they share is computed once."""


def halves(columns: int) -> Pairs:
    return Pairs(slice(0, columns // 2), slice(columns // 2, columns))


def _rotation(positions: torch.Tensor, columns: int = COLUMNS) -> Rotation:
    inv_freq = 10000.0 ** -(torch.arange(0, columns, 2, device=positions.device) / columns)
    angles = positions[:, None] * inv_freq
    return angles.cos(), angles.sin()


def bands(
    variant: str,
    queries: int,
    keys: int,
    window: int,
    columns: int = COLUMNS,
    device: str | torch.device = "cpu",
) -> list[RotatedBand]:
    """The kernel's arguments for a method; in decoding, keys are cached if possible."""
    rotation = functools.partial(_rotation, columns=columns)
    at = torch.arange(keys, dtype=torch.float32, device=device)
    own = rotation(at[-queries:])
    key = rotation(at)
    far = rotation(torch.full((1,), float(window), device=device))
    if variant == "rerope":
        return [
            RotatedBand(Distance(0, window), own, key),
            RotatedBand(Distance(window, None), far, None),
        ]
    if variant == "self_extend":
        grouped = rotation((at[-queries:] / 8).floor() + window - window // 8)
        return [
            RotatedBand(Distance(0, window), own, key),
            RotatedBand(
                Distance(window, None), grouped, rotation((at / 8).floor()) if queries > 1 else None
            ),
        ]
    if variant == "string":
        shifted = rotation(at[-queries:] - window + 128)
        return [
            RotatedBand(Distance(0, window), own, None),
            RotatedBand(Distance(window, None), shifted, None),
        ]
    if variant == "dual_chunk":
        return [
            RotatedBand(ChunkGap(window, 0, 0), own, None),
            RotatedBand(ChunkGap(window, 1, 1), own, None),
            RotatedBand(ChunkGap(window, 2, None), far, None),
        ]
    raise ValueError(variant)


VARIANTS = ("rerope", "self_extend", "string", "dual_chunk")


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate as transformers does."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def native(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, own: Rotation, cached: Rotation
) -> torch.Tensor:
    """RoPE and torch's causal attention; ``cached`` rotates the keys, None: they are rotated."""
    return F.scaled_dot_product_attention(
        rotary(query, *own),
        key if cached is None else rotary(key, *cached),
        value,
        # A single query sees the whole cache; torch would align its mask with the first key.
        is_causal=query.shape[2] == key.shape[2],
        scale=query.shape[-1] ** -0.5,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def ranges_of(call: Call, queries: int, keys: int, device: torch.device) -> decode_kernel.Ranges:
    """Key ranges of the last of consecutive tokens, for the decode kernel."""
    at = torch.arange(keys - queries, keys, device=device)[None]
    found = [
        RotatedBand(
            band.geometry,
            each_table(band.query, lambda x: x.float().expand(queries, -1)[None]),
            each_table(band.key, lambda x: x.float().expand(keys, -1)),
        )
        for band in call.bands
    ]
    origin = torch.zeros(1, dtype=torch.long, device=device)
    return decode_kernel.ranges_of(found, at, origin, at[0, :1])


def attend(
    variant: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int,
    kernel: str = "auto",
) -> Callable[[], torch.Tensor]:
    """Return a function that runs the variant once."""
    queries = query.shape[2]
    keys = key.shape[2]
    columns = query.shape[-1]
    if variant == NATIVE:
        rotation = _rotation(torch.arange(keys, device=query.device), columns)
        tables = [torch.cat((t, t), dim=-1).to(query.dtype) for t in rotation]
        own = [table[-queries:] for table in tables]
        cached = tables if queries > 1 else None  # a cache holds rotated keys
        return functools.partial(native, query, key, value, own=own, cached=cached)
    asked = bands(variant, queries, keys, window=window, columns=columns, device=query.device)
    call = Call(asked, halves(columns), columns**-0.5)
    if kernel == "decode":
        ranges = ranges_of(call, queries, keys, device=query.device)
        return functools.partial(decode_kernel.attend, query, key, value, call, ranges)
    return functools.partial(attention.attend, query, key, value, call, kernel)


def step(
    variant: str,
    query: torch.Tensor,
    cached: Sequence[tuple[torch.Tensor, torch.Tensor]],
    window: int,
) -> Callable[[], None]:
    """Return one decoding step through all layers; ``cached``: keys and values of each."""
    of_each = [attend(variant, query, *layer, window) for layer in cached]

    def run() -> None:
        for one in of_each:
            one()

    return run


def decode(
    keys: int, kv_heads: int, window: int, dtype: torch.dtype, rounds: int
) -> dict[str, Measured]:
    """Compare decoding steps through all layers, with ``keys`` tokens in the cache of each."""
    query, *first = tensors(HEADS, kv_heads=kv_heads, queries=1, keys=keys, dtype=dtype)
    # Separate memory, as in a model: no layer finds its keys in the processor's cache.
    cached = [tuple(first), *(tuple(x.clone() for x in first) for _ in range(LAYERS - 1))]
    with torch.inference_mode():
        return ratios(
            {v: step(v, query=query, cached=cached, window=window) for v in (NATIVE, *VARIANTS)},
            rounds,
        )
