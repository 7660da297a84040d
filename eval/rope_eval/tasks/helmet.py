"""HELMET: the categories that need no LLM judge or citation model, with the authors' data.

Wording, demonstrations, cutting and scoring are those of the authors' ``data.py`` and ``utils.py``
(arXiv 2410.02694, github.com/princeton-nlp/HELMET). They use no chat template (``--chat no``); with
one, the prompt does not begin the answer for the model. With ``--seed 42`` the rows and
demonstrations are those of the authors (except for in-context learning).
"""

from __future__ import annotations

import hashlib
import math
import random
import re
import string
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from rope_eval.cases import Case, Questions, digest
from rope_eval.data.prompts import Frame
from rope_eval.data.rows import Row, read_rows
from rope_eval.settings import Settings
from rope_eval.tasks import base
from rope_eval.tasks.base import Task, answer_tokens, drawn, option, register
from rope_ext.command.arguments import parse_length
from rope_ext.errors import MeasureError, OptionError, nearest

OPTION = "--helmet-data"
DEMOS = "--helmet-demos"
# Questions that the authors draw of a data set.
SAMPLES = 100
ICL_SAMPLES = 500

_RULER = (
    "{some} special magic {kind} {are} hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\nWhat {are_all} the special magic "
    "{kind} for {question} mentioned in the provided text?"
)
_RULER_LEAD = "The special magic {kind} for {question} mentioned in the provided text {are}"
_QA = (
    "Use the given documents to write a concise and short answer to the question. Write your "
    "answer in the following format:\nAnswer: [answer]\n\n{demos}{context}\n\nQuestion: {question}"
)
_KV = (
    "{context}\n\nExtract the value corresponding to the specified key in the JSON object below."
    "\n\n{demos}Key: {question}"
)
_RANK = (
    "You are provided with a list of documents, each indicated by their ID. Rank each document "
    "based on their relevance to the question in descending order from most relelvant to least "
    "relevant texts. Include all documents in the rankings. Write your answer using the unique "
    "IDs, with the following format:\nRanking: ID3 > ID1 > ID2\n\n{demos}{context}\n\n"
    "Query: {question}"
)
_ICL = (
    "Use the provided mapping from the text to label to assign a label to the text. Only output "
    '"label: {{label}}" and nothing else. \n\n{context}\n\n{question}'
)

TEMPLATES = {  # and the beginning of the answer
    "ruler": (_RULER, _RULER_LEAD),
    "kv": (_KV, "Corresponding value:"),
    "qa": (_QA, "Answer:"),
    "rank": (_RANK, "Ranking:"),
    "icl": (_ICL, "label:"),
}


class Shape(NamedTuple):
    """A data set: its format and the longest answer in tokens.

    ``field`` is the label (``icl``) or the popularity of the question (``popqa``); ``icl`` has
    ``labels`` labels, and ``shots`` demonstrations at 8k, 16k, 32k, 64k and 128k.
    """

    format: str
    tokens: int
    field: str = ""
    labels: int = 0
    shots: tuple[int, ...] = ()


SETS = {
    "ruler_niah_mk_2": Shape("ruler", 50),
    "ruler_niah_mk_3": Shape("ruler", 100),
    "ruler_niah_mv": Shape("ruler", 50),
    "json_kv": Shape("kv", 100),
    "kilt_nq": Shape("qa", 20),
    "kilt_triviaqa": Shape("qa", 20),
    "kilt_hotpotqa": Shape("qa", 20),
    "kilt_popqa_3": Shape("qa", 20, "s_pop"),
    "msmarco_rerank_psg": Shape("rank", 200),
    "icl_trec_coarse": Shape(
        format="icl", tokens=20, field="coarse_label", labels=6, shots=(400, 800, 1600, 3300, 6600)
    ),
    "icl_trec_fine": Shape(
        format="icl", tokens=20, field="fine_label", labels=50, shots=(400, 800, 1600, 3200, 6400)
    ),
    "icl_banking77": Shape(
        format="icl", tokens=20, field="label", labels=77, shots=(360, 720, 1450, 2900, 5900)
    ),
    "icl_clinic150": Shape(
        format="icl", tokens=20, field="intent", labels=151, shots=(440, 880, 1750, 3525, 7050)
    ),
    "icl_nlu": Shape(
        format="icl", tokens=20, field="label", labels=68, shots=(510, 1020, 2040, 4080, 8296)
    ),
}
"""The implemented data sets, by the authors' names."""

