"""The few scalars of a method, found on a text: what is measured, what is chosen, what is kept."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import math
import random
import re
import shutil
from pathlib import Path
from typing import get_args

import pytest
import torch
from typer.testing import CliRunner
from typing_extensions import get_type_hints

import rope_ext
from rope_eval.forward import cost
from rope_eval.reports import calibration
from rope_eval.tune import fitness
from rope_eval.tune.fitness import HAY, losses_at_end, losses_of_answers, prompts_of
from rope_eval.tune.options import CalibrationOptions, SearchOptions
from rope_ext.cli import app
from rope_ext.errors import MeasureError
from tests.helpers.checkpoint import TRAINED, stopping, written

TARGET = 2 * TRAINED
DOCUMENTS = [written(120, i) for i in range(8)]
SMALL = {"samples": 4, "prompts": 0, "options": "attention_factor"}
ASKED = {"prompts": 16}


@pytest.fixture(autouse=True)
def undrawn(monkeypatch) -> None:
    """Drawing takes longer than all else here; one test does it."""
    monkeypatch.setattr(calibration, "draw", lambda lines, path, **lengths: path.write(b"drawn"))


def found(model, tokenizer, output: Path | None = None, **changed) -> rope_ext.Calibration:
    options = {**SMALL, "output": output, "text": DOCUMENTS, "target_length": TARGET, **changed}
    text, target = options.pop("text"), options.pop("target_length")
    return rope_ext.calibrate(model, tokenizer, target, text, **options)


def lines(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "calibration.jsonl").read_text().splitlines()]


def losses(model, ids: list[int]) -> torch.Tensor:
    """Of every token but the first, by transformers' own logits."""
    row = torch.tensor([ids])
    with torch.no_grad():
        logits = model(row).logits[0, :-1].double()
    return -logits.log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]


@pytest.mark.parametrize("method", ["yarn", "self_extend"])
def test_both_parts_are_what_transformers_logits_give(model, tokenizer, method: str) -> None:
    texts = tokenizer(DOCUMENTS, verbose=False)["input_ids"]
    prompts = prompts_of(tokenizer, (TARGET, TRAINED), 6, texts, 0)
    windows, done = [text[:TARGET] for text in texts[:3]], []
    with rope_ext.patched(model, method, factor=2):
        far = losses_at_end(model, windows, 50, done.append)
        answers = losses_of_answers(model, prompts, done.append)
        for window, loss in zip(windows, far, strict=True):
            assert loss == pytest.approx(float(losses(model, window)[-50:].mean()), rel=1e-5)
        for prompt, (loss, hit) in zip(prompts, answers, strict=True):
            right = losses(model, prompt.ids)[-prompt.count :]
            assert loss == pytest.approx(float(right.mean()), rel=1e-5)  # float32, other rows
            assert hit == bool((right < 1e-9).all()) or not hit  # a random model finds none
    assert sum(done) == sum(cost(len(ids)) for ids in (*windows, *(p.ids for p in prompts)))


def test_a_hit_is_what_greedy_decoding_writes(model, tokenizer) -> None:
    """The prompts' own answers are replaced by what the model writes: all are found."""
    texts = tokenizer(DOCUMENTS, verbose=False)["input_ids"]
    for prompt in prompts_of(tokenizer, [TRAINED], 6, texts, 0)[3:]:
        asked = torch.tensor([prompt.ids[: -prompt.count]])
        given = {"attention_mask": torch.ones_like(asked), "eos_token_id": None}
        wrote = model.generate(asked, max_new_tokens=prompt.count, do_sample=False, **given)
        same = type(prompt)(prompt.hay, tuple(wrote[0].tolist()), prompt.count)
        [(_, hit), (_, miss)] = losses_of_answers(model, [same, prompt], lambda rows: None)
        assert hit and not miss


@pytest.mark.parametrize("needle", ["number", "word"])
def test_prompts_have_their_length_their_key_twice_and_their_depth(tokenizer, needle: str) -> None:
    texts = tokenizer(DOCUMENTS, verbose=False)["input_ids"]
    prompts = prompts_of(tokenizer, [TARGET], 8, texts, 0, needle)
    for hay in HAY:
        depths = []
        for prompt in (own for own in prompts if own.hay == hay):
            assert prompt.length == TARGET
            key = tokenizer.decode(prompt.ids[-prompt.count :]).strip()
            assert key.isalpha() if needle == "word" else key.isdigit() and len(key) == 5
            text = tokenizer.decode(prompt.ids[: -prompt.count])
            assert text.count(key) == 2
            assert text.strip().endswith("What is the pass key? The pass key is")
            depths.append(text.index(key) / len(text))
        assert depths == sorted(depths) and depths[0] < 0.4 < 0.6 < depths[-1]


