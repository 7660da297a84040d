"""Schemes that give short training rows positions up to the target length.

A scheme takes the tokens of a row and a random generator, and returns the tokens to train on with
their positions: sorted, distinct, and below the target.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

DOCUMENT = 5
"""PoSE's code reads this many rows of a document, and takes the second chunk from them."""

Drawn = tuple[Sequence[int], torch.Tensor]


def skipped_positions(
    length: int, target: int, chunks: int, rng: random.Random
) -> tuple[list[int], list[int]]:
    """Draw where the chunks of a PoSE row start, and by how much their positions are shifted.

    The first offset is 0; each of the others is uniform between the previous one and
    ``target - length``. Boundaries between chunks are uniform. (Zhu et al. 2023, arXiv 2309.10400,
    section 3.2; the chunks are consecutive text, their ``v_i = 0``.)
    """
    starts = [0, *sorted(rng.sample(range(1, length), chunks - 1))]
    offsets = [0]
    while len(offsets) < chunks:
        offsets.append(rng.randint(offsets[-1], target - length))
    return starts, offsets


@dataclass(frozen=True)
class PoSE:
    """Consecutive text in chunks with gaps between their positions, as in the PoSE paper.

    Args:
        target: upper bound of the positions.
        chunks: number of chunks per row.
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
    """Two chunks of one document, as in PoSE's ``train_pose.py``.

    The first chunk is the beginning of the document, at most half a row. The second can be anywhere
    after it, so text is skipped as well; its positions are shifted by up to ``target - length``.

    Args:
        target: upper bound of the positions.
        length: length of a row; documents have at least this many tokens.
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
    """Sorted random positions, drawn uniformly without replacement.

    Ruoss et al. 2023, arXiv 2305.16843, section 3; with YaRN's frequencies, Mehta et al. 2026,
    arXiv 2606.23687, without its curriculum of growing targets.

    Args:
        target: upper bound of the positions.
    """

    target: int

    def __call__(self, ids: Sequence[int], rng: random.Random) -> Drawn:
        return ids, torch.tensor(sorted(rng.sample(range(self.target), len(ids))))