# Scores

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Normalize text as in SQuAD: lower case, without punctuation, articles and extra spaces."""
    plain = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", plain).split())


def parsed(text: str, lead: str) -> str:
    """Return the line after the first ``lead``, or else the first line."""
    found = re.search(f"{lead}(.*)(?:\n|$)", text, re.IGNORECASE)
    line = found[1] if found else text.split("\n", 1)[0]
    return re.sub(f"^{re.escape(lead)}", "", line.strip(), flags=re.IGNORECASE).strip()


@dataclass(frozen=True)
class Substring:
    """Scores 1 if an answer is in the text, which starts with ``begun``, as in SQuAD."""

    answers: tuple[str, ...]
    lead: str
    begun: str

    def __call__(self, written: str) -> float:
        text = self.begun + written
        places = [normalized(text), normalized(parsed(text, self.lead))]
        right = [normalized(answer) for answer in self.answers]
        return float(any(answer in place for answer in right for place in places))


@dataclass(frozen=True)
class Label:
    """Scores 1 if the line after ``label:`` is the label."""

    label: str
    begun: str

    def __call__(self, written: str) -> float:
        line = parsed(self.begun + written, "label:")
        return float(normalized(line) == normalized(self.label))


@dataclass(frozen=True)
class Ndcg:
    """Scores NDCG@10 of the ranking in the text, as in trec_eval; an ID and grade per document."""

    relevance: tuple[tuple[str, int], ...]
    begun: str

    def __call__(self, written: str) -> float:
        grades = dict(self.relevance)
        gains = [max(0, grades.get(name, 0)) for name in ranking(self.begun + written)]
        ideal = _gain(sorted((max(0, grade) for grade in grades.values()), reverse=True))
        return _gain(gains) / ideal if ideal else 0.0


def ranking(text: str) -> list[str]:
    """Return the longest sequence ``ID > ID > ...`` in a text, without repeated IDs."""
    plain = re.sub(r"[\[\]:]", "", text).lower().replace("id", "")
    rankings = [found[0] for found in re.finditer(r"\d+(?:\s*>\s*\d+)*", plain)]
    if not rankings:
        return []
    longest = max(rankings, key=len)  # the first of the longest
    return list(dict.fromkeys(name.strip() for name in longest.split(">")))


def _gain(grades: Sequence[int]) -> float:
    return math.fsum(grade / math.log2(place + 1) for place, grade in enumerate(grades[:10], 1))


# Prompts

Files = Mapping[int | None, Sequence[Row]]
"""Rows by length; None: rows for all other lengths."""


class Question(NamedTuple):
    """A question: values for a template, and the right answers.

    ``judge`` scores a text instead of a search for the answers.
    """

    words: dict[str, str]
    answers: tuple[str, ...]
    judge: Callable[[str], float] | None = None


@dataclass(frozen=True)
class DataSet(Task):
    """The rows of one data set, each asked at every length, cut at the end where it is too long.

    ``shots`` demonstrations are sampled from ``demos``, except for ``icl``; ``samples`` is the
    number of questions, and None asks as many as the authors.
    """

    name: str
    shape: Shape
    rows: Files
    demos: Files
    tokens: int
    samples: int | None = None
    shots: int = 2

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        cases = []
        cut = dict.fromkeys(lengths, 0)
        for length in lengths:
            rows = self.chosen(length, seed)
            for number, row in enumerate(rows):
                question = self.ask(frame, row, rows, length=length, seed=seed)
                ids, is_cut = self.prompt(frame, question, length)
                cases.append(
                    Case(
                        task=self.name,
                        length=length,
                        seed=number,
                        group=self._group(row),
                        mode="write",
                        count=self.tokens,
                        ids=ids,
                        answers=question.answers,
                        judge=question.judge,
                    )
                )
                cut[length] += is_cut
        prompts = len(cases) // max(1, len(lengths))
        questions = len({(case.length, case.group) for case in cases}) // max(1, len(lengths))
        about = f" about {questions} questions, intervals over questions"
        definition = (
            f"score of HELMET's {self.name.removeprefix('helmet_')}, as its authors compute it; "
            f"{prompts} prompts{about if questions < prompts else ', exact intervals'}"
        )
        if shown := ", ".join(f"{number} at {length}" for length, number in cut.items() if number):
            definition += f"; of prompts that are too long ({shown}), the context's end is left out"
        return Questions(cases, definition)

    def shown(self, length: int) -> int:
        """Number of demonstrations; for ``icl``, the benchmark's number at that length."""
        if self.shape.format != "icl":
            return self.shots
        # Between the benchmark's lengths, as many for each token as at the longest one.
        at = {8192 * 2**number: shots for number, shots in enumerate(self.shape.shots)}
        return at.get(length) or max(1, self.shape.shots[-1] * length // 131072)

    def chosen(self, length: int, seed: int) -> Sequence[Row]:
        """Sample the same rows as the authors' code with this seed."""
        rows = self.rows.get(length) or self.rows.get(None)
        kind = self.shape.format
        if rows is None:
            raise OptionError(
                f"no data are given for {self.name} at {length} tokens; give {OPTION} "
                f"{self.name.removeprefix('helmet_')}@{length}=FILE"
            )
        rows = [row for row in rows if _popular(self.shape, row)]
        if not rows:
            raise MeasureError(f"no row of {self.name} is left; give {OPTION} other data")
        samples = self.samples or (ICL_SAMPLES if kind == "icl" else SAMPLES)
        if kind in ("qa", "rank"):
            name = _key(kind, rows[0])
            keys = sorted({row.key(name) for row in rows}, key=lambda key: (str(type(key)), key))
            keys = set(random.Random(seed).sample(keys, min(samples, len(keys))))
            return [row for row in rows if row.key(name) in keys]
        if kind == "icl" and len(rows) <= samples:
            return rows
        rows = [rows[place] for place in _shuffled(len(rows), seed)]
        if kind == "icl":
            return _balanced(rows, self.shape.field, count=samples, rng=random.Random(seed))
        return rows[:samples]

    def _group(self, row: Row) -> int:
        """The question of a row, which other rows and lengths may share."""
        kind = self.shape.format
        name = row.key(_key(kind, row)) if kind in ("qa", "rank") else row.where
        return 1 + int(digest(name)[:12], 16)

    def ask(self, frame: Frame, row: Row, rows: Sequence[Row], length: int, seed: int) -> Question:
        """Return the question of a row at a length in tokens; ``rows`` has all questions."""
        kind = self.shape.format
        demos = self.demos.get(length) or self.demos.get(None) or ()
        begun = self._begun(frame)
        if kind == "ruler":
            return self._ruler(row)
        if kind == "kv":
            return self._kv(row, begun)
        if kind == "icl":
            return self._icl(row, demos, shots=self.shown(length), seed=seed, begun=begun)
        shown = self._drawn(row, rows, demos)
        return self._rank(row, shown, begun) if kind == "rank" else self._qa(row, shown, begun)

    def _begun(self, frame: Frame) -> str:
        """The start of the answer, if the prompt contains it; it is scored with the text."""
        _, lead = TEMPLATES[self.shape.format]
        return "" if frame.around is not None else lead

    def prompt(self, frame: Frame, question: Question, length: int) -> tuple[array, bool]:
        """Return tokens that fit into ``length`` with the answer, and whether they are cut."""
        template, _ = TEMPLATES[self.shape.format]
        words = question.words
        before, _, after = template.partition("{context}")
        before = before.format(**words)
        after = after.format(**words)
        begun = self._begun(frame)
        if begun:
            after += f"\n{begun.format(**words)}"
        context = words["context"]
        ids = frame.whole(before + context + after)[0]
        if len(ids) + self.tokens <= length:
            return ids, False
        ends = [0, *_ends(frame.tokenizer, context)]

        def build(keep: int) -> array:
            return frame.whole(before + context[: ends[keep]] + after)[0]

        _, ids = base.fill(self.name, build, length, tokens=self.tokens, most=len(ends) - 1)
        return ids, True

    def _drawn(self, row: Row, rows: Sequence[Row], demos: Sequence[Row]) -> list[Row]:
        """Return the demonstrations of one question: the same in every run."""
        kind = self.shape.format
        name = _key(self.shape.format, row)
        if kind == "rank" and len(demos) > 2 * len(rows):
            left_out = {one.key(name) for one in rows}
        else:  # too few to exclude all questions
            left_out = {row.key(name)} if kind == "rank" or self.shape.field else set()
        others = [one for one in demos if _popular(self.shape, one)]
        others = [one for one in others if one.key(name) not in left_out]
        key = str(row.key(name)).encode()
        seed = int(hashlib.sha256(key).hexdigest(), 16) % 2**31
        found: dict[Any, Row] = {}
        for place in _shuffled(len(others), seed) if self.shots else ():
            found.setdefault(others[place].key(name), others[place])
            if len(found) == self.shots:
                break
        if len(found) < self.shots:
            raise MeasureError(
                f"{self.name} has {len(found)} other questions to show; give {DEMOS} more of them, "
                f"or --shots {len(found)}"
            )
        return list(found.values())

    def _icl(self, row: Row, demos: Sequence[Row], shots: int, seed: int, begun: str) -> Question:
        field = self.shape.field
        text = row.text("text")
        labels = self.shape.labels
        rng = random.Random(f"{text}:{seed}")
        # Labels are numbers in random order, so that only the demonstrations tell them.
        numbers = rng.sample(range(labels), labels)

        def number(one: Row) -> str:
            label = one.key(field)
            if type(label) is not int or not 0 <= label < labels:
                raise one.wrong(field, f"a label from 0 to {labels - 1}")
            return str(numbers[label])

        shown = _balanced(demos, field=field, count=shots, rng=rng)
        context = "\n\n".join(f"{one.text('text')}\nlabel: {number(one)}" for one in shown)
        answer = number(row)
        words = {"context": context, "question": text}
        return Question(words, answers=(answer,), judge=Label(answer, begun))

    def _ruler(self, row: Row) -> Question:
        several = self.name.endswith("mv")
        words = {
            "kind": row.text("type_needle_v"),
            "question": row.text("query" if "query" in row else "question"),
            "context": row.text("context"),
            "some": "Some" if several else "A",
            "are": "are" if several else "is",
            "are_all": "are all" if several else "is",
        }
        return Question(words, answers=tuple(row.texts("answer" if "answer" in row else "outputs")))

    def _kv(self, row: Row, begun: str) -> Question:
        pairs = row.value("demos")[: self.shots] if self.shots else []
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise row.wrong("demos", "pairs of a key and a value")
        demos = "".join(f"Key: {key}\nCorresponding value: {value}\n\n" for key, value in pairs)
        words = {name: row.text(name) for name in ("context", "question")} | {"demos": demos}
        answers = tuple(row.texts("answer"))
        # The line is located by these words even if the prompt uses others.
        return Question(words, answers, judge=Substring(answers, "corresponding value:", begun))

    def _qa(self, row: Row, shown: Sequence[Row], begun: str) -> Question:
        demos = "".join(
            f"{_documents(one)}\n\nQuestion: {one.text('question')}\nAnswer: {answer}\n\n"
            for one in shown
            for answer in one.texts("answers")[:1]
        )
        words = {"question": row.text("question"), "context": _documents(row), "demos": demos}
        answers = tuple(row.texts("answers"))
        return Question(words, answers, judge=Substring(answers, "Answer:", begun))

    def _rank(self, row: Row, shown: Sequence[Row], begun: str) -> Question:
        demos = "".join(
            f"{_documents(one, row)}\n\nQuery: {one.text('query')}\nRanking: {_order(one)}\n\n"
            for one in shown
        )
        words = {"question": row.text("query"), "context": _documents(row, row), "demos": demos}
        grades = tuple((str(one.value("id")), _grade(one)) for one in row.rows("ctxs"))
        return Question(words, answers=(_order(row),), judge=Ndcg(grades, begun))


def _ends(tokenizer: Any, text: str) -> list[int]:
    if not getattr(tokenizer, "is_fast", False):
        raise MeasureError(
            "only a fast tokenizer can cut a context; give longer --lengths, or another model"
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [end for _, end in encoded["offset_mapping"]]


def _popular(shape: Shape, row: Row) -> bool:
    """Whether ``popqa`` includes the row: its subject has fewer than 1000 page views."""
    if shape.format != "qa" or not shape.field:
        return True
    times = row.value(shape.field)
    if type(times) not in (int, float) or not times > 0:
        raise row.wrong(shape.field, "a number above 0")
    return math.log10(times) < 3


def _key(format: str, row: Row) -> str:
    names = ("qid", "query") if format == "rank" else ("id", "question")
    return names[names[0] not in row]


def _documents(row: Row, ranked: Row | None = None) -> str:
    """Format all documents; for ranking, with titles if those of ``ranked`` have them."""
    titled = ranked is None or any("title" in one for one in ranked.rows("ctxs")[:1])
    texts = []
    for one in row.rows("ctxs"):
        number = "" if ranked is None else f"[ID: {one.value('id')}] "
        title = f" (Title: {one.text('title')})" if titled else ""
        texts.append(f"{number}Document{title}: {one.text('text')}")
    return "\n\n".join(texts)


def _grade(document: Row) -> int:
    try:
        return int(document.value("label"))
    except (TypeError, ValueError):
        raise document.wrong("label", "a whole number") from None


def _order(row: Row) -> str:
    documents = sorted(row.rows("ctxs"), key=_grade, reverse=True)  # stable, like the authors' sort
    return " > ".join(str(one.value("id")) for one in documents)


def _shuffled(count: int, seed: int) -> list[int]:
    """Return indices in the order of a shuffle of that many rows by ``datasets``."""
    return np.random.default_rng(seed).permutation(count).tolist()


def _balanced(rows: Sequence[Row], field: str, count: int, rng: random.Random) -> list[Row]:
    """Return rounds of one row per label in random order; a label's rows repeat when exhausted."""
    by_label: dict[Any, list[Row]] = {}
    for row in rows:
        by_label.setdefault(row.key(field), []).append(row)
    rounds: list[Row] = []
    decks = {label: [] for label in by_label}
    while len(rounds) < count:
        drawn = []
        for label, own in by_label.items():
            decks[label] = decks[label] or rng.sample(own, len(own))
            drawn.append(decks[label].pop())
        rounds += rng.sample(drawn, len(drawn))
    return rounds[:count]


@register
@dataclass(frozen=True)
class Helmet(Task):
    """HELMET: the data sets whose files are given, as ``NAME=FILE``, or ``NAME@8k=FILE`` for that
    length only.
    """

    name: ClassVar[str] = "helmet"

    helmet_data: tuple[str, ...] = option((), "HELMET's NAME=FILE or NAME@8k=FILE; repeatable")
    helmet_demos: tuple[str, ...] = option((), "the same for demonstrations; repeatable")
    shots: int = option(2, "number of demonstrations for RAG, re-ranking and json_kv", least=0)
    samples: int | None = drawn(default="as many as the authors")
    new_tokens: int | None = answer_tokens("as in the benchmark")

    def parts(self, settings: Settings) -> Sequence[Task]:
        demos = _read(self.helmet_demos, DEMOS)
        data = _read(self.helmet_data, OPTION)
        if not data:
            raise OptionError(
                f"no data are given; give {OPTION} NAME=FILE with a name of {', '.join(SETS)}"
            )
        tasks = []
        for name, rows in data.items():
            shape = SETS[name]
            shown = demos.get(name, {})
            needed = shape.format == "icl" or (shape.format in ("qa", "rank") and self.shots)
            if needed and not (None in shown or rows.keys() <= shown.keys()):
                zero = "" if shape.format == "icl" else ", or --shots 0"
                raise OptionError(f"{name} needs demonstrations; give {DEMOS} {name}=FILE{zero}")
            tasks.append(
                DataSet(
                    name=f"helmet_{name}",
                    shape=shape,
                    rows=rows,
                    demos=shown,
                    tokens=self.new_tokens or shape.tokens,
                    samples=self.samples,
                    shots=self.shots,
                )
            )
        return tasks


def _read(given: Sequence[str], option: str) -> dict[str, dict[int | None, list[Row]]]:
    found: dict[str, dict[int | None, list[Row]]] = {}
    for text in given:
        place, _, source = text.partition("=")
        name, at, length = place.partition("@")
        if name not in SETS or not source:
            raise OptionError(
                f"{option} {text!r} names no data set that is known{nearest(name, SETS)}; give "
                f"NAME=FILE with a name of {', '.join(SETS)}"
            )
        own = found.setdefault(name, {})
        own[parse_length(length, option) if at else None] = read_rows(source, option)
    return found
