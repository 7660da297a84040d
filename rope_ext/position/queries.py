"""Applies temperatures under frequency methods, by multiplying queries before attention.

Attention layers in transformers read the name of their attention function from their
configuration. A layer with a temperature gets a copy of it with another name. The function
registered under that name multiplies the query, then calls the function named in the original
configuration, with the mask that the model created for it.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_ext.attention.call import wide
from rope_ext.errors import UnsupportedModelError
from rope_ext.methods.temperature import SSMax, Temperature
from rope_ext.position.layers import rotated_layers
from rope_ext.position.learned import TEMPERATURE, HeadScales, put
from rope_ext.rotary.context import run
from rope_ext.rotary.sequences import Sequences
from rope_ext.rotary.sites import PatchTarget, text_config
from rope_ext.rotary.swapping import Changes, set_attribute

NAME = "rope_ext_queries"  # names with sdpa, flash, flex_attention or a slash take special paths
_TEMPERED = "_rope_ext_tempered"  # attribute of an attention module; its Layer is another one


class Tempered(NamedTuple):
    """A patch's state of an attention module with a temperature."""

    config: Any  # the decoder's configuration
    eager: Any  # the eager function in the layer's modeling file
    temperature: Temperature
    sequences: Sequences | None  # None: the temperature is constant


def install(
    place: PatchTarget,
    temperature: Temperature,
    sequences: Sequences | None,
    include_sliding: bool,
    changes: Changes,
) -> list[str]:
    """Apply a temperature in the layers that ``place.scaled`` rotates.

    Returns sentences for ``describe``.
    """
    decoder, config = place.decoder, text_config(place.decoder)
    layers = rotated_layers(decoder, place.scaled)
    chosen = {m: seen for m, seen in layers.items() if include_sliding or not seen[0]}
    if not chosen:
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: every layer with a rotary embedding sees a limited window "
            f"only, where a temperature is of no use; pass sliding_layers='scale' to have it there "
            f"all the same"
        )
    own = copy.copy(config)
    own._attn_implementation_internal = NAME
    for module, (_, heads) in chosen.items():
        if module.__dict__.get("config") is not config:
            raise UnsupportedModelError(
                f"{type(decoder).__name__}: {type(module).__name__} does not read its attention "
                f"function in the configuration of the decoder, so a temperature cannot be put "
                f"there; leave temperature out, or give an attention_factor"
            )
        eager = inspect.unwrap(type(module).forward).__globals__.get("eager_attention_forward")
        tempered = Tempered(config, eager, temperature, sequences)
        set_attribute(module, _TEMPERED, tempered, changes)
        set_attribute(module, "config", own, changes)
        if isinstance(temperature, SSMax):
            put(module, TEMPERATURE, HeadScales(temperature, heads, module), changes)
    notes = [f"temperature: {temperature!r}, in {len(chosen)} attention layers"]
    if len(chosen) < len(layers):
        notes[0] += f"; {len(layers) - len(chosen)} that see a limited window have none"
    return notes


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention function under :data:`NAME`."""
    tempered: Tempered = getattr(module, _TEMPERED)
    implementation = tempered.config._attn_implementation
    own = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, tempered.eager)
    sequences = tempered.sequences
    if sequences is None:
        query = query * cast("float", tempered.temperature.constant)
    else:
        query = run(sequences, _by_position, sequences, tempered.temperature, module, query)
    return own(module, query, key, value, attention_mask, dropout=dropout, **kwargs)


def _by_position(
    sequences: Sequences, temperature: Temperature, module: nn.Module, query: torch.Tensor
) -> torch.Tensor:
    """Multiply ``query`` by a temperature that depends on positions or is learned in ``module``."""
    forward = sequences.current()
    if forward is None or forward.positions is None:
        raise UnsupportedModelError(
            f"an attention layer with temperature={temperature!r} was run by itself, and its "
            f"positions are not known; run the whole model, or give temperature= a number"
        )
    scale = forward.query_scale(temperature, query.device, wide(query))
    if scale is not None and scale.shape[2] != query.shape[2]:
        raise UnsupportedModelError(
            f"an attention layer has {query.shape[2]} queries for {scale.shape[2]} positions, so "
            f"temperature={temperature!r} cannot follow them; give temperature= a number"
        )
    if isinstance(temperature, SSMax):
        return getattr(module, TEMPERATURE)(query, scale)
    return query if scale is None else (query * scale).to(query.dtype)


AttentionInterface.register(NAME, _attend)
