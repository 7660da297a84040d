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

from lab.laboratory import page
from lab.laboratory import text as texts
from lab.laboratory.__main__ import main
from lab.laboratory.log import Cell, Log
from lab.laboratory.model import Size, chosen, known, read_with, readings
from lab.laboratory.paired import difference, rank_correlation, student
from lab.laboratory.plots import KINDS, kinds_of
from lab.laboratory.published import PUBLISHED, RISING, Published, hold
from lab.laboratory.rates import Rates, choose
from lab.laboratory.results import (
    AT,
    FAR,
    FOUR_TIMES,
    LONGER,
    SECONDS,
    TWICE,
    Results,
    first_below,
)
from lab.laboratory.tasks import GIVEN, READ, TASKS, Tasks, problem
from lab.laboratory.training import Training, peak_of
from lab.pretrain.train import MuonAdamW
from rope_eval.reports.page import Picture
from rope_ext.errors import MeasureError, OptionError, RopeExtError
from rope_ext.methods.registry import all_encodings

SMALL = Size(width=32, layers=1, heads=4)
LOSSES = {AT, TWICE, FOUR_TIMES, FAR}
CPU = torch.device("cpu")


def text(length: int = 64, **options: int) -> texts.Text:
    made_up = ["def double(x):\n    return 2 * x  # \u00fc\n" * 400] * 3
    return texts.Text(length, texts=lambda split: made_up, **options)


def test_all_registered_encodings_are_compared_with_the_rotation() -> None:
    assert {"rope", "rope_25", *(cls.name for cls in all_encodings())} == set(chosen(None))
    assert chosen(["t5", "alibi"]) == ["rope", "t5", "alibi"]
    with pytest.raises(OptionError, match=r"--encodings 'albi' is unknown.*'alibi'"):
        chosen(["albi"])


@pytest.mark.parametrize("name", ["rope_25", "alibi", "t5", "kerple_log"])
def test_models_of_one_seed_begin_with_the_same_weights(name: str) -> None:
    rope, model, other = (
        dict(SMALL.build(*which, 32).named_parameters())
        for which in (("rope", 0), (name, 0), ("rope", 1))
    )
    assert all(value.equal(model[key]) for key, value in rope.items())
    assert not rope["lm_head.weight"].equal(other["lm_head.weight"])


def test_what_an_encoding_learns_is_no_matrix_of_a_layer() -> None:
    model = SMALL.build("t5", 0, 32)
    matrix, others, encoding = MuonAdamW(model, 0.06, 2.0, 5.0).param_groups
    own = {id(p) for name, p in model.named_parameters() if "rope_ext" in name}
    assert own == {id(p) for p in encoding["params"]} and not encoding["muon"]
    assert len(matrix["params"]) == 7
    assert len(matrix["params"]) + len(others["params"]) + len(own) == len(list(model.parameters()))
    rates = [group["lr"] for group in (matrix, others, encoding)]
    assert rates == pytest.approx([0.12, 0.02, 0.05])
    assert len(MuonAdamW(SMALL.build("rope", 0, 32), 0.01).param_groups) == 2


def test_rates_are_found_where_the_loss_is_lowest() -> None:
    def loss(rates: Rates) -> float:
        if rates.encoding > 1000:
            raise FloatingPointError
        far = abs(math.log(rates.encoding / 625)) + abs(math.log(rates.model / 0.25))
        return far + rates.initial

    choice = choose(loss, own=True, normal=True)
    assert choice.rates == Rates(0.25, 625.0, 0.04)  # each beyond its list, at most two values
    tried = dict(choice.tried)
    assert len(tried) == len(choice.tried) and math.inf in tried.values()
    without = [rates for rates, _ in choose(loss, own=False).tried]
    assert {(rates.encoding, rates.initial) for rates in without} == {(1.0, 1.0)}
    assert sorted(rates.model for rates in without) == [0.125, 0.25, 0.5, 1.0, 2.0]
    assert choose(lambda rates: 1.0, own=True).rates == Rates(0.125, 1 / 25)


