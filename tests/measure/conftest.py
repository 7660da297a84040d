"""A tiny checkpoint, its model and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rope_eval.plots import results
from tests.helpers.checkpoint import save_checkpoint


@pytest.fixture(scope="package", autouse=True)
def _small_pictures() -> Iterator[None]:
    """In reports, small and as they come: half a second each. test_cli.py draws them in full."""

    def small(width: float, height: float) -> Any:
        from matplotlib.figure import Figure

        return Figure(figsize=(width / 4, height / 4))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(results, "figure_of", small)
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def model(checkpoint: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint).eval()


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(checkpoint)
