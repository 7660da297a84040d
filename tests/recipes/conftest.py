"""Fixtures of the recipes' tests."""

import pytest
from transformers import AutoModelForCausalLM

from tests.helpers.fixtures import checkpoint, own_cache, texts

__all__ = ["checkpoint", "own_cache", "texts"]


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Must not be loaded."""

    def loaded(*args: object, **kwargs: object) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loaded)
