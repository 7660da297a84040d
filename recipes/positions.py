"""Schemes that give short training rows positions up to the target length.

A scheme takes the tokens of a row and a random generator, and returns the tokens to train on with
their positions: sorted, distinct, and below the target. :class:`MixedWindows` alone trains on long
rows, and begins at 0 in every window.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
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
        starts, offsets = skipped_positions(
            len(ids), target=self.target, chunks=self.chunks, rng=rng
        )
        positions = torch.arange(len(ids))
        # Not strict: the first chunk has an offset, 0, and no gap before it.
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


@dataclass(frozen=True)
class CREAM:
    """Three chunks of consecutive text: a head at 0, a tail that ends at the target, and a middle.

    For rows of ``n`` tokens and ``s = target / n``, half of the rows have a head and a tail of
    ``4 s`` tokens (at most a third of the row), the others of ``n / 3``. The middle ends at a
    uniform position among those that fit into the first ``a n / 2`` tokens, but not before
    ``a / 2`` of its own length. ``a`` is normal with mean ``1 + s``, rounded down and clipped to
    2 and ``2 s``, so that middles gather in the middle of the context.

    Wu et al. 2024, arXiv 2406.07138, as in ``CREAM`` of their ``src/train.py``, which chooses the
    length of head and tail once per 3000 rows, not per row; written from the code alone.

    Args:
        target: upper bound of the positions.
        sigma: standard deviation of ``a``.
    """

    target: int
    sigma: float = 3.0

    def __call__(self, ids: Sequence[int], rng: random.Random) -> Drawn:
        length = len(ids)
        scale = self.target / len(ids)
        third = length // 3
        ends = third if rng.random() < 0.5 else min(int(4 * scale), third)
        middle = length - 2 * ends
        halves = int(min(max(rng.gauss(1 + scale, self.sigma), 2), 2 * scale))
        first = int(ends + (middle - 1) * halves / 2)
        last = rng.randint(first, int(halves * length / 2) - ends - 1)
        head = torch.arange(ends)
        tail = torch.arange(self.target - ends, self.target)
        return ids, torch.cat((head, torch.arange(last - middle + 1, last + 1), tail))


@dataclass(frozen=True)
class RandomFloats:
    """Sorted real positions, drawn uniformly below the target.

    They are float32, like the angles that transformers computes from them, so nothing rounds them
    on the way. Shimizu et al. 2026, arXiv 2602.14050 ("random float sampling"), from the abstract
    and summaries. The paper draws positions from the same range for every length, also in
    inference; here, inference uses plain positions, whose distances are in that range.

    Args:
        target: upper bound of the positions.
    """

    target: int

    def __call__(self, ids: Sequence[int], rng: random.Random) -> Drawn:
        drawn: set[float] = set()
        while len(drawn) < len(ids):  # two may be equal in float32, or rounded up to the target
            drawn.add(float(np.float32(rng.random() * self.target)))
            drawn.discard(float(self.target))
        return ids, torch.tensor(sorted(drawn), dtype=torch.float32)


@dataclass(frozen=True)
class MixedWindows:
    """Long rows as they are, and a share of them cut into windows of the trained length.

    Positions begin at 0 in every window, and windows do not attend to each other. With a method
    that keeps the trained frequencies within the trained length, these windows train with them, and
    whole rows with the scaled ones.

    Shang et al. 2025, arXiv 2502.20082 (LongRoPE2), section 3.3, whose short windows are documents;
    from summaries of the paper.

    Args:
        window: tokens, at most the trained length.
        share: share of the rows that are cut.
    """

    window: int
    share: float

    def __call__(self, ids: Sequence[int], rng: random.Random) -> Drawn:
        positions = torch.arange(len(ids))
        return ids, positions % self.window if rng.random() < self.share else positions
