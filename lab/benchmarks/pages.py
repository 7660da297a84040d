"""Mixed batches on scattered pages, for the kernel of :mod:`rope_ext.attention.paged`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lab.benchmarks.attention import halves
from rope_ext.attention import bands as plain
from rope_ext.attention import paged
from rope_ext.attention.call import Call, RotatedBand
from rope_ext.methods import PositionMethod, Rope
from rope_ext.methods.geometry import Map, at
from rope_ext.methods.kinds import build_method

METHODS = ("rerope", "self_extend", "leaky_rerope", "dual_chunk", "string", "jet_long")
SLOTS = 16
"""Tokens of a page, as in vLLM."""


@dataclass(frozen=True)
class Heads:
    """Sizes of a layer."""

    heads: int
    kv_heads: int
    columns: int


class Case:
    """One step of a method: requests of ``(queries, tokens)``, with random numbers.

    Args:
        method: the name of a position method, which reaches 4 times ``trained`` tokens.
        padding: rows of queries after those of the requests, as in a CUDA graph.
    """

    def __init__(
        self,
        method: str,
        requests: list[tuple[int, int]],
        heads: Heads,
        trained: int,
        dtype: torch.dtype,
        device: str,
        padding: int = 0,
    ) -> None:
        made = build_method(method, factor=4)
        assert isinstance(made, PositionMethod)
        self.rope = Rope.geometric(base=1e4, dim=heads.columns, length=trained)
        self.method = made.resolved(self.rope)
        self.requests = requests
        longest = max(tokens for _, tokens in requests)
        self.tables = paged.Tables.from_bands(
            bands=self.method.bands(),
            inv_freq=self.rope.inv_freq,
            positions=longest,
            temperature=self._temperature(torch.arange(longest)),
            device=device,
        )
        self.logits = paged.Logits(scale=heads.columns**-0.5)
        generator = torch.Generator(device).manual_seed(0)

        def drawn(*shape: int) -> torch.Tensor:
            numbers = torch.randn(shape, generator=generator, device=device)
            return numbers.to(dtype)

        rows = sum(queries for queries, _ in requests) + padding
        self.query = drawn(rows, heads.heads, heads.columns)
        self.out = torch.zeros_like(self.query)
        counts = [-(-tokens // SLOTS) for _, tokens in requests]
        order = torch.randperm(sum(counts), generator=generator, device=device).int()
        pages = torch.zeros(len(requests), max(counts), dtype=torch.int32, device=device)
        self.cache = torch.zeros(
            *(sum(counts), heads.kv_heads, SLOTS, 2 * heads.columns), dtype=dtype, device=device
        )
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for row, own in enumerate(order.split(counts)):
            pages[row, : len(own)] = own
            tokens = requests[row][1]
            key = drawn(tokens, heads.kv_heads, heads.columns)
            value = drawn(tokens, heads.kv_heads, heads.columns)
            places = torch.arange(tokens, device=device)
            stored = torch.cat((self.tables.store(places, key), value), dim=-1)
            self.cache[pages[row, places // SLOTS].long(), :, places % SLOTS] = stored
            self.keys.append(key)
            self.values.append(value)
        starts = torch.tensor([0, *(queries for queries, _ in requests)], device=device)
        self.batch = paged.Batch(
            pages=pages,
            lengths=torch.tensor([n for _, n in requests], dtype=torch.int32, device=device),
            starts=starts.cumsum(0).int(),
            max_queries=max(queries for queries, _ in requests),
        )

    def _temperature(self, t: torch.Tensor) -> torch.Tensor | None:
        return self.method.query_scaling(t.double(), self.rope)

    def attend(self) -> torch.Tensor:
        """Run the kernel; returns ``[rows, heads, columns]``, always the same tensor."""
        keys, values = self.cache.chunk(2, dim=-1)
        return paged.attend(
            query=self.query,
            key_cache=keys,
            value_cache=values,
            out=self.out,
            batch=self.batch,
            tables=self.tables,
            logits=self.logits,
        )

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        """Compute the same by plain operations on unrotated keys, request by request."""
        found = []
        first = 0
        for row, (queries, tokens) in enumerate(self.requests):
            t = torch.arange(tokens - queries, tokens, device=self.query.device).double()
            query = self.query[first : first + queries].to(dtype)
            scales = self._temperature(t)
            if scales is not None:
                query = query * scales.to(dtype)[:, None, None]
            bands = [
                RotatedBand(
                    geometry=band.geometry,
                    query=self._rotation(band.query, t, dtype),
                    key=self._rotation(
                        band.key, torch.arange(tokens, device=t.device).double(), dtype
                    ),
                )
                for band in self.method.bands()
            ]
            call = Call(bands=bands, pairs=halves(query.shape[-1]), scale=self.logits.scale)
            key = self.keys[row].to(dtype)
            value = self.values[row].to(dtype)
            by_head = [x.transpose(0, 1)[None] for x in (query, key, value)]
            found.append(plain.attend(*by_head, call)[0].transpose(0, 1))
            first += queries
        return torch.cat(found)

    def _rotation(
        self, to: Map, t: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        angles = at(to, t) * self.rope.inv_freq.to(t.device)
        exact = torch.promote_types(dtype, torch.float32)
        return angles.cos().to(exact), angles.sin().to(exact)
