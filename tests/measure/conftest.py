"""A tiny checkpoint, its model and its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tests.helpers.fixtures import checkpoint, small_pictures

__all__ = ["checkpoint", "small_pictures"]


@pytest.fixture
def model(checkpoint: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint).eval()


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(checkpoint)
