"""Keeps ``model.config`` true, so that plain transformers reloads what was patched.

A configuration is only written after transformers itself, given a saved and reloaded copy of
it, has built the patched frequencies.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rope_ext.errors import RecordError, UnsupportedModelError
from rope_ext.methods import FrequencyMethod, longrope_table
from rope_ext.record import EXPERTS, FIELD, FIELDS, Record, record_of
from rope_ext.rotary.sites import Place, RotarySite, rope_parameters, text_config

# What a scaled entry holds beside its base; replaced as a whole when a patch goes on top.
_SCALING = (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "high_freq_factor",
    "long_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "rope_type",
    "short_factor",
    "truncate",
    "type",
)
_UNSAVED = "transformers has no type for it: reload it with rope_ext.from_pretrained (plain {})"
CURE = "rope_ext: unknown to plain transformers; load with rope_ext.from_pretrained"
"""Stands where transformers looks a name up, so that its error shows the cure."""
_WRITTEN: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
"""Decoder whose patch is written into the configuration of that id."""
_BUILT_IN_FLOAT32 = 1e-5  # pow of a large base in float32 is good to about 2e-6


@dataclass(frozen=True)
class Written:
    """How a patch is written down.

    Args:
        values: configuration fields and their new values.
        native: whether plain transformers rebuilds the patch from them.
        built: for each patched site, the float32 frequencies that transformers built, so that
            the model in memory and the reloaded one agree to the last bit.
        note: one sentence for ``describe``.
    """

    values: dict[str, Any]
    native: bool
    built: dict[RotarySite, torch.Tensor]
    note: str


def written(place: Place, method: FrequencyMethod, target: int) -> Written:
    """Find a configuration from which transformers rebuilds ``method`` on the scaled sites.

    Frequencies that a method chooses per sequence are compared at its longest one.
    """
    config, sites, scaled = text_config(place.decoder), place.sites, place.scaled
    for proposal in _proposals(method, scaled):
        values: dict[str, Any] = {"rope_parameters": _merged(config, scaled, proposal)}
        types = {entry["rope_type"] for entry in proposal.values()}
        if hasattr(config, "original_max_position_embeddings"):
            values["original_max_position_embeddings"] = scaled[0].rope.length
        # The dynamic type counts from max_position_embeddings.
        dynamic = types == {"dynamic"}
        values["max_position_embeddings"] = scaled[0].rope.length if dynamic else target
        built = _built(place.decoder, config, values, sites)
        if built is None or not _equal(built, sites, scaled, method, "dynamic" in types):
            continue
        exact = {} if method.adapts else {site: built[site][0] for site in scaled}
        note = f"plain transformers reloads it (rope_type {', '.join(sorted(types))})"
        if "dynamic" in types:
            note += (
                "; max_position_embeddings stays the trained length, from which transformers' "
                "dynamic type counts: give evaluators their length by hand"
            )
        return Written(values, True, exact, note)
    return unsaved(place, target)


def unsaved(place: Place, target: int) -> Written:
    """For a patch that no configuration of transformers describes.

    Plain transformers would load it unextended without a word. So ``rope_type`` becomes a name
    that it does not know. Some families allow certain names only, or take their frequencies from
    elsewhere: for them it is the experts' implementation, which every model of transformers looks
    up first of all, with or without experts.
    """
    config = text_config(place.decoder)
    length = {"max_position_embeddings": target}
    marked = copy.deepcopy(getattr(config, "rope_parameters", None) or {})
    for site in place.scaled:
        _part(marked, site)["rope_type"] = CURE

    def whole(trial: Any) -> None:
        with torch.device("meta"):
            type(place.model)(trial)

    def rotary(trial: Any) -> None:
        _rebuilt_modules(place.decoder, trial, place.sites)

    refused = {"rope_parameters": marked, **length}
    if not _is_refused(config, refused, rotary):
        refused = {**length, EXPERTS: CURE}
        if not _is_refused(place.model.config, {EXPERTS: CURE}, whole):
            return Written(length, False, {}, _UNSAVED.format("transformers loads it unpatched"))
    return Written(refused, False, {}, _UNSAVED.format("transformers refuses it"))


def _is_refused(config: Any, values: dict[str, Any], build: Callable[[Any], Any]) -> bool:
    """Whether transformers saves and reads the configuration, but builds no model from it."""
    with quieted(logging.getLogger("transformers"), logging.CRITICAL):
        try:
            trial = _reloaded(config, values)
        except Exception:  # rope_ext.from_pretrained has to read it
            return False
        try:
            build(trial)
        except Exception as error:
            return CURE in str(error)
    return False


def _proposals(
    method: FrequencyMethod, scaled: list[RotarySite]
) -> Iterator[dict[RotarySite, dict[str, Any]]]:
    """Entries of rope_parameters for each scaled site, the most readable first."""
    if not any(site.scaled for site in scaled):
        yield {site: method.rope_parameters(site.rope) for site in scaled}
    if not method.adapts:
        tables = {}
        for site in scaled:
            inv_freq, scaling = site.under(method)
            tables[site] = longrope_table(site.rope, inv_freq, method.factor, scaling)
        yield tables
        # Some types give the whole head a frequency, zero beyond its partial_rotary_factor.
        yield {site: {**table, "partial_rotary_factor": 1.0} for site, table in tables.items()}


def _merged(
    config: Any, scaled: list[RotarySite], proposal: dict[RotarySite, dict[str, Any]]
) -> dict[str, Any]:
    merged = copy.deepcopy(getattr(config, "rope_parameters", None) or {})
    for site in scaled:
        part = _part(merged, site)
        old = {name: part.pop(name, None) for name in _SCALING}
        part.setdefault("rope_theta", site.rope.base)
        part.update(copy.deepcopy(proposal[site]))
        if old["mscale_all_dim"] and part["rope_type"] == "longrope":
            # Latent attention takes its softmax scale from these two, and a patch leaves it alone.
            part.update(factor=old["factor"], mscale_all_dim=old["mscale_all_dim"])
    return merged


def _part(parameters: dict[str, Any], site: RotarySite) -> dict[str, Any]:
    """What in a configuration's ``rope_parameters`` is of ``site``."""
    part = parameters.get(site.layer_type)
    return part if isinstance(part, dict) else parameters


