"""Attention on paged caches in Triton's interpreter, against distances in float64."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from rope_ext.attention import paged
from rope_ext.methods.kinds import PositionMethod, build_method
from rope_ext.methods.rope import Rope

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs the package triton, and TRITON_INTERPRET=1 before it is imported",
)

TRAINED, FACTOR = 64, 4
METHODS: dict[str, dict[str, Any]] = {
    "rerope": {"window": 37},
    "leaky_rerope": {"window": 21},
    "self_extend": {"window": 30, "group": 7},
    "dual_chunk": {"chunk": 48, "local": 9},
    "string": {"factor": 2, "shift": 150, "window": 11},
    "jet_long": {"window": 20},
    "lm_infinite": {"window": 50},
}
MIXED = ((1, 200), (70, 70), (1, 3), (33, 150), (1, 1), (5, 97), (1, 256))
"""Queries and tokens of every request: decoding, whole prompts and chunks of them."""


def method_of(name: str, columns: int, **options: Any) -> tuple[PositionMethod, Rope]:
    rope = Rope.geometric(1e4, columns, TRAINED)
    method = build_method(name, **{"factor": FACTOR, **METHODS[name], **options})
    assert isinstance(method, PositionMethod)
    return method.resolved(rope), rope


def tables_of(method: PositionMethod, rope: Rope, tokens: int) -> paged.Tables:
    places = torch.arange(tokens, dtype=torch.float64)
    scales = method.query_scaling(places, rope)
    return paged.Tables.from_bands(method.bands(), rope.inv_freq, tokens, scales)


@pytest.mark.every
@pytest.mark.parametrize("name", METHODS)
def test_tables_hold_every_distance(name: str) -> None:
    """Of a query to a key as it is cached; also in steps from the first key of a block."""
    tokens = TRAINED * FACTOR
    method, rope = method_of(name, 16)
    tables = tables_of(method, rope, tokens)
    table = torch.complex(tables.cos.double(), tables.sin.double())
    m, n = torch.arange(tokens, dtype=torch.float64), torch.arange(tokens, dtype=torch.float64)
    stored = table[tables.stored]
    block = torch.arange(tokens) // paged.BLOCK * paged.BLOCK
    for number, band in enumerate(method.bands()):
        distance = band.distances(m[:, None], n[None, :])
        sees = ~distance.isnan().squeeze(-1)
        low, high = tables.low[number][:, None], tables.high[number][:, None]
        assert torch.equal(sees, (n >= low) & (n < high))
        query = table[tables.query[number]]
        whole = table[tables.key[number]]
        steps = table[tables.key_step[number]] * whole[block]
        wanted = torch.polar(torch.ones(()).double(), (distance * rope.inv_freq)[sees])
        for further in (whole, steps):
            found = (query[:, None] * (stored * further).conj()[None])[sees]
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
        assert bool((tables.rotated >> number) & 1) == bool((whole != 1).any())


def test_keys_are_rotated_in_one_graph() -> None:
    method, rope = method_of("string", 16)
    tables = tables_of(method, rope, 64)
    key, positions = torch.randn(5, 2, 16), torch.arange(20, 25)
    compiled = torch.compile(paged.rotate_keys, fullgraph=True, backend="eager")
    found = compiled(key, positions, tables.stored, tables.cos, tables.sin)
    torch.testing.assert_close(found, tables.store(positions, key))
    first, second = (key.double().chunk(2, dim=-1)[part] for part in range(2))
    turned = torch.polar(torch.ones(()).double(), positions[:, None, None] * rope.inv_freq)
    wanted = torch.complex(first, second) * turned
    wanted = torch.cat((wanted.real, wanted.imag), dim=-1)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-6)


@dataclass
class Case:
    """A mixed batch on scattered pages, with the attention that the method's distances give."""

    heads: int = 4
    kv_heads: int = 2
    columns: int = 16
    slots: int = 16
    dtype: torch.dtype = torch.float32
    batch: tuple[tuple[int, int], ...] = MIXED
    splits: int | None = None
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    by_token: bool = False  # slots before heads, as other engines lay out their pages
    padding: int = 0  # tokens after those of the requests
    rows_of_a_pool: bool = False  # pages in rows of a larger table, as SGLang keeps them

    def error(self, method: PositionMethod, rope: Rope) -> float:
        make = torch.Generator().manual_seed(0)
        tokens = max(length for _, length in self.batch)
        tables = tables_of(method, rope, tokens)
        counts = [queries for queries, _ in self.batch]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        lengths = torch.tensor([length for _, length in self.batch], dtype=torch.int32)
        pages, cache = self.empty(make)
        sinks = torch.randn(self.heads, generator=make) if self.sinks else None
        logits = paged.Logits(self.columns**-0.5, self.softcap, self.window, sinks)
        shape = (int(starts[-1]) + self.padding, self.heads, self.columns)
        query, out = (torch.full(shape, torch.nan, dtype=self.dtype) for _ in range(2))
        wanted = torch.zeros(shape, dtype=torch.float64)
        for row, (queries, length) in enumerate(self.batch):
            sizes = (queries, self.heads), (length, self.kv_heads), (length, self.kv_heads)
            q, k, v = (torch.randn(*x, self.columns, generator=make).to(self.dtype) for x in sizes)
            own = slice(int(starts[row]), int(starts[row + 1]))
            query[own] = 1.5 * q
            wanted[own] = exact(method, rope, query[own].double(), k.double(), v.double(), logits)
            at = torch.arange(length)
            stored = torch.cat((tables.store(at, k), v), dim=-1)
            cache[pages[row][at // self.slots].long(), :, at % self.slots] = stored
        keys, values = cache.split(self.columns, dim=-1)
        batch = paged.Batch(pages, lengths, starts, max(counts))
        if self.rows_of_a_pool:
            order = torch.randperm(len(counts) + 4, generator=make)[: len(counts)]
            pool = torch.full((len(counts) + 4, pages.shape[1]), 10**6, dtype=torch.int32)
            pool[order] = pages
            batch = replace(batch, pages=pool, pages_of=order, lengths=lengths.long())
        paged.attend(query, keys, values, out, batch, tables, logits, self.splits)
        assert not out[: starts[-1]].isnan().any()
        assert out[starts[-1] :].isnan().all()
        return float((out.double() - wanted)[: starts[-1]].abs().max())

    def empty(self, make: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Page numbers of every request, and pages of NaN."""
        needed = [-(-length // self.slots) for _, length in self.batch]
        order = torch.randperm(sum(needed) + 5, generator=make).int()
        pages = torch.full((len(needed), max(needed) + 1), 10**6, dtype=torch.int32)
        for row, part in enumerate(order[: sum(needed)].split(needed)):
            pages[row, : len(part)] = part
        shape = [len(order), self.kv_heads, self.slots, 2 * self.columns]
        cache = torch.full(shape, torch.nan, dtype=self.dtype)
        if self.by_token:
            cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
        return pages, cache


def exact(
    method: PositionMethod,
    rope: Rope,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    logits: paged.Logits,
) -> torch.Tensor:
    """Every key rotated by its own distance, ``[tokens, heads, columns]``, float64."""
    length, groups = len(key), query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    m = torch.arange(length - len(query), length, dtype=torch.float64)
    n = torch.arange(length, dtype=torch.float64)
    q, k = (torch.complex(*x.chunk(2, dim=-1)) for x in (query, key))
    made = torch.full((query.shape[1], len(query), length), -torch.inf, dtype=torch.float64)
    for band in method.bands():
        distance = band.distances(m[:, None], n[None, :])
        sees = ~distance.isnan().any(-1)
        angles = distance.nan_to_num() * rope.inv_freq
        rotation = torch.polar(torch.ones_like(angles), angles)
        found = torch.einsum("qhp,khp,qkp->hqk", q, k.conj(), rotation).real
        made = torch.where(sees, found, made)
    scales = method.query_scaling(m, rope)
    made = made * logits.scale * (1 if scales is None else scales[:, None])
    if logits.softcap:
        made = torch.where(made.isinf(), made, logits.softcap * torch.tanh(made / logits.softcap))
    if logits.window:
        made = made.masked_fill(m[:, None] - n >= logits.window, -torch.inf)
    if logits.sinks is not None:
        sinks = logits.sinks.double()[:, None, None].expand(-1, len(query), 1)
        made = torch.cat((made, sinks), dim=-1)
    weights = made.softmax(dim=-1)[..., :length]
    return torch.einsum("hqk,khd->qhd", weights, value)


def check(name: str, tolerance: float = 2e-5, method: dict[str, Any] | None = None, **options):
    case = Case(**options)
    made, rope = method_of(name, case.columns, **(method or {}))
    error = case.error(made, rope)
    assert error < tolerance, error


@needs_triton
@pytest.mark.every
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("splits", [1, 4])
def test_mixed_batches(name: str, splits: int) -> None:
    check(name, splits=splits)


@needs_triton
@pytest.mark.every
@pytest.mark.parametrize("name", METHODS)
def test_decoding(name: str) -> None:
    check(name, splits=4, batch=((1, 1), (1, 65), (1, 255)))


@needs_triton
@pytest.mark.every
@pytest.mark.parametrize(
    "options",
    [
        {"heads": 7, "kv_heads": 1, "columns": 64},
        {"heads": 6, "columns": 80},
        {"heads": 2, "columns": 256},
        {"heads": 3, "kv_heads": 3, "columns": 32},
        {"heads": 20, "kv_heads": 1, "columns": 128},
        {"slots": 32},
        {"slots": 128},
        {"slots": 1},
        {"slots": 1, "rows_of_a_pool": True},
        {"slots": 1, "rows_of_a_pool": True, "batch": ((1, 150), (1, 20))},
        {"by_token": True},
        {"padding": 3},
        {"padding": 2, "batch": ((1, 40), (1, 90))},
        {"batch": ((4, 40), (2, 90), (1, 7))},
        {"dtype": torch.float16, "columns": 64, "tolerance": 5e-3},
        {"dtype": torch.float16, "tolerance": 5e-3, "batch": ((1, 150), (1, 20))},
        {"method": {"temperature": "log_n"}, "batch": ((1, 150), (1, 20))},
    ],
    ids=str,
)
def test_heads_and_pages_of_every_shape(options: dict[str, Any]) -> None:
    check("rerope", **{"batch": ((1, 150), (20, 90), (3, 60)), **options})


@needs_triton
@pytest.mark.every
@pytest.mark.parametrize("name", sorted({*METHODS} - {"rerope"}))
def test_heads_and_pages_of_every_method(name: str) -> None:
    """Groups of heads that fill no tile, and pages that are no power of two or of one token."""
    for shape in ({"heads": 6, "kv_heads": 2, "slots": 48}, {"slots": 1, "rows_of_a_pool": True}):
        check(name, batch=((1, 150), (20, 90), (3, 60)), **shape)


@needs_triton
@pytest.mark.every
@pytest.mark.parametrize("name", ["rerope", "jet_long"])
@pytest.mark.parametrize("splits", [1, 4])
def test_windows_caps_and_sinks(name: str, splits: int) -> None:
    limits = {"window": 45, "softcap": 5.0, "sinks": True}
    check(name, splits=splits, batch=((1, 200), (20, 90), (3, 3)), **limits)


@needs_triton
def test_positions_beyond_the_tables_read_nothing_else() -> None:
    """Drafts reach beyond the longest context; their output is not used."""
    method, rope = method_of("rerope", 16)
    tables = tables_of(method, rope, 48)
    cache = torch.ones(4, 1, 16, 32)
    query, out = torch.ones(2, 2, 16), torch.full((2, 2, 16), torch.nan)
    pages = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)
    lengths, starts = torch.tensor([51], dtype=torch.int32), torch.tensor([0, 2]).int()
    batch = paged.Batch(pages, lengths, starts, 2)
    paged.attend(query, cache[..., :16], cache[..., 16:], out, batch, tables, paged.Logits(0.25))
    torch.testing.assert_close(out, torch.ones_like(out))
    stored = replace(tables, rotates_stored=True).store(torch.tensor([60]), query[:1])
    assert stored.shape == (1, 2, 16)


@pytest.mark.parametrize(("queries", "launches"), [(1, 2), (40, 1)])
def test_nothing_on_the_device_is_read_by_the_host(queries: int, launches: int, monkeypatch):
    """As CUDA graphs need it. Tensors without values raise an error where one is read."""
    counted = []

    class Launch:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **constants: counted.append(grid)

    kernels = types.SimpleNamespace(paged_kernel=Launch(), merge_kernel=Launch())
    monkeypatch.setitem(sys.modules, "rope_ext.attention.paged_kernel", kernels)
    method, rope = method_of("jet_long", 16)
    tables = tables_of(method, rope, 256)
    with FakeTensorMode(allow_non_fake_inputs=True):
        pages = torch.zeros(2, 8, dtype=torch.int32)
        lengths = torch.zeros(2, dtype=torch.int32)
        starts = torch.zeros(3, dtype=torch.int32)
        batch = paged.Batch(pages, lengths, starts, max_queries=queries)
        query = torch.zeros(queries + 1, 4, 16)
        cache = torch.zeros(16, 2, 16, 32)
        keys = tables.store(torch.zeros(queries + 1, dtype=torch.int64), query[:, :2])
        logits = paged.Logits(scale=0.25)
        out = torch.empty_like(query)
        paged.attend(query, cache[..., :16], cache[..., 16:], out, batch, tables, logits)
        with pytest.raises(DataDependentOutputException):
            int(lengths.sum())
    assert keys.shape == (queries + 1, 2, 16)
    assert len(counted) == launches
