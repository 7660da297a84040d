"""Layers that rotate by positions which they compute from their hidden states.

A hook in front of an attention module computes the positions of the new tokens. The rotary module
rotates by nothing. The keys are rotated on their way into the cache, and the queries before they
attend, so that everything behind this file computes as without positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers.cache_utils import Cache

from rope_ext.attention.call import Pairs
from rope_ext.encodings import Encoding
from rope_ext.errors import UnsupportedModelError
from rope_ext.position.inputs import forward_of
from rope_ext.position.layers import Layout
from rope_ext.position.learned import POSITIONS, HeadPositions, put
from rope_ext.position.map import PositionMap
from rope_ext.rotary.context import forward_context, run_eagerly
from rope_ext.rotary.sites import evaluating, input_device, vocabulary_of
from rope_ext.rotary.swapping import Changes


def enter(
    decoder: nn.Module,
    position_map: PositionMap,
    layouts: Mapping[nn.Module, Layout],
    changes: Changes,
) -> None:
    """Add :class:`HeadPositions` to attention modules, and their hooks.

    Raises:
        UnsupportedModelError: a layer does not get the hidden states as its first argument.
    """
    encoding = cast("Encoding", position_map.encoding)
    for module, layout in layouts.items():
        if layout.inputs is None:
            raise UnsupportedModelError(
                f"{type(decoder).__name__}: {type(module).__name__} does not get hidden states of "
                f"[rows, tokens, columns] as its first argument, so it cannot compute positions "
                f"from them; use an encoding such as 'alibi'"
            )
        own = HeadPositions(encoding, layout.inputs, layout.key_heads, module)
        put(module, POSITIONS, own, changes)
        before = partial(_before, position_map, layout)
        changes += [
            module.register_forward_pre_hook(before, with_kwargs=True).remove,
            module.register_forward_hook(_after, always_call=True).remove,
        ]


@torch.no_grad()
def prove(decoder: nn.Module) -> None:
    """Run a patched decoder with a cache, on which it depends whether its keys can be rotated.

    Raises:
        UnsupportedModelError: it caches something else, or shares keys between layers.
    """
    tokens = torch.arange(4, device="cpu")[None] % vocabulary_of(decoder).num_embeddings
    try:
        with evaluating(decoder):
            decoder(input_ids=tokens.to(input_device(decoder)), use_cache=True)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{type(decoder).__name__}: {error}") from error


class _RotatingCache:
    """The rotation of the new tokens of one layer in one forward, which stands in for its cache.

    Args:
        pairs: the columns that rotate together.
        angles: radians, ``[rows, key heads, tokens, pairs]``.
    """

    def __init__(self, pairs: Pairs, angles: torch.Tensor) -> None:
        self.pairs, self.angles = pairs, angles
        self.cache: Any = None  # which does everything else
        self.updated = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, heads, tokens, columns]``, where every key head has as many of the heads."""
        rows, heads, tokens, _ = self.angles.shape
        if x.ndim != 4 or x.shape[1] % heads or (len(x), x.shape[2]) != (rows, tokens):
            raise UnsupportedModelError(
                f"an attention layer attends to or caches {list(x.shape)}, which are not queries "
                f"or keys of its {tokens} tokens in {rows} rows, so it cannot rotate them by "
                f"positions of its own; use an encoding such as 'alibi'"
            )
        angles = self.angles.to(x.device).repeat_interleave(x.shape[1] // heads, 1)
        return self.pairs.rotate(x, (angles.cos(), angles.sin()))

    @run_eagerly()
    def update(self, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As ``Cache.update``."""
        self.updated = True
        return self.cache.update(self.rotated(key), value, *args, **kwargs)


def rotated(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of an attention module that attends, by their positions."""
    rotation: _RotatingCache | None = forward_context.rotating.get(module)
    if rotation is None or (rotation.cache is not None) != rotation.updated:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends to keys that it did not compute and cache itself, so "
            f"their positions are not known; use an encoding such as 'alibi'"
        )
    return rotation.rotated(query), key if rotation.updated else rotation.rotated(key)


@run_eagerly()
def _before(
    position_map: PositionMap, layout: Layout, module: nn.Module, args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    """Pre-hook of an attention module."""
    forward = forward_of(position_map, module, args, kwargs)
    x = args[0] if args else kwargs["hidden_states"]
    z = getattr(module, POSITIONS)(x, forward.query.clamp(min=0))  # peft may have wrapped it
    inv_freq = position_map.inv_freq(layout.site, z.device)[layout.pair.to(z.device)]
    wide = torch.float64 if position_map.precise else z.dtype
    rotation = _RotatingCache(layout.pairs, z.to(wide).unsqueeze(-1) * inv_freq.to(wide))
    forward_context.rotating[module] = rotation

    def rotating(value: Any) -> Any:
        if not isinstance(value, Cache):
            return value
        rotation.cache = value
        return rotation

    return tuple(map(rotating, args)), {name: rotating(value) for name, value in kwargs.items()}


@run_eagerly()
def _after(module: nn.Module, args: tuple, output: Any) -> None:
    """Hook of an attention module, also if it raises an error."""
    forward_context.rotating.pop(module, None)