def test_an_encoding_with_its_own_rate_learns_more_of_what_it_needs() -> None:
    subject = text(steps=60, batch=4)
    moved = []
    for rates in (Rates(), Rates(encoding=125.0)):
        model, _ = Training(SMALL, 0.01, CPU).train(subject, "t5", 0, rates, lambda text: None)
        tables = [p for name, p in model.named_parameters() if "rope_ext" in name]
        moved.append(max(p.detach().abs().max().item() for p in tables))
    assert moved[1] > 10 * moved[0] > 0


def test_rates_are_chosen_on_text_that_is_not_reported() -> None:
    def texts_of(split: str) -> list[str]:
        return [chr(ord("a") + number) * 999 for number in range(20)]

    made = texts.Text(64, texts=texts_of)
    letters = {token for token in made.choosing()[0].unique().tolist() if token < 128}
    assert letters and not letters & set(made.held_out.tolist())


def test_rates_are_chosen_on_problems_that_are_not_trained_on() -> None:
    def long_ones(rows: tuple[torch.Tensor, torch.Tensor]) -> set[str]:
        pairs = zip(*rows, strict=True)
        return {str(ids[: ids.tolist().index(GIVEN)]) for ids, w in pairs if w.sum() > 10}

    subject = Tasks(batch=128)
    asked = long_ones(subject.choosing())
    assert asked and not any(asked & long_ones(subject.rows_of(seed, 0)) for seed in range(3))


@pytest.mark.parametrize("name", ["text", "tasks"])
def test_each_subject_has_rates_of_its_own(name: str) -> None:
    subject = {"text": text(steps=2, batch=2), "tasks": Tasks(steps=2, batch=2)}[name]
    told: list[str] = []
    record = Training(SMALL, 0.01, CPU).choose_rates(subject, "t5", told.append)
    losses = [one["loss"] for one in record["tried"]]
    best = min(record["tried"], key=lambda one: one["loss"])
    assert {name: best[name] for name in record["chosen"]} == record["chosen"]
    assert len(told) == len(losses) >= 6 and len(set(losses)) > 3


def test_rows_depend_on_seed_and_step_alone() -> None:
    for subject in (text(), Tasks()):
        ids, weights = subject.rows_of(0, 3)
        again, same = subject.rows_of(0, 3)
        assert ids.equal(again) and weights.equal(same) and ids.shape == weights.shape
        assert not any(subject.rows_of(*other)[0].equal(ids) for other in ((0, 4), (1, 3)))


def test_problems_of_a_step_are_about_as_long_as_each_other() -> None:
    subject = Tasks()
    rows = [subject.rows_of(0, step) for step in range(200)]
    longest = [ids.shape[1] for ids, _ in rows]
    assert max(longest) == subject.trained
    assert sum(longest) / len(longest) < 0.65 * subject.trained  # with all lengths in each: 0.82
    asked = {chr(task) for ids, _ in rows for task in ids[:, 1]}
    assert asked == {name[0].upper() for name in TASKS}


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


def test_a_word_is_found_only_if_all_of_it_is_right() -> None:
    known = text(rows=2).read(Cheat(), as_it_is, CPU)
    assert set(known["retrieval"].values()) == {1.0}
    assert list(known["loss"]) == [64, 128, 256, 512, 1024] and len(known["positions"]) == 16
    best = math.log(math.e + 259) - 1  # of a token that has one logit of 1, and all others 0
    assert all(loss == pytest.approx(best, abs=1e-4) for loss in known["loss"].values())


def test_what_a_length_refuses_is_told_and_leaves_the_others() -> None:
    def make(factor: float) -> None:
        if factor > 2:
            raise OptionError("no position is known there")

    found = text(rows=1).read(Cheat(), make, CPU)
    assert list(found["loss"]) == [64, 128]
    assert found["refused"] == dict.fromkeys((256, 512, 1024), "no position is known there")


