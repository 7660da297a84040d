"""LongBench v2: multiple choice about long documents, with the authors' data.

Wording, cutting and scoring are those of the authors' ``pred.py`` without ``--cot`` and ``--rag``
(arXiv 2412.15204, github.com/THUDM/LongBench). Decoding is greedy; the authors sample with a
temperature of 0.1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rope_eval.data.rows import Row, read_rows
from rope_eval.settings import Settings
from rope_eval.tasks.base import Kind, Task, answer_tokens, drawn, option, register
from rope_eval.tasks.benchmark import Asked, Benchmark
from rope_ext.errors import MeasureError, OptionError, nearest

OPTION = "--longbench-data"
LETTERS = "ABCD"
BEFORE = "Please read the following text and answer the question below.\n\n<text>\n"
AFTER = (
    "\n</text>\n\nWhat is the correct answer to this question: {question}\nChoices:\n"
    "(A) {A}\n(B) {B}\n(C) {C}\n(D) {D}\n\n"
    'Format your response as follows: "The correct answer is (insert answer here)".'
)
SUBSETS = {"easy": "difficulty", "hard": "difficulty"} | dict.fromkeys(
    ("short", "medium", "long"), "length"
)
"""Groups of the authors' tables, and the field that says what a row belongs to."""


@dataclass(frozen=True)
class Letter:
    """Scores 1 if the text gives this letter as the correct answer, in the requested words."""

    letter: str

    def __call__(self, written: str) -> float:
        plain = written.strip().replace("*", "")
        for pattern in (r"The correct answer is \(([A-D])\)", r"The correct answer is ([A-D])"):
            if found := re.search(pattern, plain):
                return float(found[1] == self.letter)
        return 0.0


@dataclass(frozen=True)
class Questionnaire(Benchmark):
    """Questions from rows of the data."""

    def asked(self, row: Row, chat: bool, seed: int) -> Asked:
        answer = row.text("answer")
        if answer not in LETTERS or len(answer) != 1:
            raise row.wrong("answer", "one of A, B, C, D")
        choices = {letter: row.text(f"choice_{letter}").strip() for letter in LETTERS}
        after = AFTER.format(question=row.text("question").strip(), **choices)
        return Asked(BEFORE, row.text("context").strip(), after, (answer,), Letter(answer))


@register
@dataclass(frozen=True)
class LongBench(Task):
    """LongBench v2.

    Args:
        longbench_data: the authors' ``data.json``, or ``hf:THUDM/LongBench-v2:train``.
        longbench_subset: ``all``, or one group of the authors' tables.
        samples: number of rows, sampled at random; None: all.
        new_tokens: maximum answer length in tokens; None uses the authors' 128.
    """

    name: ClassVar[str] = "longbench_v2"
    kind: ClassVar[Kind] = "rate"

    longbench_data: str = option("", "data.json of the authors, or hf:THUDM/LongBench-v2:train")
    longbench_subset: str = option("all", f"all, or one of {', '.join(SUBSETS)}")
    samples: int | None = drawn()
    new_tokens: int | None = answer_tokens("as in the benchmark")

    def parts(self, settings: Settings) -> Sequence[Task]:
        """With the rows, which are read here.

        Raises:
            OptionError: no data are given, or there is no such subset.
            MeasureError: they cannot be read, or no row is in the subset.
        """
        if not self.longbench_data:
            raise OptionError(f"no data are given; give {OPTION} data.json of LongBench v2")
        subset = self.longbench_subset
        if subset != "all" and subset not in SUBSETS:
            raise OptionError(
                f"unknown subset {subset!r}{nearest(subset, SUBSETS)}; choose of all, "
                f"{', '.join(SUBSETS)}"
            )
        rows = read_rows(self.longbench_data, OPTION)
        if subset != "all":
            rows = [row for row in rows if row.text(SUBSETS[subset]) == subset]
        if not rows:
            raise MeasureError(
                f"no row of {self.longbench_data} is {subset}; give --longbench-subset all"
            )
        about = f"share of LongBench v2 questions ({subset}) whose correct letter is written"
        tokens = 128 if self.new_tokens is None else self.new_tokens
        return [Questionnaire(self.name, rows, tokens, self.samples, about)]
