"""InfiniteBench: twelve tasks of around 100k tokens, with the authors' data.

Wording, answer lengths, cutting and scoring are those of the authors' ``eval_yarn_mistral.py``
and ``compute_scores.py`` (arXiv 2402.13718, github.com/OpenBMB/InfiniteBench); chat models get the
prompts for GPT-4, without its system message.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rope_eval.data.rows import Row, read_rows
from rope_eval.settings import Settings
from rope_eval.tasks.base import Kind, Task, answer_tokens, drawn, option, register
from rope_eval.tasks.benchmark import Asked, Benchmark, named
from rope_eval.tasks.scoring import normalized, overlap_f1, rouge

OPTION = "--infinitebench-data"
KINDS = {
    "id": "int64",
    "context": "string",
    "input": "string",
    "answer": "string[]",
    "options": "string[]",
}
"""Columns on the Hub, where the files of one data set disagree about the type of an answer."""

TOKENS = {
    "passkey": 6,
    "number_string": 12,
    "kv_retrieval": 50,
    "longbook_sum_eng": 1200,
    "longbook_choice_eng": 40,
    "longbook_qa_eng": 40,
    "longbook_qa_chn": 40,
    "longdialogue_qa_eng": 40,
    "math_find": 3,
    "math_calc": 30000,
    "code_run": 5,
    "code_debug": 5,
}
"""Tokens that the authors let a model write, by task."""

_HIDDEN = "There is an important info hidden inside a lot of irrelevant text. Find it"
_QUIZ = "I will quiz you about the important information"
_INPUT = "\n\n{context}\n\n{input}"
_CHOICES = "A. {OPTION_A}\nB. {OPTION_B}\nC. {OPTION_C}\nD. {OPTION_D}"
_MASKED = (
    "Below is a dialogue script where one random occurrence of a character name is replaced with "
    '"$$MASK$$", and you should try to guess who that character is.\n\n'
)
_JSON = "Extract the value corresponding to the specified key in the JSON object below.\n\n"

BASE = {
    "passkey": f"{_HIDDEN} and memorize it. {_QUIZ}.{_INPUT}\n\nThe pass key is",
    "number_string": f"{_HIDDEN}. {_QUIZ} there.{_INPUT}\n\nThe sequence of digits is",
    "kv_retrieval": f"{_JSON}{{context}}\n\n{{input}}",
    "longbook_sum_eng": "Summarize the book below.\n\n{context}\n\nSummary:",
    "longbook_choice_eng": (
        "Read the book and answer the question.\n\n{context}\n\nQuestion: {input}\n"
        f"{_CHOICES}\n\nThe letter of the correct answer is"
    ),
    "longbook_qa_eng": (
        "Read the book and answer the question. Be very concise in your answer.\n\n{context}\n\n"
        "Question: {input}\nAnswer:"
    ),
    "longbook_qa_chn": "阅读以下书籍然后回答问题。\n\n{context}\n\n问题：{input}\n答案：",  # noqa: RUF001
    "math_find": "{prefix}\n\n{context}\n\n{input}",
    "math_calc": (
        "Let us calculate the intermediate values of an expression.\n\nExpression: 1 + 3 + 4\n"
        "Values: [1, 4, 8]\n\nExpression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\n"
        "Expression: {context}\nValues:"
    ),
    "code_run": (
        "There is a function called {func} in the following Python code.\n\n{context}\n\n"
        "Please compute the exact value of {call}. The value of {call} is"
    ),
    "code_debug": (
        "Following is a Python code where exactly one of the functions/methods has a deliberate "
        f"error that makes it crash.\n\n{{context}}\n\nOptions:\n{_CHOICES}\n\n"
        "The correct option is:"
    ),
    "longdialogue_qa_eng": (
        f"{_MASKED}{{context}}\n\nThe name that has been replaced with $$MASK$$ is likely"
    ),
}
"""``yarn_mistral_templates`` of the authors' ``prompt.py``: the answer is begun for the model."""

