"""LongBench (the first version): 21 data sets in English, Chinese and code, with the authors' data.

Prompts, answer lengths, the first-line rule and scores are those of the authors' ``pred.py``,
``eval.py`` and ``metrics.py`` (arXiv 2308.14508, github.com/THUDM/LongBench, folder LongBench).
"""

from __future__ import annotations

import importlib
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, ClassVar

from rope_eval.cases import Questions
from rope_eval.data.prompts import Frame, beginning
from rope_eval.data.rows import Row, read_rows
from rope_eval.settings import Settings
from rope_eval.tasks.base import Kind, Task, answer_tokens, drawn, option, register
from rope_eval.tasks.benchmark import Asked, Benchmark, named
from rope_eval.tasks.scoring import normalized, overlap_f1
from rope_ext.errors import MeasureError

OPTION = "--longbench-v1-data"

# The prompts, with the authors' typing errors.
_STORY = (
    "nswer the question asconcisely as you can, using a single phrase if possible. Do not provide "
    "any explanation.\n\n"
)
_PAPER = (
    "nswer the question{} as concisely as you can, using a single phrase or sentence if possible. "
    "If the question cannot be answered based on the information in the article, write "
    '"unanswerable". If the question is a yes/no question, answer "yes", "no", or "unanswerable". '
    "Do not provide any explanation.\n\n"
)
_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output "
    "any other words.\n\n"
)
_HOPS = (
    f"{_PASSAGES}The following are given passages.\n{{context}}\n\n"
    f"{_PASSAGES}Question: {{input}}\nAnswer:"
)
_FIELD = (
    "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following "
    "question based on the above text, only give me the answer and do not output any other "
    "words.\n\nQuestion: {input}\nAnswer:"
)
_MEETING = (
    "You are given a meeting transcript and a query containing a question or instruction. Answer "
    "the query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based "
    "on the above meeting transcript in one or more sentences.\n\nQuery: {input}\nAnswer:"
)
_COUNT = (
    "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. "
    "Please carefully read these paragraphs and determine how many unique paragraphs there are "
    "after removing duplicates. In other words, how many non-repeating paragraphs are there in "
    "total?\n\n{context}\n\nPlease enter the final count of unique paragraphs after removing "
    "duplicates. The output format should only contain the number, such as 1, 2, 3, and so on."
    "\n\nThe final answer is: "
)
_WHICH = (
    "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which "
    "paragraph the abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\n"
    "Please enter the number of the paragraph that the abstract is from. The answer format must "
    'be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: '
)


# Scores of a text beside one right answer, and the names of all classes


def _f1(written: str, right: str, classes: Sequence[str]) -> float:
    return overlap_f1(normalized(written).split(), normalized(right).split())


_ZH = str.maketrans(
    "",
    "",
    string.punctuation
    + "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」"  # noqa: RUF001
    + "『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏.",  # noqa: RUF001
)


def _f1_chinese(written: str, right: str, classes: Sequence[str]) -> float:
    def words(text: str) -> list[str]:
        plain = ("".join(word.lower().translate(_ZH).split()) for word in _cut(text))
        return [word for word in plain if word]

    return overlap_f1(words(written), words(right))


def _rouge(written: str, right: str, classes: Sequence[str]) -> float:
    """ROUGE-L of the package ``rouge``, with 0 where it fails, as for an empty text."""
    try:
        [found] = _package("rouge").Rouge(["rouge-l"]).get_scores(written, right)
    except (ValueError, RecursionError):  # the authors catch everything
        return 0.0
    return found["rouge-l"]["f"]


def _rouge_chinese(written: str, right: str, classes: Sequence[str]) -> float:
    return _rouge(" ".join(_cut(written)), " ".join(_cut(right)), classes)


def _class(written: str, right: str, classes: Sequence[str]) -> float:
    found = [name for name in classes if name in written]
    place = 0
    while place < len(found):
        if found[place] in right and found[place] != right:
            del found[place]  # the authors' loop skips the name after one that it removes
        place += 1
    return 1 / len(found) if right in found else 0.0


