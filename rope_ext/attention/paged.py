"""Attention on paged caches on GPUs: one Triton kernel for chunks of prompts and for decoding.

Engines keep keys in pages that requests share, so a key is cached once, under a rotation that
depends on its position only: that of the method's last band. All else is a table by position. The
kernel reads tables, pages and lengths on the device, so it can be captured in a CUDA graph.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from rope_ext.methods.geometry import Band, Geometry, Map, at

BLOCK = 64
"""Keys that share a reference position in decoding; a multiple of every tile."""
SPLITS = 16
"""Splits of the keys in decoding, one thread block each, as in vLLM's kernel."""
FEW = 16
"""Rows of a tile in decoding, queries times heads of a key: the fewest that Triton multiplies."""
MOST_COLUMNS = 256
"""Maximum number of columns of a head."""


@dataclass(frozen=True, eq=False)
class Tables:
    """All that a position method assigns to positions, for positions from 0; one for all layers.

    Most maps assign whole numbers, so bands share one table of rotations, and ``query``, ``key``,
    ``key_step`` and ``stored`` are its rows.
    """

    # The first position that a query sees in a band, and one past the last: [bands, positions].
    low: Tensor
    high: Tensor
    query: Tensor  # rotation of queries, [bands, positions]
    key: Tensor  # further rotation of cached keys, [bands, positions]
    key_step: Tensor  # the same, relative to the first key of the block
    stored: Tensor  # rotation of keys when they are cached, [positions]
    cos: Tensor  # float32, [rows, pairs]
    sin: Tensor
    rotated: int  # bit b is set if band b rotates cached keys
    rotates_stored: bool  # whether keys are rotated when they are cached
    temperature: Tensor | None  # factor of the logits of a query, float32, [positions]

    @classmethod
    def from_bands(
        cls,
        bands: Sequence[Band],
        inv_freq: Tensor,
        positions: int,
        temperature: Tensor | None = None,
        device: torch.device | str = "cpu",
        rotated_queries: bool = False,
    ) -> Self:
        """Compute the tables of a resolved method for ``positions`` tokens, on a device.

        ``inv_freq``: float64, [pairs]; ``temperature``: see :class:`Tables`; ``rotated_queries``:
        queries have the rotation with which keys are cached, as models rotate both alike. Angles
        are computed in float64 on the CPU. Maps with positions by pair are not supported.
        """
        with torch.device("cpu"):  # engines build models under the device of the model
            t = torch.arange(positions, dtype=torch.float64)
            block = torch.arange(positions) // BLOCK * BLOCK
            stored = _places(bands[-1].key, t)
            before = stored if rotated_queries else torch.zeros_like(stored)
            queries = [_places(band.query, t) - before for band in bands]
            keys = [_places(band.key, t) - stored for band in bands]
            steps = [further - further[block] for further in keys]
            every = torch.stack([stored, *queries, *keys, *steps])
            # Rounded, so that equal steps get one row; the angle differs by 1e-9 at most.
            distinct, rows = torch.unique(every.round(decimals=9), return_inverse=True)
            cos, sin = _rotations(distinct, inv_freq.cpu().double())
            count = len(bands)
            low, high = _visible([band.geometry for band in bands], positions)
        query_rows, key_rows, step_rows = rows[1:].split(count)
        whole = [
            x.to(device, torch.int32).contiguous()
            for x in (low, high, query_rows, key_rows, step_rows, rows[0])
        ]
        return cls(
            *whole,
            cos=cos.to(device),
            sin=sin.to(device),
            rotated=sum(int(bool(x.any())) << number for number, x in enumerate(keys)),
            rotates_stored=bool(stored.any()),
            temperature=None if temperature is None else temperature.to(device, torch.float32),
        )

    @property
    def positions(self) -> int:
        return self.low.shape[1]

    def store(self, positions: Tensor, key: Tensor) -> Tensor:
        """Rotate keys ``[tokens, heads, columns]`` at ``[tokens]`` to what is cached."""
        if not self.rotates_stored:
            return key
        return rotate_keys(key, positions, stored=self.stored, cos=self.cos, sin=self.sin)


