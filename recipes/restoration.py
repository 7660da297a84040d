"""Keeps what an extended model does with short text: the original model teaches it.

Extending a window costs quality within the trained length. Restoration adds a loss on short rows
(LongReD, Dong et al. 2025, arXiv 2502.07365, section 3.2): the hidden states of the extended model
should point where those of the original one do. Both are the same weights: the teacher is the model
without its patch and without its adapter, so that no second model is in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import rope_ext

OPTIONS = {"output_hidden_states": True, "use_cache": False, "logits_to_keep": 1}


def restoration_loss(model: nn.Module, whole: Any, ids: torch.Tensor) -> torch.Tensor:
    """The mean of one minus the cosine between hidden states of the model and of its original.

    Over all tokens, and the output of every layer; of the last one, after the norm.

    Args:
        model: the model to train, as wrapped for training.
        whole: the same model under its adapter, not wrapped otherwise.
        ids: token ids of short rows, ``[rows, tokens]``.
    """
    with torch.no_grad(), whole.disable_adapter(), rope_ext.unpatched(whole):
        originals = model(input_ids=ids, **OPTIONS).hidden_states
    return distance(model, ids, originals)


def distance(
    model: nn.Module, ids: torch.Tensor, originals: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The loss of a model whose hidden states should be these."""
    states = model(input_ids=ids, **OPTIONS).hidden_states
    pairs = zip(states[1:], originals[1:], strict=True)  # the first are the embeddings
    losses = [
        1 - nn.functional.cosine_similarity(state.float(), original.float(), dim=-1).mean()
        for state, original in pairs
    ]
    return torch.stack(losses).mean()
