"""The decoding kernel in Triton's interpreter, against the dense form in float64."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

import rope_ext
from rope_ext.attention import bands as plain
from rope_ext.attention import decode
from rope_ext.attention.call import Call, Pairs, Places, RotatedBand
from tests.helpers.bands import HALVES, INTERLEAVED, METHODS, dense, method_bands
from tests.helpers.graphs import static
from tests.helpers.models import tiny_llama
from tests.helpers.positions import EXACT, decoded, logits
from tests.helpers.promises import pieces_of_rows_are_as_alone

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs the package triton, and TRITON_INTERPRET=1 before it is imported",
)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "runs_on", lambda device: True)
    monkeypatch.setattr(decode, "SPLITS", 4)


def ranges(
    bands: list[RotatedBand], t: torch.Tensor, origin: torch.Tensor, slots: int, temperature=None
) -> decode.Ranges:
    """For queries at ``t``, ``[rows, queries]``, and rotations by position."""

    def at(rotation, places: torch.Tensor):
        return rotation and tuple(
            x[places.clamp(0)] if len(x) > 1 else x.expand(*places.shape, -1) for x in rotation
        )

    every = torch.arange(slots)
    found = [RotatedBand(x.geometry, at(x.query, t), at(x.key, every)) for x in bands]
    return decode.ranges_of(found, t, origin, (origin + t[:, 0])[:1], temperature)


def check(
    method: str,
    kv_heads: int = 2,
    groups: int = 4,
    queries: int = 1,
    padding: tuple[int, ...] = (0,),
    pairs: Pairs = HALVES,
    columns: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-5,
    sinks: bool = False,
    temperature: bool = False,
    **more,
) -> None:
    """The kernel on slots of which some are padding and some are empty, row by row."""
    slots, room, make = 75, 90, torch.Generator().manual_seed(0)
    count = len(range(*pairs.first.indices(columns[0])))
    at = torch.arange(room)
    bands = method_bands(method, 20, count, at, at)
    shapes = (kv_heads * groups, queries, columns[0]), (kv_heads, room, columns[0])
    shapes = *shapes, (kv_heads, room, columns[1])
    query, key, value = (torch.randn(len(padding), *x, generator=make).to(dtype) for x in shapes)
    key[:, :, slots:] = value[:, :, slots:] = torch.nan  # what nothing was written to
    of_heads = torch.randn(kv_heads * groups, generator=make) if sinks else None
    origin = torch.tensor(padding)
    t = torch.arange(slots - queries, slots) - origin[:, None]
    scales = torch.linspace(0.5, 2, t.numel()).view(t.shape) if temperature else None
    call = Call((), pairs, 0.3, sinks=of_heads, **more)
    assert decode.refusal(query, value, pairs) is None
    found = decode.attend(query, key, value, call, ranges(bands, t, origin, room, scales))
    for row, before in enumerate(padding):
        there = at[: slots - before]

        def part(by, places):
            return by if by is None or len(by[0]) == 1 else tuple(x[places].double() for x in by)

        of_row = [RotatedBand(b.geometry, part(b.query, t[row]), part(b.key, there)) for b in bands]
        exact = Call(of_row, pairs, 0.3, sinks=None if of_heads is None else of_heads.double())
        exact = replace(exact, **more)
        of_row = query[row : row + 1].double() * (1 if scales is None else scales[row][:, None])
        key_there, value_there = (x[row : row + 1, :, before:slots].double() for x in (key, value))
        expected = dense(of_row, key_there, value_there, exact, Places(t[row], there))
        error = (found[row].double() - expected[0]).norm() / expected.norm()
        assert error < tolerance, (method, row, float(error))


@needs_triton
@pytest.mark.parametrize("method", METHODS)
def test_every_kind_of_bands(method: str, interpreted) -> None:
    check(method, queries=2, padding=(0, 9), sinks=True)


@needs_triton
@pytest.mark.parametrize(
    "options",
    [
        {"groups": 7, "queries": 3},
        {"groups": 1, "queries": 16},
        {"kv_heads": 1, "groups": 7, "queries": 16, "padding": (30, 0)},
        {"pairs": INTERLEAVED},
        {"pairs": Pairs(slice(0, 4), slice(4, 8))},
        {"pairs": Pairs(slice(8, 12), slice(12, 16))},
        {"pairs": Pairs(slice(0, 40), slice(40, 80)), "columns": (80, 80)},
        {"pairs": Pairs(slice(128, 192, 2), slice(129, 192, 2)), "columns": (192, 128)},
        {"pairs": Pairs(slice(0, 128), slice(128, 256)), "columns": (256, 256)},
        {"pairs": Pairs(slice(0, 0), slice(0, 0)), "method": "far only"},
        {"dtype": torch.float16, "tolerance": 2e-3},
        {"temperature": True, "padding": (3, 0), "queries": 3},
        {"softcap": 1.5},
        {"bias": torch.linspace(-2, 2, 8 * 30).view(8, 30), "queries": 3, "padding": (0, 11)},
    ],
    ids=str,
)
def test_heads_and_logits_of_every_shape(options: dict, interpreted) -> None:
    check(**{"method": "rerope", **options})


@needs_triton
@pytest.mark.parametrize("name", ["rerope", "dual_chunk", "alibi"])
@pytest.mark.parametrize("traced", [False, True])
def test_models_decode_by_it(name: str, traced: bool, ids, interpreted, request, monkeypatch):
    """Padded and unpadded, in a growing and in a static cache, one and several tokens at a time."""
    if traced:
        request.getfixturevalue("in_tensors")
    own = plain.attend

    def attend(query, *given, **more):
        assert query.shape[2] > 16, "few queries have a kernel"
        return own(query, *given, **more)

    monkeypatch.setattr(plain, "attend", attend)
    model = rope_ext.patch(tiny_llama(num_hidden_layers=1), name, factor=4)
    cache = static(model) if traced else None
    right = logits(model, ids[:, :60])
    torch.testing.assert_close(decoded(model, ids[:, :60], [52, 3, 4, 1], cache), right, **EXACT)
    rows = [ids[0, :55], ids[1, :44]]
    cache = static(model) if traced else DynamicCache(config=model.config)
    pieces_of_rows_are_as_alone(model, rows, "left", [50, 4, 1], cache)
