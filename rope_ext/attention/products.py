"""Products of queries and keys that keep the precision of float32.

A product in half precision rounds the logits: the largest has an error of up to 0.2 % of its size,
which is more than 1 from logits of 500 on, and float16 overflows beyond 65504. The softmax turns an
error of a logit into a relative error of a weight. So logits are float32 or better everywhere, as
in torch's own attention.
"""

from __future__ import annotations

import contextlib

import torch


def wide(x: torch.Tensor) -> torch.dtype:
    """The dtype of logits: float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def without_autocast(x: torch.Tensor) -> contextlib.AbstractContextManager:
    """Autocast would round the operands and the result to half precision."""
    device = x.device.type
    if not torch.amp.is_autocast_available(device):  # such as meta
        return contextlib.nullcontext()
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def logits(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """``query @ key.mT`` in float32 or better, ``[rows, heads, queries, keys]``.

    Args:
        query: ``[rows, heads, queries, columns]``.
        key: ``[rows, heads, keys, columns]``, of the same dtype.
    """
    to = wide(query)
    with without_autocast(query):
        if query.dtype == to:
            return product(query, key.mT)
        if query.device.type == "cuda" and not torch.is_grad_enabled():
            # Tensor cores accumulate in float32 anyway; this has no gradient, and no CPU kernel.
            found = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).mT, out_dtype=to)
            return found.unflatten(0, query.shape[:2])
        return product(query.to(to), key.to(to).mT)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` for four dimensions as a single operation, also in a graph.

    For a single row, inductor would decompose it into a sum of products and recompute ``a`` for
    each of them. With ``beta=0`` the first argument of ``baddbmm`` is never read; a number in its
    place would first be expanded to a full tensor.
    """
    nothing = a.new_empty(*a.shape[:-1], b.shape[-1])
    parts = (x.flatten(0, 1) for x in (nothing, a, b))
    return torch.baddbmm(*parts, beta=0).view(nothing.shape)