def _reloaded(config: Any, values: dict[str, Any]) -> Any:
    """A copy of ``config`` with ``values``, after a round trip through config.json."""
    trial = copy.deepcopy(config)
    for name, value in values.items():
        setattr(trial, name, copy.deepcopy(value))
    return type(config).from_dict(trial.to_dict())


def _built(
    decoder: nn.Module, config: Any, values: dict[str, Any], sites: list[RotarySite]
) -> dict[RotarySite, tuple[torch.Tensor, float]] | None:
    """What transformers builds from ``values``, after a round trip through config.json."""
    try:
        # Trials may be refused by transformers; that is not the user's concern.
        with quieted(logging.getLogger("transformers"), logging.CRITICAL):
            modules = _rebuilt_modules(decoder, _reloaded(config, values), sites)
        result = {}
        for site in sites:
            module = modules[site.name]
            inv_freq = module._buffers[site.buffer].detach()
            result[site] = inv_freq, float(getattr(module, site.scaling_attribute, 1.0))
        return result
    except Exception:  # whatever transformers raises on a configuration, it cannot be saved
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
    # Rotary modules with configurations of their own: only the decoder knows how they come about.
    with torch.device("meta"):
        skeleton = type(decoder)(config)
    with torch.device("cpu"):
        return {name: type(m)(skeleton.get_submodule(name).config) for name, m in own.items()}


def _equal(
    built: dict[RotarySite, tuple[torch.Tensor, float]],
    sites: list[RotarySite],
    scaled: list[RotarySite],
    method: FrequencyMethod,
    dynamic: bool,
) -> bool:
    for site in sites:
        inv_freq, scaling = site.loaded.double(), site.scaling
        if site in scaled and not dynamic:
            inv_freq, scaling = site.under(method)
            if method.adapts:  # a freshly built module starts at the trained length
                lengths = torch.tensor([site.rope.length], dtype=torch.float64, device="cpu")
                inv_freq = method.inv_freq_at(site.rope, lengths)[0]
        got, got_scaling = built[site]
        if got.shape != inv_freq.shape:
            return False
        # A frequency of zero is written as one that turns 1e-30 times as fast.
        close = torch.allclose(got.double(), inv_freq, rtol=_BUILT_IN_FLOAT32, atol=1e-25)
        if not close or abs(got_scaling - scaling) > 1e-9 * scaling:
            return False
    return True