def test_the_cheap_preset_says_what_it_costs_before_it_starts(
    model, tokenizer, monkeypatch, capsys
) -> None:
    """Four windows in each half, no prompts, and the attention factor alone."""
    pretend(monkeypatch)
    result = found(model, tokenizer, cheap=True, samples=8, prompts=16, options=None)
    assert result.prompts == 0 and set(result.best.proposed.options()) >= {"attention_factor"}
    assert CalibrationOptions(target_length=8, cheap=True, samples=6, options="window").samples == 6
    given = CalibrationOptions(target_length=8, samples=4, prompts=0, options="attention_factor")
    assert CalibrationOptions(target_length=8, cheap=True) == given  # resumes its log
    # A window holds two of the trained length, which the unpatched model reads as well.
    assert (result.rows - 2 * 4 * 2) % (4 * 3) == 0
    [said] = re.findall(
        r"at most (\d+) forwards of one row, ([\d,]+) tokens", capsys.readouterr().err
    )
    assert result.rows <= int(said[0]) and int(said[1].replace(",", "")) > TARGET


def pretend(monkeypatch, far=lambda a, i: 2.0, inside=lambda a, i: 1.0) -> None:
    """Losses of window ``i`` under cos and sin times ``a``, in place of the model's."""

    def losses_of(model, windows, scored, advance):
        a = model.model.rotary_emb.attention_scaling
        loss = inside if windows and len(windows[0]) == TRAINED else far
        return [loss(a, sum(window) % 97 / 97) for window in windows]

    monkeypatch.setattr(fitness, "losses_at_end", losses_of)


@pytest.mark.parametrize("optimum", [0.8, 1.0, 1.26, 1.72])
def test_the_best_factor_is_found_also_beyond_the_grid(model, tokenizer, monkeypatch, optimum):
    pretend(monkeypatch, lambda a, i: 2 + (a - optimum) ** 2 + i)
    result = found(model, tokenizer)
    assert result.method.attention_factor == pytest.approx(optimum, abs=0.051)
    assert not result.best.reasons and "->" in result.sentence
    rope_ext.patch(model, result.method)
    assert rope_ext.describe(model).target_length == TARGET


def test_the_halves_are_of_different_documents(model, tokenizer, monkeypatch) -> None:
    texts, seen = [written(400, i) for i in range(3)], {}

    def of_text(model, windows, scored, advance):
        if windows and len(windows[0]) == TARGET:
            seen[tuple(windows)] = [tokenizer.decode(window[1:-1]) for window in windows]
        return [1.0] * len(windows)

    monkeypatch.setattr(fitness, "losses_at_end", of_text)
    found(model, tokenizer, text=texts)
    one, two = ({t for t in texts for w in half if w in t} for half in seen.values())
    assert one and two and not one & two


def test_what_the_other_half_does_not_confirm_stays_as_it_was_published(
    model, tokenizer, monkeypatch
) -> None:
    halves: list[float] = []

    def far(a: float, i: float) -> float:  # better where it chooses, and there alone
        return 2 + i - (a > 1.25 and len(halves) < 4 and not halves.append(a)) * 0.1

    pretend(monkeypatch, far)
    result = found(model, tokenizer, samples=4)
    assert result.best.proposed != result.best.published == result.method == rope_ext.YaRN(factor=2)
    assert "is not better beyond noise" in result.sentence
    assert result.sentence.startswith("Keep the published default")


def test_the_cost_within_the_trained_length_is_capped(model, tokenizer, monkeypatch) -> None:
    start = rope_ext.YaRN(factor=2).attention_scaling(None)  # 1.069
    pretend(monkeypatch, lambda a, i: 3 - a + i, lambda a, i: 1 + max(0, a - start))
    for share, factor in ((0, None), (0.05, 1.1), (0.21, 1.25)):  # of perplexity: expm1(0.181)
        assert found(model, tokenizer, cost=share).method.attention_factor == factor


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(model, tokenizer) -> None:
    config = copy.deepcopy(model.config)
    config.vocab_size = 20
    smaller = type(model)(config).eval()
    with pytest.raises(MeasureError, match="token"):
        found(smaller, tokenizer)


