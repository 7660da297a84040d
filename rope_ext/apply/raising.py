"""``compose="raise"``: a larger factor in the checkpoint's own RoPE scaling.

YaRN on top of YaRN is not YaRN with a larger factor: the second ramp starts from the pairs that the
first one left. Here the scaling that the checkpoint ships with is taken off, and the same type with
the same options and a larger factor takes its place.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rope_ext.config.entries import METHODS, method_of
from rope_ext.errors import AlreadyScaledError, OptionError, UnsupportedModelError
from rope_ext.methods import FrequencyMethod, Method, Rope, method_class
from rope_ext.methods.checked import not_none
from rope_ext.methods.rope import reach
from rope_ext.methods.temperature import yarn_factor
from rope_ext.options import Options
from rope_ext.rotary.sites import PatchTarget, Raised, RotarySite, text_config
from rope_ext.rotary.swapping import Changes, set_attribute

TYPES = {kind: name for kind, name in METHODS.items() if kind != "longrope"}
"""Methods by the ``rope_type`` whose factor can be raised."""
_LENGTH = "original_max_position_embeddings"


def raise_factor(
    place: PatchTarget, method: Method, options: Options
) -> tuple[PatchTarget, FrequencyMethod]:
    """The unscaled sites, and the checkpoint's own method with the factor of ``method``.

    Args:
        place: a model that is not patched.
        method: named after the scaling of the checkpoint; only its factor counts.
        options: of ``patch``; those that need the unscaled checkpoint are refused.

    Raises:
        AlreadyScaledError: the checkpoint's type has no factor that could be raised.
        OptionError: ``method`` is another type, has further options, or its factor is not larger.
        UnsupportedModelError: the checkpoint is not scaled, or not by what its configuration says.
    """
    scaled = [site for site in place.scaled if site.scaled]
    if not scaled:
        raise UnsupportedModelError(
            f"{type(place.decoder).__name__} ships without RoPE scaling, so compose='raise' has no "
            f"factor to raise; leave compose out"
        )
    _refuse(method, scaled[0], options)
    found = {site: _raised(place.decoder, site, method.factor) for site in scaled}
    methods = {made for _, made in found.values()}
    if len(methods) > 1:
        raise UnsupportedModelError(
            f"{type(place.decoder).__name__} scales its kinds of layers by different options, and "
            f"compose='raise' raises one set; pass compose=True to extend all of them further"
        )
    sites = [found[site][0] if site in found else site for site in place.sites]
    raised = [found[site][0] for site in scaled]
    return replace(place, sites=sites, scaled=raised), methods.pop()


def _refuse(method: Method, site: RotarySite, options: Options) -> None:
    kind = site.rope_type
    if kind not in TYPES:
        raise AlreadyScaledError(
            f"the checkpoint is scaled by {kind!r}, a table that was searched for one length: no "
            f"factor stretches it. Load it with rope_type 'default' and patch that, or search for "
            f"a table of the new length with rope_ext.search"
        )
    name = TYPES[kind]
    if method.name != name:
        raise OptionError(
            f"compose='raise' raises the factor of the checkpoint's own scaling, which is "
            f"{kind!r}, not {method.name!r}; pass method={name!r}, or compose=True to put "
            f"{method.name!r} on top"
        )
    plain = method_class(name)(factor=method.factor)
    if method != plain:
        given = [k for k, v in method.options().items() if v != getattr(plain, k)]
        raise OptionError(
            f"compose='raise' takes every option but the factor from the checkpoint; leave "
            f"{', '.join(given)} out"
        )
    for option in ("bias", "layers", _LENGTH):
        if getattr(options, option) is not None:
            raise OptionError(f"compose='raise' cannot have {option}=; leave it out")


def _raised(
    decoder: nn.Module, site: RotarySite, factor: float
) -> tuple[RotarySite, FrequencyMethod]:
    own, kind = site.settings.parameters, site.rope_type
    old, length = not_none(site.settings.factor), not_none(site.settings.length)
    if factor <= old:
        raise OptionError(
            f"factor={factor!r} does not raise the checkpoint's own factor, which is {old!r}; pass "
            f"a larger one"
        )
    rope = Rope.geometric(site.rope.base, site.rope.dim, length)
    entry = {**copy.deepcopy(dict(own)), "factor": float(factor)}
    # Llama 3's factor divides frequencies by more, or less, than its context grows.
    target = (
        reach(factor / old, not_none(site.settings.target))
        if kind == "llama3"
        else reach(factor, length)
    )
    made = _method(own, old)
    if kind == "dynamic":  # the buffer may have grown with a sequence
        loaded = rope.inv_freq.float()
    else:
        loaded = site.loaded
        same = torch.allclose(made.inv_freq(rope), loaded.double(), rtol=1e-5, atol=0)
        if not same or not math.isclose(made.attention_scaling(rope), site.scaling, rel_tol=1e-6):
            raise UnsupportedModelError(
                f"{type(decoder).__name__}: its frequencies are not those of rope_type {kind!r} in "
                f"its configuration, so its factor cannot be raised; pass compose=True to extend "
                f"them further"
            )
    if kind == "yarn":  # engines and files name these always
        entry |= {name: float(getattr(made, name)) for name in ("beta_fast", "beta_slow")}
        if _follows(own, old):
            entry.pop("attention_factor", None)
    site = replace(
        site,
        rope=rope,
        loaded=loaded,
        scaling=1.0,
        rope_type="default",
        baked=(),
        raised=Raised(entry, target),
    )
    return site, _method(entry, float(factor))


def _method(entry: Mapping[str, Any], factor: float) -> FrequencyMethod:
    """The method that computes an entry of ``rope_parameters`` with this factor."""
    made = method_of({**entry, "attention_factor": _attention_factor(entry, factor)}, factor)
    assert made is not None, "_refuse lets through the types that have a method"
    return made


def _attention_factor(entry: Mapping[str, Any], factor: float) -> float | None:
    """As transformers reads it; None: the usual one."""
    given, mscale, share = (entry.get(k) for k in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return float(given)
    if not mscale or not share:
        return None
    grown = yarn_factor(factor) - 1
    return (mscale * grown + 1) / (share * grown + 1)


def _follows(entry: Mapping[str, Any], factor: float) -> bool:
    """Whether ``attention_factor`` is what the factor gives, so that it grows along."""
    given = entry.get("attention_factor")
    without = _attention_factor({**entry, "attention_factor": None}, factor)
    usual = yarn_factor(factor) if without is None else without
    return given is None or math.isclose(given, usual, rel_tol=1e-6)


def finish(place: PatchTarget, values: Mapping[str, Any], changes: Changes) -> list[str]:
    """Change what else a checkpoint's own scaling has set.

    transformers changes dynamic frequencies in every forward, and latent attention computes its
    softmax scale from ``mscale_all_dim`` when a layer is built.

    Args:
        place: raised by :func:`raise_factor`.
        values: the new values of the configuration.
        changes: gets what is changed.

    Returns:
        A sentence for ``describe``, or none.
    """
    for module in {site.module for site in place.scaled}:
        kind: Any = getattr(module, "rope_type", None)
        if kind == "dynamic":
            set_attribute(module, "rope_type", "default", changes)
    entries = [site.raised.entry for site in place.scaled if site.raised is not None]
    if not any(entry.get("mscale_all_dim") for entry in entries):
        return []
    config = copy.deepcopy(text_config(place.decoder))
    config.rope_parameters = copy.deepcopy(values["rope_parameters"])
    try:
        with torch.device("meta"):
            built = dict(type(place.decoder)(config).named_modules())
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(place.decoder).__name__} cannot be built from its configuration ({error}), so "
            f"the softmax scale under the raised factor is unknown; pass compose=True instead"
        ) from error
    count = 0
    for name, module in place.decoder.named_modules():
        old, new = module.__dict__.get("scaling"), getattr(built.get(name), "scaling", None)
        if isinstance(old, float) and isinstance(new, float) and new != old:
            set_attribute(module, "scaling", new, changes)
            count += 1
    return [f"softmax scale: that of the raised factor (mscale_all_dim) in {count} layers"]
