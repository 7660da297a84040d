"""Intervals, perplexity, passkey and the run: against naive computations and real decoding."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint import TRAINED, save_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import rope_ext
from rope_ext.errors import MeasureError
from rope_ext.measure import compare
from rope_ext.measure.cells import Cell, read_cells
from rope_ext.measure.compare import Settings, prepare, run
from rope_ext.measure.intervals import bootstrap_mean, wilson
from rope_ext.measure.passkey import passed, passkey_grid
from rope_ext.measure.perplexity import choose_windows, window_losses
from rope_ext.measure.report import Report
from rope_ext.measure.summary import Scores, estimate_perplexity, number, recommend
from rope_ext.measure.text import read_texts


def no_progress(work: float) -> None:
    pass


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tiny(checkpoint: Path) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(checkpoint).eval()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two long documents and one too short for any window."""
    path = tmp_path_factory.mktemp("text") / "documents.jsonl"
    words = [
        " ".join(f"word{i * k % 97}" for i in range(n)) for k, n in ((3, 400), (5, 400), (7, 9))
    ]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in words))
    return path


@pytest.fixture
def settings(checkpoint: Path, text: Path, tmp_path: Path) -> Settings:
    return Settings(
        model=str(checkpoint),
        methods=("yarn", "dynamic-ntk"),
        lengths=(256, 128),
        texts=(text,),
        windows=3,
        trials=2,
        depths=2,
        output=tmp_path / "results",
    )


# Intervals


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (8, 10, 0.4902, 0.9433),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, Statistics in Medicine 17, table I
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_published_values(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)


