"""The checkpoints in the box: load plainly, retrieve within their length, break beyond it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_ext
from rope_eval.data.prompts import beginning
from rope_eval.data.text import python_library, read_texts
from rope_eval.forward import score
from rope_eval.tasks.passkey import PasskeyPrompts
from rope_eval.tasks.perplexity import choose_windows

FOLDER = Path(__file__).parents[1] / "checkpoints"
NAMES = ["tiny-512", "tiny-bytes-512"]
LENGTH = 512  # of both
MENDED_BY = {  # and how many of five passkeys at least; the second one asks for a temperature
    "tiny-512": (rope_ext.YaRN(factor=4), 5),
    "tiny-bytes-512": (rope_ext.SelfExtend(factor=4, attention_factor=1.2), 4),
}


@pytest.fixture(scope="module", params=[NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.slow)])
def path(request) -> Path:
    return FOLDER / request.param


@pytest.fixture(scope="module")
def tokenizer(path):
    return AutoTokenizer.from_pretrained(path)


@pytest.fixture
def model(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def documents(path, tokenizer) -> list[list[int]]:
    """Text that it was not trained on, as tokens."""
    shipped = path / "held_out.jsonl"
    texts = read_texts([shipped]) if shipped.exists() else python_library("held_out")
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def found(model, tokenizer, length: int, trials: int) -> int:
    prompts = PasskeyPrompts(tokenizer)
    cases = [prompts.forward_case(length, (i + 0.5) / trials, seed=i) for i in range(trials)]
    _, hits = score(model, [case.ids for case in cases], cases[0].count)
    return int(hits.all(1).sum())


def losses(model, tokenizer, documents, length: int) -> float:
    windows = choose_windows(documents, [LENGTH, 4 * LENGTH], 2, beginning(tokenizer), None, seed=0)
    return float(score(model, windows.at(length), windows.scored)[0].mean())


def test_it_finds_the_passkey_within_its_length(model, tokenizer) -> None:
    shortest = 128 if PasskeyPrompts(tokenizer).minimum_length() < 128 else 280
    hits = [found(model, tokenizer, length, 10) for length in (shortest, 400, LENGTH)]
    assert min(hits) >= 9 and sum(hits) >= 28


@pytest.mark.slow
def test_beyond_its_length_it_breaks_and_a_patch_mends_it(
    model, tokenizer, documents, path
) -> None:
    method, least = MENDED_BY[path.name]
    assert found(model, tokenizer, 4 * LENGTH, 5) <= 2
    broken = losses(model, tokenizer, documents, 4 * LENGTH)
    rope_ext.patch(model, method)
    assert found(model, tokenizer, 4 * LENGTH, 5) >= least
    mended = losses(model, tokenizer, documents, 4 * LENGTH)
    rope_ext.unpatch(model)
    assert broken - losses(model, tokenizer, documents, LENGTH) > 0.5  # nats per token
    assert broken - mended > 0.5


def test_generation_writes_the_key_that_teacher_forcing_predicts(model, tokenizer, path) -> None:
    rope_ext.patch(model, MENDED_BY[path.name][0])
    case = PasskeyPrompts(tokenizer).case(768, 0.1, seed=3)
    prompt = torch.tensor([case.ids.tolist()])
    out = model.generate(prompt, max_new_tokens=case.count, do_sample=False)
    assert tokenizer.decode(out[0, prompt.shape[1] :]) == case.key
