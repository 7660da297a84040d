"""Shared by all tests: a tiny random Llama, trained (so to say) on 64 tokens."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging

from tests.helpers.models import tiny_llama

logging.disable_progress_bar()
logging.set_verbosity_error()


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture
def ids() -> torch.Tensor:
    """Two rows of 160 tokens, ids 3 and up."""
    return torch.randint(3, 128, (2, 160), generator=torch.Generator().manual_seed(1))