def test_wilson_refuses_impossible_counts() -> None:
    for successes, trials in ((0, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="no rate"):
            wilson(successes, trials)


def test_bootstrap() -> None:
    values = torch.randn(200, generator=torch.Generator().manual_seed(0)).tolist()
    low, high = bootstrap_mean(values, seed=1)
    assert (low, high) == bootstrap_mean(values, seed=1) != bootstrap_mean(values, seed=2)
    mean = sum(values) / 200
    error = torch.tensor(values).std().item() / math.sqrt(200)
    # Of so many values the mean is normal: 1.96 standard errors to either side.
    assert (mean - low) / error == pytest.approx(1.96, abs=0.15)
    assert (high - mean) / error == pytest.approx(1.96, abs=0.15)
    assert bootstrap_mean([2.5], seed=0) == (2.5, 2.5)


# Perplexity


def documents(*sizes: int) -> list[list[int]]:
    """Token k of document d is 1000 d + k."""
    return [list(range(1000 * d, 1000 * d + size)) for d, size in enumerate(sizes, 1)]


def test_windows_end_at_the_same_place_and_score_the_same_tokens() -> None:
    windows = choose_windows(documents(500, 700), [64, 200, 130], 4, bos=0, eos=1, seed=0)
    assert windows.scored == 32 and not windows.joined and len(windows.texts) == 4
    for length in (64, 130, 200):
        for ids, longest in zip(windows.at(length), windows.at(200), strict=True):
            assert len(ids) == length and ids[0] == 0 and ids.count(0) == 1
            assert ids[1:] == longest[-length + 1 :]
            assert {token // 1000 for token in ids[1:]} in ({1}, {2})
    tokens = [token for text in windows.texts for token in text]
    assert len(tokens) == len(set(tokens))  # no overlap
    assert {text[0] // 1000 for text in windows.texts[:2]} == {1, 2}  # every document first


def test_windows_without_bos_and_with_many_scored_tokens() -> None:
    windows = choose_windows(documents(900), [600, 800], 1, bos=None, eos=None, seed=0)
    assert windows.scored == 256
    assert windows.at(800) == list(windows.texts) and len(windows.texts[0]) == 800


def test_windows_join_short_documents() -> None:
    windows = choose_windows(documents(60, 50, 50), [40, 80], 2, bos=None, eos=1, seed=3)
    stream = [*range(1000, 1060), 1, *range(2000, 2050), 1, *range(3000, 3050), 1]
    assert windows.joined and len(windows.texts) == 2
    for ids in windows.texts:
        assert list(ids) == stream[stream.index(ids[0]) :][:80]
    with pytest.raises(MeasureError, match=r"has 160 tokens.*give a longer --text"):
        choose_windows(documents(60, 50, 50), [40, 300], 2, bos=None, eos=1, seed=0)


@pytest.mark.parametrize("method", [None, "yarn", "dynamic_ntk"])
@pytest.mark.parametrize("batch_tokens", [1, 1000])
def test_losses_equal_a_naive_computation(
    tiny: LlamaForCausalLM, method: str | None, batch_tokens: int
) -> None:
    rows = torch.randint(3, 400, (3, 200), generator=torch.Generator().manual_seed(0)).tolist()
    work: list[float] = []
    seen: list[int] = []
    hook = tiny.lm_head.register_forward_hook(lambda m, args, out: seen.append(args[0].shape[1]))
    if method:
        rope_ext.patch(tiny, method, factor=4)
    try:
        losses = window_losses(tiny, rows, 50, batch_tokens, work.append)
        assert set(seen) == {51}  # logits of nothing but the scored tail
        with torch.no_grad():
            logits = tiny(input_ids=torch.tensor(rows)).logits.double()
    finally:
        hook.remove()
        if method:
            rope_ext.unpatch(tiny)
    for row, ids in enumerate(rows):
        nll = []
        for position in range(150, 200):
            scores = logits[row, position - 1]
            nll.append(float(scores.exp().sum().log() - scores[ids[position]]))
        assert losses[row] == pytest.approx(sum(nll) / 50, abs=1e-5)
    assert len(work) == (3 if batch_tokens == 1 else 1)
    estimate = estimate_perplexity(losses, seed=0)
    assert estimate.low <= estimate.value <= estimate.high
    assert estimate.value == pytest.approx(math.exp(sum(losses) / 3))


def test_a_loss_that_is_not_a_number_counts_as_infinite(tiny: LlamaForCausalLM) -> None:
    hook = tiny.lm_head.register_forward_hook(lambda module, args, out: out * math.nan)
    losses = window_losses(tiny, [range(3, 40)], 5, 100, no_progress)
    hook.remove()
    assert losses == [math.inf] and estimate_perplexity(losses, 0).high == math.inf
    cell = Cell("key", "perplexity", "yarn", 37, None, tuple(losses), 0.1)
    assert "Infinity" not in json.dumps(cell.to_json())
    assert Cell.from_json(json.loads(json.dumps(cell.to_json()))) == cell


# Passkey


@pytest.mark.parametrize("method", [None, "yarn", "dynamic_ntk"])
def test_passed_is_what_greedy_decoding_does(
    tiny: LlamaForCausalLM, checkpoint: Path, method: str | None
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tiny.generation_config.eos_token_id = None  # or a random model may stop before the last digit
    grid = passkey_grid(tokenizer, [130, 200], depths=3, trials=2, seed=0)
    cases = [case for cell in grid.values() for case in cell]
    assert len(grid) == 6 and len({case.key for case in cases}) == 12
    if method:
        rope_ext.patch(tiny, method, factor=4)
    try:
        for case in cases:
            size = case.answer_tokens
            prompt = torch.tensor([case.ids[:-size]])
            output = tiny.generate(prompt, max_new_tokens=size, do_sample=False, pad_token_id=1)
            written = tuple(output[0, -size:].tolist())
            answers = [case.ids[-size:], written, (*written[:-1], written[-1] ^ 1)]
            variants = [
                dataclasses.replace(case, ids=(*case.ids[:-size], *answer)) for answer in answers
            ]
            expected = [answer == written for answer in answers]
            assert passed(tiny, variants, 10_000, no_progress) == expected
            assert passed(tiny, variants, 1, no_progress) == expected
    finally:
        if method:
            rope_ext.unpatch(tiny)


def test_passkey_grid_depths_and_seeds(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    grid = passkey_grid(tokenizer, [150], depths=4, trials=5, seed=0)
    for (length, depth), cases in grid.items():
        assert all(depth / 4 <= case.depth < (depth + 1) / 4 for case in cases)
        assert all(len(case.ids) <= length for case in cases)
        assert all(tokenizer.decode(case.ids).count(case.key) == 3 for case in cases)
    assert grid == passkey_grid(tokenizer, [150], depths=4, trials=5, seed=0)
    assert grid != passkey_grid(tokenizer, [150], depths=4, trials=5, seed=1)


# The run


def values(cells: list[Cell]) -> list[tuple]:
    return [(c.kind, c.method, c.length, c.depth, c.values) for c in cells]


def test_run_measures_every_cell_on_the_same_data(settings: Settings, tiny: Any) -> None:
    plan = prepare(settings)
    work: list[float] = []
    cells = run(plan, work.append)
    assert sum(work) == pytest.approx(plan.work) and plan.work > 0
    assert [c.method for c in cells] == [
        m for m in ("none", "yarn", "dynamic_ntk") for _ in range(6)
    ]
    assert [(c.kind, c.length, c.depth) for c in cells[:6]] == [
        ("perplexity", 128, None),
        ("perplexity", 256, None),
        *(("passkey", length, depth) for length in (128, 256) for depth in (0, 1)),
    ]
    by_place = {(c.method, c.kind, c.length): c.values for c in cells}
    # Within the trained length dynamic NTK is the unpatched model, bit for bit; YaRN is not.
    assert by_place["dynamic_ntk", "perplexity", 128] == by_place["none", "perplexity", 128]
    assert by_place["dynamic_ntk", "perplexity", 256] != by_place["none", "perplexity", 256]
    assert by_place["yarn", "perplexity", 128] != by_place["none", "perplexity", 128]
    with rope_ext.patched(tiny, "yarn", factor=4):
        losses = window_losses(tiny, plan.windows.at(256), plan.windows.scored, 8192, work.append)
    assert by_place["yarn", "perplexity", 256] == pytest.approx(losses, abs=1e-6)
    assert list(read_cells(settings.output / "cells.jsonl").values()) == cells


def test_resume_repeats_nothing_and_changes_nothing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(prepare(settings))
    calls: list[Any] = []
    measure = compare._measure
    monkeypatch.setattr(compare, "_measure", lambda *a: calls.append(a[2]) or measure(*a))

    cut = dataclasses.replace(settings, output=settings.output / "cut", resume=True)
    with pytest.raises(KeyboardInterrupt):
        run(prepare(cut), lambda work: interrupt(len(calls) == 8))
    with (cut.output / "cells.jsonl").open("a") as log:
        log.write('{"key": "half a li')
    again = prepare(cut)
    assert len(again.left) == 18 - 7
    assert values(run(again)) == values(whole)
    assert len(calls) == 8 + 11

    monkeypatch.setattr(compare.models, "load_model", lambda *a: pytest.fail("loaded"))
    assert values(run(prepare(cut))) == values(whole)  # nothing left: not even the model
    assert len(calls) == 8 + 11

    other = prepare(dataclasses.replace(cut, seed=1))
    assert len(other.left) == 18  # another seed, other data


def test_a_seed_determines_every_number(settings: Settings) -> None:
    def numbers(**changes: Any) -> list[Any]:
        plan = prepare(dataclasses.replace(settings, **changes))
        data = Report(plan, run(plan)).to_json()
        return [data["summary"], data["recommendation"], [cell["values"] for cell in data["cells"]]]

    first = numbers()
    assert numbers(output=settings.output / "again") == first
    assert numbers(overwrite=True, seed=1) != first
    assert len(read_cells(settings.output / "cells.jsonl")) == 18  # the old ones are gone


def interrupt(now: bool) -> None:
    if now:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "change",
    [{"factor": 2.0}, {"dtype": "bfloat16"}, {"trained_length": 100}, {"windows": 2}],
    ids=str,
)
def test_what_determines_a_cell_is_in_its_key(settings: Settings, change: dict) -> None:
    plan, other = prepare(settings), prepare(dataclasses.replace(settings, **change))
    keys = {task.key for task in plan.tasks}
    assert len(keys) == len(plan.tasks)
    kept = [task for task in other.tasks if task.key in keys]
    if "factor" in change:
        assert {task.method for task in kept} == {"none"}
    elif "windows" in change:
        assert {task.kind for task in kept} == {"passkey"}
    else:
        assert not kept


def test_new_weights_are_another_model(settings: Settings, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "copy")
    settings = dataclasses.replace(settings, model=str(folder))
    before = prepare(settings)
    (folder / "model.safetensors").touch()
    assert not {t.key for t in before.tasks} & {t.key for t in prepare(settings).tasks}


def test_notes(settings: Settings) -> None:
    plan = prepare(dataclasses.replace(settings, lengths=(128, 600), windows=9))
    far, joined, few = plan.notes
    assert far.startswith(f"600 tokens: beyond factor 4 x the trained {TRAINED} tokens = 512")
    assert "documents are joined" in joined and "(9 asked for)" in few


def test_read_texts(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.md", tmp_path / "b.jsonl"
    plain.write_text("one\ntwo")
    lines.write_text('{"text": "three\u2028four"}\n\n{"text": "five", "id": 1}\n')
    assert read_texts([plain, lines]) == ["one\ntwo", "three\u2028four", "five"]
    for content, message in (("  \n", "is empty"), ('{"texts": 1}', "line 1: expected")):
        lines.write_text(content)
        with pytest.raises(MeasureError, match=message):
            read_texts([lines])
    plain.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MeasureError, match="not UTF-8"):
        read_texts([plain])


# The recommendation


def scores(within: list[float], beyond: list[float], passes: int) -> Scores:
    """One length within and one beyond the trained one; ``passes`` of 20 passkeys beyond."""
    trials = [1] * passes + [0] * (20 - passes)
    return Scores({512: within, 1024: beyond}, {(512, 0): [1] * 20, (1024, 0): trials})


EASY = [1.0, 2.0, 3.0, 1.5, 2.5, 2.0]


def shifted(by: float) -> list[float]:
    """Harder by about ``by`` in every window, which says much although windows differ more."""
    return [loss + by * (1 + 0.1 * (i % 2)) for i, loss in enumerate(EASY)]


def test_recommend_by_perplexity() -> None:
    measured = {
        "none": scores(EASY, shifted(2.0), 0),
        "good": scores(EASY, shifted(0.0), 1),
        "same": scores(EASY, [x + 0.01 * (-1) ** i for i, x in enumerate(EASY)], 0),
        "fair": scores(shifted(0.01), shifted(0.1), 0),
        "dear": scores(shifted(0.1), shifted(-0.5), 20),
    }
    sentence = recommend(measured, 512, seed=0)
    assert sentence.startswith(
        "good is recommended, not clearly better in perplexity than same (7."
    )
    assert "its perplexity is 7.39 (unpatched 60." in sentence
    assert "finds 5% [1, 24] of the passkeys (unpatched 0% [0, 16])" in sentence
    assert sentence.endswith(
        "it costs +0.0% perplexity; left out, since they cost more than 5% there: dear."
    )
    assert recommend(measured, 512, seed=0) == sentence


def test_recommend_by_passkey() -> None:
    measured = {
        "none": scores(EASY, shifted(2.0), 0),
        "smooth": scores(EASY, shifted(-0.1), 2),
        "finder": scores(shifted(0.02), shifted(0.3), 19),
        "second": scores(EASY, shifted(0.4), 18),
    }
    sentence = recommend(measured, 512, seed=0)
    assert sentence.startswith("finder is recommended, clearly better at passkeys than smooth:")
    assert "at 512 tokens it costs +2.1% perplexity." in sentence


def test_recommend_nothing() -> None:
    none = scores(EASY, shifted(0.5), 3)
    worse = {"none": none, "a": scores(EASY, shifted(0.6), 3), "b": scores(EASY, shifted(0.9), 0)}
    assert recommend(worse, 512, 0).startswith(
        "No method clearly beats the unpatched model; the best of them is a: beyond 512 tokens"
    )
    blind = {"none": scores(EASY, shifted(2.0), 20), "a": scores(EASY, shifted(0.0), 0)}
    assert recommend(blind, 512, 0).startswith("No method clearly beats the unpatched model")
    dear = {"none": none, "a": scores(shifted(0.2), EASY, 20), "b": scores(shifted(0.1), EASY, 20)}
    assert recommend(dear, 512, 0).startswith("No method is recommended: each raises perplexity at")
    assert "b by the least (+11.1%)" in recommend(dear, 512, 0)
    assert "was not measured" in recommend(worse, 256, 0)
    assert recommend(worse, 2048, 0).startswith("No recommendation: no length beyond")
    broken = {"none": none, "a": scores(EASY, [math.inf] * 6, 0)}
    assert recommend(broken, 512, 0).startswith("No method clearly beats the unpatched model")
    broken = {"none": scores(EASY, [math.inf] * 6, 0), "a": scores(EASY, EASY, 0)}
    assert recommend(broken, 512, 0).startswith("a is recommended: beyond 512 tokens")


def test_number() -> None:
    shown = [number(x) for x in (1.0, 9.999, 12.345, 99.96, 123.4, 51234.2, 3e7, math.inf)]
    assert shown == ["1.00", "10.00", "12.3", "100.0", "123", "51234", "3.00e+07", "inf"]
