"""Runs of tokens in a batch whose rows may be padded and may hold several documents.

They are found by reading positions, which only code outside of graphs can.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from rope_ext.errors import UnsupportedModelError

_BACK = {  # what to do where positions decrease
    False: "give packed documents no attention mask and use_cache=False, so that transformers "
    "keeps them apart, or rows of their own if the model never does (gpt_oss)",
    True: "it is padded on the right, behind which generation goes on; pad on the left "
    "(padding_side='left' of the tokenizer)",
}


class Run(NamedTuple):
    """Tokens of one sequence, in all rows that have them in the same slots.

    Args:
        rows: None: all.
        first: slot of the first query of the batch.
        slots: of its keys, int64; the last ones are those of its queries.
        count: of its queries.
        places: positions of its keys, int64, ``[keys]``, on the CPU.
        steady: whether they count one by one.
    """

    rows: list[int] | None
    first: int
    slots: torch.Tensor
    count: int
    places: torch.Tensor
    steady: bool

    @property
    def queries(self) -> slice | torch.Tensor:
        """Index of its queries among the new tokens."""
        return _range(self.slots[len(self.slots) - self.count :] - self.first)

    @property
    def keys(self) -> slice | torch.Tensor:
        """Index of its keys among the slots."""
        return _range(self.slots)


def _range(index: torch.Tensor) -> torch.Tensor | slice:
    """A slice if the index has no gaps, which avoids a copy."""
    start, end = int(index[0]), int(index[-1]) + 1
    return slice(start, end) if end - start == len(index) else index


def runs(places: torch.Tensor, sequences: torch.Tensor, rows: int, first: int) -> list[Run]:
    """The batch as runs.

    Args:
        places: position of the token in each slot, int64, ``[rows or 1, slots]``.
        sequences: the sequence in each slot, likewise; negative without a token.
        rows: batch size.
        first: slot of the first query.

    Raises:
        UnsupportedModelError: positions go back within a sequence.
    """
    places, sequences = places.cpu(), sequences.cpu()
    alike = len(places) == len(sequences) == 1
    found: dict[tuple, tuple[list[int], torch.Tensor, torch.Tensor]] = {}
    for row in range(1 if alike else rows):
        of_row, at = (x[row if len(x) > 1 else 0] for x in (sequences, places))
        for number in of_row[of_row >= 0].unique():
            slots = torch.nonzero(of_row == number).flatten()
            if slots[-1] >= first:
                key = tuple(slots.tolist()), tuple(at[slots].tolist())
                found.setdefault(key, ([], slots, at[slots]))[0].append(row)
    made = []
    for of_run, slots, at in found.values():
        step = at.diff()
        back = step < 0
        if bool(back.any()):
            raise UnsupportedModelError(
                f"the position ids of row {of_run[0]} go back within one sequence, where a "
                f"position method would have to attend to the future; "
                f"{_BACK[bool((back & (slots.diff() > 1)).any())]}"
            )
        count = int((slots >= first).sum())
        made.append(
            Run(None if alike else of_run, first, slots, count, at, bool((step == 1).all()))
        )
    return made


def within(found: list[Run], reach: int | None) -> Iterator[Run]:
    """The runs, split so that the queries of each are at most ``reach`` tokens apart."""
    for run in found:
        if reach is None:
            yield run
            continue
        keys = len(run.places)
        begin = keys - run.count
        at = run.places.tolist()
        for end in range(begin + 1, keys + 1):
            if end == keys or at[end] - at[begin] > reach:
                parts = {"slots": run.slots[:end], "places": run.places[:end]}
                yield run._replace(count=end - begin, **parts)
                begin = end
