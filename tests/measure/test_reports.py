"""Reports: what they are called, what they carry, and what the numbers mean to a reader."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
import shlex

import pytest
import typer

from recipes import memory
from rope_eval.cases import dump
from rope_eval.command import command_for
from rope_eval.reports.page import Cell, Picture, Row, Section, Table, render
from rope_eval.reports.report import Report
from rope_eval.reports.summary import TOO_FEW, Estimate, interval, is_clear, signed
from rope_eval.run import runner as run
from rope_eval.run.plan import prepare
from rope_eval.settings import Settings
from rope_eval.tasks import Passkey, Perplexity
from rope_ext.cli import app
from rope_ext.command.arguments import parse_options
from tests.helpers.checkpoint import save_checkpoint, save_texts

ONE = (" ".join(f"word{i * 3 % 97}" for i in range(900)) + ".",)
OPTIONS = {"yarn": {"beta_fast": 16}, "longrope": {"long_factor": [4.0] * 8}}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """One document of text, so that its perplexity has no interval."""
    folder = tmp_path_factory.mktemp("run")
    model = str(save_checkpoint(folder / "tiny"))
    given = {"models": (model,), "methods": ("yarn", "pi", "longrope"), "lengths": (128, 256)}
    return Settings(**given, options=OPTIONS, seed=3, output=folder / "out")


@pytest.fixture(scope="module")
def report(settings: Settings) -> Report:
    plan = prepare(settings, [Perplexity(ONE, windows=2), Passkey(trials=2, depths=2)])
    made = Report(plan, run.run(plan))
    made.write()
    return made


@pytest.fixture(scope="module")
def rows(report: Report, settings: Settings) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((settings.output / "cells.csv").read_text())))


YARN = "yarn (beta_fast=16)"


def test_few_passkeys_are_noted_and_the_chat_template_is_said(report: Report) -> None:
    found = [
        dataclasses.replace(o, value=1.0) if o.task == "passkey" else o for o in report.outcomes
    ]
    made = Report(report.plan, found)
    texts = made.markdown(), dump(made.to_json()), made.page([])
    assert all("no chat template" in text for text in texts[::2])
    assert not any("finds few passkeys" in text for text in texts)
    assert all("finds few passkeys, 0% at 128" in note for note in report.warnings)


def test_a_row_with_options_is_told_from_the_plain_method(
    report: Report, rows: list[dict[str, str]], settings: Settings
) -> None:
    names = [
        "unpatched",
        YARN,
        "pi",
        "longrope (long_factor=[4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0])",
    ]
    names[-1] = "longrope (long_factor=...)"  # too long for a table
    assert [system.name for system in report.plan.systems] == names
    for table in (report.sections[0].tables[0], report.sections[1].tables[0]):
        assert [row.cells[0].text for row in table.rows] == names
    assert {row["system"] for row in rows} == set(names)
    assert f"| {YARN} |" in report.markdown() and YARN in report.recommendations[0]
    found = json.loads((settings.output / "results.json").read_text())
    assert [system["name"] for system in found["systems"]] == names
    assert YARN in (settings.output / "report.html").read_text()


def test_files_carry_settings_and_the_options_of_tasks(
    report: Report, rows: list[dict[str, str]]
) -> None:
    tasks = {task["name"]: task for task in report.to_json()["tasks"]}
    assert tasks["perplexity"]["options"]["windows"] == 2 and tasks["perplexity"]["kind"] == "loss"
    assert tasks["passkey"]["options"]["trials"] == tasks["passkey"]["options"]["depths"] == 2
    for row in rows:
        loss = row["task"] == "perplexity"
        assert (row["windows"], row["trials"], row["depths"]) == (
            ("2", "", "") if loss else ("", "2", "2")
        )
        assert (row["seed"], row["dtype"], row["trained_length"]) == ("3", "auto", "128")
    options = {row["system"]: row["options"] for row in rows}
    assert json.loads(options[YARN]) == {"factor": 4.0, "beta_fast": 16}
    assert {row["method"] for row in rows} == {"unpatched", "yarn", "pi", "longrope"}


def test_one_document_has_no_interval_anywhere(
    report: Report, rows: list[dict[str, str]], settings: Settings, capsys: pytest.CaptureFixture
) -> None:
    estimate = report.estimates["perplexity", "unpatched", 128]
    assert estimate.low is estimate.high is None and estimate.count == 1
    assert report.costs["perplexity", "pi"].low is None
    assert not is_clear(report.costs["perplexity", "pi"])
    report.print()
    printed = capsys.readouterr().out
    html = (report.plan.settings.output / "report.html").read_text()
    cells = [row for row in report.sections[0].tables[0].rows[0].cells[2:]]
    assert all(re.fullmatch(r"[\d.]+ \(too few documents\)", cell.text) for cell in cells)
    assert all(row["low"] == row["high"] == "" for row in rows if row["task"] == "perplexity")
    data = report.to_json()
    for entry in (*data["summary"], *data["costs"], *data["differences"]):
        if entry["task"] == "perplexity":
            assert entry["low"] is entry["high"] is None and entry["value"] is not None
    assert data["notes"][0] == "all windows are from one document, so there is no interval"
    for text in (printed, report.markdown(), html, (settings.output / "cells.csv").read_text()):
        assert "too few documents" in text
    assert all(e["note"] == TOO_FEW for e in data["summary"] if e["task"] == "perplexity")
    assert interval(Estimate(66.2, None, None, 1)) == "66.2"
    assert signed(Estimate(0.25, None, None, 1)) == "+25.0"


def test_a_page_contains_no_control_characters() -> None:
    """Names are from elsewhere, and the page may be printed in a terminal."""
    name = "a\x1b[31m<b>\u202e"
    table = Table(name, (name,), (Row((Cell(name, below=name),)),), (name,))
    section = Section(name, (name,), [table], [Picture(name, b"png")])
    page = render(name, [name], [name], [section], name, [name], [name])
    assert page.count(r"a\x1b[31m&lt;b&gt;\u202e") > 10
    assert page.replace("\n", "").isprintable()


def test_a_positive_cost_is_worse_for_every_kind(report: Report, settings: Settings) -> None:
    outcomes = []
    for outcome in report.outcomes:  # pi is worse, of both kinds
        worse = {"perplexity": 9.0, "passkey": 0.0} if outcome.system == "pi" else {}
        plain = {"perplexity": 2.0, "passkey": 1.0}
        outcomes.append(dataclasses.replace(outcome, value=(plain | worse)[outcome.task]))
    found = Report(report.plan, outcomes)
    assert found.costs["perplexity", "pi"].value > 1 and found.costs["passkey", "pi"].value == 1
    assert found.costs["passkey", YARN].value == found.costs["perplexity", YARN].value == 0
    for task, unit in (("perplexity", "%"), ("passkey", "points")):
        table = next(s for s in found.sections if s.name == task).tables[0]
        assert table.header[1] == f"cost at 128, {unit} (+: worse)"
        assert table.rows[2].cells[1].text.startswith("+1")


def test_a_row_that_is_called_otherwise_is_found_again(report: Report, settings: Settings) -> None:
    """Another factor of the run, and the same one of yarn: its cases are known, its name is new."""
    options = {"yarn": {"beta_fast": 16, "factor": 4.0}}
    changed = {"options": options, "factor": 2.0, "methods": ("yarn",), "resume": True}
    plan = prepare(dataclasses.replace(settings, **changed), report.plan.tasks)
    assert not any(map(plan.left, plan.systems))
    found = Report(plan, plan.collect(plan.stored))
    name = "yarn (factor=4.0, beta_fast=16)"
    for task in ("perplexity", "passkey"):
        assert found.estimates[task, name, 128] == report.estimates[task, YARN, 128]


def test_the_next_command_can_be_typed_and_asks_the_same_of_more(
    report: Report, settings: Settings
) -> None:
    """Of one document nothing can be told, so that it is a comparison on more."""
    [words] = report.next_commands
    # Once in every file, and never in the sentences, after which it is printed.
    line = shlex.join(words)
    assert report.to_json()["next"] == [line]
    for text in (report.markdown(), report.page([])):
        assert text.count("rope-ext compare") == 1
    assert not any("rope-ext" in sentence for sentence in report.recommendations)
    assert words[:2] == ["rope-ext", "compare"]
    made = command_for("compare", words).make_context("compare", words[2:]).params
    assert parse_options(made["options"]) == settings.options
    assert list(made["models"]) == list(settings.models) and made["windows"] == 64
    assert (made["seed"], made["depths"]) == (settings.seed, 2) and made["protocol"] is None


@pytest.fixture(scope="module")
def helped(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """YaRN and ReRoPE made better than the unpatched model on five documents."""
    folder = tmp_path_factory.mktemp("helped")
    given = {"methods": ("yarn", "rerope"), "options": {}, "output": folder / "out"}
    path = save_texts(folder / "texts.jsonl")
    tasks = [Perplexity(text=[path], windows=5), Passkey(trials=2, depths=2)]
    plan = prepare(dataclasses.replace(settings, **given), tasks)
    better = {"unpatched": 5.0, "yarn": 3.0, "rerope": 2.0}
    outcomes = [
        dataclasses.replace(o, value=better[o.system] + o.group / 100)
        if o.task == "perplexity"
        else o
        for o in run.run(plan)
    ]
    return Report(plan, outcomes)


def test_the_best_that_an_engine_can_serve_is_named_with_its_engines(helped: Report) -> None:
    beyond, cost, engines = helped.recommendations
    assert "rerope is best" in beyond and "perplexity" in cost
    assert "llama.cpp" in engines.split("(")[1].split("): yarn")[0], engines
    assert engines.endswith("vllm and sglang can serve rerope with rope_ext installed.")
    [words] = helped.next_commands
    assert words[words.index("--text") + 1].endswith("texts.jsonl")  # not on other text
    command = typer.main.get_command(app).get_command(None, words[1])
    made = command.make_context(words[1], words[2:])  # parsed, not run
    assert words[:2] == ["rope-ext", "calibrate"] and made.params["methods"] == "rerope"


def test_a_length_beyond_the_factor_is_measured_again_with_a_factor_that_reaches_it(
    helped: Report,
) -> None:
    """The method that looks best there was not meant to reach that far: no reason to take it."""
    low = {name: {"factor": 1.5} for name in ("yarn", "rerope")}
    systems = [
        dataclasses.replace(system, options=low.get(system.method, system.options))
        for system in helped.plan.systems
    ]
    plan = dataclasses.replace(
        helped.plan,
        systems=tuple(systems),
        settings=dataclasses.replace(helped.plan.settings, factor=1.5),
    )
    found = Report(plan, helped.outcomes)
    longest, trained = max(plan.settings.lengths), systems[0].trained
    assert f"raise --factor to {longest / trained:g}" in found.recommendations[-1]
    [words] = found.next_commands
    assert words[:2] == ["rope-ext", "compare"]
    assert words[words.index("--factor") + 1] == f"{longest / trained:g}"
    [words] = helped.next_commands  # within the factor
    assert words[1] != "compare"
    alone = dataclasses.replace(plan, tasks=plan.tasks[:1])  # of eval, without a recommendation
    found = Report(alone, helped.outcomes)
    [words] = found.next_commands
    assert not found.recommendations and words[1] == "compare"
    assert words[words.index("--factor") + 1] == f"{longest / trained:g}"


def test_a_method_with_options_is_not_calibrated_from_its_defaults(helped: Report) -> None:
    """Calibrate begins with published options, and longrope has none."""
    given = {
        "options": {"rerope": {"window": 64}, "yarn": {"beta_fast": 16}},
        "trained_length": 128,
    }
    settings = dataclasses.replace(helped.plan.settings, **given)
    found = Report(dataclasses.replace(helped.plan, settings=settings), helped.outcomes)
    [words] = found.next_commands
    assert words[1] == "export" and words[words.index("--option") + 1] == "rerope.window=64"
    command = typer.main.get_command(app).get_command(None, "export")
    assert command.make_context("export", words[2:]).params["factor"] == settings.factor
    assert words[words.index("--trained-length") + 1] == "128"


def test_the_next_comparison_is_of_the_same_prompts_and_of_what_reaches(
    report: Report, settings: Settings
) -> None:
    given = {"chat": "no", "attn": "eager", "batch_size": 1, "compose": True, "lengths": (400,)}
    given |= {"resume": True, "force": True}
    methods = ("unpatched", "yarn", "string")
    changed = dataclasses.replace(settings, **given, methods=methods, options={}, factor=1.9)
    systems = prepare(changed, report.plan.tasks).systems
    plan = dataclasses.replace(report.plan, settings=changed, systems=systems)
    found = Report(plan, [])
    words = found._after(settings.models[0])
    made = command_for("compare", words).make_context("compare", words[2:]).params
    assert (made["chat"], made["attn"], made["batch_size"]) == ("no", "eager", "1")
    # STRING reaches less than twice the trained length.
    assert made["factor"] == 3.13 and list(made["methods"]) == ["yarn"]
    said = " ".join(found.essentials)
    assert "compose stack" in said and "attention eager" in said


@pytest.mark.parametrize("methods", [("yarn", "rerope"), ("unpatched", "yarn", "rerope")])
def test_finetune_goes_on_with_training(helped: Report, methods: tuple[str, ...]) -> None:
    tuned = dataclasses.replace(helped.plan.settings, finetune=True, methods=methods)
    found = Report(dataclasses.replace(helped.plan, settings=tuned), helped.outcomes)
    [words], [optional] = found.next_commands, found.optional_commands
    assert words[:4] == ["python", "-m", "recipes.memory", "recipes/own_model_yarn_lora.yaml"]
    recipe, args = memory.read(words[3], *words[4:])
    assert (recipe.method, recipe.factor) == ("yarn", tuned.factor)
    assert recipe.eval_dataset is not None and recipe.eval_dataset.endswith("texts.jsonl")
    assert args.use_cpu and not recipe.quantize  # as the comparison ran
    assert optional[:2] == ["rope-ext", "calibrate"] and "--finetune" in optional
    assert optional[optional.index("--method") + 1] == "yarn"
