"""Applies frequency methods: writes the rotary buffers, and adds hooks where that is not enough."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from torch import nn

from rope_ext.apply import position, raising
from rope_ext.apply.base import Applied, require_scaling, scale_layers, scale_softmax, target
from rope_ext.apply.rebuild import unsaved, written
from rope_ext.errors import OptionError, UnsupportedModelError
from rope_ext.methods import FrequencyMethod
from rope_ext.options import Options
from rope_ext.position.layers import find_layouts
from rope_ext.rotary import buffers, hooks
from rope_ext.rotary.calls import refuse_sharded
from rope_ext.rotary.sequences import Sequences
from rope_ext.rotary.sites import PatchTarget, RotarySite
from rope_ext.rotary.swapping import Changes


def apply(
    place: PatchTarget, method: FrequencyMethod, options: Options, changes: Changes
) -> Applied:
    """Apply a frequency method."""
    scaled = place.scaled
    temperature = method.tempered(scaled[0].rope)
    constant = None if temperature is None else temperature.constant
    tempered: list[nn.Module] = []
    if constant is not None:
        found = find_layouts(place.decoder, scaled, "leave temperature out")
        rotated = {module: layout for module, layout in found.items() if layout is not None}
        every = options.sliding_layers == "scale"
        tempered = [module for module, layout in rotated.items() if every or not layout.local]
        if not all(rotated[module].scales for module in tempered):
            tempered = []
    keep = options.sliding_layers == "keep" and any(site.shared for site in scaled)
    uneven = keep or method.start_tokens or options.bias or options.layers
    if uneven or (temperature is not None and not tempered):
        return position.apply(place, method, options, changes)
    length = max(site.target_length(method) for site in scaled)
    targets = {site: target(place, site, method, options) for site in scaled}
    hooks.refuse_unused(place.decoder, scaled)
    growing = getattr(method, "mode", None) == "growing"
    precise = options.is_precise(length) and not (growing and options.precise == "auto")
    if growing and precise:
        raise OptionError(
            f"{method.name}: mode='growing' is transformers' own code and cannot be combined with "
            f"precise=True; use mode='fixed'"
        )
    require_scaling(place, method)
    saved, sequences = written(place, method, length), None
    if tempered:  # the frequencies stay the same, but no rope_type expresses it
        saved = replace(unsaved(place, length), built=saved.built)
    if method.is_dynamic and not growing:
        sequences = Sequences(place, method, changes)
    for site, (inv_freq, scaling) in targets.items():
        if growing:
            _grow(site, method.name, saved.native, changes)
            continue
        values = saved.built.get(site, inv_freq.float()), scaling
        if method.is_dynamic:  # the hook replaces them; the buffer keeps the trained ones
            values = site.loaded, site.scaling
        buffers.write(site, *values)
        if precise or sequences is not None:
            hooks.RotaryHook(site, inv_freq, scaling, precise, sequences).put(changes)
    per_sequence = method.is_dynamic and not growing and saved.native
    notes = _notes(place, precise, per_sequence)
    notes += scale_softmax(scaled, (method,), changes)
    if options.compose == "raise":
        notes += raising.finish(place, saved.values, changes)
    if temperature is not None and constant is not None:
        scale_layers(tempered, constant, changes)
        notes.append(f"temperature: {temperature.formula}, in {len(tempered)} attention layers")
    return Applied(
        method=method,
        target_length=length,
        saved=saved,
        # Plain transformers changes frequencies within a sequence, and only has float32 angles.
        plain=saved.native and not precise and sequences is None,
        precise=precise,
        notes=tuple(notes),
    )


def _grow(site: RotarySite, name: str, native: bool, changes: Changes) -> None:
    """Let transformers' own dynamic type compute the frequencies."""
    if not native:
        raise UnsupportedModelError(
            f"{type(site.module).__name__}: transformers cannot build its dynamic type for this "
            f"family; use mode='fixed'"
        )
    buffers.grow(site, changes)
    refuse = functools.partial(_refuse_sharded, name)
    changes.append(site.module.register_forward_pre_hook(refuse).remove)


def _refuse_sharded(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
    refuse_sharded(name)


def _notes(place: PatchTarget, precise: bool, per_sequence: bool) -> list[str]:
    notes = []
    left = [site for site in place.sites if site not in place.scaled]
    if left:
        names = ", ".join(sorted({site.layer_type or site.name for site in left}))
        notes.append(f"sliding layers: {names} see a limited window and stay as they were")
    if any(site.shared for site in place.scaled):
        notes.append(
            "sliding layers: they share the rotary module and are scaled along, as transformers "
            "does; sliding_layers='keep' leaves them alone"
        )
    if precise:
        notes.append("angles: computed in float64; by plain transformers, in float32")
    if per_sequence:
        notes.append(
            "sequences: each keeps the frequencies it starts with; plain transformers changes them "
            "as a sequence grows, a model reloaded with rope_ext.from_pretrained does not"
        )
    return notes
