"""Encodings that change the input of layers: where they are put, and the hooks.

The hook is on a layer and not on the embedding, since families may change embeddings before the
first layer (Gemma multiplies them), and embeddings may be given. Gradient checkpointing runs the
hook again with its layer; the attention mask then identifies the forward.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import nn

from rope_ext.encodings.inputs import InputEncoding
from rope_ext.errors import OptionError, UnsupportedModelError
from rope_ext.position.forward import PositionForward
from rope_ext.position.learned import INPUT, InputPositions, put
from rope_ext.position.map import PositionMap
from rope_ext.position.masks import BatchMask
from rope_ext.rotary.context import current, run_eagerly
from rope_ext.rotary.sites import evaluating, input_device, vocabulary_of
from rope_ext.rotary.swapping import Changes
from rope_ext.rotary.zero3 import size

_SAMPLE = 64
"""Tokens of the vocabulary whose hidden states before the first layer are measured."""


def enter(decoder: nn.Module, position_map: PositionMap, changes: Changes) -> str:
    """Install an input encoding on ``decoder``; returns a sentence for ``describe``.

    Raises:
        UnsupportedModelError: the input of its layers is unknown.
        OptionError: it has fewer layers than the encoding enters.
    """
    encoding, layers = cast("InputEncoding", position_map.encoding), _layers(decoder)
    entered, where = layers if encoding.entered == "every" else layers[:1], encoding.entered
    if isinstance(where, int):
        if where > len(layers):
            raise OptionError(
                f"{encoding.name} changes the input of the last {where} layers, and the model has "
                f"{len(layers)}; choose fewer"
            )
        entered = [layers[-where]]
    columns, size = _measured(decoder, layers[0], position_map)
    module = InputPositions(encoding, columns, size, position_map.rope, layers[0])
    put(decoder, INPUT, module, changes)
    hook = partial(_enter, decoder, position_map)
    for layer in entered:
        changes.append(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
    named = {"first": "the first layer", "every": "every layer"}
    what = named.get(cast("str", where), f"the first of the last {where} layers")
    times = "" if module.factor is None else f", times {float(module.factor):.3g}"
    return f"inputs: what {what} gets has its positions{times}"


@run_eagerly()
def _enter(
    decoder: nn.Module, position_map: PositionMap, layer: nn.Module, args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    """Pre-hook of a decoder layer that changes its hidden states."""
    forward = forward_of(position_map, layer, args, kwargs)
    x = args[0] if args else kwargs["hidden_states"]
    p, module = forward.made.get(INPUT), getattr(decoder, INPUT)  # peft may have wrapped it
    learning = torch.is_grad_enabled() and any(v.requires_grad for v in module.parameters())
    if p is None or (learning and not p.requires_grad):
        t = forward.query.clamp(min=0)
        # Checkpointing counts the tensors that a layer saves, and must not count shared ones.
        shared = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with shared, torch.autocast(x.device.type, enabled=False):
            p = module(t, x.dtype)
        if current(position_map) is forward:  # else checkpointing runs a layer again
            forward.made[INPUT] = p
    encoding = cast("InputEncoding", position_map.encoding)
    x = encoding.join(x, p.to(x.device, x.dtype))
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})


def forward_of(
    position_map: PositionMap, layer: nn.Module, args: tuple, kwargs: dict
) -> PositionForward:
    """The forward that a layer with these arguments is part of.

    Raises:
        UnsupportedModelError: it is not known.
    """
    masks = (one for one in (*args, *kwargs.values()) if isinstance(one, BatchMask))
    forward = next((mask.owner for mask in masks if mask.owner is not None), current(position_map))
    if forward is None or not forward.located:
        raise UnsupportedModelError(
            f"{type(layer).__name__} was run by itself under {position_map.method.name}, so the "
            f"positions of its tokens are not known; run the whole model"
        )
    return forward


def _layers(decoder: nn.Module) -> list[nn.Module]:
    """Its layers, in order: the list of modules with the most parameters."""
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise UnsupportedModelError(
            f"{type(decoder).__name__} has no list of layers, so it is not known where to put "
            f"positions; use an encoding in the attention, such as 'alibi'"
        )
    return list(max(lists, key=lambda module: sum(map(size, module.parameters()))))


@torch.no_grad()
def _measured(decoder: nn.Module, first: nn.Module, position_map: PositionMap) -> tuple[int, float]:
    """Columns and root mean square of the input of the first layer, for some tokens."""
    seen = []

    def look(layer: nn.Module, args: tuple, kwargs: dict) -> None:
        located = getattr(current(position_map), "located", False)
        seen.append((args[0] if args else kwargs.get("hidden_states"), located))

    vocabulary = vocabulary_of(decoder)
    count = min(_SAMPLE, vocabulary.num_embeddings)
    tokens = torch.arange(count, device="cpu") * (vocabulary.num_embeddings // count)
    handle = first.register_forward_pre_hook(look, with_kwargs=True)
    try:
        with evaluating(decoder):
            decoder(input_ids=tokens[None].to(input_device(decoder)), use_cache=False)
    finally:
        handle.remove()
    x, located = seen[0] if seen else (None, False)
    if not located or not isinstance(x, torch.Tensor) or x.shape[:-1] != (1, count):
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: its first layer does not get hidden states of "
            f"[rows, tokens, columns] whose positions are known, so {position_map.method.name} "
            f"cannot be put in front of it; use an encoding in the attention, such as 'alibi'"
        )
    return x.shape[-1], float(x.double().square().mean().sqrt())