def _share(written: str, number: str) -> float:
    """Share of the numbers in a text that are this one."""
    numbers = re.findall(r"\d+", written)
    return numbers.count(number) / len(numbers) if numbers else 0.0


def _count(written: str, right: str, classes: Sequence[str]) -> float:
    return _share(written, right)


def _paragraph(written: str, right: str, classes: Sequence[str]) -> float:
    found = re.search(r"(?:Paragraph |段落)(\d+)", right)
    return _share(written, found[1] if found else "")


def _code(written: str, right: str, classes: Sequence[str]) -> float:
    """Likeness to the first line that is neither a comment nor a fence, in whole per cent."""
    lines = written.lstrip("\n").split("\n")
    line = next((one for one in lines if not re.search("`|#|//", one)), "")
    if not (line and right):  # fuzzywuzzy compares two equal texts first, even empty ones
        return float(line == right)
    return round(100 * SequenceMatcher(None, line, right).ratio()) / 100


def _cut(text: str) -> list[str]:
    return list(_package("jieba").cut(text, cut_all=False))


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)  # in no extra of ours
    except ImportError:
        raise MeasureError(
            f"this data set is scored with the package {name}, which is not installed; install it "
            f"with: pip install {name}, or leave the data set out"
        ) from None


Score = Callable[[str, str, Sequence[str]], float]


@dataclass(frozen=True)
class Shape:
    """A data set.

    Args:
        prompt: with ``{context}``, and ``{input}`` if it has a question.
        tokens: maximum answer length in tokens.
        score: of a text and a right answer; the best over the answers counts.
        first_line: only the first line is scored.
        plain: no chat template is used.
    """

    prompt: str
    tokens: int
    score: Score
    first_line: bool = False
    plain: bool = False


def _shown(prompt: str, tokens: int, score: Score) -> Shape:
    """A data set with solved examples."""
    return Shape(prompt, tokens, score, first_line=True, plain=True)


SETS = {
    "narrativeqa": Shape(
        "You are given a story, which can be either a novel or a movie script, and a question. A"
        + _STORY
        + "Story: {context}\n\nNow, a"
        + _STORY.replace("the question", "the question based on the story")
        + "Question: {input}\n\nAnswer:",
        128,
        _f1,
    ),
    "qasper": Shape(
        "You are given a scientific article and a question. A"
        + _PAPER.format("")
        + "Article: {context}\n\n A"
        + _PAPER.format(" based on the above article")
        + "Question: {input}\n\nAnswer:",
        128,
        _f1,
    ),
    "multifieldqa_en": Shape(_FIELD, 64, _f1),
    "multifieldqa_zh": Shape(
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n现在请基于上面的文章回答下面的问题，只告诉我答案，"  # noqa: RUF001
        "不要输出任何其他字词。\n\n问题：{input}\n回答：",  # noqa: RUF001
        64,
        _f1_chinese,
    ),
    "hotpotqa": Shape(_HOPS, 32, _f1),
    "2wikimqa": Shape(_HOPS, 32, _f1),
    "musique": Shape(_HOPS, 32, _f1),
    "dureader": Shape(
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n"  # noqa: RUF001
        "问题：{input}\n回答：",  # noqa: RUF001
        128,
        _rouge_chinese,
    ),
    "gov_report": Shape(
        "You are given a report by a government agency. Write a one-page summary of the report."
        "\n\nReport:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        _rouge,
    ),
    "qmsum": Shape(_MEETING, 512, _rouge),
    "multi_news": Shape(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n"
        "{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:",
        512,
        _rouge,
    ),
    "vcsum": Shape(
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n会议总结：",  # noqa: RUF001
        512,
        _rouge_chinese,
    ),
    "trec": _shown(
        "Please determine the type of the question below. Here are some examples of questions.\n\n"
        "{context}\n{input}",
        64,
        _class,
    ),
    "triviaqa": _shown(
        "Answer the question based on the given passage. Only give me the answer and do not output "
        "any other words. The following are some examples.\n\n{context}\n\n{input}",
        32,
        _f1,
    ),
    "samsum": _shown(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"
        "{context}\n\n{input}",
        128,
        _rouge,
    ),
    "lsht": _shown("请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}", 64, _class),  # noqa: RUF001
    "passage_count": Shape(_COUNT, 32, _count),
    "passage_retrieval_en": Shape(_WHICH, 32, _paragraph),
    "passage_retrieval_zh": Shape(
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n"  # noqa: RUF001
        '下面是一个摘要\n\n{input}\n\n请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式'  # noqa: RUF001
        "\n\n答案是：",  # noqa: RUF001
        32,
        _paragraph,
    ),
    "lcc": Shape(
        "Please complete the code given below. \n{context}Next line of code:\n",
        64,
        _code,
        plain=True,
    ),
    "repobench-p": Shape(
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        64,
        _code,
        plain=True,
    ),
}
"""What is here, by the authors' names."""


