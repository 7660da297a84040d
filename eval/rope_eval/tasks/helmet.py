"""HELMET: the categories that need no LLM judge, with the authors' data.

Recall (``json_kv`` and three of RULER), RAG, many-shot in-context learning and passage re-ranking:
wording, demonstrations, cutting and scoring are those of the authors' ``data.py`` and ``utils.py``
(arXiv 2410.02694, github.com/princeton-nlp/HELMET). They use no chat template for these, so pass
``--chat no``; with a template, the prompt does not begin the answer for the model. With ``--seed
42`` the rows and demonstrations are those of the authors (except for in-context learning).
"""

from __future__ import annotations

import hashlib
import math
import random
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from rope_eval.cases import Case, Questions, require_positive
from rope_eval.data.prompts import Frame, encode, joined
from rope_eval.data.rows import Row, load_datasets, read_rows
from rope_eval.settings import Settings
from rope_eval.tasks.base import Kind, Task, answer_tokens, drawn, option, register
from rope_eval.tasks.haystack import too_long
from rope_ext.command.arguments import parse_length
from rope_ext.errors import MeasureError, OptionError, nearest

OPTION, DEMOS = "--helmet-data", "--helmet-demos"
SAMPLES, ICL_SAMPLES = 100, 500
"""Questions that the authors draw of a data set."""

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

Format = Literal["ruler", "kv", "qa", "rank", "icl"]


@dataclass(frozen=True)
class Shape:
    """A data set.

    Args:
        format: of its rows and prompts.
        tokens: maximum answer length in tokens.
        field: of the label (``icl``), or of the question's popularity (``popqa``).
        labels: number of different labels (``icl``).
        shots: demonstrations at 8k, 16k, 32k, 64k and 128k (``icl``).
    """

    format: Format
    tokens: int
    field: str = ""
    labels: int = 0
    shots: tuple[int, ...] = ()


def _icl(field: str, labels: int, *shots: int) -> Shape:
    return Shape("icl", 20, field, labels, shots)


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
    "icl_trec_coarse": _icl("coarse_label", 6, 400, 800, 1600, 3300, 6600),
    "icl_trec_fine": _icl("fine_label", 50, 400, 800, 1600, 3200, 6400),
    "icl_banking77": _icl("label", 77, 360, 720, 1450, 2900, 5900),
    "icl_clinic150": _icl("intent", 151, 440, 880, 1750, 3525, 7050),
    "icl_nlu": _icl("label", 68, 510, 1020, 2040, 4080, 8296),
}
"""What is here, by the authors' names."""

_JUDGED = "its answers are judged by GPT-4o"
_CITED = "its citations are judged by a model of entailment"
_ELSEWHERE = "its texts are cut with Llama 2's tokenizer; infinitebench of lm-eval has these data"
REFUSED = {
    "narrativeqa": _JUDGED,
    "infbench_sum": _JUDGED,
    "multi_lexsum": _JUDGED,
    "alce_asqa": _CITED,
    "alce_qampari": _CITED,
    "infbench_qa": _ELSEWHERE,
    "infbench_choice": _ELSEWHERE,
}
"""What is not, and why."""


