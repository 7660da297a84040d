"""Layers that rotate by positions which they compute from their hidden states.

A hook in front of an attention module computes the positions of the new tokens. The rotary module
rotates by nothing. The keys are rotated on their way into the cache, and the queries before they
attend, so that everything behind this file computes as without positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from rope_ext.attention.call import Pairs
from rope_ext.encodings import Encoding
from rope_ext.errors import UnsupportedModelError
from rope_ext.position.bias import Learning, like_weights
from rope_ext.position.inputs import forward_among
from rope_ext.position.layers import LayerInput, Layout
from rope_ext.position.map import PositionMap
from rope_ext.rotary.context import forward_context, run_eagerly
from rope_ext.rotary.sites import evaluating, input_device, vocabulary_of

NAME = "rope_ext_positions"  # name of the module within an attention module, and in checkpoints


class HeadPositions(Learning):
    """The positions of tokens in one attention layer, with their parameters.

    Args:
        encoding: the encoding, resolved.
        given: sizes of the layer's input.
        like: gives dtype and device of the parameters.
    """

    encoding: Encoding

    def __init__(self, encoding: Encoding, given: LayerInput, like: torch.Tensor) -> None:
        super().__init__(encoding.initial_positions(*given), like, encoding.bounds)
        self.encoding = encoding

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """``[rows, key heads, tokens]`` of hidden states, float32 or better.

        Args:
            x: ``[rows, tokens, columns]``.
            t: positions in the sequence, int64, ``[rows or 1, tokens]``.
        """
        # In bfloat16, positions beyond 256 would be whole numbers.
        wide = torch.promote_types(x.dtype, torch.float32)
        like = next(self.parameters(), x)
        with torch.autocast(x.device.type, enabled=False):
            learned = {name: value.to(wide) for name, value in self.clamped().items()}
            return self.encoding.places(x.to(like.device, wide), t.to(like.device, wide), learned)


@dataclass(eq=False)
class HeadRotation:
    """The rotation of the new tokens of one layer in one forward.

    Args:
        pairs: the columns that rotate together.
        angles: radians, ``[rows, key heads, tokens, pairs]``.
        cached: whether the layer has a cache, whose keys are rotated on their way into it.
        updated: whether they have been.
    """

    pairs: Pairs
    angles: torch.Tensor
    cached: bool = False
    updated: bool = False

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


def rotated(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of an attention module that attends, by their positions."""
    rotation: HeadRotation | None = forward_context.rotating.get(module)
    if rotation is None or rotation.cached != rotation.updated:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends to keys that it did not compute and cache itself, so "
            f"their positions are not known; use an encoding such as 'alibi'"
        )
    return rotation.rotated(query), key if rotation.cached else rotation.rotated(key)


class _RotatingCache:
    """Stands in for a cache while one layer runs, and rotates the keys that it gets.

    Args:
        cache: the cache, which does everything else.
        rotation: of the new keys.
    """

    def __init__(self, cache: Cache, rotation: HeadRotation) -> None:
        self._cache, self._rotation = cache, rotation
        rotation.cached = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    @run_eagerly()
    def update(self, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As ``Cache.update``."""
        self._rotation.updated = True
        return self._cache.update(self._rotation.rotated(key), value, *args, **kwargs)


def enter(
    position_map: PositionMap,
    layouts: Mapping[nn.Module, Layout],
    given: Mapping[nn.Module, LayerInput],
) -> list[Any]:
    """Add :class:`HeadPositions` to attention modules; returns the handles of their hooks."""
    encoding, handles = position_map.encoding, []
    assert encoding is not None, "positions of heads are those of an encoding"
    for module, layout in layouts.items():
        module.add_module(NAME, HeadPositions(encoding, given[module], like_weights(module)))
        before: Any = partial(_before, position_map, layout)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(_after, always_call=True))
    return handles


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


@run_eagerly()
def _before(
    position_map: PositionMap, layout: Layout, module: nn.Module, args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    """Pre-hook of an attention module."""
    forward = forward_among(position_map, args, kwargs)
    if forward is None or not forward.located:
        raise UnsupportedModelError(
            f"{type(module).__name__} was run by itself under {position_map.method.name}, so the "
            f"positions of its tokens are not known; run the whole model"
        )
    x = args[0] if args else kwargs["hidden_states"]
    z = getattr(module, NAME)(x, forward.query.clamp(min=0))  # looked up: peft may have wrapped it
    inv_freq = position_map.inv_freq(layout.site, z.device)[layout.pair.to(z.device)]
    wide = torch.float64 if position_map.precise else z.dtype
    rotation = HeadRotation(layout.pairs, z.to(wide).unsqueeze(-1) * inv_freq.to(wide))
    forward_context.rotating[module] = rotation

    def rotating(value: Any) -> Any:
        return _RotatingCache(value, rotation) if isinstance(value, Cache) else value

    return tuple(map(rotating, args)), {name: rotating(value) for name, value in kwargs.items()}


@run_eagerly()
def _after(module: nn.Module, args: tuple, output: Any) -> None:
    """Hook of an attention module, also if it raises an error."""
    forward_context.rotating.pop(module, None)
