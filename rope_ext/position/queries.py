"""Temperatures under a frequency method: multiply queries on their way into the attention.

Every attention layer of transformers reads the name of its attention function from its
configuration. A layer with a temperature gets a view of that configuration with another name. The
function registered under it multiplies the query and calls the function that the original
configuration names, with the mask that the model made for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_ext.attention.call import wide
from rope_ext.errors import UnsupportedModelError
from rope_ext.methods.temperature import SSMax, Temperature
from rope_ext.position.layers import rotated_layers
from rope_ext.position.learned import TEMPERATURE, HeadScales, put
from rope_ext.rotary.context import is_traced, run_eagerly
from rope_ext.rotary.sequences import Sequences
from rope_ext.rotary.sites import PatchTarget, evaluating, input_device, text_config
from rope_ext.rotary.swapping import Changes, set_attribute

NAME = "rope_ext_queries"  # names with sdpa, flash, flex_attention or a slash take special paths


class View:
    """A view of a configuration with another attention function.

    ``eager`` is the eager one in the modeling file of the layer. Without ``sequences`` the
    temperature is constant.
    """

    _attn_implementation = NAME

    def __init__(
        self,
        config: Any,
        eager: Callable[..., Any],
        temperature: Temperature,
        sequences: Sequences | None,
    ) -> None:
        self.config, self.eager = config, eager
        self.temperature, self.sequences = temperature, sequences
        self.constant = temperature.constant
        self.heads: int | None = None  # of the query, once the layer has attended by this view

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "config":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.config, name)


@torch.no_grad()
def install(
    place: PatchTarget,
    temperature: Temperature,
    sequences: Sequences | None,
    include_sliding: bool,
    changes: Changes,
) -> list[str]:
    """Put a temperature in force in the layers that ``place.scaled`` rotates.

    Returns sentences for ``describe``.
    """
    decoder, config = place.decoder, text_config(place.decoder)
    layers = rotated_layers(decoder, place.scaled)
    chosen = [module for module, local in layers.items() if include_sliding or not local]
    if not chosen:
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: every layer with a rotary embedding sees a limited window "
            f"only, where a temperature is of no use; pass sliding_layers='scale' to have it there "
            f"all the same"
        )
    views = {}
    for module in chosen:
        eager = inspect.unwrap(type(module).forward).__globals__.get("eager_attention_forward")
        views[module] = View(config, eager, temperature, sequences)
        if module.__dict__.get("config") is config:
            set_attribute(module, "config", views[module], changes)
    tokens = torch.ones(1, 2, dtype=torch.long, device=input_device(decoder))
    with evaluating(decoder):
        decoder(input_ids=tokens, use_cache=False)
    for module, view in views.items():
        if view.heads is None:
            raise UnsupportedModelError(
                f"{type(decoder).__name__}: {type(module).__name__} does not read its attention "
                f"function in the configuration of the decoder, so a temperature cannot be put "
                f"there; leave temperature out, or give an attention_factor"
            )
        if isinstance(temperature, SSMax):
            put(module, TEMPERATURE, HeadScales(temperature, view.heads, module), changes)
    notes = [f"temperature: {temperature.formula}, in {len(chosen)} attention layers"]
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
    view = cast("View", module.config)
    own = ALL_ATTENTION_FUNCTIONS.get_interface(view.config._attn_implementation, view.eager)
    if view.heads is None:
        view.heads = query.shape[1]
    elif view.sequences is None:
        query = query * cast("float", view.constant)  # which others have instead of sequences
    elif torch.compiler.is_compiling() and not is_traced(view.sequences):
        query = _by_position_eagerly(view, view.sequences, module, query)
    else:
        query = _by_position(view, view.sequences, module, query)
    return own(module, query, key, value, attention_mask, dropout=dropout, **kwargs)


def _by_position(
    view: View, sequences: Sequences, module: nn.Module, query: torch.Tensor
) -> torch.Tensor:
    """``query`` times a temperature that follows positions, or that learns in ``module``."""
    forward = sequences.current()
    if forward is None or forward.positions is None:
        raise UnsupportedModelError(
            f"an attention layer with temperature={view.temperature!r} was run by itself, and its "
            f"positions are not known; run the whole model, or give temperature= a number"
        )
    scale = forward.query_scale(view.temperature, query.device, wide(query))
    if scale is not None and scale.shape[2] != query.shape[2]:
        raise UnsupportedModelError(
            f"an attention layer has {query.shape[2]} queries for {scale.shape[2]} positions, so "
            f"temperature={view.temperature!r} cannot follow them; give temperature= a number"
        )
    if isinstance(view.temperature, SSMax):
        return getattr(module, TEMPERATURE)(query, scale)
    return query if scale is None else (query * scale).to(query.dtype)


_by_position_eagerly = run_eagerly()(_by_position)
AttentionInterface.register(NAME, _attend)