# Scores

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Lower case, without punctuation, articles and spare blanks, as SQuAD has it."""
    plain = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", plain).split())


def parsed(text: str, lead: str) -> str:
    """The line after the first ``lead``, or else the first line."""
    found = re.search(f"{lead}(.*)(?:\n|$)", text, re.IGNORECASE)
    line = found[1] if found else text.split("\n", 1)[0]
    return re.sub(f"^{re.escape(lead)}", "", line.strip(), flags=re.IGNORECASE).strip()


@dataclass(frozen=True)
class Substring:
    """Scores 1 if an answer is in the text, or in its answer line; punctuation is ignored.

    Args:
        answers: any of them is right.
        lead: beginning of the answer line.
        begun: beginning of the answer that the prompt already contains.
    """

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
class Recall:
    """The fraction of the answers in the text, ignoring case."""

    answers: tuple[str, ...]

    def __call__(self, written: str) -> float:
        text = written.lower()
        return sum(answer.lower() in text for answer in self.answers) / len(self.answers)


@dataclass(frozen=True)
class Ndcg:
    """NDCG@10 of the ranking in the text, as in trec_eval.

    Args:
        relevance: (ID, grade) of every document.
        begun: beginning of the answer that the prompt already contains.
    """

    relevance: tuple[tuple[str, int], ...]
    begun: str

    def __call__(self, written: str) -> float:
        grades = dict(self.relevance)
        gains = [max(0, grades.get(name, 0)) for name in ranking(self.begun + written)]
        ideal = _gain(sorted((max(0, grade) for grade in grades.values()), reverse=True))
        return _gain(gains) / ideal if ideal else 0.0


def ranking(text: str) -> list[str]:
    """The longest run of ``ID > ID > ...`` in a text, each ID at its first place."""
    plain = re.sub(r"[\[\]:]", "", text).lower().replace("id", "")
    runs = [found[0] for found in re.finditer(r"\d+(?:\s*>\s*\d+)*", plain)]
    if not runs:
        return []
    run = max(runs, key=len)  # the first of the longest
    return list(dict.fromkeys(name.strip() for name in run.split(">")))


def _gain(grades: Sequence[int]) -> float:
    return math.fsum(grade / math.log2(place + 1) for place, grade in enumerate(grades[:10], 1))


# Prompts


@dataclass(frozen=True)
class Asked:
    """A row as a prompt.

    Args:
        before, context, after: the prompt in three parts; the second may be cut at its end.
        answers: right answers, for the results.
        judge: scores a text.
    """

    before: str
    context: str
    after: str
    answers: tuple[str, ...]
    judge: Callable[[str], float]


@dataclass(frozen=True)
class Rows(Task):
    """The rows of one data set, each asked at every length.

    A prompt is tokenized as a whole. If it does not fit the length, less the template and the
    answer, the end of its context is left out. Shorter rows are not changed.

    Args:
        name: of the task.
        rows: of the data.
        tokens: maximum answer length in tokens; part of the length.
        samples: questions to ask, sampled at random; None: as many as the authors ask.
        shape: the data set.
        demos: rows to sample demonstrations from.
        shots: number of demonstrations; for ``icl``, by length.
    """

    kind: ClassVar[Kind] = "rate"

    name: str
    rows: Sequence[Row]
    tokens: int
    samples: int | None
    shape: Shape
    demos: Sequence[Row] = ()
    shots: int = 0

    def __post_init__(self) -> None:
        require_positive(new_tokens=self.tokens, samples=self.samples)

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        """All rows at every length.

        Raises:
            MeasureError: a row lacks something.
            OptionError: a length cannot hold a prompt.
        """
        cases, shortened = [], dict.fromkeys(lengths, 0)
        around = len(frame.head) + len(frame.tail) + self.tokens
        rows = self.chosen(seed)
        for number, row in enumerate(rows):
            asked = self.asked(row, bool(frame.tail), seed)
            whole = encode(frame.tokenizer, asked.before + asked.context + asked.after)
            for length in lengths:
                ids = whole
                if len(whole) + around > length:
                    shortened[length] += 1
                    ids = self._cut(frame.tokenizer, asked, whole, length, length - around)
                cases.append(
                    Case(
                        task=self.name,
                        length=length,
                        seed=number,
                        mode="write",
                        count=self.tokens,
                        ids=joined(frame.head, ids, frame.tail),
                        answers=asked.answers,
                        judge=asked.judge,
                    )
                )
        cases.sort(key=lambda case: case.length)  # stable
        definition = (
            f"score of HELMET's {self.name.removeprefix('helmet_')}, as its authors compute it; "
            f"{len(rows)} prompts, exact intervals"
        )
        counts = ", ".join(f"{count} at {length}" for length, count in shortened.items() if count)
        if counts:
            definition += (
                f"; the end of the context is left out where a prompt is too long ({counts})"
            )
        return Questions(cases, definition)

    def _cut(
        self, tokenizer: Any, asked: Asked, whole: Sequence[int], length: int, room: int
    ) -> Sequence[int]:
        """At most ``room`` tokens of the prompt."""
        ends = _ends(tokenizer, asked.context)
        keep = len(ends)
        ids = whole
        for _ in range(16):  # cut text may be tokenized otherwise: by a token or two
            keep -= len(ids) - room
            if keep < 0:
                break
            text = asked.before + asked.context[: ends[keep - 1] if keep else 0] + asked.after
            ids = encode(tokenizer, text)
            if len(ids) <= room:
                return ids
        least = length - room + len(encode(tokenizer, asked.before + asked.after))
        raise too_long(self.name, least, length)

    def chosen(self, seed: int) -> Sequence[Row]:
        """The rows that the authors' code draws with this seed."""
        rows = [row for row in self.rows if _popular(self.shape, row)]
        if not rows:
            raise MeasureError(f"no row of {self.name} is left; give {OPTION} other data")
        samples = self.samples or (ICL_SAMPLES if self.shape.format == "icl" else SAMPLES)
        if self.shape.format in ("qa", "rank"):
            name = _key(self.shape, rows[0])
            keys = sorted(dict.fromkeys(row.key(name) for row in rows), key=_kept_apart)
            keys = set(random.Random(seed).sample(keys, min(samples, len(keys))))
            return [row for row in rows if row.key(name) in keys]
        if self.shape.format == "icl" and len(rows) <= samples:
            return rows
        rows = [rows[place] for place in _shuffled(len(rows), seed)]
        if self.shape.format == "icl":
            return _balanced(rows, self.shape.field, samples, random.Random(seed))
        return rows[:samples]

    def asked(self, row: Row, chat: bool, seed: int) -> Asked:
        """The prompt of a row, without the beginning of the answer for a chat model."""
        words, lead, answers = getattr(self, f"_{self.shape.format}")(row, seed)
        template = {"ruler": _RULER, "kv": _KV, "qa": _QA, "rank": _RANK, "icl": _ICL}
        before, _, after = template[self.shape.format].partition("{context}")
        # Where the answer is begun in the prompt, it is read with that beginning.
        begun = "" if chat else lead
        after = after.format(**words) + (f"\n{begun}" if begun else "")
        judge = self._judge(row, answers, begun)
        return Asked(before.format(**words), words["context"], after, answers, judge)

    def _judge(self, row: Row, answers: tuple[str, ...], begun: str) -> Any:
        if self.shape.format == "ruler":
            return Recall(answers)
        if self.shape.format == "icl":
            return Label(answers[0], begun)
        if self.shape.format == "rank":
            grades = [(_id(one), _grade(one)) for one in row.rows("ctxs")]
            return Ndcg(tuple(grades), begun)
        # The line is looked for by these words also where the prompt has others.
        lead = "corresponding value:" if self.shape.format == "kv" else "Answer:"
        return Substring(answers, lead, begun)

    def _ruler(self, row: Row, seed: int) -> tuple[dict[str, str], str, tuple[str, ...]]:
        several = self.name.endswith("mv")
        words = {
            "kind": row.text("type_needle_v"),
            "question": row.text(row.either("query", "question")),
            "context": row.text("context"),
            "some": "Some" if several else "A",
            "are": "are" if several else "is",
            "are_all": "are all" if several else "is",
        }
        answers = row.texts(row.either("answer", "outputs"))
        return words, _RULER_LEAD.format(**words), tuple(answers)

    def _kv(self, row: Row, seed: int) -> tuple[dict[str, str], str, tuple[str, ...]]:
        shown = row.value("demos") if self.shots else []
        right = isinstance(shown, list) and all(isinstance(one, list) for one in shown)
        if not (right and all(len(one) == 2 for one in shown)):
            raise row.wrong("demos", "pairs of a key and a value")
        pairs = shown[: self.shots]
        demos = [f"Key: {key}\nCorresponding value: {value}\n\n" for key, value in pairs]
        words = {name: row.text(name) for name in ("context", "question")}
        answers = tuple(row.texts("answer"))
        return words | {"demos": "".join(demos)}, "Corresponding value:", answers

    def _qa(self, row: Row, seed: int) -> tuple[dict[str, str], str, tuple[str, ...]]:
        name = _key(self.shape, row)
        others = self.demos
        if self.shape.field:  # popqa has one split: not the question itself
            others = [one for one in others if _popular(self.shape, one)]
            others = [one for one in others if one.key(name) != row.key(name)]
        demos = [
            f"{_documents(one)}\n\nQuestion: {one.text('question')}\nAnswer: {_answers(one)[0]}\n\n"
            for one in self._drawn(others, name, row.key(name))
        ]
        words = {"question": row.text("question"), "context": _documents(row)}
        return words | {"demos": "".join(demos)}, "Answer:", _answers(row)

    def _rank(self, row: Row, seed: int) -> tuple[dict[str, str], str, tuple[str, ...]]:
        asked = self.chosen(seed)
        if len(self.demos) <= 2 * len(asked):  # too few to do without all that are asked
            asked = [row]
        left_out = {one.key("qid") for one in asked}
        others = [one for one in self.demos if one.key("qid") not in left_out]
        demos = [
            f"{_documents(one, row)}\n\nQuery: {one.text('query')}\nRanking: {_order(one)}\n\n"
            for one in self._drawn(others, "qid", row.key("qid"))
        ]
        words = {"question": row.text("query"), "context": _documents(row, row)}
        return words | {"demos": "".join(demos)}, "Ranking:", (_order(row),)

    def _icl(self, row: Row, seed: int) -> tuple[dict[str, str], str, tuple[str, ...]]:
        field, text = self.shape.field, row.text("text")
        rng = random.Random(f"{text}:{seed}")
        numbers = rng.sample(range(self.shape.labels), self.shape.labels)

        def number(one: Row) -> str:
            label = one.key(field)
            if type(label) is not int or not 0 <= label < self.shape.labels:
                raise one.wrong(field, f"a label from 0 to {self.shape.labels - 1}")
            return str(numbers[label])

        shown = _balanced(self.demos, field, self.shots, rng)
        context = "\n\n".join(f"{one.text('text')}\nlabel: {number(one)}" for one in shown)
        return {"context": context, "question": text}, "label:", (number(row),)

    def _drawn(self, rows: Sequence[Row], name: str, key: Any) -> list[Row]:
        """The demonstrations of one question: the same in every run."""
        if not self.shots:
            return []
        seed = int(hashlib.sha256(str(key).encode()).hexdigest(), 16) % 2**31
        found: dict[Any, Row] = {}
        for place in _shuffled(len(rows), seed):
            found.setdefault(rows[place].key(name), rows[place])
            if len(found) == self.shots:
                return list(found.values())
        raise MeasureError(
            f"{self.name} has {len(found)} other questions to show, {self.shots} are asked for; "
            f"give {DEMOS} more of them, or --shots {len(found)}"
        )


