"""The evaluators as they are run: plans, resumption, processes, tasks and reports."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen2_5_VLForConditionalGeneration,
    T5Gemma2ForConditionalGeneration,
    T5GemmaForConditionalGeneration,
)
from typer.testing import CliRunner

import rope_ext
from rope_eval.cases import Case, Questions, read_outcomes
from rope_eval.data.prompts import Frame
from rope_eval.evaluate import evaluate
from rope_eval.forward import score
from rope_eval.reports.report import Report
from rope_eval.run import runner as run
from rope_eval.run.plan import prepare
from rope_eval.settings import Settings
from rope_eval.tasks import ruler as suite
from rope_eval.tasks.haystack import Needles
from rope_eval.tasks.longppl import LongPPL
from rope_eval.tasks.passkey import Passkey, PasskeyPrompts
from rope_eval.tasks.perplexity import Perplexity
from rope_ext.cli import app
from rope_ext.errors import MeasureError, OptionError
from rope_ext.saving import checkpoints as models
from tests.families.zoo import tiny_of
from tests.helpers.checkpoint import TRAINED, save_checkpoint
from tests.helpers.saved_patches import edited, lora

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "checkpoints" / "tiny-512"
BOOK = [" ".join(f"word{i * k % 97}" for i in range(400)) + "." for k in (3, 5)]


@pytest.fixture(scope="module")
def frame() -> Frame:
    return Frame.from_tokenizer(AutoTokenizer.from_pretrained(SHIPPED))


@pytest.fixture
def settings(checkpoint: Path, tmp_path: Path) -> Settings:
    return Settings(
        models=(str(checkpoint),),
        methods=("yarn", "dynamic-ntk"),
        lengths=(256, 128),
        output=tmp_path / "results",
    )


TASKS = (Perplexity(BOOK, windows=3), Passkey(trials=2, depths=2))


def test_every_method_gets_every_case(settings: Settings, checkpoint: Path) -> None:
    plan = prepare(settings, TASKS)
    work: list[float] = []
    outcomes = run.run(plan, work.append, work.append)
    assert work[0] == pytest.approx(sum(work[1:])) and work[0] > 0
    per_system = 2 * 3 + 2 * 2 * 2
    assert [o.system for o in outcomes] == [
        name for name in ("unpatched", "yarn", "dynamic_ntk") for _ in range(per_system)
    ]
    by_system = [outcomes[i * per_system :][:per_system] for i in range(3)]
    assert len({tuple(o.prompt for o in group) for group in by_system}) == 1
    at = {(o.system, o.task, o.length, o.seed): o.value for o in outcomes}
    # Within the trained length dynamic NTK is the unpatched model, bit for bit; YaRN is not.
    assert at["dynamic_ntk", "perplexity", 128, 0] == at["unpatched", "perplexity", 128, 0]
    assert at["dynamic_ntk", "perplexity", 256, 0] != at["unpatched", "perplexity", 256, 0]
    assert at["yarn", "perplexity", 128, 0] != at["unpatched", "perplexity", 128, 0]
    case = next(c for c in plan.cases(plan.systems[1]) if c.length == 256)
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    with rope_ext.patched(model, "yarn", factor=4):
        losses, _ = score(model, [case.ids], case.count)
    assert at["yarn", "perplexity", 256, 0] == pytest.approx(float(losses.mean()), abs=1e-5)
    assert list(read_outcomes([settings.output / run.LOG]).values()) == outcomes


def test_a_model_for_images_and_text_is_measured_on_text(
    settings: Settings, tmp_path: Path
) -> None:
    folder = tmp_path / "vision"
    model = tiny_of(Qwen2_5_VLForConditionalGeneration)
    tokenizer = AutoTokenizer.from_pretrained(settings.models[0])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    given = dataclasses.replace(settings, models=(str(folder),), methods=("yarn", "rerope"))
    plan = prepare(given, [Perplexity(BOOK, windows=1)])
    found = {(o.system, o.length): o.value for o in run.run(plan)}
    for system in plan.systems:
        case = next(case for case in plan.cases(system) if case.length == 256)
        loaded = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder).eval()
        if system.method != "unpatched":
            rope_ext.patch(loaded, system.method, factor=4)
        ids = torch.tensor([case.ids])
        with torch.no_grad():
            logits = loaded(ids).logits[0, :-1].log_softmax(-1)
        losses = -logits.gather(-1, ids[0, 1:, None])[-case.count :]
        assert found[system.name, 256] == pytest.approx(float(losses.mean()), abs=1e-5)


@pytest.mark.parametrize("cls", [T5GemmaForConditionalGeneration, T5Gemma2ForConditionalGeneration])
def test_a_model_that_continues_no_prompt_is_refused_before_weights_are_read(
    cls: Any, settings: Settings, tmp_path: Path
) -> None:
    tiny_of(cls).config.save_pretrained(tmp_path / "both")
    given = dataclasses.replace(settings, models=(str(tmp_path / "both"),))
    with pytest.raises(OptionError, match="encoder-decoder"):
        prepare(given, TASKS)


def test_a_refused_method_is_listed_with_its_reason_and_the_others_are_measured(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {"longrope": {"long_factor": [2.0] * 3}}  # the model has another number of pairs
    given = dataclasses.replace(
        settings, methods=("longrope", "yarn"), options=wrong, finetune=True
    )
    report = evaluate(given, TASKS)
    assert report is not None
    assert [system.method for system in report.plan.systems] == ["unpatched", "yarn"]
    told = capsys.readouterr()
    reason = report.plan.refused["longrope (long_factor=[2.0, 2.0, 2.0])"]
    assert "long_factor" in reason and reason in " ".join(told.out.split())
    assert reason in told.err and "longrope" not in told.err.split("next:")[1]
    found = json.loads((settings.output / "results.json").read_text())
    assert list(found["refused"].values()) == [reason]
    assert reason in (settings.output / "table.md").read_text()
    assert (
        "longrope (long_factor=[2.0, 2.0, 2.0]) is not"
        in (settings.output / "report.html").read_text()
    )
    other = str(save_checkpoint(settings.output.parent / "other", head_dim=6))  # it has three pairs
    evaluate(dataclasses.replace(given, models=(*given.models, other), overwrite=True), TASKS)
    said = capsys.readouterr().err.splitlines()
    next_commands = [line for line in said if line.startswith(("next:", "optional:"))]
    assert any("longrope" in line for line in next_commands if other in line)
    assert not any("longrope" in line for line in next_commands if other not in line)
    alone = dataclasses.replace(given, methods=("longrope",), overwrite=True)
    with pytest.raises(OptionError, match="long_factor"):  # nothing is left to compare
        evaluate(alone, TASKS)


def test_the_trained_length_is_measured_without_being_asked(settings: Settings) -> None:
    plan = prepare(dataclasses.replace(settings, lengths=(256,)), [Passkey(1, 1)])
    assert plan.lengths == (TRAINED, 256)
    plan = prepare(dataclasses.replace(settings, lengths=(100,)), [Passkey(1, 1)])
    assert plan.lengths == (100,)
    long = [Needles("needle", trials=1, tokens=90)]  # which does not fit into 128 tokens
    plan = prepare(dataclasses.replace(settings, lengths=(512,)), long)
    assert plan.lengths == (512,)
    assert "cost within the trained length is not measured" in plan.notes[0]


def test_resume_repeats_nothing_and_changes_nothing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dataclasses.replace(settings, batch_size=2)
    whole = run.run(prepare(settings, TASKS))
    calls: list[float] = []

    def ninth(work: float) -> None:
        calls.append(work)
        interrupt(len(calls) == 9)

    cut = dataclasses.replace(settings, output=settings.output / "cut", resume=True)
    with pytest.raises(KeyboardInterrupt):
        run.run(prepare(cut, TASKS), ninth)
    with (cut.output / run.LOG).open("a") as log:
        log.write('{"key": "half a li')
    again = prepare(cut, TASKS)
    batches = sum(len(again.batches(system)) for system in again.systems)
    assert sum(len(again.left(system)) for system in again.systems) == batches - 9
    assert run.run(again, calls.append) == whole
    assert len(calls) == batches

    monkeypatch.setattr(models, "load_model", lambda *a, **named: pytest.fail("loaded"))
    assert run.run(prepare(cut, TASKS)) == whole  # nothing left: not even the model
    other = prepare(dataclasses.replace(cut, seed=1), TASKS)
    assert all(other.left(system) == other.batches(system) for system in other.systems)


def interrupt(now: bool) -> None:
    if now:
        raise KeyboardInterrupt


class Forgetful:
    """A model that has memory for so many tokens in one forward."""

    def __init__(self, memory: int, error: Exception | None = None) -> None:
        self.memory, self.seen = memory, []
        self.error = error or torch.OutOfMemoryError("no")

    def score(self, model: Any, rows: Any, tail: int, pad: int) -> Any:
        self.seen.append(len(rows))
        if len(rows) * len(rows[0]) > self.memory:
            raise self.error
        return score(model, rows, tail, pad)


def test_out_of_memory_halves_an_automatic_batch(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [Perplexity(BOOK * 2, windows=4, protocol="start")]
    expected = run.run(prepare(settings, tasks))
    model = Forgetful(300)
    monkeypatch.setattr(run, "score", model.score)
    found = run.run(prepare(dataclasses.replace(settings, overwrite=True), tasks))
    assert [o.value for o in found] == pytest.approx([o.value for o in expected], abs=1e-6)
    assert len({o.value for o in found}) > 8  # so that a mixed-up order would show
    assert model.seen[:7] == [4, 2, 1, 1, 2, 1, 1]


CHANGES = {"factor": 2.0, "dtype": "bfloat16", "trained_length": 100, "attn": "eager"}
CHANGES |= {"batch_size": 1, "compose": True}


@pytest.mark.parametrize("change", [{name: value} for name, value in CHANGES.items()], ids=str)
def test_what_determines_an_outcome_is_in_its_key(settings: Settings, change: dict) -> None:
    def keys(settings: Settings, tasks: Any = TASKS) -> set[tuple[str, str, str]]:
        plan = prepare(settings, tasks)
        return {(s.method, c.task, s.key(c)) for s in plan.systems for c in plan.cases(s)}

    before, after = keys(settings), keys(dataclasses.replace(settings, **change))
    assert len(before) == 3 * 14
    kept = {method for method, _, _ in before & after}
    assert kept == ({"unpatched"} if "factor" in change else set())
    assert not before & keys(dataclasses.replace(settings, seed=1))
    more = keys(settings, [Perplexity(BOOK, windows=2), Passkey(2, 2)])
    assert {task for _, task, _ in before - more} == {"perplexity"}


@pytest.mark.parametrize("name", ["unpatched", "none"])
def test_the_unpatched_model_has_a_name_and_an_alias(
    name: str, settings: Settings, checkpoint: Path
) -> None:
    asked = dataclasses.replace(settings, methods=(name, "yarn"))
    rows = [system.name for system in prepare(asked, TASKS).systems]
    assert rows == ["unpatched", "yarn"]
    alone = dataclasses.replace(settings, methods=(name,))
    assert [system.name for system in prepare(alone, TASKS).systems] == ["unpatched"]
    described = CliRunner().invoke(app, ["describe", str(checkpoint), "--method", name])
    assert described.exit_code == 0 and "rope_ext.patch" not in described.stdout


def test_compare_has_no_option_for_what_it_always_does(checkpoint: Path, tmp_path: Path) -> None:
    """It measures all requested lengths; an option that changes nothing would promise more."""
    words = ["compare", str(checkpoint), "--methods", "yarn", "--lengths", "128"]
    output = ["--output", str(tmp_path / "out")]
    refused = CliRunner().invoke(app, [*words, *output, "--force"])
    assert refused.exit_code == 2 and "No such option: --force" in refused.stderr
    assert not (tmp_path / "out").exists()


def test_beyond_the_reach_of_a_method_needs_force(settings: Settings) -> None:
    far = dataclasses.replace(settings, lengths=(128, 600))
    with pytest.raises(
        OptionError,
        match=r"600 tokens: beyond factor 4 x the trained 128.* 4.69, .*--force",
    ):
        prepare(far, TASKS)
    notes = prepare(dataclasses.replace(far, force=True), TASKS).notes
    assert notes[0].startswith("600 tokens: beyond factor 4 x the trained 128 tokens = 512 of yarn")
    assert "not meant to reach that far" in notes[0]


def naive_keys(model: Any, ids: list[int], short: int) -> set[int]:
    """Places in the text of the tokens that gain more than 2 nats, a short forward for each."""
    keys, whole = set(), score(model, [ids], len(ids) - 1)[0][0]
    first = short + short // 4
    for place in range(first, len(ids)):
        long = float(whole[place - 1])
        # Stretches of short / 4 tokens share a window, which begins ``short`` before them.
        stretch = first + (place - first) // (short // 4) * (short // 4)
        end = min(len(ids), stretch + short // 4)
        window = [ids[0], *ids[max(1, end - short // 4 - short) : place + 1]]
        if score(model, [window], 1)[0].item() - long > 2 and -long > -2:
            keys.add(place - 1)
    return keys


def test_longppl_scores_the_key_tokens_alone(frame: Frame) -> None:
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).eval()
    # A name and its number, far enough from where it comes again that 64 tokens do not reach it.
    filler = " ".join(f"def function_{i}(self, value): return value * {i}" for i in range(6))
    text = f"secret_number = 83627194\n{filler}\nsecret_number = 83627194\n" * 3
    task = LongPPL(
        [text], windows=1, stride=40, short_context=64, opened=lambda: nullcontext(model)
    )
    built = task.questions(frame, [100, 200], seed=0)
    windows = task.choose(frame, [100, 200], 0)
    keys = naive_keys(model, [0, *windows.texts[0]], 64)
    assert 3 < len(keys) < 60 and f"the {len(keys)} of 199 tokens" in built.definition
    for length in (100, 200):  # every length scores the very same tokens
        cases = [case for case in built.cases if case.length == length]
        scored = [case.ids[place] for case in cases for place in case.only]
        assert scored == [windows.texts[0][place] for place in sorted(keys)]
    [whole] = [case for case in built.cases if case.length == 200]
    losses = score(model, [whole.ids], 199)[0][0].double()
    expected = [float(losses[place - 1]) for place in whole.only]
    settings = Settings(models=(str(SHIPPED),), methods=("unpatched",), lengths=(200,))
    [result] = run.Runner(model, str(SHIPPED), settings).measure([whole])
    assert result.value == pytest.approx(sum(expected) / len(keys)) and result.tokens == len(keys)
    with pytest.raises(OptionError, match="short_context=300 is too long for lengths up to 300"):
        dataclasses.replace(task, short_context=300).questions(frame, [100, 300], 0)
    with pytest.raises(MeasureError, match="no token in the text that needs more than 200"):
        dull = dataclasses.replace(task, documents=["return None\n" * 300], short_context=200)
        dull.questions(frame, [100, 300], 0)


@pytest.mark.slow
def test_longppl_from_the_command_line(tmp_path: Path) -> None:
    words = ["--model", SHIPPED, "--method", "yarn", "--factor", 4, "--lengths", "512,1k"]
    words += ["--windows", 1, "--short-context", 128, "--output", tmp_path]
    app(["eval", "perplexity", "longppl", *map(str, words)], standalone_mode=False)
    data = json.loads((tmp_path / "results.json").read_text())
    assert [row["task"] for row in data["summary"]] == 4 * ["perplexity"] + 4 * ["longppl"]
    assert "when the model with yarn sees all of the text" in data["definitions"]["longppl"]
    at = {(row["system"], row["length"]): row["value"] for row in data["summary"][4:]}
    assert at["yarn", 1024] < min(at["yarn", 512], at["unpatched", 1024])


SLOW = [
    pytest.param(n, marks=pytest.mark.slow) for n in ("unpatched", "yarn", "dynamic_yarn", "llama3")
]


@dataclasses.dataclass(frozen=True)
class Forced(Passkey):
    """The same prompts with their answers, scored by one forward each."""

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        found = super().questions(frame, lengths, seed)
        prompts = PasskeyPrompts(frame.tokenizer, frame)
        cases = [
            dataclasses.replace(
                prompts.forward_case(case.length, case.depth or 0.0, case.seed), bin=case.bin
            )
            for case in found.cases
        ]
        return Questions(cases, found.definition)


@pytest.mark.parametrize("method", ["dynamic_ntk", *SLOW])
def test_teacher_forced_and_generated_agree_on_every_case(method: str, tmp_path: Path) -> None:
    results = []
    for task in (Forced, Passkey):
        settings = Settings(
            models=(str(SHIPPED),),
            methods=(method,),
            lengths=(200, 1000),
            factor=8,
            output=tmp_path / task.__name__,
        )
        plan = prepare(settings, [task(trials=2, depths=2)])
        plan = dataclasses.replace(plan, systems=plan.systems[-1:])
        results.append(run.run(plan))
    forced, generated = results
    assert [o.answers for o in forced] == [o.answers for o in generated]
    assert [o.value for o in forced] == [o.value for o in generated]
    assert all(o.tokens <= 5 for o in generated)
    if method == "unpatched":  # or agreement would say little
        assert {o.value for o in forced} == {0.0, 1.0}


def ask(task: Any, frame: Frame, *lengths: int, seed: int = 0) -> list[Case]:
    return list(task.questions(frame, lengths, seed).cases)


def test_needles_lie_where_they_should(frame: Frame) -> None:
    task = Needles("needle", keys=3, queries=2, trials=3, depths=4, tokens=40)
    for case in ask(task, frame, 900, 2000):
        text = frame.tokenizer.decode(case.ids)
        found = re.findall(r"special magic numbers for (\S+) is: (\d{7})\.", text)
        assert len(found) == 3 and set(case.answers) < {value for _, value in found}
        question = text[text.rindex("What are all") :]
        asked = [key for key, value in found if value in case.answers]
        assert all(key in question for key in asked) and len(case.answers) == 2
        distractor = next(key for key, value in found if value not in case.answers)
        assert distractor not in question
        assert case.bin / 4 <= case.depth < (case.bin + 1) / 4
        assert case.length - 60 < case.tokens <= case.length  # short by less than a sentence
        at = text.index(case.answers[0]) / text.rindex("\nWhat are all")
        assert at == pytest.approx(case.depth, abs=0.15)


@pytest.mark.parametrize("name", suite.TASKS)
def test_ruler_prompts_fit_and_hold_their_answers(name: str, frame: Frame) -> None:
    task = suite.build_task(name, 1)
    assert task.name == name and task.suite == "RULER"
    cases = ask(task, frame, 2048, 3000)
    short = [case for case in cases if case.length == 2048]
    assert short == ask(task, frame, 2048) != ask(task, frame, 2048, seed=1)
    for case in cases:
        text = frame.tokenizer.decode(case.ids)
        assert all(answer in text for answer in case.answers)
        assert case.tokens <= case.length and case.tokens > 0.9 * case.length
        assert case.ids.tolist().count(0) == 1
    with pytest.raises(OptionError, match=rf"a {name} prompt needs at least \d+ tokens") as error:
        ask(task, frame, 150)
    least = int(re.search(r"at least (\d+)", str(error.value))[1])
    assert 150 < least < 1500


def test_the_third_frequent_word_is_never_tied(frame: Frame) -> None:
    task = suite.FrequentWords(3, 50)
    with pytest.raises(OptionError) as error:
        ask(task, frame, 150)
    least = int(re.search(r"at least (\d+)", str(error.value))[1])
    for length in range(least + 20, least + 220, 8):
        for case in ask(task, frame, length):
            text = frame.tokenizer.decode(case.ids)
            text = text[text.index("coded words.") : text.rindex("\nQu")]
            words = re.findall(r"\b[a-z]{6}\b", text)
            times = Counter(words)
            others = [count for word, count in times.items() if word not in case.answers]
            assert times[case.answers[2]] > max(others, default=0)
            assert case.tokens <= length


def test_two_models_are_two_blocks_of_one_report(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Of which one was, so to say, trained on 64 tokens, which cannot hold a passkey."""
    other = save_checkpoint(tmp_path / "other")
    with edited(other) as config:
        config["max_position_embeddings"] = 64
    words = ["passkey", "--trials", 2, "--model", checkpoint, "--model", other, "--factor", 8]
    words += ["--method", "yarn", "--lengths", "128,256", "--output", tmp_path / "out"]
    app(["eval", *map(str, words)], standalone_mode=False)
    data = json.loads((tmp_path / "out" / "results.json").read_text())
    name = checkpoint.name
    outputs = re.findall(r"next: .* --output (\S+)", capsys.readouterr().err)
    assert outputs == [f"compared-{name}", "compared-other"]
    rows = [f"{model} {method}" for model in (name, "other") for method in ("unpatched", "yarn")]
    assert [system["name"] for system in data["systems"]] == rows
    assert data["lengths"] == [128, 256]
    # The first model has its trained length measured; the other, shorter one has not.
    assert {row["system"] for row in data["costs"]} == {f"{name} yarn"}
    assert (f"{name} unpatched", f"{name} yarn") in {
        (row["system"], row["less"]) for row in data["differences"]
    }


