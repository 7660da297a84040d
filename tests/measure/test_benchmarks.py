"""Benchmarks with data of their own: prompts, scores and errors, and the page that lists them.

Digests are of the prompts that the authors' code makes of the same rows; values are computed by
hand from its definitions.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rope_eval.cases import Case
from rope_eval.data.prompts import Frame, encode, joined
from rope_eval.run.runner import share_found
from rope_eval.settings import Settings
from rope_eval.tasks import Task, build
from rope_eval.tasks.helmet import Ndcg, Substring
from rope_eval.tasks.nolima import TEMPLATE, Book, Gold, distractor_depth, read_tests
from rope_eval.tasks.story import OnlyEnd, Repeated
from rope_ext.errors import MeasureError, OptionError
from tests.helpers import published_rows
from tests.helpers.published_rows import HELMET, HELMET_DEMOS, write_rows

ROOT = Path(__file__).parents[2]
SETTINGS = Settings(models=("m",), methods=("yarn",), lengths=(4096,))


@pytest.fixture(scope="module")
def frame() -> Frame:
    return Frame.from_tokenizer(
        AutoTokenizer.from_pretrained(ROOT / "checkpoints" / "tiny-512"), "no"
    )


@pytest.fixture(scope="module")
def chat(frame: Frame) -> Frame:
    """The same model with a template."""
    return Frame(frame.tokenizer, (), ("Q: ", "\nA: "))


def given(name: str, folder: Path, rows: list[published_rows.Row] | None = None) -> Task:
    """The part of a task that has this name, with made-up data, or these."""
    if name == "nolima":
        (folder / "book.txt").write_text("The mill stood by the river.\n" * 200, encoding="utf-8")
        made = {
            "nolima_needles": write_rows(folder / "needles.json", rows or published_rows.NOLIMA),
            "nolima_books": (str(folder / "book.txt"),),
            "samples": 3,
        }
    else:
        task = name.removeprefix("helmet_")
        name = "helmet"
        data = write_rows(folder / "rows.jsonl", rows or HELMET[task])
        made = {"helmet_data": (f"{task}={data}",)}
        if task in HELMET_DEMOS:
            demos = write_rows(folder / "demos.jsonl", HELMET_DEMOS[task])
            made["helmet_demos"] = (f"{task}={demos}",)
    [part] = [part for task in build([name], made) for part in task.parts(SETTINGS)]
    return part


def texts(task: Task, frame: Frame, length: int = 65536, seed: int = 42) -> list[str]:
    cases = task.questions(frame, [length], seed).cases
    before, after = frame.around or ("", "")
    found = [frame.tokenizer.decode(case.ids[len(frame.head) :]) for case in cases]
    return [text.removeprefix(before).removesuffix(after) for text in found]


def digests(prompts: list[str]) -> list[str]:
    return [hashlib.sha256(text.encode()).hexdigest()[:12] for text in prompts]


OFFICIAL = {
    "helmet_ruler_niah_mk_2": ("6bb15b65c75b", "71b74fd447bf"),
    "helmet_ruler_niah_mk_3": ("3ea0d754625e", "c33bde1338f5"),
    "helmet_ruler_niah_mv": ("bfc366ca335a", "9ebce1969f3d"),
    "helmet_json_kv": ("6b77e3b62113", "dd6e36d0fbf1"),
    "helmet_kilt_nq": ("af4d1a066f90 8163cb2d5d01", "aaf6bdcf5b19 8cce4a4a37ba"),
    "helmet_kilt_triviaqa": ("af4d1a066f90 8163cb2d5d01", "aaf6bdcf5b19 8cce4a4a37ba"),
    "helmet_kilt_hotpotqa": ("af4d1a066f90 8163cb2d5d01", "aaf6bdcf5b19 8cce4a4a37ba"),
    "helmet_kilt_popqa_3": ("48cd8d6b9253 d477bcb3914b", "7447b7b360f1 dd5923d6057e"),
    "helmet_msmarco_rerank_psg": ("2240d0318bb9 9c8ed8aca61b", "26c1461e143b ab461890e691"),
}
"""Of the prompts for a base and for a chat model; HELMET's with seed 42 and two samples."""