def _ends(tokenizer: Any, text: str) -> list[int]:
    """Where each token of a text ends, characters."""
    if not getattr(tokenizer, "is_fast", False):
        raise MeasureError(
            "this tokenizer does not say which text a token stands for, so that no context can be "
            "cut; give longer --lengths, or a model with a fast tokenizer"
        )
    made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [end for _, end in made["offset_mapping"]]


def _popular(shape: Shape, row: Row) -> bool:
    """Whether ``popqa`` has the row: what it is about is looked up less than 1000 times."""
    if shape.format != "qa" or not shape.field:
        return True
    times = row.value(shape.field)
    if type(times) not in (int, float) or not times > 0:
        raise row.wrong(shape.field, "a number above 0")
    return math.log10(times) < 3


def _key(shape: Shape, row: Row) -> str:
    if shape.format == "rank":
        return "qid" if "qid" in row else "query"
    return "id" if "id" in row else "question"


def _kept_apart(key: Any) -> tuple[str, Any]:
    """Orders keys of one type as they are, and keys of two types at all."""
    return type(key).__name__, key


def _answers(row: Row) -> tuple[str, ...]:
    answers = row.value("answers")
    if isinstance(answers, list) and answers and isinstance(answers[0], list):
        answers = [one for several in answers for one in several]
    if not (isinstance(answers, list) and answers and all(isinstance(a, str) for a in answers)):
        raise row.wrong("answers", "some strings")
    return tuple(answers)


