"""Questions about documents among many others: ``qa_1`` and ``qa_2`` of RULER.

The documents of a question are in random order among others from the same data set: SQuAD 2.0 or
HotpotQA (distractor setting), read from your file, or synthetic facts. If a
question has several right answers, one is enough.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

from rope_eval.cases import Case, Questions
from rope_eval.data.prompts import Frame
from rope_eval.data.rows import Row, read_rows
from rope_eval.tasks.base import Draw, Prompts
from rope_ext.errors import OptionError

ONLY = "Only give me the answer and do not output any other words."
INTRO = (
    f"Answer the question based on the given documents. {ONLY}\n\n"
    f"The following are given documents.\n\n"
)
ASK = f"\n\nAnswer the question based on the given documents. {ONLY}\n\nQuestion: "
LEAD = " Answer:"


@dataclass(frozen=True)
class AnyOf:
    """Scores 1 if any of the answers is in the text, ignoring case."""

    answers: tuple[str, ...]

    def __call__(self, written: str) -> float:
        text = written.lower()
        return float(any(answer.lower() in text for answer in self.answers))


class AnsweredQuestion(NamedTuple):
    """A question: its answers, the documents it needs, and preferred distractors."""

    question: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    near: tuple[int, ...] = ()


class Source(NamedTuple):
    """A data set: its name, its option, how to read its rows, and a synthetic replacement."""

    name: str
    option: str
    read: Callable[[Sequence[Row]], tuple[list[AnsweredQuestion], list[str]]]
    made_up: Callable[[], list[dict[str, Any]]]


def _squad(articles: Sequence[Row]) -> tuple[list[AnsweredQuestion], list[str]]:
    """Return answerable questions (distractors are from the same article), and all documents."""
    parts = [article.rows("paragraphs") for article in articles]
    # Sorted, since the order of a set depends on the hash seed of the process.
    documents = sorted({part.text("context") for article in parts for part in article})
    number = {text: index for index, text in enumerate(documents)}
    questions = []
    for article in parts:
        places = [number[part.text("context")] for part in article]
        for part, own in zip(article, places, strict=True):
            near = tuple(index for index in places if index != own)
            for qa in part.rows("qas"):
                if not qa.data.get("is_impossible", False):
                    answers = tuple(one.text("text") for one in qa.rows("answers"))
                    if not answers:  # an empty answer cannot score
                        raise qa.wrong("answers", "at least one")
                    questions.append(
                        AnsweredQuestion(
                            question=qa.text("question"), answers=answers, needed=(own,), near=near
                        )
                    )
    return questions, documents


def _hotpotqa(rows: Sequence[Row]) -> tuple[list[AnsweredQuestion], list[str]]:
    """Return all questions, each with its ten documents, and all documents."""
    texts = []
    for row in rows:
        try:
            texts.append([f"{title}\n{''.join(lines)}" for title, lines in row.value("context")])
        except (TypeError, ValueError):
            raise row.wrong("context", "pairs of a title and its lines") from None
    # Sorted, as those of SQuAD.
    documents = sorted({text for context in texts for text in context})
    number = {text: index for index, text in enumerate(documents)}
    questions = [
        AnsweredQuestion(
            row.text("question"), (row.text("answer"),), tuple(map(number.__getitem__, context))
        )
        for row, context in zip(rows, texts, strict=True)
    ]
    return questions, documents


# Facts that no model has seen in training: names are random, and each is in the documents about
# its town alone.

GOODS = (
    *("amber", "barley", "bells", "bricks", "candles", "cheese", "copper", "cork", "felt"),
    *("glass", "honey", "lace", "linen", "marble", "paper", "pottery", "rope", "salt", "silk"),
    *("slate", "soap", "timber", "tin", "wool"),
)
PARAGRAPH = (
    "{town} is a town on the river {river}. It was founded in {founded} by {founder}, who had come "
    "down the river with eleven boats, and at the last count it had {people} inhabitants. The best "
    "known building of {town} was designed by {architect}. The present mayor, {mayor}, has an "
    "office in it."
)
PERSON = (
    "{founder} is a surveyor. After an apprenticeship of four years {founder} settled in {town}, "
    "and has lived there ever since."
)
PLACE = (
    "{town} lies on the river {river}. It was founded in {founded}, is known for its {goods}, and "
    "has the mayor {mayor}."
)
QUESTIONS = (
    ("In which year was {town} founded?", "founded"),
    ("Who founded {town}?", "founder"),
    ("How many inhabitants does {town} have?", "people"),
    ("Who designed the best known building of {town}?", "architect"),
    ("Who is the mayor of {town}?", "mayor"),
)
HOPS = (
    ("On which river does the town lie in which {founder} settled?", "river"),
    ("In which year was the town founded in which {founder} settled?", "founded"),
    ("Who is the mayor of the town in which {founder} settled?", "mayor"),
    ("What is the town known for in which {founder} settled?", "goods"),
)


@cache
def _towns(count: int) -> list[dict[str, str]]:
    rng = random.Random("towns")
    names = dict[str, None]()

    def name(end: str = "") -> str:
        before = len(names)
        while len(names) == before:  # ends: there are hundreds of thousands
            syllables = (rng.choice("bdfghklmnprstvw") + rng.choice("aeiou") for _ in range(3))
            names["".join(syllables).capitalize() + end] = None
        return next(reversed(names))

    def town() -> dict[str, str]:
        names = {role: f"{name()} {name('n')}" for role in ("mayor", "founder", "architect")}
        names |= {"town": name(rng.choice(("ville", "berg", "ton"))), "river": name()}
        numbers = {"founded": str(rng.randrange(1102, 1788)), "goods": rng.choice(GOODS)}
        return names | numbers | {"people": str(rng.randrange(2100, 98000))}

    return [town() for _ in range(count)]


def like_squad(articles: int = 1500) -> list[dict[str, Any]]:
    """Return an article of one paragraph and one question per town, in the format of SQuAD 2.0."""
    data = []
    for index, town in enumerate(_towns(articles)):
        question, answer = QUESTIONS[index % len(QUESTIONS)]
        qa = {"question": question.format(**town), "answers": [{"text": town[answer]}]}
        paragraph = {"context": PARAGRAPH.format(**town), "qas": [qa]}
        data.append({"title": town["town"], "paragraphs": [paragraph]})
    return data


def like_hotpotqa(questions: int = 640) -> list[dict[str, Any]]:
    """Return questions that need two of ten documents, in HotpotQA's distractor format."""
    rng = random.Random("people")
    towns = _towns(questions)
    data = []

    def documents(town: dict[str, str]) -> list[tuple[str, list[str]]]:
        texts = {"founder": PERSON, "town": PLACE}
        return [(town[title], [text.format(**town)]) for title, text in texts.items()]

    for index, town in enumerate(towns):
        question, answer = rng.choice(HOPS)
        others = rng.sample([other for at, other in enumerate(towns) if at != index], 8)
        context = [*documents(town), *(rng.choice(documents(other)) for other in others)]
        rng.shuffle(context)
        qa = {"question": question.format(**town), "answer": town[answer]}
        data.append({**qa, "context": context})
    return data


