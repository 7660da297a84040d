"""NoLiMa: needles that share no words with the question, with the authors' needles and books.

Wording, placement and scoring are those of the authors' ``run_tests.py``, ``async_evaluate.py`` and
``book_haystack.py`` (arXiv 2502.05167, github.com/adobe-research/NoLiMa), with one difference: the
length here includes the whole prompt and its answer; the authors' length is that of the book alone.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rope_eval.cases import Case, Questions, require_positive
from rope_eval.data.prompts import Frame, encode, joined
from rope_eval.data.rows import Row, read_rows
from rope_eval.data.text import read_texts
from rope_eval.settings import Settings
from rope_eval.tasks.base import Kind, Task, answer_tokens, drawn, option, register
from rope_eval.tasks.haystack import too_long
from rope_ext.errors import MeasureError, OptionError

OPTION, BOOKS = "--nolima-needles", "--nolima-books"
TEMPLATE = (
    "You will answer a question based on the following book snippet:\n\n{haystack}\n\nUse the "
    "information provided in the book snippet to answer the question. Your answer should be short "
    "and based on either explicitly stated facts or strong, logical inferences.\n\n"
    "Question: {question}\n\n Return only the final answer with no additional explanation or "
    "reasoning."
)
"""For needles that bring none."""

Metric = Literal["contains", "EM", "lastline_contains", "lastline_EM"]
METRICS: tuple[Metric, ...] = ("contains", "EM", "lastline_contains", "lastline_EM")


@dataclass(frozen=True)
class Gold:
    """Scores 1 if an answer is in the response, or equals it, or is in or equals its last line.

    Args:
        answers: any of them is right; case matters.
        metric: which of these, by the authors' names.
    """

    answers: tuple[str, ...]
    metric: Metric

    def __call__(self, written: str) -> float:
        text = written
        if self.metric != "contains":
            text = text.strip()
        if self.metric.startswith("lastline"):
            text = text.split("\n")[-1]
        if self.metric.endswith("EM"):
            return float(text in self.answers)
        return float(any(answer in text for answer in self.answers))


@dataclass(frozen=True)
class Test:
    """A needle and its question.

    Args:
        needle, question: with ``{CHAR}`` for the character, if there are ``characters``.
        template: with ``{haystack}`` and ``{question}``.
        answers: right ones; empty: the character.
        characters: one of them is sampled for every prompt.
        distractor: a sentence that looks like the needle.
    """

    __test__ = False  # not one of pytest's

    needle: str
    question: str
    template: str
    answers: tuple[str, ...]
    characters: tuple[str, ...]
    distractor: str | None

    def asked(self, haystack: str, question: str) -> str:
        """The prompt around a haystack."""
        return self.template.replace("{question}", question).replace("{haystack}", haystack)


def read_tests(source: str) -> list[Test]:
    """All tests of a needle set: every question with all that its placeholders stand for.

    Raises:
        MeasureError: the file is not one of needles.
    """
    return [test for row in read_rows(source, OPTION) for test in _tests(row)]


def _tests(row: Row) -> Iterator[Test]:
    template = row.text("task_template") if "task_template" in row else TEMPLATE
    characters = tuple(row.texts("character_set")) if "character_set" in row else ()
    questions, tests = row.row("questions"), row.row("tests")
    for kind in questions.data:
        for name in tests.data:
            test = tests.row(name)
            values = test.texts("input_args") if test.data.get("input_args") else []
            needle = _filled(row.text("needle"), values)
            if "{CHAR}" in needle and not characters:
                raise row.wrong("needle", "no {CHAR} without a field character_set")
            if "{CHAR}" not in needle and "gold_answers" not in test:
                test.value("gold_answers")
            yield Test(
                needle=needle,
                question=_filled(questions.text(kind), values),
                template=template,
                answers=tuple(test.texts("gold_answers")) if "{CHAR}" not in needle else (),
                characters=characters,
                distractor=_filled(row.row("distractors").text(kind), values)
                if "distractors" in row
                else None,
            )


def _filled(text: str, values: Sequence[str]) -> str:
    for number, value in enumerate(values, 1):
        text = text.replace(f"{{{number}}}", value)
    return text


@dataclass(frozen=True)
class Book:
    """A text as tokens, and the ends of its lines.

    Args:
        ids: tokens.
        ends: indices of tokens with a line break, and the start.
        name: of the file.
    """

    ids: Sequence[int]
    ends: Sequence[int]
    name: str

    @classmethod
    def from_text(cls, tokenizer: Any, text: str, name: str) -> Book:
        """Tokenize a book."""
        ids = encode(tokenizer, text)
        breaks = {token: "\n" in tokenizer.decode([token]) for token in set(ids)}
        return cls(ids, [0, *(at for at, token in enumerate(ids) if at and breaks[token])], name)

    def place(self, tokens: int, depth: float) -> tuple[int, int, int]:
        """Where a stretch of ``tokens`` begins, where the needle is put in, and where it ends.

        The first line that ends at ``depth`` of the stretch or later is followed by the needle.

        Raises:
            MeasureError: the book is too short.
        """
        found = bisect_left(self.ends, depth * (tokens + 1))
        if found == len(self.ends) or not self.ends[found] <= len(self.ids) - 1:
            raise self._short(tokens)
        at = self.ends[found]
        start = at - round(tokens * depth)
        if start < 0 or start + tokens > len(self.ids):
            raise self._short(tokens)
        return start, at + 1, start + tokens

    def _short(self, tokens: int) -> MeasureError:
        return MeasureError(
            f"{self.name} has {len(self.ids)} tokens, too few lines for a stretch of {tokens}; "
            f"give {BOOKS} a longer text, or shorter --lengths"
        )

    def stretch(self, tokenizer: Any, tokens: int, depth: float, needle: str) -> str:
        """A stretch of ``tokens`` with a needle on the line after ``depth``."""
        start, at, end = self.place(tokens, depth)
        before = tokenizer.decode(self.ids[start:at])
        before = before[: max(before.rfind("\n"), 0)]
        return f"{before} {needle}\n{tokenizer.decode(self.ids[at:end])}"


def distractor_depth(depth: float, tokens: int, rng: random.Random, free: float = 0.2) -> float:
    """Where a distractor lies: at random, but not near the needle or the ends."""
    drawn = rng.uniform(0, max(0, depth - 2 * free) + max(0, 1 - depth - 2 * free))
    if tokens < 500:
        return 0.7 if depth < 0.6 else 0.6 if depth > 0.75 else 0.5
    left = max(0, depth - 2 * free)
    return depth + free + drawn - left if drawn > left else drawn + free


@dataclass(frozen=True)
class Hidden(Task):
    """All tests in all books.

    Args:
        tests, books: as read; a book is (name, text).
        metric: see ``Gold``.
        depths: positions of the needle, from the start to the end.
        samples: prompts for each length; None: all.
        tokens: maximum answer length in tokens.
    """

    name: ClassVar[str] = "nolima"
    kind: ClassVar[Kind] = "rate"

    tests: Sequence[Test]
    books: Sequence[tuple[str, str]]
    metric: Metric
    depths: int
    samples: int | None
    tokens: int

    def __post_init__(self) -> None:
        require_positive(new_tokens=self.tokens, samples=self.samples, placements=self.depths)

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        """All prompts.

        Raises:
            OptionError: a length cannot hold a prompt.
            MeasureError: a book is too short.
        """
        books = [Book.from_text(frame.tokenizer, text, name) for name, text in self.books]
        places = [
            (book, test, depth)
            for book in range(len(books))
            for test in range(len(self.tests))
            for depth in range(self.depths)
        ]
        if self.samples is not None and self.samples < len(places):
            rng = random.Random(f"nolima:{seed}")
            places = sorted(rng.sample(places, self.samples))
        # A picture by depth has them all.
        binned = len({depth for *_, depth in places}) == self.depths
        cases = []
        for length in lengths:
            for number, (book, test, depth) in enumerate(places):
                rng = random.Random(f"nolima:{seed}:{length}:{book}:{test}:{depth}")
                at = depth / max(1, self.depths - 1)
                ids, gold = self.prompt(frame, books[book], self.tests[test], length, at, rng)
                case = Case(
                    task=self.name,
                    length=length,
                    seed=number,
                    mode="write",
                    count=self.tokens,
                    ids=ids,
                    answers=gold.answers,
                    depth=at,
                    bin=depth if binned else None,
                    judge=gold,
                )
                cases.append(case)
        definition = (
            f"share of NoLiMa's questions answered ({self.metric}); {len(places)} of "
            f"{len(self.tests)} questions in {len(books)} books at {self.depths} depths, a length "
            f"being that of the whole prompt, exact intervals"
        )
        return Questions(cases, definition)

    def prompt(
        self,
        frame: Frame,
        book: Book,
        test: Test,
        length: int,
        depth: float,
        rng: random.Random,
    ) -> tuple[Any, Gold]:
        tokenizer = frame.tokenizer
        character = rng.choice(test.characters) if "{CHAR}" in test.needle else ""
        needle = test.needle.replace("{CHAR}", character)
        question = test.question.replace("{CHAR}", character)
        answers = (character,) if character else test.answers
        around = len(frame.head) + len(frame.tail) + self.tokens
        draw = rng.random()
        room = length - around - len(encode(tokenizer, test.asked(f" {needle}\n", question)))
        if test.distractor:
            room -= len(encode(tokenizer, f" {test.distractor}\n"))
        size = room
        while size > 0 and size > room - 64:  # ends: a cut text may be tokens longer, a few
            text = book.stretch(tokenizer, size, depth, needle)
            if test.distractor:
                own = random.Random(draw)
                text = self._distracted(tokenizer, book, size, text, test.distractor, depth, own)
            ids = encode(tokenizer, test.asked(text, question))
            if len(ids) + around <= length:
                return joined(frame.head, ids, frame.tail), Gold(answers, self.metric)
            size -= len(ids) + around - length
        raise too_long(self.name, length - room + 1, length)

    def _distracted(
        self,
        tokenizer: Any,
        book: Book,
        size: int,
        text: str,
        distractor: str,
        depth: float,
        rng: random.Random,
    ) -> str:
        """The stretch with the distractor at the end of a line, where the authors put it."""
        place = distractor_depth(depth, size, rng)
        lines = [at for at, letter in enumerate(text) if letter == "\n"]
        at = min(lines, key=lambda line: abs(line - place * len(text)))
        return f"{text[:at]} {distractor}\n{text[at:]}"


@register
@dataclass(frozen=True)
class NoLiMa(Task):
    """NoLiMa.

    Args:
        nolima_needles: the authors' ``needle_set.json``, or another of their sets.
        nolima_books: their ``rand_book_1.txt`` and so on, or other texts.
        nolima_metric: see ``Gold``; the authors' tables use ``contains``, and ``lastline_EM`` for
            models that reason first.
        placements: positions of the needle, from the start to the end.
        samples: prompts for each length; None: all.
        new_tokens: maximum answer length in tokens; None uses the authors' 192.
    """

    name: ClassVar[str] = "nolima"
    kind: ClassVar[Kind] = "rate"

    nolima_needles: str = option("", "the authors' needle_set.json, or another of their sets")
    nolima_books: tuple[str, ...] = option((), "the authors' rand_book_1.txt etc.; repeatable")
    nolima_metric: str = option("contains", f"one of {', '.join(METRICS)}")
    placements: int = option(26, "number of positions of the needle, from start to end")
    samples: int | None = drawn("prompts for each length")
    new_tokens: int | None = answer_tokens("as in the benchmark")

    def parts(self, settings: Settings) -> Sequence[Task]:
        """With the needles and the books, which are read here.

        Raises:
            OptionError: something is not given, or there is no such metric.
            MeasureError: a file cannot be read.
        """
        if not self.nolima_needles:
            raise OptionError(f"no needles are given; give {OPTION} needle_set.json of NoLiMa")
        if not self.nolima_books:
            raise OptionError(f"no books are given; give {BOOKS} rand_book_1.txt of NoLiMa")
        if self.nolima_metric not in METRICS:
            raise OptionError(
                f"nolima_metric={self.nolima_metric!r} is not valid; it must be one of "
                f"{', '.join(METRICS)}"
            )
        tokens = 192 if self.new_tokens is None else self.new_tokens
        books = [(name, "\n\n".join(read_texts([name]))) for name in self.nolima_books]
        tests = read_tests(self.nolima_needles)
        hidden = Hidden(tests, books, self.nolima_metric, self.placements, self.samples, tokens)
        return [hidden]
