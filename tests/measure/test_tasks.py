"""Tasks: the registry, their options as flags, files of one's own, and what --resume notices."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from rope_eval import command
from rope_eval.data.prompts import Frame
from rope_eval.options import read_options
from rope_eval.tasks import Passkey, Perplexity, Task, all_tasks, base
from rope_eval.versions import PACKAGES, SHOWS, sources
from rope_ext.cli import app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding.md").read_text("utf-8")


@pytest.fixture
def own_tasks() -> Iterator[None]:
    """Tasks that the test registers are unknown after it."""
    before = all_tasks()
    yield
    for name, cls in all_tasks().items():
        if name not in before:
            base.unregister(cls)


def parsed(*words: str, tasks: list[str]) -> list[Task]:
    words = ("--tasks", ",".join(tasks), "--model", "m", "--lengths", "1k", *words)
    typed = command.command_for("eval", words).make_context("eval", [*words]).params
    own: dict[str, Any] = {}
    for cls in base.chosen(tasks):
        own = read_options(cls, typed) | own
    return base.build(tasks, own)


def test_fields_are_flags_and_tasks_share_those_of_one_name() -> None:
    words = ["--trials", "3", "--text", "a", "--text", "b", "--stride", "1k"]
    tasks = ["passkey", "ruler", "longppl", "perplexity"]
    one, longppl, keys, suite = parsed(*words, tasks=tasks)
    assert one == Perplexity(text=["a", "b"], stride=1024, protocol="sliding")
    assert (longppl.text, longppl.stride, longppl.windows) == (["a", "b"], 1024, 16)
    assert keys == Passkey(trials=3)
    assert (suite.trials, suite.ruler_tasks) == (3, "all")
    assert [task.trials for task in parsed(tasks=["passkey", "ruler"])] == [10, 20]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--tasks", "passkeys"],
            "unknown task 'passkeys'; did you mean 'passkey'? Tasks: perplexity",
        ),
        (["--model", "m"], "give --tasks some of perplexity, longppl, passkey"),
        (["passkey", "--windows", "3"], "No such option: --windows"),
        (["nowhere.py"], "file nowhere.py does not exist"),
        (["empty.py"], "empty.py registers no task; decorate one with @register"),
        (["clash.py"], "the field seed of the task clash is called as an option of every"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.usefixtures("own_tasks")
def test_mistakes_are_told(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    (tmp_path / "empty.py").touch()
    (tmp_path / "clash.py").write_text(
        "from dataclasses import dataclass\n"
        "from rope_eval.tasks import Task, option, register\n"
        "@register\n@dataclass(frozen=True)\nclass Clash(Task):\n"
        "    name, kind = 'clash', 'rate'\n    seed: int = option(0, 'of dice')\n"
    )
    needed = ["--model", "m", "--lengths", "1k", "--method", "yarn"]
    result = CliRunner().invoke(app, ["eval", *words, *needed])
    assert result.exit_code == 2 and result.stdout == ""
    assert message.split("; ")[0] in " ".join(result.stderr.split())


@pytest.mark.usefixtures("own_tasks")
def test_the_evaluator_of_the_page_runs(checkpoint: Path, tmp_path: Path) -> None:
    _, _, section = PAGE.partition("\n## An evaluator\n")
    file, call, *_ = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (tmp_path / "echo.py").write_text(file)
    words = [tmp_path / "echo.py", "--model", checkpoint, "--method", "yarn,ntk", "--trials", 3]
    words += ["--lengths", "128,256", "--output", tmp_path / "out"]
    result = CliRunner().invoke(app, ["eval", *map(str, words)])
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "out" / "results.json").read_text())
    rows = [(row["task"], row["system"], row["count"]) for row in data["summary"]]
    assert rows == [("echo", name, 3) for name in ("unpatched", "yarn", "ntk") for _ in (128, 256)]
    assert data["definitions"]["echo"].startswith("Share of first words")

    echo = all_tasks()["echo"]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for case in echo(trials=3).questions(Frame.from_tokenizer(tokenizer), [128, 256], 0).cases:
        text = tokenizer.decode(case.ids, skip_special_tokens=True)
        assert case.length - 9 < len(case.ids) <= case.length and text.count(case.key) == 2
        assert tokenizer.decode(case.ids[-case.count :]).strip() == case.key

    names = {"Echo": echo, "model": str(checkpoint), "output": tmp_path / "called"}
    exec(call, names)
    assert {outcome.task for outcome in names["report"].outcomes} == {"echo"}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_a_change_of_what_computes_is_noticed_and_of_what_shows_is_not(
    package: ModuleType, tmp_path: Path
) -> None:
    copy = tmp_path / package.__name__
    shutil.copytree(Path(package.__file__).parent, copy)
    before = sources(copy)
    assert before == sources(Path(package.__file__).parent)  # wherever it lies
    for room in (path.parent for path in copy.rglob("__init__.py")):
        (room / "new.py").write_text("", encoding="utf-8")
        assert (sources(copy) == before) is (room.relative_to(copy).as_posix() in SHOWS), room
        (room / "new.py").unlink()
