"""A step of decoding with the flash kernel of the CPU; what all layers share is computed once.

Each layer rotates its query for every band, calls one kernel per band, and merges the results.
Keys that a band needs at another position than the cached one stay rotated in a :class:`Ring`, so
that a step rotates only the new key.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from rope_ext.attention import flash, sizes
from rope_ext.attention.call import Pairs, Rotation
from rope_ext.methods.geometry import Geometry


class Table(Protocol):
    """Rotations by position, such as :class:`rope_ext.position.tables.RotationTable`."""

    idle: bool

    def between(self, first: int, last: int, device: torch.device, dtype: torch.dtype) -> Rotation:
        """For the positions from ``first`` to ``last - 1``; one row if all are equal."""
        ...


@dataclass(frozen=True, eq=False)
class Columns:
    """The rotary pairs of a head, by column.

    Args:
        partner: the other column of the pair of each column, or the column itself, ``[columns]``.
        pair: index of the pair of each column; columns without a pair have the number of pairs.
        sign: sign of the sine for each column.
        own, swap: matrices that map every column to itself and to its partner, ``[columns, 1,
            columns]``.
        whole: whether every column is in a pair.
    """

    partner: torch.Tensor
    pair: torch.Tensor
    sign: torch.Tensor
    own: torch.Tensor
    swap: torch.Tensor
    whole: bool

    @classmethod
    def from_pairs(cls, pairs: Pairs, columns: int) -> Columns:
        own = torch.arange(columns, device="cpu")
        first, second = own[pairs.first], own[pairs.second]
        number = torch.arange(len(first), device="cpu")
        partner, pair = own.clone(), torch.full_like(own, len(first))
        partner[first], partner[second] = second, first
        pair[first], pair[second] = number, number
        sign = torch.ones(columns, dtype=torch.float32, device="cpu")
        sign[first] = -1
        one = torch.eye(columns, dtype=torch.float32, device="cpu")
        swap = one[partner]
        return cls(partner, pair, sign, one[:, None], swap[:, None], 2 * len(first) == columns)

    def wide(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tables of ``[tokens, pairs]`` as ``[tokens, columns]``, the sine with its sign."""
        if not self.whole:
            cos, sin = F.pad(cos, (0, 1), value=1.0), F.pad(sin, (0, 1))
        return cos.index_select(-1, self.pair), sin.index_select(-1, self.pair) * self.sign

    def matrices(self, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Matrices that rotate a row ``[columns]``: ``[columns, rotations, columns]``.

        A head is so small that one matrix product with many zeros is faster than four operations.

        Args:
            cos: ``[rotations, pairs]``.
            sin: likewise.
        """
        cos, sin = self.wide(cos, sin)
        return torch.addcmul(self.own * cos, self.swap, sin)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Tokens ``[..., tokens, columns]`` rotated by tables of their own."""
        cos, sin = self.wide(cos, sin)
        return torch.addcmul(x * cos, x.index_select(-1, self.partner), sin).to(x.dtype)


class KeyRotation(NamedTuple):
    """Rotation of cached keys to where a band needs them.

    Args:
        table: rotations by position; never idle.
        newest: matrix that rotates the last key of the part, ``[columns, columns]``.
    """

    table: Table
    newest: torch.Tensor


class Part(NamedTuple):
    """Keys that one kernel call attends to.

    Args:
        band: index of their band.
        query: index of the rotated query that sees them; None: the query is not rotated.
        piece: index of their piece of all slots.
        first, last: the slots from ``first`` to ``last - 1``.
        key: how the keys are rotated; None: they are used as cached.
    """

    band: int
    query: int | None
    piece: int
    first: int
    last: int
    key: KeyRotation | None


class Ring:
    """Rotated keys of a band, kept from one step to the next.

    They are in the order of their values, with spare memory after the last one; when that is used
    up, the keys that the band still needs move to new memory.
    """

    def __init__(self) -> None:
        self.kept: torch.Tensor | None = None
        self.first = self.last = 0  # slots, as in Part
        self.start = 0  # position of slot 0

    def keys(
        self, step: Step, part: Part, rotation: KeyRotation, key: torch.Tensor
    ) -> torch.Tensor:
        """The rotated keys of ``part``, ``[batch, kv_heads, keys, columns]``; ``key`` has all."""
        missing = part.last - self.last
        kept = self.kept if self.start == step.start else None
        if kept is None or self.first > part.first or not 0 <= missing <= 1:
            kept = self._begin(part, step.rotated(part, rotation, key), step.start)
        elif missing:
            if part.last - self.first > kept.shape[2]:
                shown = kept.narrow(2, part.first - self.first, self.last - part.first)
                kept = self._begin(part, shown, step.start)
            newest = key.select(2, self.last)
            if step.dtype != step.wide:
                newest = newest.to(step.wide)
            kept.select(2, self.last - self.first).copy_(newest @ rotation.newest)
            self.last = part.last
        return kept.narrow(2, part.first - self.first, part.last - part.first)

    def _begin(self, part: Part, rotated: torch.Tensor, start: int) -> torch.Tensor:
        batch, heads, keys, columns = rotated.shape
        with torch.inference_mode(False):  # it outlives the mode
            kept = rotated.new_empty(batch, heads, keys + sizes.SPARE_KEYS, columns)
        kept[:, :, :keys] = rotated
        self.first, self.last, self.start = part.first, part.first + keys, start
        self.kept = kept
        return kept


@dataclass(frozen=True, eq=False)
class Step:
    """What all layers of one layout share in a step of decoding.

    Args:
        parts: disjoint; together all keys that the query sees.
        sizes: sizes of the pieces that the slots up to the last one are split into.
        rotations: matrices that rotate the query, side by side, ``[columns, rotations * columns]``;
            None: it is not rotated.
        query_scale: factor of the query.
        start: position of the first key.
        columns, pairs: the columns that rotate together.
        dtype: dtype of query, key and value.
        wide: dtype in which they are rotated.
    """

    parts: list[Part]
    sizes: list[int]
    rotations: torch.Tensor | None
    query_scale: float
    start: int
    columns: Columns
    pairs: Pairs
    dtype: torch.dtype
    wide: torch.dtype

    @classmethod
    def from_bands(
        cls,
        bands: Sequence[tuple[Geometry, Table, Table]],
        start: int,
        keys: int,
        query_scale: float,
        columns: Columns,
        pairs: Pairs,
        dtype: torch.dtype,
    ) -> Step:
        """The step of a query at the last of ``keys`` keys; bands are geometry and two tables."""
        where, wide = torch.device("cpu"), torch.promote_types(dtype, torch.float32)
        rows: list[tuple[torch.Tensor, torch.Tensor]] = []

        def row(table: Table, slot: int) -> int | None:
            made = table.between(start + slot, start + slot + 1, where, wide)
            if made is None:
                return None
            rows.append(made)
            return len(rows) - 1

        found = [
            (band, tile.key, tile.key + tile.keys)
            for band, (geometry, _, _) in enumerate(bands)
            for tile in flash.tiles(geometry, 1, keys, start)
        ]
        of_query = [row(bands[band][1], keys - 1) for band, _, _ in found]
        queries = len(rows)
        of_newest = [row(bands[band][2], last - 1) for band, _, last in found]
        if rows:
            made = columns.matrices(*(torch.cat(one) for one in zip(*rows, strict=True)))
        rotations = made[:, :queries].reshape(len(made), -1) if queries else None
        parts = []
        cuts = sorted({0, *(cut for _, *ends in found for cut in ends)})
        sizes = [end - begin for begin, end in itertools.pairwise(cuts)]
        for (band, first, last), query, new in zip(found, of_query, of_newest, strict=True):
            key = None if new is None else KeyRotation(bands[band][2], made[:, new])
            parts.append(Part(band, query, cuts.index(first), first, last, key))
        return cls(parts, sizes, rotations, query_scale, start, columns, pairs, dtype, wide)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        rings: dict[int, Ring] | None = None,
    ) -> torch.Tensor:
        """``[batch, 1, heads, columns]``; what comes in is as :class:`Call` has it.

        ``bias`` is what is added to the logit of every key, ``[heads, keys]``; ``rings`` has, by
        the number of a band, what is known of these very keys.
        """
        batch, heads, _, columns = query.shape
        if not query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
            query, key, value = map(flash.packed, (query, key, value))
        wide, narrow = self.wide, self.dtype != self.wide
        rows, shape = query.reshape(-1, columns), (batch, key.shape[1], heads // key.shape[1])
        rotated, total = (), None
        if self.rotations is not None:
            rotated = torch.mm(rows.to(wide) if narrow else rows, self.rotations)
            rotated = (rotated.to(self.dtype) if narrow else rotated).view(*shape, -1, columns)
            rotated = rotated.unbind(3)
        values = value.split_with_sizes([*self.sizes, value.shape[2] - sum(self.sizes)], 2)
        added = None
        if bias is not None:
            added = bias.view(1, *shape[1:], -1).split_with_sizes(self.sizes, 3)
        if sinks is not None:
            lse = sinks.to(wide).view(1, *shape[1:]).expand(shape)
            total = query.new_zeros(*shape, columns, dtype=wide)
        for part in self.parts:
            if part.key is None:
                near = key.narrow(2, part.first, part.last - part.first)
            elif rings is None:
                near = self.rotated(part, part.key, key)
            else:
                ring = rings.get(part.band)
                if ring is None:
                    ring = rings[part.band] = Ring()
                near = ring.keys(self, part, part.key, key)
            out, new = flash.kernel(
                rows.view(*shape, columns) if part.query is None else rotated[part.query],
                near,
                values[part.piece],
                attn_mask=None if added is None else added[part.piece],
                scale=scale * self.query_scale,
            )
            if narrow:
                out = out.to(wide)
            if total is None:
                total, lse = out, new
                continue
            total = total.lerp(out, (new - lse).sigmoid().unsqueeze(-1))
            if part is not self.parts[-1]:
                lse = torch.logaddexp(lse, new)
        assert total is not None, "a query sees at least itself"
        return (total.to(self.dtype) if narrow else total).reshape(batch, 1, heads, columns)

    def rotated(self, part: Part, rotation: KeyRotation, key: torch.Tensor) -> torch.Tensor:
        """The keys of a part, rotated to where its band needs them."""
        near = key.narrow(2, part.first, part.last - part.first)
        table = rotation.table.between(
            self.start + part.first, self.start + part.last, key.device, self.wide
        )
        if table is None or near.shape[2] > sizes.ROTATED:
            return flash.rotate_part(near, table, flash.ALL, self.pairs)
        return self.columns.rotate(near, *table)