CHAT = {
    "passkey": f"{_HIDDEN} and memorize them. {_QUIZ} there.{_INPUT}",
    "number_string": f"{_HIDDEN}. {_QUIZ} there.{_INPUT}",
    "kv_retrieval": BASE["kv_retrieval"],
    "longbook_sum_eng": "Summarize the following book.\n\n{context}",
    "longbook_choice_eng": (
        "Read the book and answer the question.\n\n{context}\n\nQuestion: {input}\n\n"
        "Only one of the following options is correct, tell me the answer using one single letter "
        f"(A, B, C, or D). Don't say anything else.\n{_CHOICES}"
    ),
    "longbook_qa_eng": (
        "Read the book below and answer a question.\n\n{context}\n\nQuestion: {input}\n\n"
        "Be very concise."
    ),
    "longbook_qa_chn": (
        "请根据以下书籍回答我的问题。\n\n{context}\n\n问题：{input}\n请尽量简短地回答。"  # noqa: RUF001
    ),
    "math_find": BASE["math_find"],
    "math_calc": "Compute the intermediate values in the following long expression.\n\n{context}",
    "code_run": (
        "Following is a set of Python functions. There is a function called named {func}.\n\n"
        "{context}\n\nPlease give me the exact number of the return value of {call}. Be concise. "
        "Your response must end with the final returned value."
    ),
    "code_debug": (
        "There is ONLY ONE function in the large project that is deliberately made to include an "
        "obvious error. Please find the function that contains the most obvious errors. I will "
        "give you four options to narrow your scope. You can inspect the options and think. "
        "Eventually, tell me the answer using one single letter (A, B, C, or D).\n\n{context}\n\n"
        f"Which funtion has deliberate error?\n{_CHOICES}\n\n"
        "You should first find the functions in the options. Repeat their content, inspect through "
        "code, and at last give me your answer for the function that has the deliberate and "
        "obvious error in A, B, C, or D."
    ),
    "longdialogue_qa_eng": (
        f"{_MASKED}The dialogue:\n\n---\n\n{{context}}\n\n---\n\nEnd of dialogue.\n\n"
        'Which character is most likely "$$MASK$$"? Just say the name used by the scriptwriter '
        "(before the colon marks) of one single character and nothing else."
    ),
}
"""``gpt4_templates`` of the same file."""

Label = tuple[Any, ...]
_ZH_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕"  # noqa: RUF001
    "〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."  # noqa: RUF001
)
_ZH = str.maketrans("", "", string.punctuation + _ZH_PUNCTUATION)
_MARKS = "\n:\"'.,?!{}"


def _spaced(text: str, marks: Sequence[str]) -> str:
    for mark in marks:
        text = text.replace(mark, " ")
    return text


def _after(text: str, leads: Sequence[str]) -> str | None:
    """What comes after the first of these leads that occurs, and the character behind it."""
    text = re.sub(" {2,}", " ", text)
    for lead in leads:
        if lead in text:
            return text[text.index(lead) + len(lead) + 1 :]
    return None


def _first_integer(written: str, label: Label) -> bool:
    found = re.search("[0-9]+", written)
    return found is not None and found[0] == label[0]


def _word(written: str, label: Label) -> bool:
    return label[0] in _spaced(written, _MARKS).split()


def _upper_word(written: str, label: Label) -> bool:
    return label[0] in _spaced(written.strip(), _MARKS).upper().split()


def _last_number(written: str, label: Label) -> bool:
    words = _spaced(written.strip(), "\n.`'\":").split()
    try:
        return bool(words) and int(words[-1]) == label[0]
    except ValueError:
        return False


def _first_number(written: str, label: Label) -> bool:
    found = re.search(r"\d+\.\d+|\d+", written)
    return found is not None and float(found[0]) == label[0]


def _values(written: str, label: Label) -> float:
    """Share of the values before the first wrong one; a minus counts for nothing."""
    numbers = [int(digits) for digits in re.findall("[0-9]+", written)]
    right = 0
    while right < min(len(label), len(numbers)) and numbers[right] == label[right]:
        right += 1
    return right / len(label)


def _faulty(written: str, label: Label) -> bool:
    name, letter = label
    text = written.strip()
    if text[:2] in (f"{letter}.", f"{letter}:"):
        return True
    text = _spaced(text, ["\n", "`", "'", '"', "-", "*", "Option", "option"])
    rest = _after(text, ["answer is:", "is:", "answer:", "correct option is:"])
    return rest is not None and rest.startswith((letter, name))


def _choice(written: str, label: Label) -> bool:
    text = written.strip()
    if not text or text[0] in "ABCD":
        return text[:1] in label
    if text in label:
        return True
    text = _spaced(text, "\n\"'.,?!{}")
    rest = _after(text, ["answer is:", "answer:", "answer is", "option is"])
    if rest is not None:
        return rest.startswith(label)
    words = [word for word in text.split() if word in "ABCD"]
    return bool(words) and words[0] in label


def _answer_f1(written: str, label: Label) -> float:
    words = normalized(written).split()
    return max(overlap_f1(words, normalized(answer).split()) for answer in label)


def _answer_f1_chinese(written: str, label: Label) -> float:
    def characters(text: str) -> str:
        return "".join(text.lower().translate(_ZH).split())

    return max(overlap_f1(characters(written), characters(answer)) for answer in label)


def _summary(written: str, label: Label) -> float:
    return rouge(written, label, "rougeLsum", stem=False)


