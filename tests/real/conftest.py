"""The pretrained checkpoints, each loaded once in every dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.helpers import pretrained

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(scope="session")
def load() -> Callable[[str, str], PreTrainedModel]:
    """The model of a name (``smollm2``, ``gemma3``) in a dtype; leave it unpatched."""

    @functools.lru_cache(maxsize=1)
    def load(name: str, dtype: str) -> PreTrainedModel:
        path = getattr(pretrained, name)()
        loaded = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=DTYPES[dtype]
        )
        return loaded.eval()

    return load