@pytest.mark.parametrize("name", OFFICIAL)
def test_prompts_are_those_of_the_official_code(
    name: str, frame: Frame, chat: Frame, tmp_path: Path
) -> None:
    """With the rows that it draws, and the demonstrations."""
    task = replace(given(name, tmp_path), samples=2)
    for model, official in zip((frame, chat), OFFICIAL[name], strict=True):
        assert digests(texts(task, model)) == official.split()


def test_in_context_learning_shows_every_label_alike(frame: Frame, tmp_path: Path) -> None:
    task = given("helmet_icl_trec_coarse", tmp_path)
    few = replace(task, shape=task.shape._replace(shots=(18,) * 5))
    rows = HELMET["icl_trec_coarse"]
    for prompt, row in zip(texts(few, frame, 8192), rows, strict=True):
        instruction, *shown, end = prompt.split("\n\n")
        assert instruction == (
            "Use the provided mapping from the text to label to assign a label to the text. Only "
            'output "label: {label}" and nothing else. '
        )
        assert end == f"{row['text']}\nlabel:"
        pairs = [one.split("\nlabel: ") for one in shown]
        numbers = [int(number) for _, number in pairs]
        assert all(sorted(numbers[i : i + 6]) == [0, 1, 2, 3, 4, 5] for i in (0, 6, 12))
        own = {number for text, number in pairs if text.split(" of ")[1][0] == row["text"][-2]}
        assert len(own) == 1
    for case, row in zip(few.questions(frame, [8192], 42).cases, rows, strict=True):
        shown = frame.tokenizer.decode(case.ids)
        assert f" of {row['coarse_label']}?\nlabel: {case.key}\n" in shown
        assert case.judge(f" {case.key}\n") == 1 and case.judge(" 77") == 0
    assert [task.shown(n) for n in (8192, 65536, 131072, 16000)] == [400, 3300, 6600, 805]


def test_nolima_fills_in_what_the_needle_set_says(tmp_path: Path) -> None:
    tests = read_tests(write_rows(tmp_path / "needles.json", published_rows.NOLIMA))
    opera = "Actually, {CHAR} lives next to the Semper Opera House."
    kiasma = "Actually, {CHAR} lives next to the Kiasma museum."
    assert [(test.needle, test.question) for test in tests] == [
        (opera, "Which character has been to Dresden?"),
        (kiasma, "Which character has been to Helsinki?"),
        (opera, "Who saw Saxony?"),
        (kiasma, "Who saw Uusimaa?"),
        ("Then Mandy said that tea would be too hot for her.", "Who could not drink tea?"),
    ]
    assert all(test.characters == ("Yuki", "Stuart") for test in tests[:-1])
    assert tests[-1].answers == ("Mandy",) and tests[-1].characters == ()
    assert tests[-1].distractor == "There was a sign about tea on the wall."
    assert digests([TEMPLATE.format(haystack="HAYSTACK", question="QUESTION")]) == ["155fea8d446e"]


def test_nolima_needles_follow_the_line_at_their_depth(frame: Frame) -> None:
    """By the authors' rule: the first line that ends at the depth of the stretch, or later."""
    text = "".join(f"line {n} of the book\n" for n in range(300))
    book = Book.from_text(frame.tokenizer, text, "book")
    ids = encode(frame.tokenizer, text)
    breaks = [at for at, token in enumerate(ids) if "\n" in frame.tokenizer.decode([token])]
    assert book.ends == [0, *breaks]
    for depth in (0.0, 0.04, 0.5, 1.0):
        start, at, end = book.place(500, depth)
        line = min(place for place in [0, *breaks] if place >= depth * 501)
        assert (start, at, end) == (line - round(500 * depth), line + 1, start + 500)
        made = book.span(frame.tokenizer, 500, depth, "NEEDLE")
        before, after = made.split(" NEEDLE\n")
        assert before == frame.tokenizer.decode(ids[start:at]).rpartition("\n")[0]
        assert after == frame.tokenizer.decode(ids[at:end])
    with pytest.raises(MeasureError, match="too few lines for a span of 9999; give --nolima-bo"):
        book.place(9999, 0.5)


