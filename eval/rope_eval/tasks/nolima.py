"""NoLiMa: needles that share no words with the question, with the authors' needles and books.

Wording, placement and scoring are those of the authors' ``run_tests.py``, ``async_evaluate.py`` and
``book_haystack.py`` (arXiv 2502.05167, github.com/adobe-research/NoLiMa), with one difference: the
length here includes the whole prompt and its answer; the authors' length is that of the book alone.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

from rope_eval.cases import Case, Questions
from rope_eval.data.prompts import Frame, encode
from rope_eval.data.rows import Row, read_rows
from rope_eval.data.text import read_texts
from rope_eval.settings import Settings
from rope_eval.tasks import base
from rope_eval.tasks.base import Task, answer_tokens, drawn, option, register
from rope_ext.errors import MeasureError, OptionError

OPTION = "--nolima-needles"
BOOKS = "--nolima-books"
TEMPLATE = (
    "You will answer a question based on the following book snippet:\n\n{haystack}\n\nUse the "
    "information provided in the book snippet to answer the question. Your answer should be short "
    "and based on either explicitly stated facts or strong, logical inferences.\n\n"
    "Question: {question}\n\n Return only the final answer with no additional explanation or "
    "reasoning."
)
"""For needles without a template of their own."""
Metric = Literal["contains", "EM", "lastline_contains", "lastline_EM"]


@dataclass(frozen=True)
class Gold:
    """Scores 1 if an answer is in the response or its last line, or equals it; case matters."""

    answers: tuple[str, ...]
    metric: str

    def __call__(self, written: str) -> float:
        text = written if self.metric == "contains" else written.strip()
        if self.metric.startswith("lastline"):
            text = text.split("\n")[-1]
        if self.metric.endswith("EM"):
            return float(text in self.answers)
        return float(any(answer in text for answer in self.answers))


class Test(NamedTuple):
    """A needle and its question, and a ``distractor`` that resembles the needle.

    ``{CHAR}`` in them is one of ``characters``, which is the answer; then ``answers`` is empty.
    """

    needle: str
    question: str
    template: str
    answers: tuple[str, ...]
    characters: tuple[str, ...]
    distractor: str | None


def read_tests(source: str) -> list[Test]:
    return [test for row in read_rows(source, OPTION) for test in _tests(row)]


def _tests(row: Row) -> Iterator[Test]:
    """Yield the questions of a row of the published file, with names filled in."""
    template = row.text("task_template") if "task_template" in row else TEMPLATE
    characters = tuple(row.texts("character_set")) if "character_set" in row else ()
    questions = row.row("questions")
    tests = row.row("tests")
    for kind in questions.data:
        for name in tests.data:
            test = tests.row(name)
            values = test.texts("input_args") if test.data.get("input_args") else []
            needle = _filled(row.text("needle"), values)
            sampled = "{CHAR}" in needle
            distractor = None
            if sampled and not characters:
                raise row.wrong("needle", "no {CHAR} without a field character_set")
            if "distractors" in row:
                distractor = _filled(row.row("distractors").text(kind), values)
            answers = () if sampled else tuple(test.texts("gold_answers"))
            question = _filled(questions.text(kind), values)
            yield Test(
                needle=needle,
                question=question,
                template=template,
                answers=answers,
                characters=characters,
                distractor=distractor,
            )


def _filled(text: str, values: Sequence[str]) -> str:
    for number, value in enumerate(values, 1):
        text = text.replace(f"{{{number}}}", value)
    return text


class Book(NamedTuple):
    """A tokenized text, with the positions of tokens with a line break, and the start."""

    ids: Sequence[int]
    ends: Sequence[int]
    name: str

    @classmethod
    def from_text(cls, tokenizer: Any, text: str, name: str) -> Book:
        """Tokenize a text, and find its line breaks; ``name`` is for errors."""
        ids = encode(tokenizer, text)
        breaks = {token: "\n" in tokenizer.decode([token]) for token in set(ids)}
        return cls(ids, [0, *(at for at, token in enumerate(ids) if at and breaks[token])], name)

    def place(self, tokens: int, depth: float) -> tuple[int, int, int]:
        """Return the start of a span of ``tokens``, the position of the needle, and the end.

        The first line that ends at ``depth`` of the span or later is followed by the needle.
        """
        found = bisect_left(self.ends, depth * (tokens + 1))
        at = self.ends[found] if found < len(self.ends) else len(self.ids)
        start = at - round(tokens * depth)
        if at == len(self.ids) or start < 0 or start + tokens > len(self.ids):
            raise MeasureError(
                f"{self.name} has {len(self.ids)} tokens, too few lines for a span of {tokens}; "
                f"give {BOOKS} a longer text, or shorter --lengths"
            )
        return start, at + 1, start + tokens

    def span(self, tokenizer: Any, tokens: int, depth: float, needle: str) -> str:
        """Build a span of ``tokens`` with a needle on the line after ``depth``."""
        start, at, end = self.place(tokens, depth)
        before = tokenizer.decode(self.ids[start:at])
        before = before[: max(before.rfind("\n"), 0)]
        return f"{before} {needle}\n{tokenizer.decode(self.ids[at:end])}"


def distractor_depth(depth: float, tokens: int, rng: random.Random, free: float = 0.2) -> float:
    """Sample a distractor's position, not near the needle or the ends."""
    drawn = rng.uniform(0, max(0, depth - 2 * free) + max(0, 1 - depth - 2 * free))
    if tokens < 500:
        if depth < 0.6:
            return 0.7
        return 0.6 if depth > 0.75 else 0.5
    left = max(0, depth - 2 * free)
    return depth + free + drawn - left if drawn > left else drawn + free


