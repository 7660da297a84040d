"""Finds configuration fields from which plain transformers rebuilds a patch.

A candidate is accepted only if transformers, given a saved and reloaded copy of the configuration,
builds the patched frequencies from it.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rope_ext.apply.configuration import part_of, quieted
from rope_ext.config.record import EXPERTS, HEAD, OLDER
from rope_ext.errors import CURE
from rope_ext.methods import FrequencyMethod, longrope_table
from rope_ext.rotary.sites import PatchTarget, RotarySite, text_config

# Fields of a scaled entry besides its base; composing replaces all of them.
SCALING_FIELDS = (
    *("attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "long_factor"),
    *("low_freq_factor", "mscale", "mscale_all_dim", "rope_type", "short_factor", "truncate"),
    "type",
)
UNSAVED = "no rope_type can express it: load it with rope_ext.from_pretrained (plain {})"
REFUSED, UNPATCHED = "transformers raises an error", "transformers loads it unpatched"
_BUILT_IN_FLOAT32 = 1e-5  # float32 pow of a large base is accurate to about 2e-6


@dataclass(frozen=True)
class Written:
    """Saved form of a patch."""

    values: dict[str, Any]  # configuration fields and their new values
    native: bool  # whether plain transformers rebuilds the patch from them
    # float32 frequencies that transformers built for each patched site, so that the model in
    # memory and the reloaded one are bit-identical
    built: dict[RotarySite, torch.Tensor]
    note: str  # one sentence for describe


def written(place: PatchTarget, method: FrequencyMethod, target: int) -> Written:
    """Find a configuration from which transformers rebuilds ``method`` on the scaled sites.

    If a method chooses frequencies per sequence, those of the longest sequence are compared.
    """
    config, sites, scaled = text_config(place.decoder), place.sites, place.scaled
    heads: list[dict[str, int]] = [{}]
    if vars(config).get(HEAD, 0) is None:  # some transformers functions cannot read it
        heads.append({HEAD: config.hidden_size // config.num_attention_heads})
    for proposal, head in itertools.product(_proposals(method, scaled), heads):
        values: dict[str, Any] = {"rope_parameters": _merged(config, scaled, proposal, method)}
        values.update(head)
        types = {entry["rope_type"] for entry in proposal.values()}
        if hasattr(config, "original_max_position_embeddings"):
            values["original_max_position_embeddings"] = scaled[0].rope.length
        # The dynamic type scales from max_position_embeddings.
        dynamic = types == {"dynamic"}
        values["max_position_embeddings"] = scaled[0].rope.length if dynamic else target
        built = _built(place.decoder, config, values, sites)
        if built is None or not _equal(built, scaled, method, "dynamic" in types):
            continue
        exact = {} if method.is_dynamic else {site: built[site][0] for site in scaled}
        note = f"plain transformers reloads it (rope_type {', '.join(sorted(types))})"
        if "dynamic" in types:
            note += (
                "; max_position_embeddings stays the trained length, because transformers' "
                "dynamic type scales from it: pass the length to evaluators explicitly"
            )
        return Written(values, True, exact, note)
    return unsaved(place, target)


def unsaved(place: PatchTarget, target: int) -> Written:
    """Return fields for a patch that transformers cannot express.

    Plain transformers would silently load the model unextended, so ``rope_type`` is set to a name
    it does not know. Some families only accept certain names, or ignore the field. For those the
    experts implementation is set instead, which every transformers model looks up first, with or
    without experts.
    """
    config = text_config(place.decoder)
    length = {"max_position_embeddings": target}
    marked = copy.deepcopy(getattr(config, "rope_parameters", None) or {})
    for site in place.scaled:
        part_of(marked, site)["rope_type"] = CURE

    def rotary(trial: Any) -> None:
        _rebuilt_modules(place.decoder, trial, place.sites)

    refused = {"rope_parameters": marked, **length}
    if _is_refused(config, refused, rotary):
        return Written(refused, False, {}, UNSAVED.format(REFUSED))
    if _is_refused(place.model.config, {EXPERTS: CURE}, type(place.model)):
        return Written({**length, EXPERTS: CURE}, False, {}, UNSAVED.format(REFUSED))
    return Written(length, False, {}, UNSAVED.format(UNPATCHED))


def _is_refused(config: Any, values: dict[str, Any], build: Callable[[Any], Any]) -> bool:
    """Whether transformers saves and loads the configuration, but cannot build a model from it."""
    with quieted(logging.getLogger("transformers"), logging.CRITICAL):
        try:
            trial = _reloaded(config, values)
        except Exception:  # but rope_ext.from_pretrained must read it
            return False
        try:
            with torch.device("meta"):
                build(trial)
        except Exception as error:
            return CURE in str(error)
    return False


def _proposals(
    method: FrequencyMethod, scaled: list[RotarySite]
) -> Iterator[dict[RotarySite, dict[str, Any]]]:
    """Yield candidate ``rope_parameters`` entries for each scaled site, the most readable first."""
    raised = {site: dict(site.raised[0]) for site in scaled if site.raised is not None}
    if raised:  # keep the checkpoint's own type
        yield raised
        return
    if not any(site.scaled for site in scaled):
        yield {site: method.rope_parameters(site.rope) for site in scaled}
    if not method.is_dynamic:
        tables = {}
        for site in scaled:
            inv_freq, scaling = site.under(method)
            tables[site] = longrope_table(site.rope, inv_freq, method.factor, scaling)
        yield tables
        # Some types cover the whole head, with frequency zero beyond partial_rotary_factor.
        yield {site: {**table, "partial_rotary_factor": 1.0} for site, table in tables.items()}


def _merged(
    config: Any,
    scaled: list[RotarySite],
    proposal: dict[RotarySite, dict[str, Any]],
    method: FrequencyMethod,
) -> dict[str, Any]:
    merged = copy.deepcopy(getattr(config, "rope_parameters", None) or {})
    for site in scaled:
        part = part_of(merged, site)
        old = {name: part.pop(name, None) for name in SCALING_FIELDS}
        part.setdefault("rope_theta", site.rope.base)
        part.update(copy.deepcopy(proposal[site]))
        if old["mscale_all_dim"] and part["rope_type"] == "longrope":
            # Multi-head latent attention computes its softmax scale from these two fields.
            share = old["mscale_all_dim"]
            if site.baked:
                grown = 0.1 * math.log(old["factor"])
                share = (method.attention_scaling(site.rope) * (grown * share + 1) - 1) / grown
            part.update(factor=old["factor"], mscale_all_dim=share)
    return merged


def _reloaded(config: Any, values: dict[str, Any]) -> Any:
    """Return a copy of ``config`` with ``values``, after a round trip through config.json."""
    trial = copy.deepcopy(config)
    for name in OLDER:  # they would override the new values
        vars(trial).pop(name, None)
    for name, value in values.items():
        setattr(trial, name, copy.deepcopy(value))
    return type(config).from_dict(trial.to_dict())


def _built(
    decoder: nn.Module, config: Any, values: dict[str, Any], sites: list[RotarySite]
) -> dict[RotarySite, tuple[torch.Tensor, float]] | None:
    """Build what transformers builds from ``values``, after a round trip through config.json."""
    try:
        # transformers may reject a candidate; hide its messages from users.
        with quieted(logging.getLogger("transformers"), logging.CRITICAL):
            modules = _rebuilt_modules(decoder, _reloaded(config, values), sites)
        result = {}
        for site in sites:
            module = modules[site.name]
            inv_freq = module.get_buffer(site.buffer).detach()
            result[site] = inv_freq, float(getattr(module, site.scaling_attribute, 1.0))
        return result
    except Exception:  # whatever the error, this candidate does not work
        return None


def _rebuilt_modules(
    decoder: nn.Module, config: Any, sites: list[RotarySite]
) -> dict[str, nn.Module]:
    own = {site.name: site.module for site in sites}
    if all(module.config is text_config(decoder) for module in own.values()):
        cache: dict[type, nn.Module] = {}
        with torch.device("cpu"):
            for module in own.values():
                cls = type(module)
                cache[cls] = cache.get(cls) or cls(config)
        return {name: cache[type(module)] for name, module in own.items()}
    # Rotary modules may have their own configurations, which only the decoder can derive.
    with torch.device("meta"):
        skeleton = type(decoder)(config)
    with torch.device("cpu"):
        return {name: type(m)(skeleton.get_submodule(name).config) for name, m in own.items()}


def _equal(
    built: dict[RotarySite, tuple[torch.Tensor, float]],
    scaled: list[RotarySite],
    method: FrequencyMethod,
    dynamic: bool,
) -> bool:
    """Whether transformers built what the patch computes, and left the other sites alone."""
    for site, (got, got_scaling) in built.items():
        inv_freq, scaling = site.loaded.double(), site.scaling
        if site in scaled:
            inv_freq, scaling = site.under(method)
            if dynamic:  # dynamic modules start unscaled
                inv_freq = site.loaded.double()
            elif method.is_dynamic:  # a new module starts at the trained length
                inv_freq = method.frequencies(site.rope, site.rope.length)
        # A frequency of zero is saved as one that rotates 1e-30 times as fast.
        if got.shape != inv_freq.shape or abs(got_scaling - scaling) > 1e-9 * scaling:
            return False
        if not torch.allclose(got.double(), inv_freq, rtol=_BUILT_IN_FLOAT32, atol=1e-25):
            return False
    return True