def test_an_adapter_is_in_use_where_a_method_is(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    model = lora(AutoModelForCausalLM.from_pretrained(checkpoint))
    model.save_pretrained(folder)

    def losses(name: str, **change: Any) -> dict[str, float]:
        given = {"models": (str(checkpoint),), "methods": ("yarn",), "lengths": (128,)}
        settings = Settings(**{**given, **change}, output=tmp_path / name)
        outcomes = run.run(prepare(settings, [Perplexity(BOOK, windows=1)]))
        return {outcome.system: outcome.value for outcome in outcomes}

    plain, with_it = losses("a"), losses("b", adapter=str(folder))
    assert plain["unpatched"] == with_it["unpatched"] and plain["yarn"] != with_it["yarn"]
    with pytest.raises(MeasureError, match="is an adapter; set --model to its base"):
        losses("g", models=(str(folder),))
    own = {"adapter": str(folder), "methods": ("adapter",), "factor": 2.0}
    with pytest.raises(OptionError, match=r"has none; set --method to the name"):
        losses("d", **own)
    rope_ext.save_sidecar(rope_ext.patch(model, "yarn", factor=4), folder)
    assert losses("e", **own) == {
        "unpatched": with_it["unpatched"],
        "yarn (factor=4)": with_it["yarn"],
    }
    with pytest.raises(OptionError, match=r"was trained with .*'yarn', factor=4"):
        losses("f", **{**own, "methods": ("yarn",)})


def test_one_report_before_and_after_training(checkpoint: Path, tmp_path: Path) -> None:
    """``before`` is the base patched by hand, ``adapter`` the trained model."""
    base, folder = AutoModelForCausalLM.from_pretrained(checkpoint), tmp_path / "adapter"
    patched = rope_ext.patch(base, "yarn", factor=4.0, beta_fast=16.0)
    model = lora(patched, modules_to_save=["embed_tokens", "norm"])
    model.save_pretrained(folder)
    rope_ext.save_sidecar(model, folder)

    def report(name: str, **change: Any) -> Report:
        given = {"models": (str(checkpoint),), "lengths": (128, 256), "methods": ("yarn",)}
        settings = Settings(**{**given, **change}, output=tmp_path / name)
        return Report(plan := prepare(settings, [Perplexity(BOOK, windows=2)]), run.run(plan))

    names = ("unpatched", "before", "adapter", "ntk")
    both = report("both", methods=names, adapter=str(folder), force=True)
    by_hand = report("by-hand", options={"yarn": {"beta_fast": 16.0}})
    trained = report("trained", methods=("adapter",), adapter=str(folder))
    method = "yarn (beta_fast=16.0)"
    rows = ["unpatched", f"{method}, before training", f"{method}, trained", "ntk"]
    assert [system.name for system in both.plan.systems] == rows
    for length in (128, 256):
        at = [both.estimates["perplexity", row, length] for row in rows]
        assert at[:2] == [by_hand.estimates["perplexity", r, length] for r in ("unpatched", method)]
        assert at[2] == trained.estimates["perplexity", method, length]
        assert len({estimate.value for estimate in at}) == 4
    change = f"({100 * (at[2].value / at[1].value - 1):+.1f} "
    [sentence] = both.recommendations
    assert sentence.startswith("Training under yarn: beyond 128 tokens, perplexity: cannot tell")
    assert sentence in both.markdown() and change in sentence
    with pytest.raises(OptionError, match="give --method before,adapter"):
        report("alone", methods=("before", "yarn"), adapter=str(folder), force=True)
