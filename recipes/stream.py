"""Endless, resumable streams of rows, from one source or a weighted mixture.

Documents are read, tokenized and packed in blocks of a few hundred rows, and each block is
shuffled. A block depends only on the seed, its index and its position in the source, so a resumed
run rebuilds one block of each source and reads nothing before it.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from datasets import IterableDataset

from recipes.contents import SHOWN
from rope_ext.config.writing import quieted
from rope_ext.errors import RopeExtError

_READ = 16  # documents tokenized at once
_DRAWN = 1000  # shares of a mixture are exact in every block of this many rows
PROBLEM = "problem"
"""Column with the reason why a file or row is left out, or None; recipes/files.py."""
PLACE = "place"
"""Column that says where a document is from: its dataset or file, and the line or row in it."""
SKIPPED: Mapping[str, Any] = {"input_ids": [], "index": -1}
"""Placeholder for a row before the checkpoint, which Trainer skips."""
_GIVEN = ("text", PLACE)  # columns for what tokenizes


class DataError(RopeExtError):
    """The data cannot be read, or does not fill a row."""


Documents = Mapping[str, Sequence[Sequence[Any]]]
"""``input_ids`` of documents, and ``scored`` where not all tokens have a loss."""


class Packer(Protocol):
    """Makes rows of ``length`` tokens from documents."""

    length: int

    @property
    def shortest(self) -> int:
        """Length in tokens of the shortest document that is not dropped."""
        ...

    def rows(self, tokens: int) -> float:
        """Mean number of rows from a document with this many tokens."""
        ...

    def __call__(self, batch: Documents) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Source:
    """One dataset of a stream.

    Args:
        documents: documents in the column ``text``.
        tokenize: tokenizes texts.
        pack: packs tokenized documents into rows.
        minimum: length of the shortest document to use, tokens.
        seed: random seed of the order.
        block: minimum number of rows that are shuffled together.
    """

    documents: IterableDataset
    tokenize: Callable[[Any], Mapping[str, Any]]
    pack: Packer
    minimum: int
    seed: int
    block: int = 256

    def blocks(self, at: Mapping[str, Any] | None) -> Iterator[tuple[dict, list[dict]]]:
        """Yield the start of each block and its rows, pass after pass, endlessly.

        Args:
            at: a start yielded by an earlier iteration; None: the beginning.
        """
        at = at or {"turn": 0, "number": 0, "place": None}
        turn = at["turn"]
        number = at["number"]
        place = at["place"]
        while True:
            documents = self._shuffled(turn)
            before = number
            if place is not None:
                documents.load_state_dict(place)
            reading = iter(documents)
            more = True
            while more:
                begun = {"turn": turn, "number": number, "place": place}
                rows, more = self._rows(reading, turn, number)
                if rows:
                    yield begun, rows
                    number += 1
                place = documents.state_dict()
            # A whole pass, not one that was resumed near its end.
            if number == before and begun["place"] is None:
                raise DataError(
                    f"documents of at least {self.minimum} tokens do not fill a row of "
                    f"{self.pack.length} tokens; use more data or a smaller --length"
                )
            turn += 1
            place = None

    def _shuffled(self, turn: int) -> IterableDataset:
        """Shuffle the order of files in each pass. A shuffle buffer would not be checkpointed."""
        try:
            return self.documents.shuffle(
                # By the number of the pass, so that a resumed run reads files in the same order.
                seed=self.seed + turn,
                buffer_size=1,
                max_buffer_input_shards=1,
            )
        except TypeError:  # datasets before 5.0
            return self.documents.skip(0)

    def _rows(self, reading: Iterator[Any], turn: int, number: int) -> tuple[list[dict], bool]:
        """The rows of the next documents, and whether more documents may follow."""
        documents, more = self._read(reading)
        if not documents:
            return [], False
        # From the place alone, so that a resumed run shuffles alike.
        rng = np.random.default_rng([self.seed, turn, number])
        # Documents before packing, so that a row has several files; rows after it, since a long
        # document fills consecutive ones.
        order = rng.permutation(len(documents))
        packed = self.pack({name: [documents[i][name] for i in order] for name in documents[0]})
        names = list(packed)
        rows = [dict(zip(names, row, strict=True)) for row in zip(*packed.values(), strict=True)]
        return [rows[i] for i in rng.permutation(len(rows))], more

    def _read(self, reading: Iterator[Any]) -> tuple[list[dict[str, np.ndarray]], bool]:
        """The next documents that are long enough, for a block of rows, and whether more follow."""
        kept: list[dict[str, np.ndarray]] = []
        size = 0.0
        # Whole reads only: the place after them, from which a run resumes, is that of the iterator.
        while size < self.block:
            # It warns that a shuffle buffer is not restored, but here the buffer is empty.
            with quieted(logging.getLogger("datasets.iterable_dataset")):
                found = list(itertools.islice(reading, _READ))
            if not found:
                return kept, False
            for document in self._tokenized(found):
                tokens = len(document["input_ids"])
                if tokens >= self.minimum:
                    kept.append(document)
                    size += self.pack.rows(tokens)
        return kept, True

    def _tokenized(self, found: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, np.ndarray]]:
        """Tokenize documents, and warn of files and rows among them that are left out."""
        tokenized = self.tokenize({name: [row.get(name) for row in found] for name in _GIVEN})
        given = [row.get(PROBLEM) for row in found]
        problems = [each for each in (*given, *tokenized.get(PROBLEM, ())) if each]
        for problem in problems[:SHOWN]:
            warnings.warn(f"left out: {problem}", stacklevel=2)
        if len(problems) > SHOWN:
            more = len(problems) - SHOWN
            warnings.warn(f"left out: {more:,} more, of {len(found):,} read", stacklevel=2)
        columns = [name for name in ("input_ids", "scored") if name in tokenized]
        for parts in zip(*(tokenized[name] for name in columns), strict=True):
            arrays = [np.asarray(part, np.int32) for part in parts]
            yield dict(zip(columns, arrays, strict=True))


class _Reader:
    """Iterates over the rows of one source, and remembers the block of each."""

    def __init__(self, source: Source, at: Mapping[str, Any] | None) -> None:
        at = at or {"first": 0, "begun": None, "given": 0}
        self._blocks = source.blocks(at["begun"])
        self._rows: list[dict] = []
        self._next = 0
        self._count = at["first"]
        self._marks: deque[tuple[int, Any]] = deque([(at["first"], at["begun"])])
        for _ in range(at["given"] - at["first"]):
            next(self)

    def __next__(self) -> dict:
        if self._next == len(self._rows):
            begun, self._rows = next(self._blocks)
            self._next = 0
            self._marks.append((self._count, begun))
        row = self._rows[self._next]
        self._next += 1
        self._count += 1
        return row

    def state(self, given: int) -> dict[str, Any]:
        """The state that resumes after ``given`` rows."""
        # The last block that begins at or before these rows: a resumed run repeats it up to there.
        while len(self._marks) > 1 and self._marks[1][0] <= given:
            self._marks.popleft()
        first, begun = self._marks[0]
        return {"first": first, "begun": begun, "given": given}


class Stream(torch.utils.data.IterableDataset):
    """Mixes rows of several sources; shares are exact in every thousand rows.

    Args:
        sources: the sources; each restarts when it ends.
        shares: share of the rows of each source; they add up to 1.
        seed: random seed of the mixture.
    """

    def __init__(self, sources: Sequence[Source], shares: Sequence[float], seed: int) -> None:
        super().__init__()
        self.sources = list(sources)
        self.seed = seed
        self.bounds = np.cumsum(shares)[:-1]
        self._start: Mapping[str, Any] | None = None
        self._readers: list[_Reader] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        start = self._start or {"rows": 0, "sources": [None] * len(self.sources)}
        pairs = zip(self.sources, start["sources"], strict=True)
        # By a local name, since a second iterator replaces the readers of ``state``.
        self._readers = readers = [_Reader(source, at) for source, at in pairs]
        for index, which in enumerate(self._drawn()):
            if index < start["rows"]:
                # Trainer skips as many rows when it resumes; reading and packing them would take
                # hours.
                yield dict(SKIPPED)
            else:
                yield {**next(readers[which]), "index": index}

    def _drawn(self) -> Iterator[int]:
        """The source of each row."""
        for part in itertools.count():
            rng = np.random.default_rng([self.seed, part])
            # Evenly spaced places in random order: shares are exact, unlike those of draws.
            places = (rng.permutation(_DRAWN) + 0.5) / _DRAWN
            yield from np.searchsorted(self.bounds, places).tolist()

    def state(self, rows: int) -> dict[str, Any] | None:
        """State for :meth:`start` after ``rows`` rows; None if another process read them."""
        if not self._readers:
            return None
        # Of the rows that were trained on: the readers are ahead, since a loader fetches early.
        given = np.bincount(
            np.fromiter(itertools.islice(self._drawn(), rows), int, rows),
            minlength=len(self.sources),
        )
        states = [reader.state(int(n)) for reader, n in zip(self._readers, given, strict=True)]
        return {"rows": rows, "sources": states}

    def start(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``: yield ``SKIPPED`` for earlier rows without reading them.

        Raises:
            ValueError, TypeError, KeyError: it is not a state of this stream.
        """
        places = [one and (one["first"], one["given"], one["begun"]) for one in state["sources"]]
        counts = [state["rows"], *(number for place in places if place for number in place[:2])]
        if len(places) != len(self.sources) or any(type(number) is not int for number in counts):
            raise ValueError(f"it is not the state of {len(self.sources)} sources")
        self._start = state
