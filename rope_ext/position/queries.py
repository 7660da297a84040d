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

from rope_ext.errors import UnsupportedModelError
from rope_ext.methods.temperature import SSMax, Temperature
from rope_ext.position import head_scales
from rope_ext.position.layers import rotated_layers
from rope_ext.rotary.context import is_traced, run_eagerly
from rope_ext.rotary.sequences import Sequences
from rope_ext.rotary.sites import PatchTarget, evaluating, input_device, text_config
from rope_ext.rotary.swapping import Changes, set_attribute

NAME = "rope_ext_queries"  # names with sdpa, flash, flex_attention or a slash take special paths


class View:
    """A view of a configuration with another attention function.

    Args:
        config: the original configuration.
        eager: the eager attention function in the modeling file of the layer.
        temperature: with every option filled in.
        sequences: the sequences of the batch; None for a constant temperature.
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
        self.reached: dict[nn.Module, int] | None = None  # in the proof: modules, and their heads

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "config":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.config, name)


def install(
    place: PatchTarget,
    temperature: Temperature,
    sequences: Sequences | None,
    include_sliding: bool,
    changes: Changes,
) -> list[str]:
    """Put a temperature in force in the layers that ``place.scaled`` rotates.

    Args:
        place: the parts of the model to change.
        temperature: with every option filled in.
        sequences: the sequences of the batch, if it follows positions.
        include_sliding: also in layers that see a limited window.
        changes: records how to undo it.

    Returns:
        Sentences for ``describe``.

    Raises:
        UnsupportedModelError: there are no such layers, or it cannot be proven to reach them.
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
    for module in chosen:
        eager = inspect.unwrap(type(module).forward).__globals__.get("eager_attention_forward")
        if module.__dict__.get("config") is not config:
            raise UnsupportedModelError(
                f"{type(decoder).__name__}: {type(module).__name__} reads its attention function "
                f"in a configuration of its own, so a temperature cannot be put there; leave "
                f"temperature out, or give an attention_factor"
            )
        set_attribute(module, "config", View(config, eager, temperature, sequences), changes)
    heads = _prove(decoder, chosen)
    if isinstance(temperature, SSMax):
        for module in chosen:
            head_scales.add(module, temperature, heads[module])
        changes.append(head_scales.Added(chosen).undo)
    notes = [f"temperature: {temperature.formula}, in {len(chosen)} attention layers"]
    if len(chosen) < len(layers):
        notes[0] += f"; {len(layers) - len(chosen)} that see a limited window have none"
    return notes


@torch.no_grad()
def _prove(decoder: nn.Module, modules: list[nn.Module]) -> dict[nn.Module, int]:
    """The query heads of every module; raises unless their attention uses their views."""
    tokens = torch.ones(1, 2, dtype=torch.long, device=input_device(decoder))
    views = [cast("View", module.config) for module in modules]
    reached: dict[nn.Module, int] = {}
    for view in views:
        view.reached = reached
    try:
        with evaluating(decoder):
            decoder(input_ids=tokens, use_cache=False)
    finally:
        for view in views:
            view.reached = None
    if set(reached) != set(modules):
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: its attention layers do not read their attention function "
            f"in their configuration, so a temperature cannot be put there; leave temperature out, "
            f"or give an attention_factor"
        )
    return reached


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
    if view.reached is not None:
        view.reached[module] = query.shape[1]
    name = view.config._attn_implementation
    own = ALL_ATTENTION_FUNCTIONS.get_interface(name, view.eager)
    if view.sequences is None:
        query = query * cast("float", view.constant)  # which others have instead of sequences
    elif torch.compiler.is_compiling() and not is_traced(view.sequences):
        query = _untraced(view, view.sequences, module, query)
    else:
        query = by_position(view, view.sequences, module, query)
    return own(module, query, key, value, attention_mask, dropout=dropout, **kwargs)


@run_eagerly()
def _untraced(
    view: View, sequences: Sequences, module: nn.Module, query: torch.Tensor
) -> torch.Tensor:
    return by_position(view, sequences, module, query)


def by_position(
    view: View, sequences: Sequences, module: nn.Module, query: torch.Tensor
) -> torch.Tensor:
    """``query`` times a temperature that follows positions, or that learns in ``module``."""
    forward = sequences.current()
    if forward is None or forward.positions is None:
        raise UnsupportedModelError(
            f"an attention layer with temperature={view.temperature!r} was run by itself, and its "
            f"positions are not known; run the whole model, or give temperature= a number"
        )
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    query_scale = forward.query_scale(view.temperature, query.device, dtype)
    if query_scale is not None and query_scale.shape[2] != query.shape[2]:
        raise UnsupportedModelError(
            f"an attention layer has {query.shape[2]} queries for {query_scale.shape[2]} "
            f"positions, so temperature={view.temperature!r} cannot follow them; give "
            f"temperature= a number"
        )
    # During the proof, the scales are not there yet.
    if isinstance(view.temperature, SSMax) and view.reached is None:
        return getattr(module, head_scales.NAME)(query, query_scale)
    return query if query_scale is None else (query * query_scale).to(query.dtype)


AttentionInterface.register(NAME, _attend)