@register
@dataclass(frozen=True)
class NoLiMa(Task):
    """NoLiMa: all tests in all books."""

    name: ClassVar[str] = "nolima"

    nolima_needles: str = option("", "the authors' needle_set.json, or another of their sets")
    nolima_books: tuple[str, ...] = option((), "the authors' rand_book_1.txt etc.; repeatable")
    nolima_metric: Metric = option("contains", "how an answer is scored")  # noqa: RUF009
    placements: int = option(26, "number of positions of the needle, from start to end")
    samples: int | None = drawn("prompts for each length")
    new_tokens: int | None = answer_tokens("as in the benchmark")

    def parts(self, settings: Settings) -> Sequence[Task]:
        if not self.nolima_needles:
            raise OptionError(f"no needles are given; give {OPTION} needle_set.json of NoLiMa")
        if not self.nolima_books:
            raise OptionError(f"no books are given; give {BOOKS} rand_book_1.txt of NoLiMa")
        # Errors in the files are reported before anything is measured.
        self._read  # noqa: B018
        return [self]

    @cached_property
    def _read(self) -> tuple[list[Test], list[tuple[str, str]]]:
        books = [(name, "\n\n".join(read_texts([name], BOOKS))) for name in self.nolima_books]
        return read_tests(self.nolima_needles), books

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        """Ask every question in every book at evenly spaced depths, or a sample of these."""
        tests, texts = self._read
        books = [Book.from_text(frame.tokenizer, text, name) for name, text in texts]
        depths = range(self.placements)
        places = [(b, t, d) for b in range(len(books)) for t in range(len(tests)) for d in depths]
        if self.samples is not None and self.samples < len(places):
            places = sorted(random.Random(f"nolima:{seed}").sample(places, self.samples))
        # Plots by depth show all of them.
        binned = len({depth for *_, depth in places}) == self.placements
        cases = []
        tokens = self.new_tokens or 192
        for length in lengths:
            for number, (book, test, bin) in enumerate(places):
                rng = random.Random(f"nolima:{seed}:{length}:{book}:{test}:{bin}")
                depth = bin / max(1, self.placements - 1)
                ids, answers = self._prompt(
                    frame, book=books[book], test=tests[test], length=length, depth=depth, rng=rng
                )
                cases.append(
                    Case(
                        task=self.name,
                        length=length,
                        seed=number,
                        group=1 + test,
                        mode="write",
                        count=tokens,
                        ids=ids,
                        answers=answers,
                        depth=depth,
                        bin=bin if binned else None,
                        judge=Gold(answers, self.nolima_metric),
                    )
                )
        asked = len({test for _, test, _ in places})
        definition = (
            f"share of NoLiMa's questions answered ({self.nolima_metric}); {len(places)} prompts "
            f"about {asked} questions, books: {len(books)}, depths: {self.placements}; lengths of "
            f"whole prompts, intervals over questions"
        )
        return Questions(cases, definition)

    def _prompt(
        self, frame: Frame, book: Book, test: Test, length: int, depth: float, rng: random.Random
    ) -> tuple[array, tuple[str, ...]]:
        """Return a prompt that leaves room for its answer, and the right answers."""
        tokens = self.new_tokens or 192
        character = rng.choice(test.characters) if "{CHAR}" in test.needle else ""
        needle, question = (t.replace("{CHAR}", character) for t in (test.needle, test.question))
        answers = (character,) if character else test.answers
        seed = rng.random()

        def build(size: int) -> array:
            text = book.span(frame.tokenizer, size, depth, needle) if size else f" {needle}\n"
            if test.distractor:
                # A new generator, so that the distractor keeps its share when the text grows.
                wanted = distractor_depth(depth, size, random.Random(seed)) * len(text)
                breaks = [at for at, letter in enumerate(text) if letter == "\n"]
                at = min(breaks, key=lambda place: abs(place - wanted))
                text = f"{text[:at]} {test.distractor}\n{text[at:]}"
            content = test.template.replace("{question}", question).replace("{haystack}", text)
            return frame.whole(content)[0]

        most = max(0, length - tokens - len(build(0)))
        return base.fill(self.name, build, length, tokens=tokens, most=most)[1], answers