@torch.no_grad()
def test_log_n_at_test_time_changes_nothing_but_queries_beyond_the_trained_length() -> None:
    model = SMALL.build("rope", 0, 16).eval()
    ids = torch.arange(48)[None]
    before = model(input_ids=ids).logits
    with read_with(model, readings("rope")["rope+log_n"], 3.0):
        under = model(input_ids=ids).logits
    torch.testing.assert_close(under[:, :16], before[:, :16], rtol=0, atol=1e-5)
    assert (under - before)[:, 17:].abs().max() > 1e-4
    assert model(input_ids=ids).logits.equal(before)


def test_the_peak_counts_what_was_held_at_once() -> None:
    def work() -> float:
        for _ in range(3):
            torch.zeros(2**18)
        return 1.0

    result, peak = peak_of(work, CPU)
    assert result == 1.0
    assert 2**20 <= peak < 2**21  # one of the three at a time, 4 bytes each


def test_students_quantiles_are_those_of_the_tables() -> None:
    tables = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 30: 2.042}
    assert {n: round(student(n), 3) for n in tables} == tables


def test_differences_are_paired_by_seed() -> None:
    found = difference({0: 1.0, 1: 2.0, 2: 3.0, 9: 50.0}, {0: 0.5, 1: 1.6, 2: 2.4})
    assert found.mean == pytest.approx(0.5) and found.pairs == 3 and found.clear
    assert found.high - found.mean == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-4)
    assert difference({0: 1.0}, {1: 1.0}) is None
    assert not difference({0: 1.0}, {0: 2.0}).clear  # one pair says nothing of the next


def test_intervals_end_where_possible_values_do() -> None:
    measure = "words found at the longest"
    rope, other = {0: 0.1, 1: 0.2, 2: 0.2}, {0: 1.0, 1: 1.0, 2: 1.0}
    assert page.compared(measure, {"rope": rope, "t5": other}, "t5").below == "+83 (+69 to +83)"
    other = {seed: share + 1e-4 for seed, share in rope.items()}
    same = page.compared(measure, {"rope": rope, "t5": other}, "t5")
    assert same.below == "the same" and not same.clear


def test_how_soon_a_loss_is_reached() -> None:
    curve = [(10, 4.0), (20, 3.0), (30, 1.0)]
    assert first_below(curve, 2.0) == 25 and first_below(curve, 5.0) == 10
    assert first_below(curve, 0.5) is None
    cells = {
        Cell("text", "rope", 0): {"curve": curve},
        Cell("text", "t5", 0): {"curve": [(10, 2.0), (20, 1.5), (30, 1.0)]},
        Cell("text", "nope", 0): {"curve": [(10, 5.0), (20, 4.0), (30, 3.9)]},
    }
    assert Results({}, cells).speed() == {"rope": {0: 15.0}, "t5": {0: 10.0}}


def test_no_panel_has_more_than_eight_lines() -> None:
    names = [name for made in known() for name in readings(made)]
    kinds = kinds_of([*names, *(f"new_{number}" for number in range(9))])
    assert set(kinds) == {*KINDS, "others", "others 2"}  # no registered encoding is without a kind
    assert all(len(members) < 8 for members in kinds.values())
    assert set(names) - {"rope"} <= {name for members in kinds.values() for name in members}


