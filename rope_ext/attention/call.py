"""What an attention kernel with several bands is asked for.

A position map rotates a query differently for near and for far keys. The causal triangle is
split into disjoint bands; in each, query and key have one rotation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rope_ext.encodings.scores import Block, Scores
from rope_ext.methods.geometry import Geometry

__all__ = ["Block", "Call", "Pairs", "RotatedBand", "Rotation", "Scores"]

Rotation = tuple[torch.Tensor, torch.Tensor] | None
"""Cosine and sine, ``[tokens or 1, pairs]`` each; None rotates nothing."""


def part_of(rotation: Rotation, tokens: slice) -> Rotation:
    """The rotations of some tokens; where all have one, that."""
    return rotation and tuple(x if x.shape[0] == 1 else x[tokens] for x in rotation)


@dataclass(frozen=True)
class RotatedBand:
    """One band of the causal triangle and how its queries and keys are rotated.

    Args:
        geometry: which keys each query sees in it. The bands of a call are disjoint.
        query: rotation of each query, ``[queries or 1, pairs]``.
        key: rotation of each key, ``[keys or 1, pairs]``.
    """

    geometry: Geometry
    query: Rotation
    key: Rotation


@dataclass(frozen=True)
class Pairs:
    """Where the two columns of each rotary pair lie in a head.

    Args:
        first, second: columns of each pair, in the order of the rotations: slices (with start
            and stop) where they can be, else int64 tensors of shape ``[pairs]``. A rotation by
            ``angle`` makes ``first * cos - second * sin`` and ``second * cos + first * sin``.
            Columns in neither are left alone.
    """

    first: slice | torch.Tensor
    second: slice | torch.Tensor

    @property
    def halves(self) -> bool:
        """Whether the second columns lie in one piece right behind the first."""
        first, second = self.first, self.second
        both = isinstance(first, slice) and isinstance(second, slice)
        return both and first.stop == second.start and {first.step, second.step} <= {None, 1}

    def rotate(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """``x`` (``[..., tokens, columns]``) rotated; computed in the dtype of the rotation."""
        if rotation is None:
            return x
        cos, sin = rotation
        a, b = x[..., self.first], x[..., self.second]
        if torch.compiler.is_compiling() and self.halves:  # writes to parts become masks in a graph
            wide = torch.promote_types(x.dtype, cos.dtype)
            before, after = x[..., : self.first.start], x[..., self.second.stop :]
            parts = (before, a * cos - b * sin, b * cos + a * sin, after)
            return torch.cat([part.to(wide) for part in parts], dim=-1).to(x.dtype)
        out = x.to(torch.promote_types(x.dtype, cos.dtype), copy=True)
        if isinstance(self.first, slice) and isinstance(self.second, slice):
            out[..., self.first].mul_(cos).addcmul_(b, sin, value=-1)
            out[..., self.second].mul_(cos).addcmul_(a, sin)
        else:
            out[..., self.first] = a * cos - b * sin
            out[..., self.second] = b * cos + a * sin
        return out.to(x.dtype)

    def rotate_into(
        self, out: torch.Tensor, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Write :meth:`rotate` to ``out``, in fewer steps; neither gets a gradient."""
        cos, sin = rotation
        if not (isinstance(self.first, slice) and isinstance(self.second, slice)):
            out.copy_(self.rotate(x, rotation))
            return
        a, b = x[..., self.first], x[..., self.second]
        if 2 * a.shape[-1] < x.shape[-1]:
            out.copy_(x)
        wide = torch.promote_types(x.dtype, cos.dtype)
        if x.dtype == wide:
            torch.mul(a, cos, out=out[..., self.first]).addcmul_(b, sin, value=-1)
            torch.mul(b, cos, out=out[..., self.second]).addcmul_(a, sin)
        else:
            a, b = a.to(wide), b.to(wide)
            out[..., self.first] = (a * cos).addcmul_(b, sin, value=-1)
            out[..., self.second] = b.mul_(cos).addcmul_(a, sin)


@dataclass(frozen=True, eq=False)
class Call:
    """Everything that a kernel is told beside query, key and value.

    Every kernel takes ``query`` (``[batch, heads, queries, columns]``, as the bands' rotations
    expect it), ``key`` (``[batch, kv_heads, keys, columns]``; ``heads`` is a multiple of
    ``kv_heads``), ``value`` (``[batch, kv_heads, keys, value_columns]``) and a call, and
    returns ``[batch, heads, queries, value_columns]``, zero for queries that see no key.

    Args:
        bands: disjoint; a key in no band of a query is hidden from it. Rotations get no gradient.
        pairs: the columns that rotate together.
        scale: factor of all logits.
        start: position of the first key, in tokens; the queries are the last of the keys.
        temperature: factor of each query, ``[queries]`` (log-n scaling).
        softcap: logits become ``softcap * tanh(logit / softcap)``.
        sinks: one further logit per head, ``[heads]``, that takes weight and gives no value.
        bias: what every distance adds to the logits, after the soft cap: ``[heads, distances]``,
            finite, float32 or better, from 0 on; the last holds for all that are larger.
        scores: what makes more of the logits than a bias, after the soft cap, before the bias.
    """

    bands: Sequence[RotatedBand]
    pairs: Pairs
    scale: float
    start: int = 0
    temperature: torch.Tensor | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    scores: Scores | None = None

    def scale_query(self, query: torch.Tensor) -> torch.Tensor:
        """``query`` times the temperature."""
        if self.temperature is None:
            return query
        return (query * self.temperature[:, None]).to(query.dtype)
