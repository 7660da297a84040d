"""A tiny random Llama with a tokenizer, saved as a folder that `rope-ext compare` can read."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast

from rope_eval.tasks.passkey import FILLER, INTRO, NEEDLE, QUESTION
from tests.helpers.models import tiny_llama

TRAINED = 128


def save_checkpoint(folder: Path, **overrides: object) -> Path:
    """Save a model with a nominal trained length of 128; one token per digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([INTRO + "".join(FILLER) + NEEDLE + QUESTION] * 2, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)
    model = tiny_llama(
        vocab_size=400,
        max_position_embeddings=TRAINED,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        **overrides,
    )
    model.save_pretrained(folder)
    return folder


def save_texts(path: Path) -> Path:
    """Write five documents of about 400 words; tokenizing the default text takes seconds."""
    books = [" ".join(f"word{i * k % 97}" for i in range(400)) + "." for k in (3, 5, 7, 11, 13)]
    path.write_text("\n".join(json.dumps({"text": book}) for book in books), encoding="utf-8")
    return path


def written(words: int, seed: float) -> str:
    """Return text without repetition: random words of five letters."""
    rng = random.Random(f"written:{seed}")
    return " ".join("".join(rng.choices(string.ascii_lowercase, k=5)) for _ in range(words))


def stopping(patch: pytest.MonkeyPatch, model: Any, at: int) -> list[None]:
    """Interrupt the ``at``-th forward of this class of models; the list counts forwards."""
    ran, original = [], type(model).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(None)
        if len(ran) == at:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    patch.setattr(type(model), "forward", forward)
    return ran


def save_config(folder: Path, config: PreTrainedConfig, checkpoint: Path) -> Path:
    """Save a model without its weights: a configuration, and the tokenizer of ``checkpoint``."""
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)
    return folder
