"""Causal linear attention with RoPE or decay with the distance.

    o_i = sum_j e^(-m (i - j)) <R_i phi(q_i), R_j phi(k_j)> v_j
          / sum_j e^(-m (i - j)) <phi(q_i), phi(k_j)>,            j <= i, phi(x) = elu(x) + 1

``R`` is only in the numerator: Su et al. 2021, arXiv 2104.09864, equation 19. ``phi`` is from
Katharopoulos et al. 2020, arXiv 2006.16236. ``m`` are ALiBi's slopes: in a softmax, its bias is the
same factor. :func:`attention` computes a sequence in chunks, :func:`step` the next token
from a state whose size does not depend on the length.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface

from lab.laboratory.scratch.base import rotate
from rope_ext.encodings.alibi import slopes
from rope_ext.methods.rope import geometric

LINEAR = {
    "linear": (False, False),
    "linear_rope": (True, False),
    "linear_alibi": (False, True),
    "linear_rope_alibi": (True, True),
}
"""Models with linear attention, by name: whether they rotate, and whether they decay."""
_CHUNK = 128


class State(NamedTuple):
    """Sums over the past: keys times values, ``[..., columns, value columns]``, and keys."""

    products: torch.Tensor
    keys: torch.Tensor


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    angles: torch.Tensor | None = None,
    slope: torch.Tensor | None = None,
    chunk: int = _CHUNK,
) -> torch.Tensor:
    """The output for every token; time and memory are linear in their number.

    Args:
        query: ``[batch, heads, tokens, columns]``, as are the others.
        key: not rotated, like ``query``: the rotation comes after ``phi``.
        value: values of the keys.
        angles: rotation in radians, ``[tokens, columns / 2]``, or with leading batch and head
            dimensions; None: no rotation.
        slope: ``m``, ``[heads]``; None: no decay.
        chunk: tokens whose products are computed at once.
    """
    query = _phi(query)
    key = _phi(key)
    below = _sums(query, key, value=torch.ones_like(value[..., :1]), slope=slope, chunk=chunk)
    if angles is not None:
        query, key = (rotate(x, angles.cos(), angles.sin()) for x in (query, key))
    return _sums(query, key, value, slope=slope, chunk=chunk) / below


def step(
    state: State | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    angles: torch.Tensor | None = None,
    slope: torch.Tensor | None = None,
) -> tuple[torch.Tensor, State]:
    """The output for the next token, and the state after it.

    The arguments are those of :func:`attention` without the dimension of the tokens. ``state`` is
    None before the first one.
    """
    query = _phi(query)
    key = _phi(key)
    below = key if state is None else key + _decayed(state.keys, slope, 1)
    total = (query * below).sum(-1, keepdim=True)
    if angles is not None:
        query, key = (rotate(x, angles.cos(), angles.sin()) for x in (query, key))
    products = key[..., :, None] * value[..., None, :]
    if state is not None:
        products = products + _decayed(state.products, slope, 2)
    return (query[..., None, :] @ products).squeeze(-2) / total, State(products, below)


def register() -> None:
    """Register every name in :data:`LINEAR` as an ``attn_implementation`` of transformers.

    For rows without padding, and models that do not rotate queries and keys themselves: RoPE is
    applied here, after ``phi``.
    """
    for name, (rotates, decays) in LINEAR.items():
        AttentionInterface.register(name, partial(_forward, rotates=rotates, decays=decays))


def _forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    position_ids: torch.Tensor,
    rotates: bool,
    decays: bool,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    angles = slope = None
    if rotates:
        base = module.config.rope_parameters["rope_theta"]
        theta = geometric(base, query.shape[-1]).to(query)
        angles = position_ids[:, None, :, None] * theta
    if decays:
        slope = slopes(query.shape[1]).to(query)
    return attention(query, key, value, angles=angles, slope=slope).transpose(1, 2), None


def _phi(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.elu(x) + 1


def _decayed(past: torch.Tensor, slope: torch.Tensor | None, dims: int) -> torch.Tensor:
    """Decay a sum over the past by one token; ``dims``: its dimensions after the heads."""
    if slope is None:
        return past
    return past * torch.exp(-slope)[(..., *[None] * dims)]


def _sums(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slope: torch.Tensor | None,
    chunk: int,
) -> torch.Tensor:
    """``sum_j e^(-m (i - j)) <q_i, k_j> v_j``: a state of earlier chunks, and all pairs in each."""
    m = (query.new_zeros(1) if slope is None else slope)[:, None, None]
    state = query.new_zeros(*query.shape[:2], key.shape[-1], value.shape[-1])
    found = []
    for q, k, v in zip(*(x.split(chunk, -2) for x in (query, key, value)), strict=True):
        at = torch.arange(q.shape[-2], device=q.device)
        # Clamped: above the diagonal the factor could be infinite, and infinite times 0 is NaN.
        within = torch.exp(-m * (at[:, None] - at).clamp(min=0)).tril()
        found.append((q @ k.mT * within) @ v + torch.exp(-m * (at[:, None] + 1)) * (q @ state))
        left = len(at) - 1 - at[:, None]
        state = torch.exp(-m * len(at)) * state + (torch.exp(-m * left) * k).mT @ v
    return torch.cat(found, -2)
