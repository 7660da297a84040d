"""The laboratory: equal beginnings, rows, problems, intervals, its log, a run that is killed."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lab.laboratory import text as texts
from lab.laboratory.__main__ import main
from lab.laboratory.model import Size
from lab.laboratory.paired import difference
from lab.laboratory.rates import Rates
from lab.laboratory.tasks import GIVEN, READ, TASKS, Tasks, problem
from lab.laboratory.training import Training
from rope_ext.errors import MeasureError

SMALL = Size(width=32, layers=1, heads=4)
CPU = torch.device("cpu")


def text(length: int = 64, **options: int) -> texts.Text:
    made_up = ["def double(x):\n    return 2 * x  # \u00fc\n" * 400] * 3
    return texts.Text(length, texts=lambda split: made_up, **options)


@pytest.mark.parametrize("name", ["rope_25", "alibi", "t5", "kerple_log"])
def test_models_of_one_seed_begin_with_the_same_weights(name: str) -> None:
    rope, model, other = (
        dict(SMALL.build(*which, 32).named_parameters())
        for which in (("rope", 0), (name, 0), ("rope", 1))
    )
    assert all(value.equal(model[key]) for key, value in rope.items())
    assert not rope["lm_head.weight"].equal(other["lm_head.weight"])


def test_every_answer_is_the_word_that_was_given_once_before() -> None:
    subject = text()
    assert subject.stream.max() == texts.END and set(subject.stream) <= {*range(128), texts.END}
    questions = set()
    for number in range(50):
        ids, weights = texts.retrieval(np.random.default_rng(number), subject.stream, 64)
        row, counts = ids.tolist(), weights.tolist()
        given, asked = row.index(texts.GIVEN), [n for n, t in enumerate(row) if t == texts.ASKED]
        word = row[given + 1 : given + 4]
        assert len(row) == 64 and row[-3:] == word and min(asked) > given
        for place in asked:
            assert row[place + 1 : place + 4] == word and min(counts[place + 1 : place + 4]) > 1
        marks = [given, *asked]
        outside = [n for n in range(64) if not any(m <= n <= m + 3 for m in marks)]
        assert all(row[n] < 128 or row[n] == texts.END for n in outside)
        assert {counts[n] for n in outside} == {1.0} and counts[given : given + 4] == [0.0] * 4
        questions.add(len(asked))
    assert questions == {1, 2, 3, 4}


def answer_to(task: str, given: str) -> str:
    if task == "addition":
        one, other = (int(number[::-1]) for number in given.split("+"))
        return f"{one + other:0{len(given) // 2 + 1}d}"[::-1]
    if task == "parity":
        return "".join(str(given[: n + 1].count("1") % 2) for n in range(len(given)))
    return {"copy": given, "reverse": given[::-1], "sorting": "".join(sorted(given))}[task]


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_right(task: str) -> None:
    for items in (1, 2, 7, 40):
        for seed in range(5):
            ids, weights = problem(np.random.default_rng(seed), task, items)
            middle = ids.tolist().index(GIVEN)
            given = "".join(map(chr, ids[2:middle]))
            answer = "".join(map(chr, ids[middle + 1 : -1]))
            assert answer == answer_to(task, given)
            assert weights.tolist() == [0.0] * (middle + 1) + [1.0] * (len(answer) + 1)


class Cheat(torch.nn.Module):
    """Sees the next token, and takes the token ``wrong`` for another one."""

    def __init__(self, wrong: int | None = None) -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        following = input_ids.roll(-1, 1)
        if self.wrong is not None:
            following = torch.where(following == self.wrong, 0, following)
        return SimpleNamespace(logits=torch.nn.functional.one_hot(following, 260).float())


def as_it_is(factor: float) -> None:
    return None


def test_a_problem_is_solved_only_if_all_of_its_answer_and_its_end_are_right() -> None:
    tasks = Tasks(("copy", "sorting"), rows=2)
    known = tasks.read(Cheat(), as_it_is, CPU)
    endless = tasks.read(Cheat(wrong=258), as_it_is, CPU)
    assert known["exact"] == {name: dict.fromkeys(READ, 1.0) for name in tasks.names}
    assert endless["exact"] == {name: dict.fromkeys(READ, 0.0) for name in tasks.names}
    assert known["refused"] == {}


@pytest.mark.parametrize("weight", [math.nan, 3e38])
def test_a_training_whose_loss_is_not_finite_has_diverged(weight: float) -> None:
    """Also in the last step, whose loss no other one follows."""
    ids = torch.zeros((1, 8), dtype=torch.long)
    weights = torch.zeros((1, 8))
    weights[0, 5] = weight  # times a loss of several nats, this is infinite
    subject = SimpleNamespace(trained=8, steps=1, rows_of=lambda seed, step: (ids, weights))
    with pytest.raises(FloatingPointError, match="0 steps"):
        Training(SMALL, 0.01, CPU).train(subject, "rope", 0, Rates(), tell=lambda text: None)


def test_differences_are_paired_by_seed() -> None:
    found = difference({0: 1.0, 1: 2.0, 2: 3.0, 9: 50.0}, {0: 0.5, 1: 1.6, 2: 2.4})
    assert found.mean == pytest.approx(0.5) and found.pairs == 3 and found.clear
    assert found.high - found.mean == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-4)
    assert difference({0: 1.0}, {1: 1.0}) is None
    assert not difference({0: 1.0}, {0: 2.0}).clear  # one pair says nothing of the next


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_and_makes_the_page(tmp_path) -> None:
    options = "--encodings alibi --seeds 1 --tasks text,copy --steps 2 --choosing-share 0.5"
    options += " --length 64 --width 32 --problem-steps 2 --layers 1 --rows 1"
    given = [*options.split(), "--output", str(tmp_path)]
    command = [sys.executable, "-m", "lab.laboratory", *given]
    log = tmp_path / "laboratory.jsonl"
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        for _ in range(6000):
            if log.exists() and log.read_text().count("\n") > 1:
                break
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    first = log.read_text().splitlines()[1]
    if len(log.read_text().splitlines()) < 7:
        with pytest.raises(MeasureError, match="give --resume to go on"):
            main(given)
    assert main([*given, "--resume"]) == 0
    lines = log.read_text().splitlines()
    cells = [tuple(json.loads(line)["cell"].values()) for line in lines[1:]]
    assert first in lines
    names = ("rope", "alibi")
    subjects = ("text", "tasks")
    assert cells == [
        *((f"rates for {subject}", name, 1000) for subject in subjects for name in names),
        *((subject, name, 0) for subject in subjects for name in names),
    ]
    assert (tmp_path / "laboratory.html").read_text().startswith("<!doctype html>")
    assert main([*given, "--report"]) == 0
