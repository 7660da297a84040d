"""The rows that the checkpoints in the box are trained on."""

from __future__ import annotations

import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from lab.pretrain import tiny_bytes_512, train
from rope_eval.data.text import read_texts
from rope_eval.tasks.passkey import FILLER, INTRO, NEEDLE, QUESTION

BYTES = Path(__file__).parents[2] / "checkpoints" / "tiny-bytes-512"


def made_up() -> list[str]:
    """Twenty documents of the same made-up words on every machine."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(3, 8))) for _ in range(300)]
    return [
        "\n".join(f"{rng.choice(words)} = {rng.choice(words)}({rng.randrange(999)})." for _ in ids)
        for ids in [range(40)] * 20
    ]


def rows_of(made, texts: list[str], count: int):
    return made.rows(made.tokenizer(texts), texts, count, seed=0)


@pytest.fixture(scope="module")
def prose():
    return rows_of(tiny_bytes_512.CHECKPOINT, made_up(), 400)


def test_the_evaluators_passkeys_are_new_to_the_second_checkpoint(prose) -> None:
    known = [*FILLER, *re.split(r"(?<=[.?])\s", INTRO + QUESTION + NEEDLE), "pass key", "grass"]
    sentences = [sentence.format(key="").strip().lower() for sentence in known]
    rows = [prose[index]["input_ids"] for index in range(len(prose))]
    wordings = [*tiny_bytes_512.STATEMENTS, *tiny_bytes_512.QUESTIONS, *tiny_bytes_512.HEADINGS]
    seen = [*prose.tokenizer.batch_decode(rows), *wordings, *read_texts([BYTES / "held_out.jsonl"])]
    for text in seen:
        assert not [sentence for sentence in sentences if sentence and sentence in text.lower()]


@pytest.mark.slow
@pytest.mark.parametrize("name", train.CHECKPOINTS)
def test_the_recipe_begins_resumes_and_writes_a_checkpoint_that_loads(
    name: str, tmp_path, monkeypatch
) -> None:
    small = replace(train.CHECKPOINTS[name], texts=lambda split: made_up())
    monkeypatch.setitem(train.CHECKPOINTS, name, small)
    work, output = tmp_path / "work", tmp_path / "output"
    command = ["train.py", name, "--work", str(work), "--output", str(output), "--resume"]
    for steps in ("2", "3"):  # the first finds nothing to resume
        few = ["--steps", steps, "--batch-size", "2", "--save-steps", "2"]
        monkeypatch.setattr(sys, "argv", [*command, *few])
        train.main()
    assert {path.name for path in work.iterdir()} >= {"checkpoint-2", "checkpoint-3"}
    model = AutoModelForCausalLM.from_pretrained(output)
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert model.config.use_cache and model.config.pad_token_id == tokenizer.pad_token_id
    assert len(tokenizer) <= model.config.vocab_size
    if small.ships_held_out:
        assert read_texts([output / "held_out.jsonl"]) == made_up()