def _documents(row: Row, ranked: Row | None = None) -> str:
    """All documents; where they are to be ranked, with titles if those of ``ranked`` have them."""
    found = row.rows("ctxs")
    if ranked is None:
        texts = [f"Document (Title: {one.text('title')}): {one.text('text')}" for one in found]
    else:
        titled = any("title" in one for one in ranked.rows("ctxs")[:1])
        texts = [
            f"[ID: {_id(one)}] Document"
            + (f" (Title: {one.text('title')})" if titled else "")
            + f": {one.text('text')}"
            for one in found
        ]
    return "\n\n".join(texts)


def _id(document: Row) -> str:
    return str(document.value("id"))


def _grade(document: Row) -> int:
    try:
        return int(document.value("label"))
    except (TypeError, ValueError):
        raise document.wrong("label", "a whole number") from None


def _order(row: Row) -> str:
    documents = sorted(row.rows("ctxs"), key=_grade, reverse=True)  # stable, as the authors' is
    return " > ".join(map(_id, documents))


def _shuffled(count: int, seed: int) -> list[int]:
    """Places in the order into which ``datasets`` shuffles that many rows."""
    data = load_datasets().Dataset.from_dict({"place": list(range(count))})
    return list(data.shuffle(seed=seed)["place"])


def _balanced(rows: Sequence[Row], field: str, count: int, rng: random.Random) -> list[Row]:
    """Rounds of one row per label in random order; a label's rows repeat where they run out."""
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


