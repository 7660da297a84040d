"""Attention of single queries on paged caches on CPUs, against distances in float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba")  # vLLM installs it; its environment runs these tests, too

from rope_ext.attention import paged, paged_cpu
from rope_ext.attention.call import RotatedBand, Rotation
from rope_ext.methods.geometry import Map, at
from rope_ext.methods.kinds import PositionMethod
from rope_ext.methods.rope import Rope
from tests.positions.test_paged import METHODS, Case, exact, method_of

TOKENS = (200, 3, 97, 1, 256, 255, 129)
"""Tokens of every request: within one part and in several, in full pages and others."""


def rotation(to: Map, stored: Map, places: torch.Tensor, rope: Rope) -> Rotation:
    angles = (at(to, places) - at(stored, places)) * rope.inv_freq
    return (angles.cos().float(), angles.sin().float()) if bool(angles.any()) else None


def error_of(name: str, dtype: torch.dtype = torch.float32, **options: int) -> float:
    case = Case(dtype=dtype, batch=tuple((1, length) for length in TOKENS), **options)
    method, rope = method_of(name, case.columns)
    stored = method.bands()[-1].key
    make = torch.Generator().manual_seed(0)
    pages, cache = case.empty(make)
    pages = pages.where(pages < 10**6, 0)
    positions = [length - 1 for length in TOKENS]
    every = torch.arange(max(TOKENS), dtype=torch.float64)
    query = 1.5 * torch.randn(len(TOKENS), case.heads, case.columns, generator=make).to(dtype)
    wanted = torch.zeros(query.shape, dtype=torch.float64)
    for row, length in enumerate(TOKENS):
        k, v = (
            torch.randn(length, case.kv_heads, case.columns, generator=make).to(dtype)
            for _ in range(2)
        )
        logits = paged.Logits(case.columns**-0.5)
        own = exact(method, rope, query[row : row + 1].double(), k.double(), v.double(), logits)
        wanted[row] = own[0]
        turned = rotation(stored, 0.0, every[:length], rope)
        if turned is not None:
            cos, sin = (x[:, None] for x in turned)
            a, b = k.float().chunk(2, dim=-1)
            k = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(dtype)
        index = torch.arange(length)
        cache[pages[row][index // case.slots].long(), :, index % case.slots] = torch.cat((k, v), -1)
    found = paged_cpu.attend(query, cache, pages, queries_of(method, rope, positions, case.columns))
    return float((found.double() - wanted).abs().max())


def queries_of(
    method: PositionMethod, rope: Rope, positions: list[int], columns: int
) -> paged_cpu.Queries:
    places = torch.tensor(positions, dtype=torch.float64)
    every = torch.arange(max(positions) + 1, dtype=torch.float64)
    stored = method.bands()[-1].key
    bands = [
        RotatedBand(
            geometry=band.geometry,
            query=rotation(band.query, 0.0, places, rope),
            key=rotation(band.key, stored, every, rope),
        )
        for band in method.bands()
    ]
    scales = method.query_scaling(places, rope)
    scales = torch.ones(len(positions)) if scales is None else scales.float()
    return paged_cpu.Queries.from_bands(
        requests=list(range(len(positions))),
        positions=positions,
        bands=bands,
        pairs=columns // 2,
        scales=scales * columns**-0.5,
    )


@pytest.mark.every
@pytest.mark.parametrize("name", METHODS)
def test_it_equals_distances(name: str) -> None:
    assert error_of(name) < 2e-5


@pytest.mark.parametrize("name", ["rerope", "self_extend"])
def test_bfloat16_is_read_as_it_is(name: str) -> None:
    """Keys alone are rounded, when they are cached."""
    assert error_of(name, torch.bfloat16) < (1e-5 if name == "rerope" else 2e-2)


@pytest.mark.parametrize("options", [{"heads": 6}, {"columns": 64}, {"slots": 64}, {"kv_heads": 4}])
def test_groups_columns_and_pages(options: dict[str, int]) -> None:
    assert error_of("self_extend", **options) < 2e-5


def test_long_requests_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = error_of("rerope")
    monkeypatch.setattr(paged_cpu, "SPAN", 40)
    assert error_of("rerope") < 2e-5 and whole < 2e-5
