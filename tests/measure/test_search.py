"""The search for LongRoPE's table, and the start tokens that it may leave alone."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import rope_ext
from rope_eval.data.prompts import beginning
from rope_eval.data.text import python_library
from rope_eval.forward import score
from rope_eval.reports.intervals import mean_interval
from rope_eval.tasks.perplexity import choose_windows
from rope_eval.tune import fitness
from rope_eval.tune import search as module
from rope_eval.tune.fitness import Scores
from rope_eval.tune.options import SearchOptions
from rope_eval.tune.search import Candidate, Space, evolve
from rope_ext.cli import app
from rope_ext.config.record import method_to_json
from tests.helpers.checkpoint import TRAINED, stopping, written
from tests.helpers.models import tiny_llama
from tests.helpers.positions import EXACT, decoded, logits

BOX = Path(__file__).parents[2] / "checkpoints" / "tiny-512"
TARGET = 2 * TRAINED
DOCUMENTS = [written(80, i) for i in range(4)]
KNOWN = 14  # methods that are measured before any table, YaRN with five ramps and five temperatures
SMALL = {"population": 8, **{"samples": 2, "validation_samples": 0, "prompts": 0}}


def test_evolution_approaches_the_best_table() -> None:
    goal = torch.linspace(100, 400, 16)
    tried: list[Candidate] = []

    def loss(one: Candidate) -> float:
        tried.append(one)
        return float((torch.tensor(one.table) - goal).square().mean().sqrt()) + abs(one.start - 4)

    first = [Candidate((100,) * 16, 0), Candidate((400,) * 16, 0)]
    sizes = {"population": 64, "iterations": 20, "seed": 0}
    evolve(first, Space(500, (0, 4, 8)), loss, **sizes)
    assert tried[:2] == first and len(tried) == 64 * 21
    # The first are 173 away; a random walk does not come near.
    best = min(list(tried), key=loss)
    assert loss(best) < 20 and best.start == 4

    def full(one: Candidate) -> float:
        raise rope_ext.MeasureError("no space left")

    with pytest.raises(rope_ext.MeasureError, match="no space left"):
        evolve(first, Space(500, (0,)), full, **sizes)


def found(model, tokenizer, output: Path | None = None, iterations: int = 2, **changed):
    options = {**SMALL, "output": output, "iterations": iterations, **changed}
    return rope_ext.search(model, tokenizer, TARGET, DOCUMENTS, **options)


def log(output: Path, sample: str = "ranking") -> list[dict]:
    lines = output.with_suffix(".jsonl").read_text().splitlines()[1:]
    return [line for line in map(json.loads, lines) if line["method"] and line["sample"] == sample]


def loss_of(line: dict) -> float:
    return Scores.from_json(line["scores"]).loss


@pytest.mark.slow
def test_a_search_is_seeded_ascends_and_beats_what_it_began_with(model, tokenizer, tmp_path):
    output = tmp_path / "new" / "found.json"
    method = found(model, tokenizer, output, iterations=5)
    assert method == found(model, tokenizer, iterations=5)
    assert method != found(model, tokenizer, seed=1)
    assert method.factor == 2 and method.start_tokens == 0
    assert all(a <= b for a, b in pairwise((1.0, *method.long_factor, 2.5)))
    assert rope_ext.LongRoPE(**json.loads(output.read_text())) == method

    tried = log(output)
    names = ["pi", "ntk", "yarn", "mrrope", "longrope2"]
    assert [line["method"]["name"] for line in tried[:KNOWN]] == names + 9 * ["yarn"]
    given = [line["method"]["attention_factor"] for line in tried[:KNOWN]]
    assert given == 9 * [None] + [1.0, 1.1, 1.2, 1.3, 1.4]
    # Candidates that stand for one and the same table are measured once.
    assert KNOWN + 8 + 4 * 8 < len(tried) <= KNOWN + 8 + 5 * 8
    losses = {
        (tuple(x["method"]["long_factor"]), x["method"]["attention_factor"]): loss_of(x)
        for x in tried[KNOWN:]
    }
    begun = [loss_of(x) for x in tried[KNOWN : KNOWN + 5]]
    best = method.long_factor, method.attention_factor
    assert losses[best] == min(losses.values()) < min(begun)
    assert len({scale for _, scale in losses}) > 2
    # What YaRN divides by, in hundredths: 16 pairs, see tests/methods for its ramp.
    site = rope_ext.describe(rope_ext.patch(model, "yarn", factor=2)).sites[0]
    both = zip(site.inv_freq_before, site.inv_freq_after, strict=True)
    assert tried[KNOWN + 2]["method"]["long_factor"] == [round(a / b, 2) for a, b in both]


def test_a_table_that_is_best_for_text_and_finds_nothing_is_not_found(
    model, tokenizer, monkeypatch
) -> None:
    """Text is best at an attention factor of 1, and answers are found from 1.2 on."""

    def factor(model) -> float:
        return model.model.rotary_emb.attention_scaling

    def of_text(model, windows, scored, advance):
        return [2 + 0.1 * factor(model)] * len(windows)

    def of_answers(model, prompts, advance):
        hit = factor(model) >= 1.2 or rope_ext.describe(model).method is None
        return [(0.1 if hit else 3.0, hit)] * len(prompts)

    monkeypatch.setattr(fitness, "losses_at_end", of_text)
    monkeypatch.setattr(fitness, "losses_of_answers", of_answers)
    by_default = {"population": 40, "prompts": SearchOptions(target_length=TARGET).prompts}
    assert found(model, tokenizer, **by_default).attention_factor == 1.2
    assert found(model, tokenizer, prompts=0).attention_factor == 1.0


def test_other_windows_decide_between_the_best(model, tokenizer, tmp_path, monkeypatch) -> None:
    """What is best on the windows of the search is worst on the others, and so is not kept."""

    def of_text(model, windows, scored, advance):
        sign = -1 if len(windows) == SMALL["samples"] else 1
        return [2 + sign * 0.1 * model.model.rotary_emb.attention_scaling] * len(windows)

    monkeypatch.setattr(fitness, "losses_at_end", of_text)
    output = tmp_path / "found.json"
    method = found(model, tokenizer, output, validation_samples=4)
    ranked, decided = log(output), log(output, "validation")
    first = min(ranked[KNOWN:], key=loss_of)["method"]
    assert method_to_json(method) == min(decided, key=loss_of)["method"] != first
    assert first in [line["method"] for line in decided if loss_of(line) > loss_of(decided[0])]
    assert rope_ext.LongRoPE(**json.loads(output.read_text())) == method


def trial(text: np.ndarray, answers: np.ndarray) -> Scores:
    return Scores(tuple(text.tolist()), (), tuple(answers.tolist()), ())


def test_a_finalist_replaces_yarn_only_if_it_is_better_beyond_noise_and_worse_in_nothing() -> None:
    random = np.random.default_rng(0)
    text, answers = random.normal(2, 1, 8), random.normal(1, 0.5, 32)

    def kept(of_text: float, of_answers: float, noise: float = 0.01) -> bool:
        one, two = (
            values + change + random.normal(0, noise, len(values))
            for values, change in ((text, of_text), (answers, of_answers))
        )
        return module.validated({"yarn": trial(text, answers), "other": trial(one, two)}) == "yarn"

    assert not kept(-0.1, -0.1)
    assert kept(0.1, -1)  # better in sum, worse for the text
    assert kept(-1, 0.1)
    assert kept(-0.1, -0.1, noise=1)  # cannot tell
    assert np.mean([kept(0, 0) for _ in range(400)]) > 0.98
    lost = {"yarn": trial(text + np.inf, answers), "other": trial(text, answers)}
    assert module.validated(lost) == "other"


def test_answers_alone_need_prompts_that_count(model, tokenizer) -> None:
    with pytest.raises(rope_ext.MeasureError, match="scored=0 leaves out the text"):
        found(model, tokenizer, prompts=16, scored=0)


def test_a_search_that_is_killed_goes_on_as_if_it_had_not_been(
    model, tokenizer, tmp_path, monkeypatch
) -> None:
    whole, part = tmp_path / "whole.json", tmp_path / "part.json"
    method = found(model, tokenizer, whole)

    with monkeypatch.context() as patch:
        ran = stopping(patch, model, 27)  # at the 26th table, beyond the first population
        with pytest.raises(KeyboardInterrupt):
            found(model, tokenizer, part)
        assert rope_ext.describe(model).method is None
        assert len(log(part)) == 25 and part.exists()
        path = part.with_suffix(".jsonl")
        path.write_bytes(path.read_bytes()[:-10])  # and its last line is cut short
        assert found(model, tokenizer, part) == method
        # One tells the model; 24 are known.
        assert len(ran) == 27 + 1 + (len(log(whole)) - 24)
    for suffix in (".json", ".jsonl"):
        assert part.with_suffix(suffix).read_bytes() == whole.with_suffix(suffix).read_bytes()


def test_tables_with_start_tokens_are_not_exported(model, tokenizer) -> None:
    method = found(model, tokenizer, iterations=1, start_tokens=(4,))
    assert method.start_tokens == 4
    rope_ext.patch(model, method)
    with pytest.raises(rope_ext.ExportError, match="patch with start_tokens=0"):
        rope_ext.export(model, "vllm")


BAD = [
    ({"target_length": TRAINED}, "target_length=128 is not beyond the 128 trained tokens"),
    ({"target_length": 4096}, "a window of 4096 is to be measured"),
    ({"scored": "needles", "prompts": 16}, "scored='needles' is not valid"),
    ({"scored": 0}, "^scored=0 and prompts=0 leave nothing"),
    ({"validation_samples": 3}, "^validation_samples=3 is not valid"),
    ({"text": 10 * DOCUMENTS[:1], "samples": 5}, r"\d\d% of the text is repeated"),
    ({"iterations": 1.5}, "iterations=1.5 is not valid"),
    ({"start_tokens": (0, -1)}, "start_tokens=.* is not valid"),
    ({"text": "no/such/file.txt"}, "cannot read the text no/such/file.txt"),
]


@pytest.mark.parametrize(("changed", "message"), BAD, ids=lambda each: str(each)[:60])
def test_bad_input_is_told_before_any_forward(model, tokenizer, changed, message) -> None:
    model.model.layers[0].register_forward_hook(lambda *args: pytest.fail("the model was run"))
    options = {"text": DOCUMENTS, "target_length": TARGET, **SMALL, **changed}
    text, target = options.pop("text"), options.pop("target_length")
    with pytest.raises(rope_ext.RopeExtError, match=message):
        rope_ext.search(model, tokenizer, target, text, **options)
    assert rope_ext.describe(model).method is None


@pytest.mark.slow
def test_the_command_searches_prints_and_goes_on(checkpoint, tmp_path) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "found.json"
    text.write_text("\n".join(written(80, i) for i in range(8)))
    words = ["search", str(checkpoint), "--length", str(TARGET), "--output", str(output)]
    words += ["--text", str(text), "--population", "8"]
    words += ["--samples", "2", "--iterations", "1", "--prompts", "0"]
    words += ["--validation-samples", "4"]
    words += ["--trained-length", "100"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    tried = log(output)
    best = min(loss_of(x) for x in tried if x["method"]["name"] == "longrope")
    assert (
        f"longrope  {math.exp(best):>8.4g}, best of {len(tried) - KNOWN} tables\n" in result.stdout
    )
    yarn = [loss_of(x) for x in tried if x["method"]["name"] == "yarn"]
    assert f"yarn      {math.exp(min(yarn)):>8.4g}, best of 10 settings\n" in result.stdout
    assert result.stdout.count("\n  yarn") == 1 and "passkeys" not in result.stdout
    before = output.with_suffix(".jsonl").read_bytes()
    again = CliRunner().invoke(app, words)  # all is known
    assert again.stdout == result.stdout
    assert output.with_suffix(".jsonl").read_bytes() == before

    # The calls that it prints work as they are.
    [compare] = [x for x in result.stderr.splitlines() if x.startswith("next: rope-ext compare")]
    told = [*compare.split()[2:], "--output", str(tmp_path / "out"), "--trials", "1"]
    told += ["--depths", "1", "--windows", "2", "--text", str(text)]
    result = CliRunner().invoke(app, told)
    assert result.exit_code == 0, result.output
    systems = json.loads((tmp_path / "out" / "results.json").read_text())["systems"]
    options = json.loads(output.read_text())
    assert [s["options"] for s in systems if s["method"] == "longrope"] == [options]
    assert "--trained-length 100" in compare
    assert ", original_max_position_embeddings=100)" in again.stdout
    result = CliRunner().invoke(app, [*words, "--seed", "1"])
    assert result.exit_code == 2 and "is of another search" in result.stderr


@pytest.mark.slow
def test_the_table_in_the_box_beats_yarn_on_text_that_it_was_not_searched_on() -> None:
    """All tokens of one window of every held-out file that is long enough."""
    model = AutoModelForCausalLM.from_pretrained(BOX, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(BOX)
    ids = tokenizer(python_library("held_out"), add_special_tokens=False, verbose=False)
    documents = [document for document in ids["input_ids"] if len(document) >= 2047]
    windows = choose_windows(documents, [2048], len(documents), beginning(tokenizer), None, seed=0)
    options = json.loads((BOX / "longrope_2048.json").read_text())
    losses = []
    for name, values in (("longrope", options), ("yarn", {"factor": 4})):
        with rope_ext.patched(model, name, **values):
            rows = [score(model, [row], 2047)[0] for row in windows.at(2048)]
        losses.append(torch.cat(rows).double().mean(1))
    low, high = mean_interval((losses[0] - losses[1]).tolist())
    assert low < high < 0


# Start tokens

TABLE = [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 4.0, 4.0]
START = {"factor": 4, "long_factor": TABLE}


@pytest.mark.parametrize("precise", [False, True])
def test_start_tokens_keep_their_angles_and_later_ones_get_the_new(ids, precise: bool) -> None:
    model = tiny_llama()
    first = (torch.arange(ids.shape[1]) < 7).unsqueeze(-1)

    def angles(start: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        seen, more = [], {"attention_factor": 1.25, "precise": precise, **START}
        patched = rope_ext.patched(model, "longrope", start_tokens=start or 0, **more)
        with nullcontext() if start is None else patched:
            rotary = model.model.rotary_emb
            handle = rotary.register_forward_hook(lambda *call: seen.append(call[-1]))
            logits(model, ids, use_cache=False)
            handle.remove()
        return seen[0]

    both = zip(angles(7), angles(None), angles(0), strict=True)
    for made, trained, new in both:  # cosine, then sine
        # float32 angles up to 160 rad are good to 2e-5
        expected = torch.where(first, 1.25 * trained, new)
        torch.testing.assert_close(made.expand_as(expected), expected, atol=5e-5, rtol=0)
    assert (angles(7)[0] - angles(0)[0]).abs().max() > 0.1


def test_start_tokens_decode_as_they_are_recomputed(ids) -> None:
    model = rope_ext.patch(tiny_llama(), rope_ext.LongRoPE(start_tokens=20, **START))
    whole = logits(model, ids, use_cache=False)
    torch.testing.assert_close(decoded(model, ids, [150] + [1] * 10), whole, **EXACT)
