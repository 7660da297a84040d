"""Kernels for logits of more than the distance, where there is one faster than blocks."""

from __future__ import annotations

from functools import singledispatch

import torch

from rope_ext.attention.call import Call, Scores


@singledispatch
def faster(
    scores: Scores, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
) -> torch.Tensor | None:
    """Attention as :class:`Call` has it, by a kernel registered for the type of ``scores``.

    None: there is none, or none for this call; :mod:`rope_ext.attention.blocked` then does it.
    """
    return None
