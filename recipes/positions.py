"""Positions of a training row that are not one after the other: long ones on short rows.

A scheme takes the tokens of a row and a generator of random numbers, and returns the tokens it
trains on with a position for each, sorted, distinct, and below the target.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

DOCUMENT = 5
"""PoSE's code reads so many rows of a document, and draws the second chunk out of them."""

Drawn = tuple[Sequence[int], torch.Tensor]


def skipped_positions(
    length: int, target: int, chunks: int, rng: random.Random
) -> tuple[list[int], list[int]]:
    """Where the chunks of a PoSE row begin, and by how much their positions are moved.

    Offsets are uniform between the one before and ``target - length``, the first is 0; borders
    between chunks are uniform. (Zhu et al. 2023, arXiv 2309.10400, section 3.2; the text of the
    chunks is one consecutive piece, their ``v_i = 0``.)
    """
    starts = [0, *sorted(rng.sample(range(1, length), chunks - 1))]
    offsets = [0]
    while len(offsets) < chunks:
        offsets.append(rng.randint(offsets[-1], target - length))
    return starts, offsets


@dataclass(frozen=True)
class PoSE:
    """Chunks of consecutive text whose positions skip, as the paper says it.

    Args:
        target: positions are below it.
        chunks: of a row.
    """

    target: int
    chunks: int = 2

    def __call__(self, ids: Sequence[int], rng: random.Random) -> Drawn:
        starts, offsets = skipped_positions(len(ids), self.target, self.chunks, rng)
        positions = torch.arange(len(ids))
        for start, before, offset in zip(starts[1:], offsets, offsets[1:], strict=False):
            positions[start:] += offset - before
        return ids, positions


@dataclass(frozen=True)
class ReleasedPoSE:
    """Two chunks of one document, as PoSE's ``train_pose.py`` cuts them.

    The first is the beginning of the document, at most half a row; the second ends anywhere, so
    that text is skipped as well; its positions are moved by up to ``target - length``.

    Args:
        target: positions are below it.
        length: of a row; documents have that many tokens or more.
    """

    target: int
    length: int

    def __call__(self, ids: Sequence[int], rng: random.Random) -> Drawn:
        first = rng.randint(1, (self.length + 1) // 2)
        end = rng.randint(self.length, len(ids))
        moved = rng.randint(0, self.target - self.length)
        positions = torch.arange(self.length)
        positions[first:] += moved
        return [*ids[:first], *ids[end - self.length + first : end]], positions


@dataclass(frozen=True)
class Scattered:
    """Sorted random positions, every set of them as likely as any other.

    Ruoss et al. 2023, arXiv 2305.16843, section 3; with YaRN's frequencies, Mehta et al. 2026,
    arXiv 2606.23687, whose curriculum of growing targets is left out.

    Args:
        target: positions are below it.
    """

    target: int

    def __call__(self, ids: Sequence[int], rng: random.Random) -> Drawn:
        return ids, torch.tensor(sorted(rng.sample(range(self.target), len(ids))))
