"""Pretrained checkpoints; tests that need one are skipped if it cannot be downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints import pretrained


def smollm2() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct."""
    return _or_skip(pretrained.smollm2)


def gemma3() -> Path:
    """Return the GGUF file of Gemma 3 270M."""
    return _or_skip(pretrained.gemma3)


def _or_skip(find: Callable[[], Path]) -> Path:
    pytest.importorskip("gguf")
    try:
        return find()
    except pretrained.UnavailableError as error:
        pytest.skip(str(error))