@dataclass(frozen=True)
class ByLength(Task):
    """One data set that may have a separate file for every length.

    Args:
        name: of the task.
        made: the rows for each length; None: those for all other lengths.
    """

    kind: ClassVar[Kind] = "rate"

    name: str
    made: Mapping[int | None, Rows]

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        """All rows of every length.

        Raises:
            OptionError: a length has no rows, or cannot hold a prompt.
            MeasureError: a row lacks something.
        """
        parts = [self.at(length).questions(frame, [length], seed) for length in lengths]
        cases = [case for part in parts for case in part.cases]
        definition = "; ".join(dict.fromkeys(part.definition for part in parts))
        return Questions(cases, definition)

    def at(self, length: int) -> Rows:
        """The rows of one length, with as many examples as the benchmark shows at it.

        Raises:
            OptionError: there are none.
        """
        rows = self.made.get(length) or self.made.get(None)
        if rows is None:
            raise OptionError(
                f"no data are given for {self.name} at {length} tokens; give {OPTION} "
                f"{self.name.removeprefix('helmet_')}@{length}=FILE"
            )
        if rows.shape.format != "icl":
            return rows
        official: dict[int, int] = dict(
            zip((8192, 16384, 32768, 65536, 131072), rows.shape.shots, strict=True)
        )
        shots = official.get(length) or max(1, official[131072] * length // 131072)
        return replace(rows, shots=shots)


@register
@dataclass(frozen=True)
class Helmet(Task):
    """HELMET: the data sets whose files are given.

    Args:
        helmet_data: ``NAME=FILE``, or ``NAME@8k=FILE`` for that length only.
        helmet_demos: the same for the source of demonstrations.
        shots: demonstrations of RAG, re-ranking and ``json_kv``.
        samples: questions from each data set; None uses the authors' numbers.
        new_tokens: maximum answer length in tokens; None uses the authors' numbers.
    """

    name: ClassVar[str] = "helmet"
    kind: ClassVar[Kind] = "rate"

    helmet_data: tuple[str, ...] = option((), "HELMET's NAME=FILE or NAME@8k=FILE; repeatable")
    helmet_demos: tuple[str, ...] = option((), "the same for demonstrations; repeatable")
    shots: int = option(2, "number of demonstrations for RAG, re-ranking and json_kv")
    samples: int | None = drawn(default="as many as the authors")
    new_tokens: int | None = answer_tokens("as in the benchmark")

    def __post_init__(self) -> None:
        if self.shots < 0:
            raise OptionError(f"shots={self.shots} is not valid; it must be at least 0")

    def parts(self, settings: Settings) -> Sequence[Task]:
        """A task for each data set, read here.

        Raises:
            OptionError: no data are given, or not those of a data set that is here.
            MeasureError: they cannot be read.
        """
        demos = {
            (name, length): read_rows(source, DEMOS)
            for name, length, source in _sources(self.helmet_demos, DEMOS)
        }
        tasks: dict[str, dict[int | None, Rows]] = {}
        for name, length, source in _sources(self.helmet_data, OPTION):
            shape = SETS[name]
            shown = demos.get((name, length)) or demos.get((name, None)) or ()
            if not shown and (
                shape.format == "icl" or (shape.format in ("qa", "rank") and self.shots)
            ):
                zero = "" if shape.format == "icl" else ", or --shots 0"
                raise OptionError(f"{name} needs demonstrations; give {DEMOS} {name}=FILE{zero}")
            tasks.setdefault(name, {})[length] = Rows(
                name=f"{self.name}_{name}",
                rows=read_rows(source, OPTION),
                tokens=shape.tokens if self.new_tokens is None else self.new_tokens,
                samples=self.samples,
                shape=shape,
                demos=shown,
                shots=self.shots,
            )
        if not tasks:
            raise OptionError(
                f"no data are given; give {OPTION} NAME=FILE with a name of {_known()}"
            )
        return [ByLength(f"{self.name}_{name}", made) for name, made in tasks.items()]


def _sources(given: Sequence[str], option: str) -> Iterator[tuple[str, int | None, str]]:
    """(name, length, source) of ``NAME=SOURCE`` and ``NAME@8k=SOURCE``."""
    for text in given:
        place, _, source = text.partition("=")
        name, at, length = place.partition("@")
        for refused, why in REFUSED.items():
            if name.startswith(refused):
                raise OptionError(f"HELMET's {name} is not here: {why}; leave it out")
        if name not in SETS or not source:
            raise OptionError(
                f"{option} {text!r} names no data set that is known{nearest(name, SETS)}; give "
                f"NAME=FILE with a name of {_known()}"
            )
        yield name, parse_length(length, option) if at else None, source


def _known() -> str:
    return ", ".join(SETS)
