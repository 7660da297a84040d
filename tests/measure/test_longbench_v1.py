"""LongBench v1: prompts and scores of the authors' code, and what is left out without a template.

Digests are of the prompts in the authors' ``dataset2prompt.json``; scores are what their
``metrics.py`` and ``eval.py`` compute (github.com/THUDM/LongBench at 2e00731), with fuzzywuzzy
0.18.0 without Levenshtein, rouge 1.0.1 and jieba 0.42.1.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rope_eval.data.prompts import Frame, encode
from rope_eval.settings import Settings
from rope_eval.tasks import Task, build
from rope_eval.tasks.longbench_v1 import SETS, Scored
from tests.helpers.published_rows import longbench_v1, packages, write_rows

ROOT = Path(__file__).parents[2]
CLASSES = ("Number", "date", "Number of date", "Location", "Number location")

OFFICIAL = {
    "narrativeqa": "ca9f07fdf9f5",
    "qasper": "2348612ac9ba",
    "multifieldqa_en": "c19398b7471f",
    "multifieldqa_zh": "39c14d7ae023",
    "hotpotqa": "d31e73b501d5",
    "2wikimqa": "d31e73b501d5",
    "musique": "d31e73b501d5",
    "dureader": "66de4f9799dc",
    "gov_report": "e64c669fb47c",
    "qmsum": "1ba55beaab07",
    "multi_news": "2fa37178a851",
    "vcsum": "333ce30a208f",
    "trec": "a31ea386ec87",
    "triviaqa": "0ef1603d346d",
    "samsum": "b184d51d1f91",
    "lsht": "e41441500364",
    "passage_count": "fa3f78681dd4",
    "passage_retrieval_en": "8f1eab757de5",
    "passage_retrieval_zh": "4632499f641f",
    "lcc": "c3d427e651b3",
    "repobench-p": "91686225aaab",
}
SCORES = [
    ("hotpotqa", " The old Mill, by a river.", ["an old wheel", "mill"], 0.4),
    ("triviaqa", "\n\nOld mill\nPassage: mill", ["old mill wheel"], 0.8),
    ("trec", "\nNumber of date\nType: date", ["Number of date"], 0.5),
    ("trec", "date Number", ["date"], 0.5),
    ("trec", "Number location", ["Number location"], 1.0),
    ("trec", "Number of date, Location", ["Number of date"], 0.3333333333333333),
    ("passage_retrieval_en", "Paragraph 3, or 12", ["Paragraph 12"], 0.5),
    ("passage_count", "3 or 7, or 3", ["3"], 0.6666666666666666),
    ("passage_retrieval_zh", "段落7", ["段落7"], 1.0),
    ("lcc", "\n# next\n```python\nreturn x + 1\nreturn y", ["return x - 1;"], 0.88),
    ("lcc", "# only", ["x"], 0.0),
    ("multifieldqa_zh", "河流流过古老的城市。", ["古老城市"], 0.5714285714285715),
    ("dureader", "河流流过城市", ["河流流过古老的城市"], 0.7499999953125),
    (
        "gov_report",
        "The mill turns. The river falls.",
        ["The mill turns slowly. A river falls."],
        0.8333333284722222,
    ),
    ("samsum", "\nAnn keeps the lamp.\nDialogue: Ben", ["Ann keeps it"], 0.5714285665306124),
    ("gov_report", "", ["x"], 0.0),
]


def parts(folder: Path, *names: str) -> list[Task]:
    data = [write_rows(folder / f"{name}.jsonl", [longbench_v1(name)]) for name in names]
    [task] = build(["longbench_v1"], {"longbench_v1_data": tuple(data)})
    return list(task.parts(Settings(models=("m",), methods=("none",), lengths=(4096,))))


def test_the_prompts_are_the_authors() -> None:
    made = {
        name: hashlib.sha256(
            shape.prompt.format(context="CONTEXT", input="INPUT").encode()
        ).hexdigest()[:12]
        for name, shape in SETS.items()
    }
    assert made == OFFICIAL


@pytest.mark.parametrize(("name", "written", "right", "value"), SCORES)
def test_scores_are_the_authors(name: str, written: str, right: list[str], value: float) -> None:
    for package in packages.get(name, ()):
        pytest.importorskip(package)
    assert Scored(name, tuple(right), CLASSES)(written) == pytest.approx(value, abs=1e-12)


def test_solved_examples_and_code_have_no_chat_template(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "checkpoints" / "tiny-512")
    chat = Frame(tokenizer, tuple(encode(tokenizer, "Q: ")), tuple(encode(tokenizer, "A: ")))
    for task in parts(tmp_path, "hotpotqa", "trec", "triviaqa", "lsht", "lcc", "repobench-p"):
        [case] = task.questions(chat, [4096], 0).cases
        templated = tokenizer.decode(case.ids).endswith("A: ")
        assert templated == (task.name == "longbench_v1_hotpotqa")