SQUAD = Source(name="SQuAD", option="squad", read=_squad, made_up=like_squad)
HOTPOTQA = Source(name="HotpotQA", option="hotpotqa", read=_hotpotqa, made_up=like_hotpotqa)


def read(source: Source, path: str | None) -> tuple[list[AnsweredQuestion], list[str]]:
    option = f"--{source.option}"
    if path is not None:
        return source.read(read_rows(path, option))
    return source.read([Row(one, "made-up facts", option) for one in source.made_up()])


@dataclass(frozen=True)
class Answering(Prompts):
    """The first questions of a file, as in RULER; a ``path`` of None generates questions."""

    tokens: int = 32
    source: Source = SQUAD
    path: str | None = None

    @property
    def about(self) -> str:
        return (
            f"share of questions that the model answers from documents among others of "
            f"{self.path or 'made-up facts'}, in random order"
        )

    @cached_property
    def _data(self) -> tuple[list[AnsweredQuestion], list[str]]:
        return read(self.source, self.path)

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        if self.trials > len(self._data[0]):
            raise OptionError(
                f"{self.name} has {len(self._data[0])} questions; give fewer --trials"
            )
        return super().questions(frame, lengths, seed)

    def notes(self, cases: Sequence[Case]) -> Iterator[str]:
        if self.path is None:
            yield (
                f"{self.name} asks about made-up facts, not about {self.source.name}: published "
                f"numbers need --{self.source.option} FILE"
            )
        count = len({one.needed for one in self._data[0][: self.trials]})
        if count < self.trials:
            yield (
                f"{self.name}: the {self.trials} questions are about {count} document"
                f"{'s' * (count > 1)}; intervals take them as independent and are too narrow"
            )

    def prompt(self, frame: Frame, length: int, draw: Draw) -> Case:
        """Build a prompt with the needed documents among as many others as fit, in random order."""
        question = self._data[0][draw.index]
        documents = self._data[1]
        rng = random.Random(f"{self.name}:{draw.number}")
        seed = rng.getrandbits(64)
        near = rng.sample(question.near, len(question.near))
        known = {*question.needed, *question.near}
        far = [index for index in range(len(documents)) if index not in known]
        rng.shuffle(far)
        order = list(dict.fromkeys((*question.needed, *near, *far)))

        def build(count: int) -> array:
            # More than there are: all of them again, as in RULER.
            chosen = [order[place % len(order)] for place in range(count)]
            # A new generator, so that each size has one order however often it is tried.
            random.Random(seed).shuffle(chosen)
            listed = (f"Document {i}:\n{documents[n]}" for i, n in enumerate(chosen, 1))
            content = INTRO + "\n\n".join(listed) + ASK + question.question
            return frame.whole(content, LEAD, keep_space=True)[0]

        _, ids = self.fill(build, length, len(question.needed))
        return self.case(length, draw, ids, answers=question.answers, judge=AnyOf(question.answers))
