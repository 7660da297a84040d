"""The few scalars of a method, found on a text: what is measured, what is chosen, what is kept."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import rope_ext
from rope_eval.folder import lock
from rope_eval.reports import calibration
from rope_eval.reports.intervals import mean_interval, sum_interval
from rope_eval.tune import calibrate as module
from rope_eval.tune import fitness
from rope_eval.tune.fitness import HAY, Needles, losses_at_end, losses_of_answers
from rope_ext.cli import app
from tests.helpers.checkpoint import TRAINED, written
from tests.helpers.killed import kill_beyond

TARGET = 2 * TRAINED
DOCUMENTS = [written(120, i) for i in range(8)]
SMALL = {"samples": 4, "prompts": 0, "options": "attention_factor"}
ASKED = {"prompts": 16}
DRAW = calibration.draw


@pytest.fixture(autouse=True)
def undrawn(monkeypatch) -> None:
    """Drawing takes longer than all else here; one test does it."""
    monkeypatch.setattr(calibration, "draw", lambda lines, *lengths: lengths[-1].write(b"drawn"))


def found(model, tokenizer, output: Path | None = None, **changed) -> rope_ext.Calibration:
    options = {**SMALL, "output": output, "text": DOCUMENTS, "target_length": TARGET, **changed}
    text, target = options.pop("text"), options.pop("target_length")
    return rope_ext.calibrate(model, tokenizer, target, text, **options)


def lines(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "calibration.jsonl").read_text().splitlines()]


# What is measured


def losses(model, ids: list[int]) -> torch.Tensor:
    """Of every token but the first, by transformers' own logits."""
    row = torch.tensor([ids])
    with torch.no_grad():
        logits = model(row).logits[0, :-1].double()
    return -logits.log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]


@pytest.mark.parametrize("method", ["yarn", "self_extend"])
def test_both_parts_are_what_transformers_logits_give(model, tokenizer, method: str) -> None:
    texts = tokenizer(DOCUMENTS, verbose=False)["input_ids"]
    needles = Needles(tokenizer)
    prompts = [
        prompt
        for length in (TARGET, TRAINED)
        for hay in HAY
        for prompt in needles.prompts(hay, length, 3, texts, 0)
    ]
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
    assert sum(done) == len(windows) + len(prompts)


def test_a_hit_is_what_greedy_decoding_writes(model, tokenizer) -> None:
    """The prompts' own answers are replaced by what the model writes: all are found."""
    texts = tokenizer(DOCUMENTS, verbose=False)["input_ids"]
    for prompt in Needles(tokenizer).prompts("text", TRAINED, 3, texts, 0):
        asked = torch.tensor([prompt.ids[: -prompt.count]])
        given = {"attention_mask": torch.ones_like(asked), "eos_token_id": None}
        wrote = model.generate(asked, max_new_tokens=prompt.count, do_sample=False, **given)
        same = type(prompt)(prompt.hay, tuple(wrote[0].tolist()), prompt.count)
        [(_, hit), (_, miss)] = losses_of_answers(model, [same, prompt], lambda rows: None)
        assert hit and not miss


def test_prompts_have_their_length_their_key_twice_and_their_depth(tokenizer) -> None:
    texts = tokenizer(DOCUMENTS, verbose=False)["input_ids"]
    for hay in HAY:
        depths = []
        for prompt in Needles(tokenizer).prompts(hay, TARGET, 4, texts, 0):
            assert prompt.length == TARGET and prompt.hay == hay
            key = tokenizer.decode(prompt.ids[-prompt.count :])
            assert key.isdigit() and len(key) == 5
            text = tokenizer.decode(prompt.ids[: -prompt.count])
            assert text.count(key) == 2 and text.endswith("What is the pass key? The pass key is ")
            depths.append(text.index(key) / len(text))
        assert depths == sorted(depths) and depths[0] < 0.4 < 0.6 < depths[-1]