def test_rank_correlation_is_kendalls() -> None:
    assert rank_correlation([1, 2, 3], [4, 5, 6]) == 1
    assert rank_correlation([1, 2, 3], [6, 5, 4]) == -1
    assert rank_correlation([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(2 / 3)
    assert rank_correlation([1, 1], [1, 2]) is None


def test_published_orders_name_models_and_measures_of_the_laboratory() -> None:
    evaluated = {label for name in known() for label in readings(name)}
    for published in PUBLISHED:
        assert published.values.keys() <= evaluated, published.source
        assert len(set(published.values.values())) > 1, published.source
        assert published.measure in {*LOSSES, LONGER, SECONDS}, published.source
        assert published.told is None or published.told.keys() == published.values.keys()
    assert {LONGER} == RISING
    orders = [(published.source, published.measure) for published in PUBLISHED]
    assert len(set(orders)) == len(orders)
    ranked = {name for published in PUBLISHED for name in published.values}
    assert {"fire", "kerple_power", "cope", "xpos", "t5"} <= ranked


def test_a_published_order_is_held_against_pairs_that_can_be_told_apart() -> None:
    published = Published("", "loss at the longest", {"a": 3, "b": 2, "c": 1, "x": 0}, rising=True)
    measured = {
        "a": {0: 1.0, 1: 1.1, 2: 1.2},  # published first, and here by far
        "b": {0: 3.0, 1: 3.1, 2: 3.2},
        "c": {0: 2.9, 1: 3.0, 2: 3.35},
    }
    held = hold(published, measured)
    assert list(held.ours) == ["a", "b", "c"]
    assert "2 as published, 0 reversed, 1 without a clear difference" in held.sentences[0]
    assert "b and c" in held.sentences[1]
    measured["c"] = {0: 0.5, 1: 0.6, 2: 0.71}
    held = hold(published, measured)
    assert "1 as published, 2 reversed" in held.sentences[0]
    assert "c is ahead of a" in held.sentences[1] and "c is ahead of b" in held.sentences[1]
    assert hold(published, {"a": {0: 1.0}}) is None


def test_the_log_keeps_what_is_finished_and_leaves_out_a_line_that_was_cut_off(tmp_path) -> None:
    log = Log(tmp_path, {"steps": 3})
    one, two = Cell("text", "rope", 0), Cell("tasks", "alibi", 1)
    log.append(0, one, {"curve": [[1, 2.0]]})
    with (tmp_path / "laboratory.jsonl").open("a") as file:
        file.write('{"cell": {"subject": "te')
    log.append(0, two, {"refused": "no"})
    log.append(3, Cell("text", "rope", 2), {})
    assert log.read() == {
        one: {"curve": [[1, 2.0]]},
        two: {"refused": "no"},
        Cell("text", "rope", 2): {},
    }


def test_logs_of_other_settings_and_of_others_are_refused(tmp_path) -> None:
    Log(tmp_path, {"steps": 3}).append(0, Cell("text", "rope", 0), {})
    with pytest.raises(MeasureError, match=r"other settings \(steps: 3, now 4\)"):
        Log(tmp_path, {"steps": 4}).read()
    (tmp_path / "laboratory.jsonl").write_text('{"mine": 1}\n')
    with pytest.raises(MeasureError, match="is not a log of this program"):
        Log(tmp_path, {"steps": 3}).read()


def test_wrong_options_are_told_before_anything_is_trained() -> None:
    for given, message in (
        (["--tasks", "text,sort"], "--tasks 'sort' is unknown.*'sorting'"),
        (["--width", "100"], "--width 100 must be a multiple of 8 x --heads 4"),
        (["--problem-steps", "0"], "--problem-steps 0 is not valid; it must be 1 or more"),
        (["--length", "32"], "--length 32 is not valid; it must be 64 or more"),
        (["--choosing-share", "2"], "--choosing-share 2 is not valid; it must be above 0 and"),
        (["--learning-rate", "-1"], "--learning-rate -1 is not valid"),
        (["--seeds", "0", "--heads", "0"], "(?s)2 mistakes.*--seeds 0.*--heads 0"),
        (["--rows", "-2", "--encodings", "albi"], "(?s)--rows -2.*--encodings 'albi'"),
    ):
        with pytest.raises(RopeExtError, match=message):
            main(given)


def record(loss: float, found: float) -> dict:
    lengths = ("64", "1024")
    read = {
        "loss": dict.fromkeys(lengths, loss),
        "retrieval": dict.fromkeys(lengths, found),
        "positions": [loss] * 16,
        "refused": {},
    }
    return {"read": read, "curve": [[1, loss]], "seconds": loss, "peak_bytes": 1}


def test_the_page_says_what_can_be_told_apart_and_what_cannot(monkeypatch) -> None:
    monkeypatch.setattr(page, "picture_of", lambda figure, alt: Picture(alt, b""))
    settings = dict(layers=1, width=32, heads=4, steps=2, problem_steps=2, length=64, rows=2)
    cells = {}
    for name, loss, found in (("rope", 2.0, 0.9), ("alibi", 1.5, 0.2), ("t5", 1.5, 0.9)):
        for seed in range(3):
            made = record(loss + 0.01 * seed * (name != "t5"), found)
            made["read"] = {name: made["read"]}
            cells[Cell("text", name, seed)] = made
    cells[Cell("text", "cope", 0)] = {"refused": "no <layout> can be proven"}
    one = {"model": 1.0, "encoding": 1.0, "initial": 1.0}
    tried = [one | {"loss": 2.0}, one | {"encoding": 25.0, "loss": 1.5}]
    cells[Cell.rates("text", "t5")] = {
        "chosen": one | {"encoding": 25.0},
        "tried": tried,
        "own": True,
    }
    made = page.contents(settings, cells)
    html = made[page.PAGE].decode()
    assert (
        "t5 has the lowest loss at 1024 bytes (1.500); no clear difference from it: alibi." in html
    )
    assert "cope (text): no &lt;layout&gt; can be proven." in html
    assert "less than half of the words are found within the trained length): alibi." in html
    assert "<script" not in html and 'src="http' not in html
    assert (
        "| t5 | 1 | 25 | 1 | 2.000 | 1.500 | 2 | 1: 2.000, 25: 1.500 |"
        in made[page.TABLES].decode()
    )
    assert "ALiBi, arXiv 2108.12409" in html and "DroPE" not in html
    assert "| alibi | 1.510<br>**-0.500 (-0.500 to -0.500)** |" in made[page.TABLES].decode()
    assert json.loads(made[page.NUMBERS])["measures"]["loss at the longest"]["t5"] == {
        "0": 1.5,
        "1": 1.5,
        "2": 1.5,
    }


def test_a_tie_of_many_is_counted(monkeypatch) -> None:
    monkeypatch.setattr(page, "picture_of", lambda figure, alt: Picture(alt, b""))
    settings = dict(layers=1, width=32, heads=4, steps=2, problem_steps=2, length=64, rows=2)
    cells = {}
    for k, name in enumerate("abcdefghijklmnopqr"):
        for seed in range(3):
            loss = 1.5 + 0.001 * k + 0.1 * ((seed + k) % 3)  # every third differs by a constant
            made = record(loss, 0.001)
            made["read"] = {name: made["read"]}
            cells[Cell("text", name, seed)] = made
    html = page.contents(settings, cells)[page.PAGE].decode()
    assert (
        "a has the lowest loss at 1024 bytes (1.600); no clear difference from it: b, c, e, f, h, "
        "i, k, l and 4 more." in html
    )
    assert "None: words found at 1024 bytes." in html  # as far as the page shows


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_and_makes_the_page(tmp_path) -> None:
    options = "--encodings alibi --seeds 1 --tasks text,copy --steps 2 --choosing-share 0.5"
    options += " --length 64 --width 32"
    given = [
        *options.split(),
        "--problem-steps",
        "2",
        "--layers",
        "1",
        "--rows",
        "1",
        "--output",
        str(tmp_path),
    ]
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


def test_two_seeds_have_no_interval() -> None:
    """Rates out of a few words are often equal in both, which would be certainty."""
    found = difference({0: 0.5, 1: 0.5, 2: 0.9}, {0: 0.25, 1: 0.25})
    assert (found.mean, found.low, found.high, found.clear) == (0.25, None, None, False)
    three = difference({0: 0.5, 1: 0.5, 2: 0.9}, {0: 0.25, 1: 0.25, 2: 0.3})
    assert three.low is not None and three.pairs == 3
