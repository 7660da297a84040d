"""Hooks for encodings that change the input of layers, or compute positions from it.

The hook is on a layer and not on the embedding, since families may change embeddings before the
first layer (Gemma scales them), and users may pass embeddings. Gradient checkpointing reruns the
hook with its layer; the attention mask then identifies the forward.

If layers compute positions, the rotary module rotates by zero. Keys are rotated when they enter
the cache, and queries before attention, which then needs no positions.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from rope_ext.attention.call import Pairs
from rope_ext.encodings import InputEncoding
from rope_ext.errors import OptionError, UnsupportedModelError
from rope_ext.position.forward import PositionForward
from rope_ext.position.layers import Layout
from rope_ext.position.learned import INPUT, POSITIONS, HeadPositions, InputPositions, put
from rope_ext.position.map import PositionMap
from rope_ext.position.masks import BatchMask
from rope_ext.rotary.context import current, run_eagerly
from rope_ext.rotary.sites import run, size, vocabulary_of
from rope_ext.rotary.swapping import Changes


def enter(decoder: nn.Module, position_map: PositionMap, changes: Changes) -> str:
    """Install an input encoding on ``decoder``; returns a sentence for ``describe``."""
    encoding = cast("InputEncoding", position_map.encoding)
    layers = _layers(decoder)
    where = encoding.entered
    if isinstance(where, int) and where > len(layers):
        raise OptionError(
            f"{encoding.name} changes the input of the last {where} layers, and the model has "
            f"{len(layers)}; choose fewer"
        )
    entered = layers[:1]
    what = "the first layer"
    if where == "every":
        entered = layers
        what = "every layer"
    elif isinstance(where, int):
        entered = [layers[-where]]
        what = f"the first of the last {where} layers"
    columns, size = _measured(decoder, layers[0], position_map)
    module = InputPositions(
        encoding, columns=columns, size=size, rope=position_map.rope, near=layers[0]
    )
    put(decoder, INPUT, module, changes=changes)
    hook = partial(_enter, decoder, position_map)
    for layer in entered:
        changes.append(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
    times = "" if module.factor is None else f", times {float(module.factor):.3g}"
    return f"inputs: what {what} gets has its positions{times}"


@run_eagerly()
def _enter(
    decoder: nn.Module, position_map: PositionMap, layer: nn.Module, args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    """Pre-hook of a decoder layer that changes its hidden states."""
    forward = forward_of(position_map, layer, args=args, kwargs=kwargs)
    x = args[0] if args else kwargs["hidden_states"]
    p = forward.shared.input
    module = getattr(decoder, INPUT)  # peft may have wrapped it
    learning = torch.is_grad_enabled() and any(v.requires_grad for v in module.parameters())
    if p is None or (learning and not p.requires_grad):
        t = forward.query.clamp(min=0)
        # Checkpointing counts the tensors that a layer saves, and must not count shared ones.
        uncounted = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with uncounted, torch.autocast(x.device.type, enabled=False):
            p = module(t, x.dtype)
        if current(position_map) is forward:  # not when checkpointing reruns a layer
            forward.shared.input = p
    x = cast("InputEncoding", position_map.encoding).join(x, p.to(x.device, x.dtype))
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})


def forward_of(
    position_map: PositionMap, layer: nn.Module, args: tuple, kwargs: dict
) -> PositionForward:
    """Return the forward that a layer call with these arguments belongs to."""
    masks = (one for one in (*args, *kwargs.values()) if isinstance(one, BatchMask))
    forward = next((mask.owner for mask in masks if mask.owner is not None), current(position_map))
    if forward is None or not forward.located:
        raise run_by_itself(position_map, layer)
    return forward


def run_by_itself(position_map: PositionMap, module: nn.Module) -> UnsupportedModelError:
    """Return the error of a module that runs without a forward that its tokens belong to."""
    return UnsupportedModelError(
        f"{type(module).__name__} was run by itself under {position_map.method.name}, or again by "
        f"gradient checkpointing with a mask of your own, so the positions of its tokens are not "
        f"known; call the whole model itself, without that mask or without checkpointing"
    )


def _layers(decoder: nn.Module) -> list[nn.Module]:
    """Return the decoder's layers, in order: the module list with the most parameters."""
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise UnsupportedModelError(
            f"{type(decoder).__name__} has no list of layers, so it is not known where to put "
            f"positions; use an encoding in the attention, such as 'alibi'"
        )
    return list(max(lists, key=lambda module: sum(map(size, module.parameters()))))


