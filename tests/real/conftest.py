"""The pretrained checkpoints, each loaded once in every dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.helpers import pretrained


@pytest.fixture(scope="session")
def load() -> Callable[[str, torch.dtype], PreTrainedModel]:
    """The model of a name (``smollm2``, ``gemma3``) in a dtype; leave it unpatched."""

    @functools.lru_cache(maxsize=1)
    def load(name: str, dtype: torch.dtype) -> PreTrainedModel:
        path = getattr(pretrained, name)()
        loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
        return loaded.eval()

    return load
