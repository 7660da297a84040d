"""Measures how well an embedder finds long documents, one JSON line for each document.

A line has the similarity of one document to every question, so a run that is stopped keeps all
documents that it has embedded. Ranks are computed from the lines of all documents.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from rope_eval.cases import Case
from rope_eval.data.prompts import Frame
from rope_eval.embedder import Embedder
from rope_eval.folder import Log, read_lines, to_line
from rope_eval.tasks.embedding import Retrieval
from rope_eval.versions import versions
from rope_ext.errors import RopeExtError
from rope_ext.methods import all_methods
from rope_ext.patching import patched

HEADER = b'{"program": "rope_ext", "log": "evidence", "format": 1}\n'
TASK = "retrieval"
CUT = "cut"
"""The unpatched model with every text cut at its window, which is what users have."""
FIRST = (
    *(CUT, "unpatched", "self_extend", "yarn", "ntk", "pi", "rerope", "dynamic_ntk", "llama3"),
    *("leaky_rerope", "string", "dpe", "lm_infinite", "dynamic_yarn", "lampe", "mrrope"),
)
"""Methods to measure first, in this order."""
NEEDS_TABLE = ("longrope", "longrope2")
FACTORS = (2, 4)
"""Lengths as multiples of the trained one, and the factor of methods there; then the cost."""
DOCUMENTS = 25
FACTS = 2
LONGEST = 6
"""More characters than a token of these manuals has."""


class Cell(NamedTuple):
    """One document under a method, or under ``unpatched`` or ``CUT``."""

    method: str
    factor: float
    length: int
    document: int


def parts_of(texts: Sequence[str], length: int) -> tuple[str, ...]:
    """Return ``DOCUMENTS`` disjoint parts of the texts, each of about ``length`` tokens or more."""
    size = LONGEST * length
    rows = [[text[at : at + size] for at in range(0, len(text) - size, size)] for text in texts]
    # In turns, so that the first of them come from all texts.
    found = [row[n] for n in range(max(map(len, rows))) for row in rows if n < len(row)]
    return tuple(found[:DOCUMENTS])


@dataclass
class Retrievals:
    """A run over the cells of one embedder; its arguments are as in ``measure.Measurement``."""

    name: str
    embedder: Embedder
    tokenizer: Any
    texts: Sequence[str]
    trained: int
    output: Path
    until: float
    methods: Sequence[str] = ()
    lines: dict[Cell, dict[str, Any]] = field(default_factory=dict)

    @cached_property
    def cases(self) -> dict[int, list[Case]]:
        """The questions of each length; the documents are the same, cut at that length."""
        frame = Frame(self.tokenizer, (), model=self.embedder.recipe.model)
        lengths = [self.trained, *(factor * self.trained for factor in FACTORS)]
        parts = parts_of(self.texts, max(lengths))
        sizes = {"queries": DOCUMENTS * FACTS, "candidates": DOCUMENTS, "facts": FACTS}
        task = Retrieval("embedding_documents", texts=parts, source="manuals", **sizes)
        return {length: list(task.questions(frame, [length], seed=0).cases) for length in lengths}

    def run(self) -> bool:
        """Measure all cells that are left; return whether none is left."""
        log = Log(self.output, HEADER, "make room or give --output another file")
        self.output.parent.mkdir(parents=True, exist_ok=True)
        log.open()
        self._read_lines()
        model = self.embedder.model
        dtype = str(model.dtype).removeprefix("torch.")
        common = {"model": self.name, "task": TASK, "seed": 0, "dtype": dtype}
        common |= {"device": str(model.device), **versions()}

        def keep(cell: Cell, found: Mapping[str, Any]) -> None:
            asked = self._asked(cell.length)
            self.lines[cell] = {**common, "questions": asked, **cell._asdict(), **found}
            log.add(to_line(self.lines[cell]))

        for cells in self._plan():
            first = cells[0]
            left = [cell for cell in cells if cell not in self.lines]
            if "refused" in self.lines.get(first, {}) or not left:
                continue
            if self.methods and first.method not in self.methods:
                continue
            if time.monotonic() > self.until:
                return False
            plain = first.method in ("unpatched", CUT)
            try:
                with nullcontext() if plain else self._patched(first):
                    if not self._measure(left, keep):
                        return False
            except RopeExtError as error:
                reason = str(error).splitlines()[0]
                keep(first, {"refused": reason})
                print(f"{first.method}: {reason}", flush=True)
        return True

    def _read_lines(self) -> None:
        """Read what was measured before, on the same questions."""
        for line in read_lines(self.output):
            if not all(name in line for name in Cell._fields):
                continue  # of another task
            cell = Cell(**{name: line[name] for name in Cell._fields})
            known = line.get("model") == self.name and cell.length in self.cases
            if known and line.get("questions") == self._asked(cell.length):
                self.lines[cell] = line

    def _asked(self, length: int) -> str:
        return self.cases[length][0].prompt

    def _patched(self, cell: Cell) -> Any:
        # STRING reaches almost 2x by default.
        factor = min(cell.factor, 1.98) if cell.method == "string" else cell.factor
        return patched(self.embedder.model, cell.method, factor=factor)

    def _plan(self) -> Iterator[list[Cell]]:
        """Cells of one method and length, the most valuable first."""
        registered = [cls.name for cls in all_methods()]
        order = [name for name in FIRST if name in (CUT, "unpatched", *registered)]
        names = [n for n in dict.fromkeys([*order, *registered]) if n not in NEEDS_TABLE]
        rounds = [(factor, factor * self.trained) for factor in FACTORS]
        for factor, length in [*rounds, (FACTORS[0], self.trained), (FACTORS[-1], self.trained)]:
            for name in names:
                plain = name in (CUT, "unpatched")
                if name == CUT and length <= self.trained:
                    continue  # nothing is cut
                yield [
                    Cell(method=name, factor=1 if plain else factor, length=length, document=n)
                    for n in range(DOCUMENTS)
                ]

    def _measure(self, cells: Sequence[Cell], keep: Any) -> bool:
        """Measure cells of one method and length; return whether there was time for all."""
        cases = self.cases[cells[0].length]
        candidates = cases[0].candidates
        assert candidates is not None
        cut = cells[0].method == CUT
        documents = candidates.cut(self.trained) if cut else candidates.documents
        questions = self.embedder.embed([case.ids for case in cases])
        for cell in cells:
            if time.monotonic() > self.until:
                return False
            start = time.perf_counter()
            [vector] = self.embedder.embed([documents[cell.document]])
            alike = [round(float(one), 6) for one in questions.double() @ vector.double()]
            seconds = round(time.perf_counter() - start, 2)
            right = [int(case.right == cell.document) for case in cases]
            keep(cell, {"alike": alike, "right": right, "seconds": seconds})
        found = self._found(cells[0])
        print(f"{cells[0].method} {cells[0].length}: {found}", flush=True)
        return True

    def _found(self, cell: Cell) -> str:
        every = [self.lines[cell._replace(document=n)] for n in range(DOCUMENTS)]
        found = found_in(every)
        return f"{sum(found)} of {len(found)}"


def found_in(lines: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return for each question whether its document is nearer than all others; a tie is not."""
    found = []
    for number in range(len(lines[0]["alike"])):
        own = next(line["alike"][number] for line in lines if line["right"][number])
        # The document itself is among them.
        nearer = sum(line["alike"][number] >= own for line in lines)
        found.append(int(nearer == 1))
    return found