@pytest.mark.parametrize(("noise", "kept"), [(0.002, False), (0.02, True)])
def test_a_cost_that_may_be_above_the_limit_is_refused_although_its_mean_is_below(
    model, tokenizer, monkeypatch, noise: float, kept: bool
) -> None:
    """It rises by 1 % at every factor but the published one, more or less by window."""

    def inside(a: float, i: float) -> float:
        return 1 + (a != start) * (0.01 + noise * (2 * i - 1))

    start = rope_ext.YaRN(factor=2).attention_scaling(None)
    pretend(monkeypatch, lambda a, i: 3 - a + i, inside)
    result = found(model, tokenizer)
    assert (result.method == result.best.published) == kept
    if kept:
        assert "no other value is better on the half" in result.sentence


def test_a_loss_far_out_that_may_rise_is_refused(model, tokenizer, monkeypatch, counting) -> None:
    """However much better the answers are."""

    def answers(model, prompts, advance):
        a = model.model.rotary_emb.attention_scaling
        return [(9 - 5 * a, True) for _ in prompts]

    monkeypatch.setattr(fitness, "losses_of_answers", answers)
    for noise, kept in ((0, False), (3, True)):
        pretend(monkeypatch, lambda a, i, noise=noise: 2 + noise * a * (2 * i - 1))
        result = found(model, tokenizer, **ASKED)
        assert (result.method == result.best.published) == kept


def test_repeated_text_is_told_from_text_that_repeats_words() -> None:
    text, rng = written(300, 0), random.Random(0)
    other = [text]
    for _ in range(9):  # copies with every twentieth word changed
        words = text.split()
        words[rng.randrange(20) :: 20] = [written(1, rng.random())] * len(words[0::20])
        other.append(" ".join(words[: len(text.split())]))
    assert fitness.repeated_share([text]) == 0
    assert fitness.repeated_share([text] * 10) == pytest.approx(0.9)
    assert fitness.repeated_share([" ".join([text[:200]] * 10)]) > 0.8
    assert 0.3 < fitness.repeated_share(other) < 0.9
    assert fitness.repeated_share([text, text.replace(" ", "\n")]) == 0.5


def test_prompts_do_not_count_where_the_unpatched_model_finds_none(model, tokenizer) -> None:
    result = found(model, tokenizer, **ASKED)
    assert len(result.notes) == 2 and "finds 0 of 16" in result.notes[0]
    assert all("do not count" in note for note in result.notes)
    assert all(trial.answers is None for trial in result.best.tried)
    assert "answers ranked first" not in str(result)


@pytest.fixture
def counting(monkeypatch) -> None:
    """Prompts count although a random model answers none."""
    monkeypatch.setattr(fitness, "MIN_FOUND", 0)