def test_rows_come_from_different_documents_in_the_two_halves() -> None:
    assert module.in_halves([0, 1, 2, 0, 1, 0]) == [0, 1, 1, 0, 1, 0]
    assert module.in_halves([5, 5, 5]) == [0, 1, 0]
    for numbers in ([0, 1, 2, 3], [0, 0, 0, 1], [2, 2, 1, 1, 0, 0, 3]):
        placed = list(zip(numbers, module.in_halves(numbers), strict=True))
        halves = [{n for n, half in placed if half == h} for h in (0, 1)]
        assert all(halves) and not halves[0] & halves[1]


def test_the_sum_of_two_means_has_the_interval_of_both() -> None:
    one, other = [1.0, 2.0, 4.0, 7.0], [3.0, -1.0, 5.0, 2.0]
    assert sum_interval([(one, None)]) == mean_interval(one)
    low, high = sum_interval([(one, None), (other, [1, 2, 1, 1])])
    # Independent errors add in squares: narrower than the sum of both, and centred on their sum.
    both = [mean_interval(one), mean_interval(other, [1, 2, 1, 1])]
    assert high - low < sum(b - a for a, b in both)
    assert low < sum(one) / 4 + (3 - 2 + 5 + 2) / 5 < high
    assert sum_interval([(one, None), ([1.0, 2.0, 3.0], None)]) is None


# What is chosen: losses that are functions of the attention factor


def pretend(monkeypatch, far=lambda a, i: 2.0, inside=lambda a, i: 1.0) -> None:
    """Losses of window ``i`` under cos and sin times ``a``, in place of the model's."""

    def losses_of(model, windows, scored, advance):
        a = model.model.rotary_emb.attention_scaling
        loss = inside if windows and len(windows[0]) == TRAINED else far
        return [loss(a, sum(window) % 97 / 97) for window in windows]

    monkeypatch.setattr(module, "losses_at_end", losses_of)


@pytest.mark.parametrize("optimum", [0.8, 1.0, 1.26, 1.72])
def test_the_best_factor_is_found_also_beyond_the_grid(model, tokenizer, monkeypatch, optimum):
    pretend(monkeypatch, lambda a, i: 2 + (a - optimum) ** 2 + i)
    result = found(model, tokenizer)
    assert result.method.attention_factor == pytest.approx(optimum, abs=0.051)
    assert not result.best.reasons and "->" in result.sentence
    rope_ext.patch(model, result.method)
    assert rope_ext.describe(model).target_length == TARGET


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


def test_noise_alone_never_replaces_the_published_default(model, tokenizer, monkeypatch) -> None:
    for seed in range(4):
        noise = random.Random(seed)
        pretend(monkeypatch, lambda a, i, rng=noise: rng.gauss(2, 0.1))
        result = found(model, tokenizer, samples=8)
        assert result.method == rope_ext.YaRN(factor=2)


def test_the_cost_within_the_trained_length_is_capped(model, tokenizer, monkeypatch) -> None:
    start = rope_ext.YaRN(factor=2).attention_scaling(None)  # 1.069
    pretend(monkeypatch, lambda a, i: 3 - a + i, lambda a, i: 1 + max(0, a - start))
    for cost, factor in ((0, None), (0.05, 1.1), (0.21, 1.25)):  # of perplexity: expm1(0.181)
        assert found(model, tokenizer, cost=cost).method.attention_factor == factor


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
    # What chooses is refused as what judges is; the mean alone, as it was, accepts it.
    if kept:
        assert "no other value is better on the half" in result.sentence
        accept = lambda self, changes: []  # noqa: E731
        monkeypatch.setattr(module.Descent, "add", patched_add(accept))
        said = found(model, tokenizer).sentence
        assert "cannot tell whether its perplexity at 128 tokens rises by less than 2 %: +" in said


