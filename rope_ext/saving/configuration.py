"""Keeps ``model.config`` true while a patch is in force, and knows what it says of a model."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from rope_ext.errors import RecordError, UnsupportedModelError
from rope_ext.record import EXPERTS, FIELD, FIELDS, HEAD, Record, record_of
from rope_ext.rotary.sites import RotarySite, rope_parameters, text_config

CURE = "rope_ext: unknown to plain transformers; load with rope_ext.from_pretrained"
"""Stands where transformers looks a name up, so that its error shows the cure."""
_WRITTEN: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
"""Decoder whose patch is written into the configuration of that id."""


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
            {name: getattr(config, name) for name in FIELDS if _is_field(config, name)}
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
                elif name != HEAD and hasattr(config, name):
                    delattr(config, name)
        if self.outermost.__dict__.get(EXPERTS) == CURE:
            delattr(self.outermost, EXPERTS)


def _is_field(config: Any, name: str) -> bool:
    """Whether a patch may write it over; a head dimension only where it is null.

    Elsewhere it may be computed, or differ from layer to layer and raise an error when it is read.
    """
    return vars(config).get(name, 0) is None if name == HEAD else hasattr(config, name)


def is_scaled(decoder: nn.Module, site: RotarySite) -> str | None:
    """What the checkpoint's own configuration does to a site, in words; None if nothing."""
    config = getattr(site.module, "config", decoder.config)
    factor = rope_parameters(config, site.layer_type).get("factor")
    if site.scaled or factor not in (None, 1, 1.0):
        return f"rope_type {site.rope_type!r} with factor {factor}"
    record = _record(text_config(decoder), native=True)
    return None if record is None else f"{record.call()}, under which it was saved"


def reports_scaling(values: dict[str, Any], scaled: list[RotarySite]) -> bool:
    """Whether the written ``rope_type`` shows that something scales; a larger base does not."""
    parts = [part_of(values["rope_parameters"], site) for site in scaled]
    return all(part["rope_type"] != "default" for part in parts)


def _record(config: Any, native: bool) -> Record | None:
    """The record in ``config`` if it can be read and is ``native``, or not."""
    try:
        record = record_of(config)
    except RecordError:  # the trained length was given, or this would not have come so far
        return None
    return record if record is not None and record.native == native else None


def part_of(parameters: dict[str, Any], site: RotarySite) -> dict[str, Any]:
    """The entry of a configuration's ``rope_parameters`` that belongs to ``site``."""
    part = None if site.layer_type is None else parameters.get(site.layer_type)
    return part if isinstance(part, dict) else parameters
