"""The tokens that models are given."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def ids() -> torch.Tensor:
    """Two rows of 90 tokens, ids 3 and up."""
    return torch.randint(3, 128, (2, 90), generator=torch.Generator().manual_seed(1))
