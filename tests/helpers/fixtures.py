"""A tiny Llama with a nominal trained length of 128, training documents, and small plots."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest

from tests.helpers import pictures
from tests.helpers.checkpoint import save_checkpoint
from tests.helpers.recipe_runs import WORDS


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="package")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write twelve documents of about 350 tokens, one per line, to a file."""
    rng = random.Random(0)
    lines = [json.dumps({"text": " ".join(rng.choices(WORDS, k=100))}) for _ in range(12)]
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a new cache folder, without data of earlier tests."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="package", autouse=True)
def small_pictures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        pictures.draw_small(patched)
        yield