SCORES: dict[str, Callable[[str, Label], float]] = {
    "passkey": _first_integer,
    "number_string": _first_integer,
    "kv_retrieval": _word,
    "longbook_sum_eng": _summary,
    "longbook_choice_eng": _choice,
    "longbook_qa_eng": _answer_f1,
    "longbook_qa_chn": _answer_f1_chinese,
    "longdialogue_qa_eng": _upper_word,
    "math_find": _first_number,
    "math_calc": _values,
    "code_run": _last_number,
    "code_debug": _faulty,
}
"""What a text is worth, by task: the functions of the authors' ``compute_scores.py``."""
_NUMBERS = ("math_find", "math_calc", "code_run")
_OPTIONS = ("longbook_choice_eng", "code_debug")


@dataclass(frozen=True)
class Scored:
    """The score of a task.

    Args:
        task: its name.
        label: strings or numbers; for multiple choice, the right option and its letter.
    """

    task: str
    label: Label

    def __call__(self, written: str) -> float:
        return float(SCORES[self.task](written, self.label))


@dataclass(frozen=True)
class Rows(Benchmark):
    """The rows of one task.

    Args:
        task: its name in the authors' data.
    """

    task: str = ""

    def asked(self, row: Row, chat: bool, seed: int) -> Asked:
        label = self._label(row)
        context = row.text(row.either("context", "content"))  # as older files call it
        before, _, after = (CHAT if chat else BASE)[self.task].partition("{context}")
        words = self._words(row)
        answers = tuple(map(str, label))
        judge = Scored(self.task, label)
        return Asked(before.format(**words), context, after.format(**words), answers, judge)

    def _words(self, row: Row) -> dict[str, str]:
        words = {"input": row.data.get("input") or ""}
        if self.task in _OPTIONS:
            options = row.texts("options", 4)
            words |= {f"OPTION_{letter}": one for letter, one in zip("ABCD", options, strict=True)}
        if self.task == "code_run":
            found = re.search(r"(func_[0-9]+)\(-?[0-9]+\)", row.text("input"))
            if found is None:
                raise row.wrong("input", "a call such as func_1(2)")
            words |= {"func": found[1], "call": found[0]}
        if self.task == "math_find":
            found = re.search(r"The .+ of", row.text("input"))
            if found is None:
                raise row.wrong("input", "'The ... of'")
            target = found[0].lower().removesuffix(" of")
            words["prefix"] = f"What is {target} in the following list?"
        return words

    def _label(self, row: Row) -> Label:
        answer = row.value("answer")
        while isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], list):
            answer = answer[0]
        label = tuple(answer) if isinstance(answer, list) else (answer,)
        if self.task in _NUMBERS:
            try:
                return tuple(one if type(one) in (int, float) else float(one) for one in label)
            except (TypeError, ValueError):
                raise row.wrong("answer", "a number, or some") from None
        if not label or not all(isinstance(one, str) for one in label):
            raise row.wrong("answer", "a string, or some")
        if self.task not in _OPTIONS:
            return label
        if len(label) == 2 and label[1] in ("A", "B", "C", "D"):
            return label
        options = row.texts("options", 4)
        if len(label) != 1 or label[0] not in options:
            raise row.wrong("answer", "one of the options")
        return label[0], "ABCD"[options.index(label[0])]


@register
@dataclass(frozen=True)
class InfiniteBench(Task):
    """InfiniteBench: the tasks whose data are given.

    Args:
        infinitebench_data: published files, named by task, such as ``passkey.jsonl``, or
            ``NAME=FILE``, or ``hf:xinrongzhang2022/InfiniteBench:passkey``.
        samples: rows of each task; None: all.
        new_tokens: maximum answer length in tokens; None uses the authors' numbers.
    """

    name: ClassVar[str] = "infinitebench"
    kind: ClassVar[Kind] = "rate"

    infinitebench_data: tuple[str, ...] = option(
        (), "a file such as passkey.jsonl, or NAME=FILE or NAME=hf:ID/CONFIG:SPLIT; repeatable"
    )
    samples: int | None = drawn()
    new_tokens: int | None = answer_tokens("as in the benchmark")

    def parts(self, settings: Settings) -> Sequence[Task]:
        """A task for each file, read here.

        Raises:
            OptionError: no data are given, or not those of a task.
            MeasureError: they cannot be read, or ROUGE is needed and not installed.
        """

        def called(source: str) -> str:
            return source.rpartition(":")[2] if source.startswith("hf:") else Path(source).stem

        made = []
        for task, source in named(self.infinitebench_data, OPTION, list(TOKENS), called):
            if task == "longbook_sum_eng":
                rouge("a", ["a"], "rougeLsum", stem=False)  # tells now if it is missing
            rows = read_rows(source, OPTION, KINDS)
            tokens = TOKENS[task] if self.new_tokens is None else self.new_tokens
            about = f"score of InfiniteBench's {task}, as its authors compute it"
            name = f"{self.name}_{task}"
            made.append(Rows(name, rows, tokens, self.samples, about, task=task))
        return made