def patched_add(objections):
    """A descent that refuses by other objections than the judgement does."""
    original = module.Descent.add

    def add(self, method, scores):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.Run, "objections", objections)
            original(self, method, scores)

    return add


def test_a_loss_far_out_that_may_rise_is_refused(model, tokenizer, monkeypatch, counting) -> None:
    """However much better the answers are."""

    def answers(model, prompts, advance):
        a = model.model.rotary_emb.attention_scaling
        return [(9 - 5 * a, True) for _ in prompts]

    monkeypatch.setattr(module, "losses_of_answers", answers)
    for noise, kept in ((0, False), (3, True)):
        pretend(monkeypatch, lambda a, i, noise=noise: 2 + noise * a * (2 * i - 1))
        result = found(model, tokenizer, **ASKED)
        assert (result.method == result.best.published) == kept


def test_both_ways_of_tuning_minimise_the_same() -> None:
    assert calibration.fitness(2.0, 0.5) == 2.5
    assert calibration.fitness(None, 0.5) == 0.5 and calibration.fitness(2.0, None) == 2.0


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


def test_the_methods_are_compared_where_they_were_chosen(model, tokenizer, monkeypatch) -> None:
    def losses_of(model, windows, scored, advance):
        name = rope_ext.describe(model).method
        return [{None: 1.0, "yarn": 2.0, "self_extend": 1.5}[name]] * len(windows)

    monkeypatch.setattr(module, "losses_at_end", losses_of)
    result = found(model, tokenizer, methods=["yarn", "self_extend"], options=None)
    assert result.method.name == "self_extend" and len(result.choices) == 2


def test_structure_is_found_after_the_factor_and_what_is_refused_is_left_out(
    model, tokenizer, monkeypatch
) -> None:
    def losses_of(model, windows, scored, advance):
        patch = rope_ext.describe(model)
        return [2 + abs(patch.options.get("window", 0) - TRAINED / 4) / TRAINED] * len(windows)

    monkeypatch.setattr(module, "losses_at_end", losses_of)
    monkeypatch.setattr(
        rope_ext.ReRoPE, "grids", lambda self, rope: {"window": (16, -1, 32, 10**9)}
    )
    result = found(model, tokenizer, methods="rerope", options=None)
    assert result.method.window == 32
    tried = [trial.method.window for trial in result.best.tried]
    assert tried == [None, 16, 32]


def test_a_method_object_is_what_is_published(model, tokenizer, monkeypatch) -> None:
    pretend(monkeypatch)
    mine = rope_ext.YaRN(factor=4, beta_fast=16)
    result = found(model, tokenizer, methods=mine)
    assert result.best.published == result.method == mine


def test_prompts_do_not_count_where_the_unpatched_model_finds_none(model, tokenizer) -> None:
    result = found(model, tokenizer, **ASKED)
    assert (
        len(result.notes) == 2
        and "finds 0 of 16" in result.notes[0]
        and all("do not count" in note for note in result.notes)
    )
    assert all(trial.answers is None for trial in result.best.tried)
    assert "answers found" not in str(result)


