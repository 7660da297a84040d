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
    if _has_autocast(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


@torch.compiler.assume_constant_result  # torch 2.11 cannot trace it
def _has_autocast(device: str) -> bool:
    """Not on a device such as meta, where ``torch.is_autocast_enabled`` raises an error."""
    return torch.amp.is_autocast_available(device)


def logits(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """``query @ key.mT`` in float32 or better, ``[rows, heads, queries, keys]``.

    Args:
        query: ``[rows, heads, queries, columns]``.
        key: ``[rows, heads, keys, columns]``.
    """
    to = wide(query)
    with without_autocast(query):
        if query.is_cuda and query.dtype == key.dtype != to and not torch.is_grad_enabled():
            # Tensor cores accumulate in float32 anyway; this has no gradient, and no CPU kernel.
            # The number of keys is not the distance of two rows in memory, since an odd one would
            # cost ten times as long.
            found = torch.bmm(key.flatten(0, 1), query.flatten(0, 1).mT, out_dtype=to)
            return found.mT.unflatten(0, query.shape[:2])
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
