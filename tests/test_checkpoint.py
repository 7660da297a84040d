"""The checkpoint in the box: loads plainly, retrieves within its length, breaks beyond it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_ext
from rope_ext.measure.forward import score
from rope_ext.measure.prompts import beginning
from rope_ext.measure.tasks.passkey import PasskeyPrompts
from rope_ext.measure.tasks.perplexity import choose_windows
from rope_ext.measure.text import python_library

PATH = Path(__file__).parents[1] / "checkpoints" / "tiny-512"
LENGTH = 512


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(PATH)


@pytest.fixture
def model():
    return AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32).eval()


def found(model, tokenizer, length: int, trials: int) -> int:
    prompts = PasskeyPrompts(tokenizer)
    cases = [prompts.case(length, (i + 0.5) / trials, seed=i) for i in range(trials)]
    _, hits = score(model, [case.ids for case in cases], cases[0].count)
    return int(hits.all(1).sum())


def losses(model, tokenizer, length: int) -> float:
    documents = tokenizer(python_library("held_out"), add_special_tokens=False, verbose=False)
    windows = choose_windows(
        documents["input_ids"], [LENGTH, 4 * LENGTH], 4, beginning(tokenizer), None, seed=0
    )
    return float(score(model, windows.at(length), windows.scored)[0].mean())


def test_it_is_small_and_knows_its_length(model, tokenizer) -> None:
    assert (PATH / "model.safetensors").stat().st_size < 10_000_000
    assert model.config.max_position_embeddings == LENGTH == tokenizer.model_max_length


def test_digits_are_tokens_of_their_own(tokenizer) -> None:
    ids = tokenizer("x = 90210", add_special_tokens=False)["input_ids"]
    assert [tokenizer.decode([token]) for token in ids[-5:]] == list("90210")
    assert tokenizer.decode(ids) == "x = 90210"


def test_it_finds_the_passkey_within_its_length(model, tokenizer) -> None:
    for length in (128, 300, LENGTH):
        assert found(model, tokenizer, length, 10) == 10


def test_beyond_its_length_it_breaks_and_a_patch_mends_it(model, tokenizer) -> None:
    assert found(model, tokenizer, 4 * LENGTH, 5) == 0
    broken = losses(model, tokenizer, 4 * LENGTH)
    rope_ext.patch(model, "yarn", factor=4)
    assert found(model, tokenizer, 4 * LENGTH, 5) == 5
    mended = losses(model, tokenizer, 4 * LENGTH)
    rope_ext.unpatch(model)
    assert broken - losses(model, tokenizer, LENGTH) > 0.5  # nats per token
    assert broken - mended > 0.5


def test_generation_writes_the_key_that_teacher_forcing_predicts(model, tokenizer) -> None:
    rope_ext.patch(model, "dynamic_yarn", factor=4)
    case = PasskeyPrompts(tokenizer).case(900, 0.1, seed=3)
    prompt = torch.tensor([case.ids[: -case.count].tolist()])
    out = model.generate(prompt, max_new_tokens=case.count, do_sample=False)
    assert tokenizer.decode(out[0, prompt.shape[1] :]) == case.key