# Seeds, logs, folders


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
    assert result.best.tried[0].answers > 0
    assert result.prompts == 16 and "0 of 16" in str(result)
    # Every row that it says: two halves, two windows inside each of the target length, prompts.
    candidates = len(result.best.tried) + 1 + (result.best.proposed != result.best.published)
    inside = 4 * ((TARGET - 1) // (TRAINED - 1))
    assert result.rows == 2 * (inside + 16) + candidates * (4 + inside + 2 * 16)


def test_the_picture_has_both_panels_or_the_loss_alone(
    model, tokenizer, tmp_path, monkeypatch, counting
) -> None:
    lines = []
    monkeypatch.setattr(calibration, "draw", lambda given, *more: lines.append(given))
    result = found(model, tokenizer, **ASKED)
    result.plot(tmp_path / "nothing.png")
    found(model, tokenizer).plot(tmp_path / "nothing.png")
    for number, ([line], measured) in enumerate(zip(lines, (True, False), strict=True)):
        assert line.name == "yarn" and len(line.points) > 4 and line.published in line.points
        assert all((point[2] is not None) == measured for point in line.points)
        path = tmp_path / f"{number}.png"
        DRAW([line], TRAINED, TARGET, path)
        assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(rope_ext.MeasureError, match="give another path"):
        monkeypatch.setattr(calibration, "draw", DRAW)
        result.plot(tmp_path / "no" / "folder.png")


def test_a_killed_calibration_goes_on_as_if_it_had_not_been(
    model, tokenizer, tmp_path, monkeypatch, counting
) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    result = found(model, tokenizer, whole, **ASKED)
    forwards, original = 0, type(model).forward

    def forward(self, *args, **kwargs):
        nonlocal forwards
        forwards += 1
        if forwards == 30:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    config, state = model.config.to_dict(), copy.deepcopy(model.state_dict())
    frequencies = model.model.rotary_emb.inv_freq.clone()
    model.train()
    model.model.layers[0].eval()
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", forward)
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


def test_nothing_of_others_is_lost_and_no_two_share_a_folder(model, tokenizer, tmp_path) -> None:
    corpus = '{"text": "mine"}'
    for name in ("calibration.json", "calibration.png", "calibration.jsonl"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text(corpus)
        with pytest.raises(rope_ext.MeasureError, match=name):
            found(model, tokenizer, folder, resume=True)
        assert (folder / name).read_text() == corpus
    found(model, tokenizer, tmp_path / "mine")
    before = (tmp_path / "mine" / "calibration.jsonl").read_bytes()
    for changed, said in (({"seed": 1}, "seed was 0"), ({"methods": "self_extend"}, "methods was")):
        with pytest.raises(rope_ext.MeasureError, match=f"another calibration .*{said}"):
            options = {"options": None, **changed}
            found(model, tokenizer, tmp_path / "mine", resume=True, **options)
    assert (tmp_path / "mine" / "calibration.jsonl").read_bytes() == before
    with lock(tmp_path / "mine"), pytest.raises(rope_ext.MeasureError, match="in use by another"):
        found(model, tokenizer, tmp_path / "mine", resume=True)


# Wrong and unusual input

BAD = [
    ({"target_length": TRAINED}, "target_length=128 is not beyond the 128 tokens"),
    ({"target_length": "2k"}, "target_length='2k' is not valid.*whole number"),
    ({"target_length": 4096}, "only 1 windows of 4096 tokens, and samples=4"),
    ({"samples": 400}, "samples=400 are needed for each of two halves; give more text"),
    ({"samples": 3}, "samples=3 is not valid.*at least 4"),
    ({"prompts": 15}, "prompts=15 is not valid; it must be 0 or at least 16"),
    ({"text": 10 * DOCUMENTS[:1], "samples": 5}, r"\d\d% of the text is repeated .*at most 20%"),
    ({"scored": TARGET}, "scored=256 is not valid; it must be below target_length=256"),
    ({"cost": -0.1}, "cost=-0.1 is not valid"),
    ({"cost": "2%"}, "cost='2%' is not valid"),
    ({"seed": -1}, "seed=-1 is not valid"),
    ({"methods": "yarm"}, "unknown method 'yarm'; did you mean 'yarn'"),
    ({"methods": []}, "no method is given"),
    ({"methods": ["yarn", 3]}, "methods=3 is not valid"),
    ({"methods": ["yarn", "yarn"]}, "yarn is given twice"),
    ({"methods": "longrope"}, "longrope needs long_factor"),
    ({"methods": rope_ext.YaRN(factor=1.5)}, "reaches 192 tokens.*give it factor=2"),
    (
        {"options": "windw", "methods": "rerope"},
        "cannot tune 'windw'.*mean 'window'",
    ),
    ({"options": []}, "options=\\[\\] is not valid"),
    ({"text": []}, "documents that are strings"),
    ({"text": "no/such/file.txt"}, "cannot read the text no/such/file.txt"),
    ({"resume": True}, "resume=True needs output=FOLDER"),
    ({"sliding_layers": "none"}, "sliding_layers='none' is not valid"),
]


@pytest.mark.parametrize(("changed", "message"), BAD, ids=lambda each: str(each)[:60])
def test_bad_input_is_told_before_any_forward(model, tokenizer, changed, message) -> None:
    ran = []
    model.model.layers[0].register_forward_pre_hook(lambda *args: ran.append(args))
    with pytest.raises(rope_ext.RopeExtError, match=message):
        found(model, tokenizer, **changed)
    assert rope_ext.describe(model).method is None
    assert not ran or "rerope" in str(changed)  # position methods are proven with the weights


def test_a_method_without_anything_to_find_is_refused(model, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(rope_ext.YaRN, "grids", lambda self, rope: {})
    with pytest.raises(rope_ext.OptionError, match="yarn has no options to calibrate"):
        found(model, tokenizer, options=None)


def test_a_patched_model_is_refused_and_stays_patched(model, tokenizer) -> None:
    rope_ext.patch(model, "yarn", factor=2)
    with pytest.raises(rope_ext.AlreadyPatchedError, match="unpatch"):
        found(model, tokenizer)
    assert rope_ext.describe(model).method == "yarn"


def test_a_model_without_finite_losses_is_told(model, tokenizer) -> None:
    with torch.no_grad():
        model.model.norm.weight.fill_(float("inf"))
    with pytest.raises(rope_ext.MeasureError, match="loss is NaN or infinite at 256 tokens under"):
        found(model, tokenizer)
    assert rope_ext.describe(model).method is None


def test_any_target_and_a_tokenizer_without_a_first_token(model, checkpoint, monkeypatch) -> None:
    pretend(monkeypatch, lambda a, i: 2 + (a - 1.2) ** 2 + i)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.bos_token = tokenizer.eos_token = None
    tokenizer.backend_tokenizer.post_processor = None
    assert tokenizer("a")["input_ids"][0] != 0
    result = found(model, tokenizer, target_length=201)
    assert result.method.factor == 1.58 and result.target_length == 201
    rope_ext.patch(model, result.method)


@pytest.mark.parametrize("attention", [pytest.param("eager", marks=pytest.mark.slow), "sdpa"])
def test_position_methods_are_calibrated_under_any_attention(
    checkpoint, tokenizer, attention: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation=attention).eval()
    result = found(model, tokenizer, methods="self_extend", options="window")
    assert {trial.method.window for trial in result.best.tried} >= {None, 16, 48}
    assert model.config._attn_implementation == attention


@pytest.mark.slow  # torch.compile is imported
def test_a_compiled_model_runs_without_its_graphs(model, tokenizer) -> None:
    def backend(graph, inputs):
        raise AssertionError("compiled")

    compiled = torch.compile(model, backend=backend)
    assert found(compiled, tokenizer) == found(model, tokenizer)


def test_prompts_that_do_not_fit_into_the_trained_length_are_left_out(checkpoint, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    given = {"original_max_position_embeddings": 24, "target_length": 48, **ASKED}
    result = found(model, tokenizer, **given)
    assert "no prompt fits into the 24 trained tokens (the shortest has" in result.notes[-1]


# The command


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


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--methods", "yarm"], "Methods: yarn,"),
        (["--text", "no/such.txt"], "cannot read the text no/such.txt"),
        (["--length", "64"], "is not beyond the 128 tokens"),
        (["--length", "much"], "--length 'much' is not"),
        (["--options", "beta"], "its options are attention_factor, beta_slow"),
    ],
    ids=str,
)
def test_wrong_words_are_one_line(checkpoint, tmp_path, more: list[str], message: str) -> None:
    words = ["calibrate", "--model", str(checkpoint), "--length", str(TARGET)]
    result = CliRunner().invoke(app, [*words, "--output", str(tmp_path / "out"), *more])
    assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output
    assert message in result.stderr
    assert not (tmp_path / "out" / "calibration.jsonl").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), ("{", "not what a calibration found"), ('{"calibration": 9}', "is 9")],
)
def test_a_file_that_is_none_is_told(tmp_path, content: str | None, message: str) -> None:
    path = tmp_path / "calibration.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(rope_ext.MeasureError, match=message):
        rope_ext.Calibration.load(path)


