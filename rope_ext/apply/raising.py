"""Implements ``compose="raise"``: a larger factor in the checkpoint's own RoPE scaling.

YaRN on top of YaRN is not YaRN with a larger factor: the second ramp starts from the pairs that the
first one left. So the checkpoint's own scaling is replaced by the same type with the same options
and a larger factor.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from rope_ext.config.settings import METHODS, method_of
from rope_ext.errors import AlreadyScaledError, OptionError, UnsupportedModelError
from rope_ext.methods import FrequencyMethod, Method, Rope, method_class
from rope_ext.methods.checked import not_none
from rope_ext.methods.rope import reach
from rope_ext.methods.temperature import yarn_factor
from rope_ext.options import Options
from rope_ext.rotary.sites import PatchTarget, RotarySite, softmax_scales
from rope_ext.rotary.swapping import Changes, set_attribute

TYPES = {kind: name for kind, name in METHODS.items() if kind != "longrope"}
"""Methods whose factor can be raised, by ``rope_type``."""


def raise_factor(
    place: PatchTarget, method: Method, options: Options, changes: Changes
) -> tuple[PatchTarget, FrequencyMethod, list[str]]:
    """Return the unscaled sites, the checkpoint's own method with a larger factor, and notes.

    Args:
        place: an unpatched model.
        method: named after the scaling of the checkpoint; only its factor counts.
        options: of ``patch``; those that need the unscaled checkpoint are refused.
        changes: receives what else depends on the checkpoint's own scaling.

    Raises:
        AlreadyScaledError: the checkpoint's type has no factor that could be raised.
        OptionError: ``method`` is another type, has further options, or its factor is not larger.
        UnsupportedModelError: the checkpoint is not scaled, or not as in its configuration.
    """
    family, scaled = type(place.decoder).__name__, [site for site in place.scaled if site.scaled]
    if not scaled:
        raise UnsupportedModelError(
            f"{family} ships without RoPE scaling, so compose='raise' has no factor to raise; "
            f"leave compose out"
        )
    kind = scaled[0].rope_type
    if kind not in TYPES:
        raise AlreadyScaledError(
            f"the checkpoint is scaled by {kind!r}, a table that was searched for one length: no "
            f"factor stretches it. Load it with rope_type 'default' and patch that, or search for "
            f"a table of the new length with rope_ext.search"
        )
    name = TYPES[kind]
    if method.name != name:
        raise OptionError(
            f"compose='raise' raises the factor of the checkpoint's own {kind!r}, not of "
            f"{method.name!r}; pass method={name!r}, or compose=True to put {method.name!r} on top"
        )
    plain = method_class(name)(factor=method.factor)
    given = [k for k, v in method.options().items() if v != getattr(plain, k)]
    own = ("bias", "layers", "original_max_position_embeddings")
    given += [f"{option}=" for option in own if getattr(options, option) is not None]
    if given:
        raise OptionError(
            f"compose='raise' takes everything but the factor from the checkpoint; leave "
            f"{', '.join(given)} out"
        )
    found = {site: _raised(family, site, method.factor) for site in scaled}
    methods = {made for _, made in found.values()}
    if len(methods) > 1:
        raise UnsupportedModelError(
            f"{family} scales its kinds of layers by different options, and compose='raise' "
            f"raises one set; pass compose=True to extend all of them further"
        )
    notes = []
    for site in scaled:
        if kind == "dynamic":  # transformers changes these frequencies in every forward
            set_attribute(site.module, "rope_type", "default", changes)
        if site.baked:
            scales = softmax_scales(place.decoder, factor=float(method.factor))
            for module, scale in scales.items():
                set_attribute(module, "scaling", scale, changes)
            notes.append(
                f"softmax scale: that of the raised factor (mscale_all_dim) in {len(scales)} layers"
            )
    sites = [found[site][0] if site in found else site for site in place.sites]
    place = replace(place, sites=sites, scaled=[found[site][0] for site in scaled])
    return place, methods.pop(), notes


def _raised(family: str, site: RotarySite, factor: float) -> tuple[RotarySite, FrequencyMethod]:
    own, kind, settings = site.settings.parameters, site.rope_type, site.settings
    old, length = not_none(settings.factor), not_none(settings.length)
    if factor <= old:
        raise OptionError(
            f"factor={factor!r} does not raise the checkpoint's own factor, which is {old!r}; pass "
            f"a larger one"
        )
    rope = Rope.geometric(site.rope.base, site.rope.dim, length)
    made, raised = (_method(own, old, number) for number in (old, float(factor)))
    target, loaded = reach(factor, length), site.loaded
    if kind == "llama3":  # its context does not grow by exactly the factor
        target = reach(factor / old, not_none(settings.target))
    if kind == "dynamic":  # the buffer may have grown with a sequence
        loaded = rope.inv_freq.float()
    elif not (
        torch.allclose(made.inv_freq(rope), loaded.double(), rtol=1e-5, atol=0)
        and math.isclose(made.attention_scaling(rope), site.scaling, rel_tol=1e-6)
    ):
        raise UnsupportedModelError(
            f"{family}: its frequencies are not those of rope_type {kind!r} in its configuration, "
            f"so its factor cannot be raised; pass compose=True to extend them further"
        )
    entry = {**copy.deepcopy(dict(own)), **raised.rope_parameters(rope)}
    if _has_own_ratio(own):
        del entry["attention_factor"]  # transformers computes it from the factor
    unscaled = {"rope": rope, "loaded": loaded, "scaling": 1.0, "rope_type": "default", "baked": ()}
    return replace(site, **unscaled, raised=(entry, target)), raised


def _has_own_ratio(entry: Mapping[str, Any]) -> bool:
    """Whether transformers computes the attention factor from ``mscale`` and the factor."""
    own = entry.get("mscale") and entry.get("mscale_all_dim")
    return bool(own) and entry.get("attention_factor") is None


def _method(entry: Mapping[str, Any], old: float, factor: float) -> FrequencyMethod:
    """Return the method that computes an entry of ``rope_parameters``, with another factor."""
    made, grown = not_none(method_of(entry, old)), yarn_factor(factor) - 1
    if _has_own_ratio(entry):
        ratio = (entry["mscale"] * grown + 1) / (entry["mscale_all_dim"] * grown + 1)
        made = replace(made, attention_factor=ratio)
    return replace(made, factor=factor)
