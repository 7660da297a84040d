"""Keeps what an extended model does with short text: the original model teaches it.

Extending a window costs quality within the trained length. Restoration adds a loss on short rows
(LongReD, Dong et al. 2025, arXiv 2502.07365, section 3.2): the hidden states of the extended model
should point where those of the original one do. Both are the same weights: the teacher is the model
without its patch and without its adapter, so that no second model is in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import rope_ext


def restoration_loss(model: nn.Module, whole: Any, ids: torch.Tensor) -> torch.Tensor:
    """The mean of one minus the cosine between hidden states of the model and of its original.

    Over all tokens, and the output of every layer; of the last one, after the norm.

    Args:
        model: the model to train, as wrapped for training.
        whole: the same model under its adapter, not wrapped otherwise.
        ids: token ids of short rows, ``[rows, tokens]``.
    """
    options = {"output_hidden_states": True, "use_cache": False, "logits_to_keep": 1}
    with torch.no_grad(), whole.disable_adapter(), rope_ext.unpatched(whole):
        originals = model(input_ids=ids, **options).hidden_states[1:]
    states = model(input_ids=ids, **options).hidden_states[1:]
    losses = [
        1 - nn.functional.cosine_similarity(state.float(), original.float(), dim=-1).mean()
        for state, original in zip(states, originals, strict=True)
    ]
    return torch.stack(losses).mean()