def rotate_keys(key: Tensor, positions: Tensor, stored: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate keys ``[tokens, heads, columns]`` to what is cached; see :class:`Tables`."""
    row = stored[positions.clamp(max=len(stored) - 1)]
    cos = cos[row][:, None]
    sin = sin[row][:, None]
    first, second = key.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(key.dtype)


def _places(to: Map, t: Tensor) -> Tensor:
    """Return the positions that a map assigns to tokens, ``[positions]``."""
    found = at(to, t)
    assert found.shape[-1] == 1, "callers refuse methods with positions by pair"
    return found[:, 0]


def _rotations(places: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, float32, without a float64 table of all of them."""
    angles = [part[:, None] * inv_freq for part in places.split(2**14)]
    cos = torch.cat([x.cos().float() for x in angles])
    sin = torch.cat([x.sin().float() for x in angles])
    return cos, sin


def _visible(geometries: Sequence[Geometry], positions: int) -> tuple[Tensor, Tensor]:
    """Return the first position that each query sees, and one past the last, by band."""
    ends = [geometry.ends(torch.arange(positions)) for geometry in geometries]
    low = torch.stack([first.clamp(min=0) for first, _ in ends])
    high = torch.stack([end for _, end in ends])
    return low, high


@dataclass(frozen=True)
class Batch:
    """Where the requests of a step are, on the device; ``starts`` is int32."""

    # Pages of every request, [requests, most pages]; request r begins at row ``pages_of[r]``, and
    # its pages may go on in the rows after it.
    pages: Tensor
    lengths: Tensor  # tokens of every request with those of this step, [requests]
    starts: Tensor  # first query of every request, and the number of queries, [requests + 1]
    max_queries: int  # most queries of a request; known to the host
    pages_of: Tensor | None = None  # row of ``pages`` of every request, [requests]; None: in order


@dataclass(frozen=True)
class Logits:
    """How logits are computed."""

    scale: float
    softcap: float = 0.0  # 0: none
    window: int = 0  # tokens that a query sees, itself included; 0: no limit
    sinks: Tensor | None = None  # a logit for every head, [heads]


def tile(max_queries: int, groups: int, columns: int, splits: int | None = None) -> dict[str, Any]:
    """Return constants of a launch: they compile for capability 8.0 and later without spills.

    ``groups``: heads of a key; ``columns`` of a head.
    """
    block = _power(max_queries)  # few sizes, since each is compiled when it first occurs
    decodes = block * groups <= FEW or block == 1
    width = max(_power(columns), 32)
    rows = max(FEW if decodes or width > 128 else 64, _power(groups))
    return {
        "BLOCK_Q": block if decodes else rows // groups,
        "ONE_BLOCK": decodes,
        "ROWS": rows,
        "SIZE": 32 if width <= 128 else 16,
        "SPLITS": (SPLITS if decodes else 1) if splits is None else splits,
        "num_warps": 4 if rows == FEW else 8,
        "num_stages": 2,
    }


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor,
    batch: Batch,
    tables: Tables,
    logits: Logits,
    splits: int | None = None,
) -> Tensor:
    """Compute attention of queries on cached keys, into ``out``.

    ``query``, ``[tokens, heads, columns]``: those of the requests one after the other, not rotated
    unless the tables are for rotated ones; each is one of the last tokens of its request. Caches:
    ``[pages, key heads, slots, columns]`` with any strides but the last; keys as
    :meth:`Tables.store` returns them.
    """
    kernels = importlib.import_module("rope_ext.attention.paged_kernel")  # it imports triton
    tokens, heads, columns = query.shape
    kv_heads, slots = key_cache.shape[1:3]
    pairs = columns // 2
    value_columns = value_cache.shape[-1]
    groups = heads // kv_heads
    requests = len(batch.lengths)
    shape = tile(
        max_queries=batch.max_queries,
        groups=groups,
        columns=max(columns, value_columns),
        splits=splits,
    )
    parts = out
    lse = out
    if shape["SPLITS"] > 1:
        every = (tokens, heads, shape["SPLITS"])
        parts = query.new_empty(*every, value_columns, dtype=torch.float32)
        lse = query.new_empty(every, dtype=torch.float32)
    unused = query  # kernels need a tensor even for arguments that they do not read
    sinks = unused if logits.sinks is None else logits.sinks
    temperature = unused if tables.temperature is None else tables.temperature
    pages_of = unused if batch.pages_of is None else batch.pages_of
    blocks = requests if shape["ONE_BLOCK"] else tokens // shape["BLOCK_Q"] + requests
    fixed = constants(
        tables,
        groups=groups,
        kv_heads=kv_heads,
        slots=slots,
        pairs=pairs,
        value_columns=value_columns,
    )
    kernels.paged_kernel[(blocks, kv_heads, shape["SPLITS"])](
        query, key_cache, value_cache, parts, lse, sinks, batch.pages, pages_of, batch.lengths,
        batch.starts, tables.low, tables.high, tables.query, tables.key, tables.key_step,
        tables.cos, tables.sin, temperature, requests, logits.scale, logits.softcap,
        tables.positions, batch.pages.stride(0), *query.stride()[:2], *out.stride()[:2],
        *key_cache.stride()[:3], *value_cache.stride()[:3],
        **fixed,
        WINDOW=logits.window, HAS_PAGES_OF=batch.pages_of is not None,
        HAS_SINKS=logits.sinks is not None, HAS_CAP=logits.softcap > 0,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", **shape,
    )  # fmt: skip
    if shape["SPLITS"] > 1:
        kernels.merge_kernel[(tokens, heads)](
            out, parts, lse, sinks, batch.starts, requests, *out.stride()[:2], HEADS=heads,
            SPLITS=shape["SPLITS"], DV=value_columns, DV2=max(_power(value_columns), 16),
            HAS_SINKS=logits.sinks is not None,
        )  # fmt: skip
    return out


def constants(
    tables: Tables, groups: int, kv_heads: int, slots: int, pairs: int, value_columns: int
) -> dict[str, Any]:
    """Return the constants of the kernel that do not depend on the batch."""
    return {
        "KV": kv_heads,
        "GROUPS": groups,
        "BANDS": len(tables.low),
        "ROTATED": tables.rotated,
        "BLOCK": BLOCK,
        "PAGE": slots,
        "PAIRS": pairs,
        "PAIRS2": max(_power(pairs), 16),
        "DV": value_columns,
        "DV2": max(_power(value_columns), 16),
        "HAS_TEMPERATURE": tables.temperature is not None,
    }


def _power(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