def test_a_calibration_is_seeded_and_reads_back(model, tokenizer, tmp_path, counting) -> None:
    result = found(model, tokenizer, tmp_path / "new" / "folder", **ASKED)
    assert result == found(model, tokenizer, **ASKED)
    assert result.choices != found(model, tokenizer, seed=1, **ASKED).choices
    saved = tmp_path / "new" / "folder"
    assert rope_ext.Calibration.load(saved) == result
    assert rope_ext.Calibration.load(saved / "calibration.json") == result
    tried = tuple(dataclasses.replace(trial, far=math.inf) for trial in result.best.tried)
    best = dataclasses.replace(result.best, tried=tried)
    infinite = dataclasses.replace(result, choices=(best,))
    (saved / "calibration.json").write_text(infinite.to_json())
    assert "Infinity" not in infinite.to_json()
    assert rope_ext.Calibration.load(saved) == infinite
    assert result.best.tried[0].answers > 0
    assert result.prompts == 16 and "0 of 16" in str(result)
    # Every row that it says: two halves, two windows inside each of the target length, prompts.
    candidates = len(result.best.tried) + 1 + (result.best.proposed != result.best.published)
    inside = 4 * ((TARGET - 1) // (TRAINED - 1))
    assert result.rows == 2 * (inside + 16) + candidates * (4 + inside + 2 * 16)


def test_a_killed_calibration_goes_on_as_if_it_had_not_been(
    model, tokenizer, tmp_path, monkeypatch, counting
) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    result = found(model, tokenizer, whole, **ASKED)
    config, state = model.config.to_dict(), copy.deepcopy(model.state_dict())
    frequencies = model.model.rotary_emb.inv_freq.clone()
    model.train()
    model.model.layers[0].eval()
    with monkeypatch.context() as patch:
        stopping(patch, model, 30)
        with pytest.raises(KeyboardInterrupt):
            found(model, tokenizer, part, **ASKED)
    assert rope_ext.describe(model).method is None and model.config.to_dict() == config
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert model.training and not model.model.layers[0].training

    log = part / "calibration.jsonl"
    assert 3 < len(lines(part)) < len(lines(whole)) and not (part / "calibration.json").exists()
    log.write_bytes(log.read_bytes()[:-10])  # and its last line is cut short
    with pytest.raises(rope_ext.MeasureError, match="give resume=True to continue it"):
        found(model, tokenizer, part, **ASKED)
    assert found(model, tokenizer, part, resume=True, **ASKED) == result
    for name in ("calibration.jsonl", "calibration.json", "calibration.png"):
        assert (part / name).read_bytes() == (whole / name).read_bytes()


# Wrong and unusual input

BAD = [
    ({"target_length": TRAINED}, "target_length=128 is not beyond the 128 trained tokens"),
    ({"target_length": 1}, "target_length=1 is not beyond the 128 trained tokens; give a longer"),
    ({"target_length": 4096}, "only 1 windows of 4096 tokens, and samples=4"),
    ({"samples": 3}, "samples=3 is not valid.*at least 4"),
    ({"text": 10 * DOCUMENTS[:1], "samples": 5}, r"\d\d% of the text is repeated .*at most 20%"),
    ({"methods": ["yarn", "yarn"]}, "yarn is given twice"),
    ({"methods": rope_ext.YaRN(factor=1.5)}, "reaches 192 tokens.*give it factor=2"),
    ({"options": "beta"}, "calibrate cannot tune 'beta'"),
]


@pytest.mark.parametrize(("changed", "message"), BAD, ids=lambda each: str(each)[:60])
def test_bad_input_is_told_before_any_forward(model, tokenizer, changed, message) -> None:
    ran = []
    model.model.layers[0].register_forward_pre_hook(lambda *args: ran.append(args))
    with pytest.raises(rope_ext.RopeExtError, match=message):
        found(model, tokenizer, **changed)
    assert rope_ext.describe(model).method is None
    assert not ran or "rerope" in str(changed)  # position methods are proven with the weights


@pytest.mark.parametrize("tune", [rope_ext.calibrate, rope_ext.search])
def test_a_model_that_continues_no_text_is_refused(model, tokenizer, tune) -> None:
    with pytest.raises(rope_ext.OptionError, match="LlamaModel does not continue a prompt"):
        tune(model.model, tokenizer, TARGET, DOCUMENTS)


def test_the_command_calibrates_prints_and_goes_on(checkpoint, tmp_path) -> None:
    text, output = tmp_path / "text.jsonl", tmp_path / "found"
    text.write_text("".join(json.dumps({"text": each}) + "\n" for each in DOCUMENTS))
    words = ["calibrate", "--model", str(checkpoint), "--length", str(TARGET), "--methods", "yarn"]
    words += ["--text", str(text), "--samples", "4", "--prompts", "16"]
    words += ["--options", "attention_factor", "--output", str(output)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert rope_ext.Calibration.load(output).sentence in result.stdout
    before = {path.name: path.read_bytes() for path in output.iterdir() if path.is_file()}
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 2 and "--resume" in again.stderr
    again = CliRunner().invoke(app, [*words, "--resume"])
    assert again.exit_code == 0 and again.stdout == result.stdout
    assert {path.name: path.read_bytes() for path in output.iterdir() if path.is_file()} == before


def test_another_trained_length_stays_in_what_follows(checkpoint, tmp_path) -> None:
    """A ratio of no whole hundredths: the search begins with the calibration for its length."""
    text, output = tmp_path / "text.txt", tmp_path / "found"
    text.write_text("\n".join(written(120, i) for i in range(8)))
    same = ["--model", str(checkpoint), "--length", "130", "--trained-length", "64"]
    same += ["--text", str(text)]
    words = ["calibrate", *same, "--methods", "yarn", "--samples", "4", "--prompts", "0"]
    words += ["--options", "attention_factor", "--output", str(output)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "original_max_position_embeddings=64" in rope_ext.Calibration.load(output).call
    [line] = [x for x in result.stderr.splitlines() if x.startswith("next: rope-ext recommend")]
    advice = CliRunner().invoke(app, line.split()[2:])
    assert advice.exit_code == 0 and rope_ext.Calibration.load(output).call in advice.stdout
    words = ["search", *same, "--start", str(output), "--output", str(tmp_path / "found.json")]
    words += ["--population", "5", "--samples", "1", "--iterations", "1", "--prompts", "0"]
    result = CliRunner().invoke(app, [*words, "--validation-samples", "0"])
    assert result.exit_code == 0, result.output


def test_advice_puts_first_what_was_calibrated_and_else_says_how(
    model, tokenizer, checkpoint, tmp_path, monkeypatch
) -> None:
    pretend(monkeypatch, lambda a, i: 2 + (a - 1.26) ** 2 + i)
    result = found(model, tokenizer, tmp_path / "found")
    plain = rope_ext.recommend(model, TARGET)
    name = plain.method.name
    assert f"rope-ext calibrate --model MODEL --length {TARGET} --methods {name}" in str(plain)
    for given in (result, tmp_path / "found"):
        advice = rope_ext.recommend(model, TARGET, calibration=given)
        assert advice.method == result.method and result.sentence in advice.reasons[0]
    other = dataclasses.replace(result, model="Other")
    with pytest.raises(rope_ext.OptionError, match="of Other, 128 ->"):
        rope_ext.recommend(model, TARGET, calibration=other)
    with pytest.raises(rope_ext.MeasureError, match="cannot read the calibration"):
        rope_ext.recommend(model, TARGET, calibration=tmp_path / "none.json")
    folder = tmp_path / "model"  # one beside the weights is found; what does not fit is not
    shutil.copytree(checkpoint, folder)
    (folder / "calibration.json").write_text(result.to_json())
    printed = CliRunner().invoke(app, ["recommend", str(folder), "--length", str(TARGET)])
    assert printed.exit_code == 0 and result.call in printed.stdout
    assert rope_ext.recommend(folder, 2 * TARGET).method != result.method


def test_a_calibration_that_changed_nothing_says_that_it_tried_one_method(
    model, tokenizer, checkpoint, tmp_path, monkeypatch
) -> None:
    pretend(monkeypatch, lambda a, i: 2.0)  # every value is as good as the default
    result = found(model, tokenizer, tmp_path / "found")
    assert "Keep the published default" in result.sentence
    plain = rope_ext.recommend(model, TARGET)
    assert plain.method.name != result.method.name
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    (folder / "calibration.json").write_text(result.to_json())
    beside = rope_ext.recommend(folder, TARGET)
    assert beside.method == plain.method and "tried no other method" in str(beside)
    asked = rope_ext.recommend(folder, TARGET, calibration=result)
    assert asked.method == result.method and "tried no other method" in str(asked)


@pytest.mark.parametrize("function", [rope_ext.calibrate, rope_ext.search])
def test_a_signature_shows_every_option_and_its_default(function) -> None:
    shown = inspect.signature(function).parameters
    assert not any(one.kind is one.VAR_KEYWORD for one in shown.values())
    assert shown["prompts"].default == 16 and shown["needle"].default == "number"
    own = {"options", "cost"} if function is rope_ext.calibrate else {"population", "critical"}
    assert own <= set(shown)
    assert shown["target_length"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


@pytest.mark.parametrize(
    ("function", "options"),
    [(rope_ext.calibrate, CalibrationOptions), (rope_ext.search, SearchOptions)],
)
def test_an_editor_reads_every_option_and_its_type_in_the_source(function, options) -> None:
    hints = get_type_hints(inspect.unwrap(function), include_extras=True)
    [keywords] = get_args(hints["options"])
    wanted = get_type_hints(options)
    del wanted["target_length"]  # a parameter of the function
    assert get_type_hints(keywords) == wanted
    assert not keywords.__required_keys__
