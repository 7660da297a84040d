"""A tiny Llama trained (so to say) on 128 tokens, and a file of documents to train it on."""

from __future__ import annotations

import json
import random
from pathlib import Path

import datasets
import pytest
from transformers import AutoModelForCausalLM

from tests.helpers.checkpoint import save_checkpoint
from tests.helpers.recipe_runs import WORDS


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No data of an earlier test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="package")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve documents of some 350 tokens, one a line, in a file."""
    rng = random.Random(0)
    lines = [json.dumps({"text": " ".join(rng.choices(WORDS, k=100))}) for _ in range(12)]
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Must not be loaded."""

    def loaded(*args: object, **kwargs: object) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loaded)
