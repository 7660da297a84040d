"""Results and checks shared by all kinds of methods."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from rope_ext.apply.configuration import is_scaled
from rope_ext.apply.raising import TYPES
from rope_ext.apply.rebuild import Written
from rope_ext.errors import AlreadyScaledError, OptionError, UnsupportedModelError
from rope_ext.methods import FrequencyMethod, Method
from rope_ext.options import Options
from rope_ext.position.layers import ignores_scaling
from rope_ext.rotary.sites import PatchTarget, RotarySite
from rope_ext.rotary.swapping import Changes, set_attribute


@dataclass(frozen=True)
class Applied:
    """An applied method."""

    method: Method  # the method with every option filled in
    target_length: int  # extended length, tokens
    saved: Written  # what the configuration stores
    plain: bool  # whether plain transformers computes the same from it
    precise: bool  # whether angles are computed in float64
    notes: tuple[str, ...]  # sentences for describe


_RAISE = "pass method={!r} and compose='raise' to raise the checkpoint's own factor"


def refuse_scaled(
    decoder: nn.Module, site: RotarySite, method: FrequencyMethod, compose: bool | str
) -> None:
    """Raise AlreadyScaledError if ``method`` cannot extend the scaling of a checkpoint."""
    there = is_scaled(decoder, site)
    if there is None or site.raised is not None:
        return
    raises = TYPES.get(site.rope_type)
    own = f", or {_RAISE.format(raises)}" if raises else ""
    if site.rope_type in ("dynamic", "longrope"):
        raise AlreadyScaledError(
            f"{type(decoder).__name__} is scaled by {there}, on top of which nothing can be "
            f"composed; load it with rope_type 'default' and patch that{own}"
        )
    if not compose:
        back = "it with rope_type 'default'" if site.scaled else "the model that it was made from"
        raise AlreadyScaledError(
            f"the rotary embedding of {type(decoder).__name__} is scaled by its configuration "
            f"already: {there}. Pass compose=True to extend its {site.rope.length} tokens further, "
            f"or load {back} to start from the unscaled frequencies{own}"
        )
    if method.is_dynamic:
        raise AlreadyScaledError(
            f"{method.name} changes with the sequence and cannot be composed with {there}; pass "
            f"length=TOKENS to fix it, or choose a fixed method such as 'yarn'"
        )


def require_scaling(place: PatchTarget, method: Method) -> None:
    """Raise if a given ``attention_factor`` would have no effect."""
    if method.attention_factor in (None, 1):
        return
    if all(ignores_scaling(place.decoder, site) for site in place.scaled):
        raise UnsupportedModelError(
            f"{type(place.decoder).__name__} normalizes queries and keys after the rotation, which "
            f"cancels attention_factor={method.attention_factor!r}; give temperature= a number, "
            f"which multiplies queries after that"
        )


def scale_softmax(
    sites: list[RotarySite],
    methods: tuple[Method, ...],
    changes: Changes,
    only: Collection[nn.Module] | None = None,
) -> list[str]:
    """Apply the ``attention_factor`` of methods to the softmax scale, if the checkpoint needs it.

    See :meth:`RotarySite.factors`. ``only``: the attention layers to patch; None: all.
    Returns sentences for ``describe``.
    """
    notes = []
    for site in sites:
        _, number = site.factors(*methods)
        baked = [module for module in site.baked if only is None or module in only]
        if not baked or number == 1:
            continue
        scale_layers(baked, number**2, changes)
        notes.append(
            f"attention_factor: {number:.4g}, by its square in the softmax scale of {len(baked)} "
            f"layers, where this checkpoint has its own (mscale_all_dim), not on cosine and sine"
        )
    return notes


def scale_layers(modules: list[nn.Module], number: float, changes: Changes) -> None:
    """Multiply the softmax scale of attention layers."""
    for module in modules:
        set_attribute(module, "scaling", cast("float", module.scaling) * number, changes)


def target(
    place: PatchTarget, site: RotarySite, method: FrequencyMethod, options: Options
) -> tuple[torch.Tensor, float]:
    """Return float64 frequencies and scaling after the patch; raises if it would extend nothing."""
    refuse_scaled(place.decoder, site, method, options.compose)
    method.check(site.rope.length)
    inv_freq, scaling = site.under(method)
    if not method.extends(site.rope):
        given = ", ".join(f"{k}={v!r}" for k, v in method.options().items())
        raise OptionError(
            f"{method.name}({given}) extends nothing on {site.name or 'this model'}: no frequency "
            f"becomes smaller; choose a larger factor or other options"
        )
    return inv_freq, scaling
