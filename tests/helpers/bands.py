"""Bands of every method with random inputs, their oracle, and random geometries."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from rope_ext.attention import bands as plain
from rope_ext.attention.call import Call, Pairs, Places, RotatedBand
from rope_ext.methods.geometry import ChunkGap, Distance, Geometry, Queries, Sinks

COLUMNS = 16
HALVES = Pairs(slice(0, 8), slice(8, 16))
INTERLEAVED = Pairs(slice(0, 16, 2), slice(1, 16, 2))
PARTIAL = Pairs(slice(2, 5), slice(5, 8))
PERMUTED = Pairs(torch.tensor([3, 0, 11, 8, 6]), torch.tensor([1, 15, 2, 9, 4]))
LAYOUTS = [HALVES, INTERLEAVED, PARTIAL, PERMUTED]


def count(pairs: Pairs) -> int:
    return torch.arange(COLUMNS)[pairs.first].numel()


def turn(positions: torch.Tensor, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    inv_freq = 100.0 ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
    angles = positions.double()[:, None] * inv_freq
    return angles.cos().float(), angles.sin().float()


def method_bands(
    method: str, size: int, pairs: int, queries: torch.Tensor, keys: torch.Tensor
) -> list[RotatedBand]:
    """Return the bands of each method; ``queries`` and ``keys`` are positions."""
    own, key = turn(queries, pairs), turn(keys, pairs)
    near, far = Distance(0, size), Distance(size, None)
    constant = turn(torch.tensor([float(size)]), pairs)
    grouped = turn(queries // 4 + size - size // 4, pairs)
    return {
        "rerope": [RotatedBand(near, own, key), RotatedBand(far, constant, None)],
        "leaky": [RotatedBand(near, own, key), RotatedBand(far, grouped, turn(keys // 4, pairs))],
        "leaky, cached": [RotatedBand(near, own, key), RotatedBand(far, grouped, None)],
        "string": [
            RotatedBand(near, own, None),
            RotatedBand(far, turn(queries - size + 2, pairs), None),
        ],
        "jet_long": [
            RotatedBand(Queries(size, 0, 2 * size), own, key),
            RotatedBand(Queries(size, 2 * size, 3 * size + 1), grouped, turn(keys // 4, pairs)),
            RotatedBand(Queries(size, 3 * size + 1, None), constant, None),
            RotatedBand(near, own, key),
        ],
        "lm_infinite": [RotatedBand(near, own, key), RotatedBand(Sinks(4, size), constant, None)],
        "dual_chunk": [
            RotatedBand(ChunkGap(size, 0, 0), own, None),
            RotatedBand(ChunkGap(size, 1, 1), turn((queries % size + size), pairs), None),
            RotatedBand(ChunkGap(size, 2, None), constant, None),
        ],
        "chunks": [
            RotatedBand(ChunkGap(size, 0, 1), own, key),
            RotatedBand(ChunkGap(size, 2, 3), None, key),
        ],
        "three": [
            RotatedBand(near, own, key),
            RotatedBand(Distance(size, 2 * size + 3), grouped, key),
            RotatedBand(Distance(2 * size + 3, None), None, None),
        ],
        "window": [RotatedBand(near, own, key)],
        "far only": [RotatedBand(far, grouped, key)],
    }[method]


METHODS = (
    "rerope",
    "leaky",
    "leaky, cached",
    "string",
    "jet_long",
    "lm_infinite",
    "dual_chunk",
    "chunks",
    "three",
    "window",
    "far only",
)


def inputs(
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    value_columns: int = COLUMNS,
    seed: int = 0,
) -> list[torch.Tensor]:
    """Return query, key, value and the sinks of the heads."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (batch, heads, queries, COLUMNS),
        (batch, kv_heads, keys, COLUMNS),
        (batch, kv_heads, keys, value_columns),
        (heads,),
    ]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def by(kernel, query, key, value, bands, pairs, **more):
    """Run a kernel on these bands."""
    return kernel(query, key, value, Call(bands, pairs, **{"scale": 0.3, **more}))


def dense(query, key, value, call, places=None):
    """Compute the result in plain operations from positions; a test compares them with loops."""
    return plain.attend(query, key, value, call, places or Places.following(call, query, key))


def oracle(tensors, bands, pairs, dtype=torch.float64, **options):
    """Compute the reference in float64; the sinks are the fourth tensor, if any."""
    query, key, value, *sinks = (x.to(dtype) for x in tensors)
    options["sinks"] = sinks[0] if sinks else None
    return by(dense, query, key, value, bands, pairs, **options)


def compare(run, tensors, bands, pairs, forward=1e-5, backward=1e-4, **options):
    """Compare a kernel's output and gradients with the reference."""
    ours = [x.clone().requires_grad_() for x in tensors]
    exact = [x.double().requires_grad_() for x in tensors]
    out = by(run, *ours[:3], bands, pairs, sinks=ours[3] if len(ours) > 3 else None, **options)
    expected = oracle(exact, bands, pairs, **options)
    torch.testing.assert_close(out.double(), expected, rtol=forward, atol=forward)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(out, ours, weight.to(out.dtype))
    expected_grads = torch.autograd.grad(expected, exact, weight.double())
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad.double(), expected_grad, rtol=backward, atol=backward)


@st.composite
def geometries(draw) -> Geometry:
    first, width = draw(st.integers(0, 40)), draw(st.one_of(st.none(), st.integers(0, 60)))
    last = None if width is None else first + width
    kind = draw(st.sampled_from([Distance, ChunkGap, Sinks, Queries]))
    if kind is Sinks:
        return Sinks(draw(st.integers(1, 60)), first)
    if kind is ChunkGap:
        first = first // 10
        return ChunkGap(draw(st.integers(1, 50)), first, None if last is None else first + width)
    if kind is Queries:
        begin = draw(st.integers(0, 60))
        return Queries(first, begin, None if width is None else begin + width)
    return Distance(first, last)


def seen(geometry: Geometry, queries: int, keys: int, start: int) -> torch.Tensor:
    at = torch.arange(start, start + keys)
    return geometry.sees(at[keys - queries :, None], at)