@contextmanager
def quieted(logger: logging.Logger, level: int) -> Iterator[None]:
    """Nothing below ``level`` from ``logger`` for the length of a ``with`` block."""
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


class ConfigState:
    """Configuration fields as they were, and a way back.

    Raises:
        UnsupportedModelError: the patch of another model is written into the configuration.
    """

    def __init__(self, decoder: nn.Module, model: nn.Module) -> None:
        configs = [text_config(decoder), text_config(model)]
        self.decoder, self.outermost = decoder, model.config
        self.configs = list({id(config): config for config in configs}.values())
        if any(_WRITTEN.get(id(config), decoder) is not decoder for config in self.configs):
            raise UnsupportedModelError(
                f"{type(decoder).__name__} shares its configuration object with another model "
                f"that is patched, so it would be taken for scaled already; unpatch that one "
                f"first, or build each model from its own copy.deepcopy(config)"
            )
        self.saved = [
            {name: getattr(config, name) for name in FIELDS if hasattr(config, name)}
            for config in self.configs
        ]

    @property
    def earlier(self) -> Record | None:
        """The record of the patch under which the model was saved that is loaded here plainly.

        One that the rest of the configuration describes as well does not count: it is in force.
        """
        return _record(self.configs[0], native=False)

    def before(self, names: Iterable[str]) -> dict[str, Any]:
        """Fields of the configuration before any patch; None: not there."""
        earlier, in_force = self.earlier, _record(self.configs[0], native=True)
        fields = {**self.saved[0], **({} if earlier is None else earlier.config)}
        before = {name: copy.deepcopy(fields.get(name)) for name in names}
        return before if in_force is None else before | {FIELD: in_force.to_json()}

    def write(self, values: dict[str, Any]) -> None:
        for config in self.configs:
            if FIELD not in values and hasattr(config, FIELD):
                delattr(config, FIELD)  # the checkpoint was saved under another patch
            _WRITTEN[id(config)] = self.decoder
            for name in FIELDS:  # in this order: the original before the maximum
                if name in values:
                    setattr(config, name, copy.deepcopy(values[name]))
        if EXPERTS in values:
            setattr(self.outermost, EXPERTS, values[EXPERTS])

    def undo(self) -> None:
        for config, saved in zip(self.configs, self.saved, strict=True):
            _WRITTEN.pop(id(config), None)
            for name in FIELDS:
                if name in saved:
                    setattr(config, name, saved[name])
                elif hasattr(config, name):
                    delattr(config, name)
        if self.outermost.__dict__.get(EXPERTS) == CURE:
            delattr(self.outermost, EXPERTS)


def is_scaled(decoder: nn.Module, site: RotarySite) -> str | None:
    """What the checkpoint's own configuration does to a site, in words; None if nothing."""
    config = getattr(site.module, "config", decoder.config)
    factor = rope_parameters(config, site.layer_type).get("factor")
    if site.scaled or factor not in (None, 1, 1.0):
        return f"rope_type {site.rope_type!r} with factor {factor}"
    record = _record(text_config(decoder), native=True)
    return None if record is None else f"{record.call()}, under which it was saved"


def tells(values: dict[str, Any], scaled: list[RotarySite]) -> bool:
    """Whether the written ``rope_type`` shows that something scales; a larger base does not."""
    parts = [_part(values["rope_parameters"], site) for site in scaled]
    return all(part["rope_type"] != "default" for part in parts)


def _record(config: Any, native: bool) -> Record | None:
    """The record in ``config`` if it can be read and is ``native``, or not."""
    try:
        record = record_of(config)
    except RecordError:  # the trained length was given, or this would not have come so far
        return None
    return record if record is not None and record.native == native else None
