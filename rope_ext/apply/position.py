"""Applies position methods, which use this package's attention function."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import cast

import torch

from rope_ext.apply.base import Applied, require_scaling, scale_softmax, target
from rope_ext.apply.rebuild import unsaved
from rope_ext.encodings import Encoding, RoPE
from rope_ext.errors import AlreadyScaledError, UnsupportedModelError
from rope_ext.methods import FrequencyMethod, PositionMethod
from rope_ext.options import Options
from rope_ext.position.map import PositionMap
from rope_ext.rotary import buffers
from rope_ext.rotary.calls import refuse_continuous_batching
from rope_ext.rotary.sites import PatchTarget, RotarySite
from rope_ext.rotary.swapping import Changes

_logger = logging.getLogger("rope_ext")


@dataclass(frozen=True, kw_only=True)
class _Standing(RoPE):
    """Wraps a frequency method as a position method that leaves positions unchanged."""

    of: FrequencyMethod

    @property
    def name(self) -> str:
        return self.of.name


def apply(
    place: PatchTarget, given: PositionMethod | FrequencyMethod, options: Options, changes: Changes
) -> Applied:
    """Apply a position method, or a frequency method with ``layers`` or a bias."""
    from rope_ext.position.install import Installed  # here, since it loads every kernel

    label = str(given) if options.frequency is None else f"{given} on {options.frequency}"
    instead = "use a frequency method such as 'yarn'"
    if isinstance(given, FrequencyMethod):
        options, instead = replace(options, frequency=given), f"patch with {given.name!r}"
        temperature = given.tempered(place.scaled[0].rope)
        method: PositionMethod = _Standing(of=given, temperature=temperature)
    else:
        method = given
    decoder, under, rope = place.decoder, options.frequency, options.rope(place.scaled[0].rope)
    named, beside = method.name, [n for n in ("bias", "layers") if getattr(options, n) is not None]
    if beside:
        added = " and ".join(f"{option}=" for option in beside)
        label = ", ".join([label, *(f"{name}={getattr(options, name)}" for name in beside)])
        named, instead = f"{named} with {added}", f"{instead} without {added}"
    for each in (method, under):
        if each is not None:
            require_scaling(place, each)
    table = {site: _write(place, site, method, options) for site in place.scaled}
    if method.by_pair and any(site.rope.dim != rope.dim for site in place.scaled):
        raise UnsupportedModelError(
            f"{method.name} tells the {rope.dim // 2} pairs of one rotary embedding apart, and "
            f"{type(decoder).__name__} is to be patched in several that have different numbers; "
            f"use another position method, such as 'self_extend'"
        )
    reached, length = method.reached(rope), method.target_length(rope)
    method = cast("PositionMethod", method.resolved(rope))
    precise = options.is_precise(length)
    include_sliding = options.sliding_layers == "scale"
    encoding = method if isinstance(method, Encoding) else options.bias
    windowed = any(site.local or site.shared for site in place.sites)
    if windowed and encoding is not None and encoding.window_beside() is not None:
        raise UnsupportedModelError(
            f"{type(decoder).__name__} has layers with a window already, and {encoding.name} "
            f"chooses the window itself; to remove the positions of layers without one, patch "
            f"with 'nope', and with layers= for some of them"
        )
    more = (include_sliding, encoding, options.layers, named, instead)
    position_map = PositionMap(method, rope, table, label, precise, options.kernel, *more)
    installed = Installed(decoder, position_map, changes)
    refuse_continuous_batching(place.model, installed.unbatched(), changes)
    notes = [*installed.notes]
    if any("mrope_section" in site.settings.parameters for site in place.scaled):
        notes.append(
            f"images: their positions have several axes, and {named} attends by one, so that "
            f"inputs with images or videos will be refused; for these, {instead}"
        )
        _logger.warning("rope_ext: %s", notes[-1])
    methods = (method,) if under is None else (method, under)
    notes += scale_softmax(place.scaled, methods, changes, installed.mapped)
    temperature = method.tempered(rope)
    if temperature is not None:
        notes.append(f"temperature: {temperature!r}, in those attention layers")
    if reached < length:
        notes.append(
            f"distances: {method} keeps to trained ones up to {reached} tokens only, of {length}"
        )
        _logger.warning("rope_ext: %s", notes[-1])
    return Applied(
        method=given if isinstance(given, FrequencyMethod) else method,
        target_length=length,
        saved=unsaved(place, length),
        plain=False,
        precise=precise,
        notes=tuple(notes),
    )


def _write(
    place: PatchTarget, site: RotarySite, method: PositionMethod, options: Options
) -> tuple[torch.Tensor, float]:
    """Write a position method's frequencies (float64, ``[pairs]``) and scaling to a site."""
    under, family = options.frequency, type(place.decoder).__name__
    if under is not None:
        inv_freq, _ = target(place, site, under, options)
        scaling, _ = site.factors(under, method)
        buffers.write(site, inv_freq.float(), scaling)
        return inv_freq, scaling
    if site.rope_type in ("dynamic", "longrope"):
        raise AlreadyScaledError(
            f"{family} has rope_type {site.rope_type!r}, whose frequencies change with the "
            f"sequence, so {method.name} cannot go on top of it; load it with rope_type 'default'"
        )
    scaling, _ = site.factors(method)
    buffers.write(site, site.loaded, scaling)
    return site.loaded.double(), scaling
