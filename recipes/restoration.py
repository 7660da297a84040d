"""Keeps an extended model close to the original model on short text.

Extending a window costs quality within the trained length. Restoration adds a loss on short rows
(LongReD, Dong et al. 2025, arXiv 2502.07365, section 3.2) that aligns the hidden states of the
extended model with those of the original. Both share their weights: the teacher is the model
without its patch and adapter, so no second model is in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import rope_ext

OPTIONS = {"output_hidden_states": True, "use_cache": False, "logits_to_keep": 1}


def restoration_loss(model: nn.Module, whole: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean of 1 - cosine between hidden states of the model and of the original.

    The mean is over all tokens and layer outputs; that of the last layer is taken after the norm.

    Args:
        model: the model to train, as wrapped for training.
        whole: the same model with its adapter, without other wrappers.
        ids: token ids of short rows, ``[rows, tokens]``.
    """
    with torch.no_grad(), whole.disable_adapter(), rope_ext.unpatched(whole):
        originals = model(input_ids=ids, **OPTIONS).hidden_states
    return distance(model, ids, originals)


def distance(
    model: nn.Module, ids: torch.Tensor, originals: Sequence[torch.Tensor]
) -> torch.Tensor:
    """:func:`restoration_loss` for given hidden states of the original model."""
    states = model(input_ids=ids, **OPTIONS).hidden_states
    pairs = zip(states[1:], originals[1:], strict=True)  # the first are the embeddings
    losses = [
        1 - nn.functional.cosine_similarity(state.float(), original.float(), dim=-1).mean()
        for state, original in pairs
    ]
    return torch.stack(losses).mean()
