"""Finds runs of consecutive tokens in a batch, whose rows may have padding and several documents.

This reads positions, which is not possible in a graph.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

BACK = (
    "the position ids go back within one row, where a position method would have to attend to the "
    "future; give packed documents no attention mask and use_cache=False, so that transformers "
    "keeps them apart, or rows of their own if it never does (gpt_oss), with padding_side='left'"
)


def goes_back(places: Tensor, real: Tensor) -> Tensor:
    """Whether a token's position is lower than an earlier one's in its row; a scalar bool tensor.

    ``places``, and ``real`` (which slots have a token): ``[rows or 1, slots]``.
    """
    return ((places.where(real, -1).cummax(1).values > places) & real).any()


class Run(NamedTuple):
    """Consecutive tokens of one sequence, in all rows that have them in the same slots."""

    rows: list[int] | None  # None: all
    keys: slice  # slots of its keys; the last ones are those of its queries
    queries: slice  # its queries among the new tokens
    start: int  # position of its first key


def find_runs(places: Tensor, sequences: Tensor, rows: int, first: int) -> list[Run] | None:
    """Split a batch into runs; None if positions jump, or if a sequence has padding between tokens.

    Args:
        places: position of the token in each slot, int64, ``[rows or 1, slots]``.
        sequences: the sequence of each slot, same shape; negative if there is no token.
        rows: batch size.
        first: slot of the first query.
    """
    places = places.cpu()
    sequences = sequences.cpu()
    alike = len(places) == len(sequences) == 1
    found: dict[tuple[int, int, int], list[int]] = {}
    for row in range(1 if alike else rows):
        of_row, at = (x[row if len(x) > 1 else 0] for x in (sequences, places))
        numbers, counts = of_row.unique_consecutive(return_counts=True)
        real = numbers[numbers >= 0]
        if len(real.unique()) < len(real):  # something lies between the tokens of a sequence
            return None
        stop = 0
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            begin = stop
            stop = stop + count
            if number < 0 or stop <= first:
                continue
            if bool((at[begin:stop].diff() != 1).any()):
                return None
            found.setdefault((begin, stop, int(at[begin])), []).append(row)
    return [
        Run(
            rows=None if alike else of_run,
            keys=slice(begin, stop),
            queries=slice(max(begin - first, 0), stop - first),  # a run may begin in the cache
            start=start,
        )
        for (begin, stop, start), of_run in found.items()
    ]


def within(found: list[Run], most: int | None) -> Iterator[Run]:
    """Split runs so that each has at most ``most`` queries."""
    for run in found:
        begin = run.queries.start
        end = run.queries.stop
        for first in range(begin, end, most or end - begin):
            last = min(first + (most or end - begin), end)
            keys = slice(run.keys.start, run.keys.stop - (end - last))
            yield run._replace(keys=keys, queries=slice(first, last))
