"""Keeps ``model.config`` true while a patch is in force, and knows what it says of a model."""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from rope_ext.errors import RecordError, UnsupportedModelError
from rope_ext.record import EXPERTS, FIELD, FIELDS, HEAD, OLDER, Record, record_of
from rope_ext.rotary.sites import RotarySite, rope_parameters, text_config

CURE = "rope_ext: unknown to plain transformers; load with rope_ext.from_pretrained"
"""Stands where transformers looks a name up, so that its error shows the cure."""
_WRITTEN: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
"""Decoder whose patch is written into the configuration of that id."""


_local = threading.local()


@contextmanager
def without_rope_ext() -> Iterator[None]:
    """Transformers in this thread as if rope_ext were not imported: it refuses saved patches."""
    before, _local.refusing = refusing(), True
    try:
        yield
    finally:
        _local.refusing = before


def refusing() -> bool:
    """Whether :func:`without_rope_ext` is in force in this thread."""
    return getattr(_local, "refusing", False)


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
        self.older = [
            {name: vars(config)[name] for name in OLDER if name in vars(config)}
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

    def write_older(self, values: dict[str, Any]) -> None:
        """Write the fields in ``OLDER``, which are saved and change nothing else.

        ``rope_scaling`` is a property of the class, so that only ``to_dict`` sees the instance's
        own value. Nothing is written where a class reads its base from ``rope_theta``.
        """
        for config in self.configs:
            if hasattr(config, "rope_parameters") and not _has_own_base(config):
                replace_older(config, copy.deepcopy(values))

    def undo(self) -> None:
        for config, saved, older in zip(self.configs, self.saved, self.older, strict=True):
            _WRITTEN.pop(id(config), None)
            replace_older(config, older)
            for name in FIELDS:
                if name in saved:
                    setattr(config, name, saved[name])
                elif name != HEAD and hasattr(config, name):
                    delattr(config, name)
        if self.outermost.__dict__.get(EXPERTS) == CURE:
            delattr(self.outermost, EXPERTS)


def replace_older(config: Any, values: Mapping[str, Any]) -> None:
    """Make ``values`` the fields in ``OLDER`` that ``config`` saves; the others are removed."""
    for name in OLDER:
        vars(config).pop(name, None)
    vars(config).update(values)


def carry_older(saved: Mapping[str, Any], config: Any) -> None:
    """Keep the fields in ``OLDER`` of a ``config.json`` that was saved under a patch.

    transformers drops them when it reads the file, so that a model loaded from it would lose them
    when it is saved again.
    """
    text = config.get_text_config(decoder=True)
    parts = [saved, *(part for part in saved.values() if isinstance(part, dict))]
    for part in parts:
        own = part.get("model_type") == text.model_type and "rope_parameters" in part
        if own and "rope_theta" in part and not _has_own_base(text):
            replace_older(text, {name: copy.deepcopy(part[name]) for name in OLDER if name in part})


def _has_own_base(config: Any) -> bool:
    """Whether the class itself reads ``rope_theta``."""
    fields = getattr(type(config), "__dataclass_fields__", {})
    return "rope_theta" in fields or not type(config).__module__.startswith("transformers.")


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
