"""Defines the arguments of attention kernels that support several bands.

A position map rotates a query differently for near and far keys. The causal triangle is split into
disjoint bands, and within a band, each query and each key has one rotation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rope_ext.methods.geometry import Geometry

Rotation = tuple[Tensor, Tensor] | None
"""Cosine and sine, ``[tokens or 1, pairs]`` each; None rotates nothing.

Plain PyTorch operations also support ``[rows or 1, 1, tokens or 1, pairs]``.
"""


def each_table(rotation: Rotation, function: Callable[[Tensor], Tensor]) -> Rotation:
    """Apply ``function`` to cosine and sine; None stays None."""
    return None if rotation is None else (function(rotation[0]), function(rotation[1]))


def part_of(rotation: Rotation, tokens: slice) -> Rotation:
    """Select the rotations of some tokens; a single rotation for all tokens is unchanged."""
    if rotation is None or rotation[0].shape[-2] == 1:
        return rotation
    return rotation[0][..., tokens, :], rotation[1][..., tokens, :]


@dataclass(frozen=True)
class RotatedBand:
    """One band of the causal triangle, and the rotations of its queries and keys."""

    geometry: Geometry  # which keys each query sees; the bands of a call are disjoint
    query: Rotation  # of each query, [queries or 1, pairs]
    key: Rotation  # of each key, [keys or 1, pairs]


@dataclass(frozen=True)
class Pairs:
    """Columns of rotary pairs in a head.

    Args:
        first, second: the two columns of each pair, in the order of the rotations: slices (with
            start and stop) where possible, else int64 tensors of shape ``[pairs]``. A rotation by
            ``angle`` computes ``first * cos - second * sin`` and ``second * cos + first * sin``.
            Columns in neither are not rotated.
    """

    first: slice | Tensor
    second: slice | Tensor

    def rotate(self, x: Tensor, rotation: Rotation, dtype: torch.dtype | None = None) -> Tensor:
        """Rotate ``x`` (``[..., tokens, columns]``); computed in the dtype of the rotation.

        ``dtype``: dtype of the result; None: that of ``x``. If nothing is rotated, nothing is cast.
        """
        if rotation is None:
            return x
        cos, sin = rotation
        to = x.dtype if dtype is None else dtype
        first = self.first
        second = self.second
        a = x[..., first]
        b = x[..., second]
        turned_a = torch.addcmul(a * cos, b, sin, value=-1)
        turned_b = torch.addcmul(b * cos, a, sin)
        wider = turned_a.dtype  # of the rotation, if that is more precise
        if (
            isinstance(first, slice)
            and isinstance(second, slice)
            and first.stop == second.start
            and {first.step, second.step} <= {None, 1}
        ):  # two adjacent ranges; inductor turns writes to slices into masks
            if first.start == 0 and second.stop == x.shape[-1]:
                return torch.cat((turned_a, turned_b), dim=-1).to(to)
            before = x[..., : first.start].to(wider)
            after = x[..., second.stop :].to(wider)
            return torch.cat((before, turned_a, turned_b, after), dim=-1).to(to)
        out = x.to(wider, copy=True)
        out[..., first] = turned_a
        out[..., second] = turned_b
        return out.to(to)


@dataclass(frozen=True, eq=False)
class Call:
    """All arguments of a kernel except query, key and value.

    Every kernel takes ``query`` (``[batch, heads, queries, columns]``, before the rotations of the
    bands), ``key`` (``[batch, kv_heads, keys, columns]``; ``heads`` is a multiple of ``kv_heads``),
    ``value`` (``[batch, kv_heads, keys, value_columns]``) and a call. It returns ``[batch, heads,
    queries, value_columns]``, zero for queries that see no key.

    Args:
        bands: disjoint; a key outside a query's bands is masked. Rotations get no gradient.
        pairs: the columns that rotate together.
        scale: factor for all logits.
        start: position of the first key; the queries are the last keys.
        softcap: logits become ``softcap * tanh(logit / softcap)``.
        sinks: one extra logit per head, ``[heads]``, which is in the softmax but has no value.
        bias: added to the logits by distance, after the soft cap: ``[heads, distances]``, finite,
            float32 or better; larger distances use the last entry.
        ahead: number of entries of ``bias`` for keys after the query, which come first, farthest
            first; entry ``ahead`` is for distance 0.
        scores: an encoding whose ``logits`` take the place of the logits after the soft cap, and
            the parameters that it is given.
    """

    bands: Sequence[RotatedBand]
    pairs: Pairs
    scale: float
    start: int = 0
    softcap: float | None = None
    sinks: Tensor | None = None
    bias: Tensor | None = None
    ahead: int = 0
    scores: tuple[Any, Mapping[str, Tensor]] | None = None


def wide(x: Tensor) -> torch.dtype:
    """The dtype of logits: float32, or float64 for float64.

    In half precision, logits have errors of up to 0.2 %, which exceeds 1 for logits above 500, and
    the softmax turns a logit's error into a relative error of its weight.
    """
    return torch.promote_types(x.dtype, torch.float32)


def by_distance(bias: Tensor, first: int, queries: int, keys: int) -> Tensor:
    """Return the bias of consecutive tokens, ``[heads, queries, keys]``.

    ``first``: entry of ``bias`` for the first query and the first key. Each query has the previous
    query's numbers, shifted by one key, so they are copied instead of looked up.
    """
    distance = torch.arange(first + queries - 1, first - keys, -1, device=bias.device)
    return bias[:, distance.clamp(0, bias.shape[1] - 1)].unfold(1, keys, 1).flip(1)


@dataclass(frozen=True, eq=False)
class Places:
    """Positions of queries and keys that are not consecutive, and a mask."""

    query: Tensor  # int64, [queries] or [batch, queries], in any order and with any gaps
    key: Tensor  # [keys] or [batch, keys]
    mask: Tensor | None = None  # bool, broadcast to [batch, heads, queries, keys]; False hides
    # The last key that a query sees, [queries]: later ones are hidden even at the same position.
    newest: Tensor | None = None
    visible: dict[Any, Any] | None = None  # what queries see, for further calls with these places

    def sees(self, geometry: Geometry, queries: slice, keys: slice) -> Tensor:
        """Return which keys these queries see, ``[queries, keys]``, or by row and head."""
        seen = geometry.sees(self.query[..., queries, None], self.key[..., None, keys])
        seen = seen[:, None] if seen.dim() == 3 else seen
        if self.mask is not None:
            mask = self.mask[..., keys]
            seen = seen & (mask if mask.shape[-2] == 1 else mask[..., queries, :])
        if self.newest is not None:
            index = torch.arange(self.key.shape[-1], device=self.key.device)[keys]
            seen = seen & (index <= self.newest[queries][:, None])
        return seen

    def biased(self, bias: Tensor, queries: slice, keys: slice, ahead: int = 0) -> Tensor:
        """Look up a :class:`Call`'s ``bias`` by distance, ``[heads, queries, keys]``, or by row."""
        distance = self.query[..., queries, None] - self.key[..., None, keys] + ahead
        found = bias[:, distance.clamp(0, bias.shape[1] - 1)]
        return found.movedim(1, 0) if found.dim() == 4 else found

    @classmethod
    def following(cls, call: Call, query: Tensor, key: Tensor) -> "Places":
        """Return consecutive positions from ``call.start`` on; the queries are the last keys."""
        positions = torch.arange(call.start, call.start + key.shape[2], device=key.device)
        return cls(positions[key.shape[2] - query.shape[2] :], positions)

    @classmethod
    def in_slots(
        cls, query: Tensor, key: Tensor, real: Tensor, filled: int | Tensor, both: bool = False
    ) -> "Places":
        """Return the places of queries in the slots from ``filled`` on, whose positions may repeat.

        A token never sees later slots, unless attention is in ``both`` directions. Tensors are
        ``[rows or 1, tokens]``; ``real`` is True for slots with a token.
        """
        newest = None if both else filled + torch.arange(query.shape[1], device=query.device)
        mask = real if len(real) == 1 else real[:, None, None]
        query, key = (x[0] if len(x) == 1 else x for x in (query, key))
        return cls(query=query, key=key, mask=mask, newest=newest)