@dataclass(frozen=True)
class Scored:
    """The score of a text: the best over the right answers, from 0 to 1.

    Args:
        name: of the data set.
        answers: any of them is right.
        classes: all possible answers, for classification.
    """

    name: str
    answers: tuple[str, ...]
    classes: tuple[str, ...] = ()

    def __call__(self, written: str) -> float:
        shape = SETS[self.name]
        if shape.first_line:
            written = written.lstrip("\n").split("\n")[0]
        return max(shape.score(written, right, self.classes) for right in self.answers)


@dataclass(frozen=True)
class Rows(Benchmark):
    """The rows of one data set.

    Args:
        source: its name in the authors' data.
    """

    source: str = field(kw_only=True)

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        """All rows at every length, without a chat template where the authors use none."""
        if SETS[self.source].plain:
            frame = Frame(frame.tokenizer, beginning(frame.tokenizer))
        return super().questions(frame, lengths, seed)

    def asked(self, row: Row, chat: bool, seed: int) -> Asked:
        shape = SETS[self.source]
        before, _, after = shape.prompt.partition("{context}")
        question = row.text("input") if "{input}" in after else ""
        answers = tuple(row.texts("answers"))
        classes = tuple(row.texts("all_classes")) if shape.score is _class else ()
        judge = Scored(self.source, answers, classes)
        after = after.replace("{input}", question)
        return Asked(before, row.text("context"), after, answers, judge)


@register
@dataclass(frozen=True)
class LongBenchV1(Task):
    """LongBench, the first version: the data sets that are given.

    Args:
        longbench_v1_data: published files, named by data set, such as ``hotpotqa.jsonl``, or
            ``NAME=FILE``, or ``hf:THUDM/LongBench/hotpotqa:test``.
        samples: rows of each data set, sampled at random; None: all.
        new_tokens: maximum answer length in tokens; None uses the authors' numbers.
    """

    name: ClassVar[str] = "longbench_v1"
    kind: ClassVar[Kind] = "rate"

    longbench_v1_data: tuple[str, ...] = option(
        (), "a file such as hotpotqa.jsonl, or NAME=FILE or NAME=hf:ID/CONFIG:SPLIT; repeatable"
    )
    samples: int | None = drawn()
    new_tokens: int | None = answer_tokens("as in the benchmark")

    def parts(self, settings: Settings) -> Sequence[Task]:
        """A task for each data set, read here.

        Raises:
            OptionError: no data are given, or not those of a data set.
            MeasureError: they cannot be read, or a package that scores them is not installed.
        """

        def called(source: str) -> str:
            if source.startswith("hf:"):
                return source.partition(":")[2].partition(":")[0].rpartition("/")[2]
            return Path(source).stem

        made = []
        for name, source in named(self.longbench_v1_data, OPTION, list(SETS), called):
            shape = SETS[name]
            if shape.score in (_rouge, _rouge_chinese):
                _package("rouge")
            if shape.score in (_f1_chinese, _rouge_chinese):
                _package("jieba")
            tokens = shape.tokens if self.new_tokens is None else self.new_tokens
            about = f"score of LongBench's {name}, as its authors compute it"
            rows = read_rows(source, OPTION)
            made.append(Rows(f"{self.name}_{name}", rows, tokens, self.samples, about, source=name))
        return made