@pytest.mark.slow
def test_a_killed_process_goes_on_with_resume(checkpoint, tmp_path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": each}) + "\n" for each in DOCUMENTS))
    words = ["calibrate", "--model", str(checkpoint), "--length", str(TARGET), "--text", str(text)]
    words += ["--samples", "4", "--methods", "yarn,self_extend", "--output"]
    assert CliRunner().invoke(app, [*words, str(tmp_path / "whole")]).exit_code == 0
    kill_beyond(8000, [*words, str(tmp_path / "part")])
    assert (tmp_path / "part" / "calibration.jsonl").stat().st_size == 8000
    more = [*words, str(tmp_path / "part"), "--resume"]
    assert CliRunner().invoke(app, more).exit_code == 0
    for name in ("calibration.jsonl", "calibration.json"):
        ends = [(tmp_path / folder / name).read_bytes() for folder in ("whole", "part")]
        assert ends[0] == ends[1]


# Advice


def test_advice_puts_first_what_was_calibrated_and_else_says_how(
    model, tokenizer, checkpoint, tmp_path, monkeypatch
) -> None:
    pretend(monkeypatch, lambda a, i: 2 + (a - 1.26) ** 2 + i)
    result = found(model, tokenizer, tmp_path / "found")
    plain = rope_ext.recommend(model, TARGET)
    assert f"rope-ext calibrate --model MODEL --length {TARGET} --methods rerope" in str(plain)
    for given in (result, tmp_path / "found", str(tmp_path / "found" / "calibration.json")):
        advice = rope_ext.recommend(model, TARGET, calibration=given)
        assert advice.method == result.method and result.sentence in advice.reasons[0]
        assert "rope-ext calibrate" not in str(advice) and advice.alternatives
    assert rope_ext.recommend(model, TARGET, True, result) == rope_ext.recommend(
        model, TARGET, True
    )
    for changed, message in (
        ({"model": "Other"}, "of Other with 128 trained tokens, and this is LlamaModel with 128"),
        ({"target_length": 200}, "for 200 tokens, and target_length=256"),
    ):
        other = dataclasses.replace(result, **changed)
        with pytest.raises(rope_ext.OptionError, match=message):
            rope_ext.recommend(model, TARGET, calibration=other)
    with pytest.raises(rope_ext.MeasureError, match="cannot read the calibration"):
        rope_ext.recommend(model, TARGET, calibration=tmp_path / "none.json")
    with pytest.raises(rope_ext.OptionError, match="calibration=3 is not valid"):
        rope_ext.recommend(model, TARGET, calibration=3)

    folder = tmp_path / "model"  # one beside the weights is found; what does not fit is not
    shutil.copytree(checkpoint, folder)
    (folder / "calibration.json").write_text(result.to_json())
    words = ["recommend", str(folder), "--length", str(TARGET)]
    printed = CliRunner().invoke(app, words)
    assert printed.exit_code == 0 and result.call in printed.stdout
    assert rope_ext.recommend(folder, 2 * TARGET).method.name == "rerope"
    (folder / "calibration.json").write_text("{}")
    assert rope_ext.recommend(folder, TARGET).method.name == "rerope"
    words += ["--calibration", str(tmp_path / "found")]
    assert result.call in CliRunner().invoke(app, words).stdout
