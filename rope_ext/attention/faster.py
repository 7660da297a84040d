"""Registry of fast kernels for scores, by type of scores."""

from __future__ import annotations

from functools import singledispatch

import torch

from rope_ext.attention.call import Call, Scores


@singledispatch
def faster(
    scores: Scores, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
) -> torch.Tensor | None:
    """Attention as :class:`Call` describes it, by the kernel registered for the type of ``scores``.

    None if no kernel supports this call; :mod:`rope_ext.attention.blocked` then computes it.
    """
    return None