def test_distractors_of_nolima_stay_away_from_the_needle() -> None:
    for depth in (0.0, 0.3, 0.5, 0.9, 1.0):
        places = [distractor_depth(depth, 2000, random.Random(n)) for n in range(200)]
        assert all(abs(place - depth) >= 0.2 and 0 <= place <= 1 for place in places)
    assert [distractor_depth(d, 400, random.Random(0)) for d in (0.1, 0.7, 0.8)] == [0.7, 0.5, 0.6]


def test_helmet_cuts_the_end_of_the_context(frame: Frame, tmp_path: Path) -> None:
    task = given("helmet_kilt_nq", tmp_path)
    whole = texts(task, frame)[0]
    least = len(encode(frame.tokenizer, whole)) + 20
    for length in (least - 1, least - 30):
        short = texts(task, frame, length)[0]
        context, _, end = whole.rpartition("\n\nQuestion:")
        start, _, same = short.rpartition("\n\nQuestion:")
        assert same == end and context.startswith(start)
        lost = len(encode(frame.tokenizer, whole)) - len(encode(frame.tokenizer, short))
        assert least - length <= lost <= least - length + 2  # tokens merge at the cut
    with pytest.raises(OptionError, match="a helmet_kilt_nq prompt needs at least"):
        task.questions(frame, [100], 0)


def test_helmet_takes_a_file_for_each_length(frame: Frame, tmp_path: Path) -> None:
    files = [
        write_rows(tmp_path / f"{n}.jsonl", [{**HELMET["json_kv"][0], "question": f"k{n}"}])
        for n in (1, 2)
    ]
    data = (f"json_kv@1k={files[0]}", f"json_kv@2k={files[1]}")
    [part] = [p for task in build(["helmet"], {"helmet_data": data}) for p in task.parts(SETTINGS)]
    cases = part.questions(frame, [1024, 2048], 0).cases
    prompts = [frame.tokenizer.decode(case.ids) for case in cases]
    assert ["Key: k1\n" in prompts[0], "Key: k2\n" in prompts[1]] == [True, True]
    with pytest.raises(OptionError, match="no data are given for helmet_json_kv at 512 tokens"):
        part.questions(frame, [512], 0)


def test_nolima_prompts_fill_their_length(frame: Frame, chat: Frame, tmp_path: Path) -> None:
    task = replace(given("nolima", tmp_path), samples=None, placements=3)
    for model in (frame, chat):
        made = task.questions(model, [600, 1000], 0)
        assert len(made.cases) == 2 * 5 * 3
        for case in made.cases:
            assert case.length - 12 <= case.tokens <= case.length
            text = model.tokenizer.decode(case.ids)
            assert text.count("Actually, ") + text.count("Mandy said") == 1
            assert ("sign about tea" in text) == ("Mandy said" in text)
            assert case.key in text and case.judge(f"{case.key}.") == 1
            assert case.bin == round(case.depth * 2)
    few = replace(task, samples=2).questions(frame, [600], 0).cases
    assert [case.bin for case in few] == [None, None]  # a picture by depth has them all


@dataclass(frozen=True)
class Worth:
    """What a judge makes of a text."""

    judge: Any
    written: str
    value: float


