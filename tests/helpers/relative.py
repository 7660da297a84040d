"""Encodings by vectors of the distance: each as its paper has it, dense, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import rope_ext
from tests.helpers.biases import parameters
from tests.helpers.models import attending_by

Learned = dict[str, torch.Tensor]
Parts = tuple[torch.Tensor, torch.Tensor | None]


def shaw(learned: Learned, query, key, content, apart, scale) -> Parts:
    """``q . (k + aK)``, and values with ``aV`` for every pair."""
    of_key, of_value = (learned[name][apart.clamp(max=7)] for name in ("key", "value"))
    return content + scale * torch.einsum("bhid,bijd->bhij", query, of_key), of_value


def deberta(learned: Learned, query, key, content, apart, scale) -> Parts:
    c2p = learned["key"][:, apart.clamp(max=6)].transpose(0, 1)
    p2c = learned["query"][:, apart.clamp(max=6)].transpose(0, 1)
    c2p = torch.einsum("bhid,bhijd->bhij", query, c2p.expand(len(query), -1, -1, -1, -1))
    p2c = torch.einsum("bhjd,bhijd->bhij", key, p2c.expand(len(query), -1, -1, -1, -1))
    return (content + scale * c2p + scale * p2c) / 3**0.5, None


def transformer_xl(learned: Learned, query, key, content, apart, scale) -> Parts:
    u, v, r = (learned[name] for name in "uvr")
    width = r.shape[-1]
    angle = apart[..., None] / 10000 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    by_distance = torch.cat((angle.sin(), angle.cos()), -1)
    keys = torch.einsum("hdw,bijw->bhijd", r, by_distance)
    position = torch.einsum(
        "bhid,bhijd->bhij", query + v[:, None], keys.expand(len(query), *[-1] * 4)
    )
    return content + scale * (torch.einsum("hd,bhjd->bhj", u, key)[:, :, None] + position), None


RELATIVE: dict[str, Callable[..., Parts]] = {
    "shaw": shaw,
    "deberta": deberta,
    "transformer_xl": transformer_xl,
}
"""Of queries and keys (``[rows, heads, tokens, columns]``), their scaled products, distances
(``[rows or 1, queries, keys]``) and scale: logits, and what is added to the values of pairs."""
SIZES: dict[str, dict[str, Any]] = {
    "shaw": {"clip": 7},
    "deberta": {"clip": 7},
    "transformer_xl": {},
}


def attend(
    name: str | Callable[..., Parts],
    learned: Learned,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    apart: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """``name``: of :data:`RELATIVE`, or such a function.

    ``apart`` and ``visible``: ``[rows or 1, queries, keys]`` and with heads.
    """
    formula = RELATIVE[name] if isinstance(name, str) else name
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    content = query @ key.mT * scale
    if softcap is not None:
        content = softcap * (content / softcap).tanh()
    logits, of_pairs = formula(learned, query, key, content, apart, scale)
    logits = logits.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        logits = torch.cat((logits, sinks[:, None, None].expand(*logits.shape[:3], 1)), -1)
    weights = logits.softmax(-1)[..., : key.shape[2]]
    out = weights @ value
    return out if of_pairs is None else out + torch.einsum("bhij,bijd->bhid", weights, of_pairs)


def randomized(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in parameters(model).values():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model


def patch(model: nn.Module, name: str, **options: Any) -> nn.Module:
    """Under an encoding of :data:`SIZES`, whose parameters are all different."""
    return randomized(rope_ext.patch(model, name, **SIZES[name], **options))


@contextmanager
def dense(
    model: nn.Module, name: str | Callable[..., Parts], tokens: torch.Tensor, learned: Learned
) -> Iterator[None]:
    """``model``, not patched: none of its rotary modules turns, and attention is the paper's.

    ``tokens``: positions, ``[rows, tokens]``; ``learned``: as :func:`parameters` of a patched one.
    """

    def attention(
        module, query, key, value, mask, scaling=None, softcap=None, s_aux=None, **_rest
    ) -> tuple[torch.Tensor, None]:
        own = f".{module.layer_idx}."
        mine = (n for n in learned if own in n or ".layers." not in n)
        of_layer = {n.split(".")[-1]: learned[n].double() for n in mine}
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        qkv = (x.double() for x in (query, key, value))
        sinks = None if s_aux is None else s_aux.double()
        apart = (tokens[:, :, None] - tokens[:, None]).clamp(min=0)
        out = attend(name, of_layer, *qkv, apart, mask, scale, softcap, sinks)
        return out.transpose(1, 2).to(value.dtype), None

    def unturned(_module, _args, output) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones_like(output[0]), torch.zeros_like(output[1])

    rotary = [m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")]
    handles = [module.register_forward_hook(unturned) for module in rotary]
    try:
        with attending_by(model, attention):
            yield
    finally:
        for handle in handles:
            handle.remove()