def _measured(decoder: nn.Module, first: nn.Module, position_map: PositionMap) -> tuple[int, float]:
    """Measure columns and root mean square of the first layer's input, for some tokens."""
    seen = []

    def look(layer: nn.Module, args: tuple, kwargs: dict) -> None:
        if getattr(current(position_map), "located", False):
            seen.append(args[0] if args else kwargs.get("hidden_states"))

    vocabulary = vocabulary_of(decoder).num_embeddings
    count = min(64, vocabulary)
    handle = first.register_forward_pre_hook(look, with_kwargs=True)
    try:
        run(decoder, torch.arange(count, device="cpu")[None] * (vocabulary // count))
    finally:
        handle.remove()
    if len(seen) > 1:
        raise UnsupportedModelError(
            f"{type(decoder).__name__} runs its first layer {len(seen)} times in one forward, so "
            f"{position_map.method.name} would be applied as often; use an encoding in the "
            f"attention, such as 'alibi'"
        )
    x = seen[0] if seen else None
    if not isinstance(x, Tensor) or x.shape[:-1] != (1, count):
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: its first layer does not get hidden states of "
            f"[rows, tokens, columns] whose positions are known, so {position_map.method.name} "
            f"cannot be put in front of it; use an encoding in the attention, such as 'alibi'"
        )
    return x.shape[-1], float(x.double().square().mean().sqrt())


def enter_heads(
    decoder: nn.Module,
    position_map: PositionMap,
    layouts: Mapping[nn.Module, Layout],
    changes: Changes,
) -> None:
    """Make attention modules compute positions, and verify that these can rotate their keys."""
    encoding = position_map.encoding
    for module, layout in layouts.items():
        if layout.inputs is None:
            raise UnsupportedModelError(
                f"{type(decoder).__name__}: {type(module).__name__} does not get hidden states of "
                f"[rows, tokens, columns] as its first argument; use an encoding such as 'alibi'"
            )
        own = HeadPositions(
            encoding, columns=layout.inputs, key_heads=layout.key_heads, near=module
        )
        put(module, POSITIONS, own, changes=changes)
        before = partial(_before, position_map, layout)
        changes.append(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    run(decoder, torch.arange(4, device="cpu")[None], use_cache=True)


class _RotatingCache:
    """Wraps a layer's cache in one forward, and rotates its new tokens.

    ``angles`` are in radians, ``[rows, key heads, tokens, pairs]``.
    """

    def __init__(self, pairs: Pairs, angles: Tensor) -> None:
        self.pairs = pairs
        self.angles = angles
        self.cache: Any = None  # handles everything else
        self.updated = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def rotated(self, x: Tensor) -> Tensor:
        """Rotate ``[rows, heads, tokens, columns]``; ``heads`` is a multiple of the key heads."""
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
    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Rotate the keys, then update the cache, like ``Cache.update``."""
        self.updated = True
        return self.cache.update(self.rotated(key), value, *args, **kwargs)


def rotated(
    forward: PositionForward, module: nn.Module, query: Tensor, key: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate an attention module's queries by their positions; returns them with the keys."""
    rotation: _RotatingCache | None = forward.shared.computed.pop(module, None)
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
    forward = forward_of(position_map, module, args=args, kwargs=kwargs)
    x = args[0] if args else kwargs["hidden_states"]
    t = forward.query.clamp(min=0)
    t = t.double() if position_map.precise else t
    z = getattr(module, POSITIONS)(x, t)  # peft may have wrapped it
    inv_freq = position_map.inv_freq(layout.site, z.device)
    wide = torch.float64 if position_map.precise else z.dtype
    rotation = _RotatingCache(layout.pairs, z.to(wide).unsqueeze(-1) * inv_freq.to(wide))
    forward.shared.computed[module] = rotation

    def rotating(value: Any) -> Any:
        if not isinstance(value, Cache):
            return value
        rotation.cache = value
        return rotation

    return tuple(map(rotating, args)), {name: rotating(value) for name, value in kwargs.items()}