def worths() -> Iterator[Worth]:
    exact = Repeated("Ab1the red fox", "Ab1")
    yield Worth(exact, "Ab1the red fox", 1)
    yield Worth(exact, " Ab1the red fox", 0)
    yield Worth(replace(exact, begun=True), " Ab1the red fox", 1)
    yield Worth(exact, "the red fox", 0)
    yield Worth(exact, "Ab1", 0)
    yield Worth(Repeated("Ab1abcd", "Ab1"), "Ab1bcde", 2 * 3 / 8)
    yield Worth(OnlyEnd("111", ("222",)), "It is 111.", 1)
    yield Worth(OnlyEnd("111", ("222",)), "111 or 222", 0)
    for metric, values in {
        "contains": (1, 1, 0, 1),
        "EM": (1, 0, 0, 0),
        "lastline_contains": (1, 0, 0, 1),
        "lastline_EM": (1, 0, 0, 0),
    }.items():
        for written, value in zip(("Yuki", "Yuki\nno", "yuki", "so:\nYuki."), values, strict=True):
            yield Worth(Gold(("Yuki", "Yoko"), metric), written, value)
    found = Substring(("the U.S.", "America"), "Answer:", "Answer:")
    for written, value in [(" us", 1), (" In North America", 1), ("\nAnswer: us", 1), (" u s", 0)]:
        yield Worth(found, written, value)
    grades = (("11", 0), ("12", 3), ("13", 1), ("14", 0))
    best = 3 + 1 / math.log2(3)
    for written, value in [
        (" 12 > 13 > 11 > 14", best),
        (" [ID: 13] > [ID: 12]", 1 + 3 / math.log2(3)),
        (" 13 > 13 > 12", 1 + 3 / math.log2(3)),  # once
        (" 99 > 12", 3 / math.log2(3)),
        ("11 > 14\nthen 14 > 11 > 12 > 13", 3 / 2 + 1 / math.log2(5)),  # the longest run
        (" none", 0),
    ]:
        yield Worth(Ndcg(grades, "Ranking:"), written, value / best)
    late = tuple((str(n), int(n == 30)) for n in range(20, 31))  # the eleventh does not count
    yield Worth(Ndcg(late, ""), " > ".join(name for name, _ in late), 0)


@pytest.mark.parametrize("worth", worths(), ids=repr)
def test_scores_are_those_of_the_official_definitions(worth: Worth) -> None:
    assert worth.judge(worth.written) == pytest.approx(worth.value, abs=1e-9)


def test_a_judge_decides_and_is_part_of_the_case() -> None:
    case = Case("t", 9, 0, "write", 4, joined([1, 2]), ("Yuki",), judge=Gold(("Yuki",), "EM"))
    assert [share_found(case, text) for text in ("Yuki ", "Yuki!")] == [1, 0]
    other = replace(case, judge=Gold(("Yuki",), "contains"))
    assert share_found(other, "Yuki!") == 1
    assert len({one.prompt for one in (case, other, replace(case, judge=None))}) == 3
    with pytest.raises(OptionError, match="is no dataclass, so --resume could not tell it"):
        replace(case, judge=lambda text: 1.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"question": 3}]', r"data.json, row 1: the field 'question' must hold a string, it is"),
        ("[1, 2]", r"data.json holds something else than a list of objects; give --helmet-data"),
        ('{"rows": []}', r'data.json holds neither a list nor an object with one in "data"; give'),
        ("[]", r"data.json holds no rows; give --helmet-data another file"),
        ("{", r"data.json is not JSON \(Expecting property name"),
        (None, r"cannot read .*data.json \(No such file or directory\); give --helmet-data a fi"),
    ],
)
def test_data_that_are_not_as_published_are_told(
    content: str | None, message: str, frame: Frame, tmp_path: Path
) -> None:
    path = tmp_path / "data.json"
    if content is not None:
        path.write_text(content)
    if content == '[{"question": 3}]':
        write_rows(path, [{**HELMET["json_kv"][0], "question": 3}])
    [task] = build(["helmet"], {"helmet_data": (f"json_kv={path}",)})
    with pytest.raises(MeasureError, match=message):
        [part] = task.parts(SETTINGS)
        part.questions(frame, [4096], 0)
