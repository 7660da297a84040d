"""Fixtures of the recipes' tests."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from recipes import finetune
from rope_ext.errors import RopeExtError
from tests.helpers.fixtures import checkpoint, own_cache, texts
from tests.helpers.recipe_runs import arguments

__all__ = ["checkpoint", "own_cache", "texts"]


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Must not be loaded."""

    def loaded(*args: object, **kwargs: object) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loaded)


@pytest.fixture
def refused(checkpoint: Path, texts: Path, tmp_path: Path, weights: None) -> Callable[..., None]:
    """Check that settings are refused before the weights are loaded and a directory is made."""

    def check(message: str, **more: object) -> None:
        with pytest.raises(RopeExtError, match=f"(?s){message}"):
            finetune.main(arguments(checkpoint, texts, tmp_path / "run", **more))
        assert not (tmp_path / "run").exists()

    return check
