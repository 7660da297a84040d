"""Reads a model's configuration, and keeps it in step with the patch."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from rope_ext.config.record import EXPERTS, FIELD, FIELDS, HEAD, OLDER, Record, record_of
from rope_ext.errors import CURE, RecordError, UnsupportedModelError
from rope_ext.rotary.sites import RotarySite, text_config

_WRITTEN: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
"""The decoder whose patch is written into a configuration, by the configuration's ``id``."""


@contextmanager
def quieted(logger: logging.Logger, level: int) -> Iterator[None]:
    """Raise the level of ``logger`` to ``level`` inside a ``with`` block."""
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


class ConfigState:
    """Saves the configuration fields that a patch overwrites, and restores them.

    Raises:
        UnsupportedModelError: the configuration already holds the patch of another model.
    """

    def __init__(self, decoder: nn.Module, model: nn.Module) -> None:
        configs = [text_config(decoder), text_config(model)]
        self.decoder, self.outermost = decoder, model.config
        self.configs = list({id(config): config for config in configs}.values())
        if any(_WRITTEN.get(id(config), decoder) is not decoder for config in self.configs):
            raise UnsupportedModelError(
                f"{type(decoder).__name__} shares its configuration object with another patched "
                f"model, so its configuration already looks scaled; unpatch the other model "
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
        """The record of the patch that the checkpoint was saved with, if it is not in force.

        A native record is in force, because transformers builds it from the other fields.
        """
        return _record(self.configs[0], native=False)

    def before(self, names: Iterable[str]) -> dict[str, Any]:
        """Configuration fields before any patch; None where a field did not exist."""
        earlier, in_force = self.earlier, _record(self.configs[0], native=True)
        fields = {**self.saved[0], **({} if earlier is None else earlier.config)}
        before = {name: copy.deepcopy(fields.get(name)) for name in names}
        return before if in_force is None else before | {FIELD: in_force.to_json()}

    def write(self, values: dict[str, Any]) -> None:
        for config in self.configs:
            if FIELD not in values and hasattr(config, FIELD):
                delattr(config, FIELD)  # the checkpoint was saved with another patch
            _WRITTEN[id(config)] = self.decoder
            for name in FIELDS:  # the order matters: the original length before the maximum
                if name in values:
                    setattr(config, name, copy.deepcopy(values[name]))
        if EXPERTS in values:
            setattr(self.outermost, EXPERTS, values[EXPERTS])

    def write_older(self, values: dict[str, Any]) -> None:
        """Write the fields in ``OLDER``, which affect the saved file only.

        ``rope_scaling`` is a property of the class, so only ``to_dict`` sees a value on the
        instance. Classes that read their base from ``rope_theta`` are skipped.
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
    """Set the fields in ``OLDER`` that ``config`` saves to ``values``, and remove the others."""
    for name in OLDER:
        vars(config).pop(name, None)
    vars(config).update(values)


def restore_older(saved: Mapping[str, Any], config: Any) -> None:
    """Restore the fields in ``OLDER`` of a ``config.json`` that was saved with a patch.

    transformers drops them when it reads the file, so without this the model would lose them when
    it is saved again.
    """
    text = config.get_text_config(decoder=True)
    parts = [saved, *(part for part in saved.values() if isinstance(part, dict))]
    for part in parts:
        own = part.get("model_type") == text.model_type and "rope_parameters" in part
        if own and "rope_theta" in part and not _has_own_base(text):
            replace_older(text, {name: copy.deepcopy(part[name]) for name in OLDER if name in part})


def _has_own_base(config: Any) -> bool:
    """Whether the configuration class itself reads ``rope_theta``."""
    fields = getattr(type(config), "__dataclass_fields__", {})
    return "rope_theta" in fields or not type(config).__module__.startswith("transformers.")


def _is_field(config: Any, name: str) -> bool:
    """Whether a patch may overwrite a field; a head dimension only if it is null.

    A head dimension that is set may be a computed property, or differ between layers, in which
    case reading it raises an error.
    """
    return vars(config).get(name, 0) is None if name == HEAD else hasattr(config, name)


def is_scaled(decoder: nn.Module, site: RotarySite) -> str | None:
    """Describe how the checkpoint's configuration scales a site; None if it does not."""
    factor = site.settings.factor
    if site.scaled or factor not in (None, 1, 1.0):
        return f"rope_type {site.rope_type!r} with factor {factor}"
    record = _record(text_config(decoder), native=True)
    return None if record is None else f"{record.call()}, which it was saved with"


def reports_scaling(values: dict[str, Any], scaled: list[RotarySite]) -> bool:
    """Whether the saved ``rope_type`` shows that RoPE is scaled; a larger base alone does not."""
    parts = [part_of(values["rope_parameters"], site) for site in scaled]
    return all(part["rope_type"] != "default" for part in parts)


def _record(config: Any, native: bool) -> Record | None:
    """The record in ``config`` if it is readable and its ``native`` flag matches."""
    try:
        record = record_of(config)
    except RecordError:  # only reached if the user gave the trained length
        return None
    return record if record is not None and record.native == native else None


def part_of(parameters: dict[str, Any], site: RotarySite) -> dict[str, Any]:
    """The entry of a configuration's ``rope_parameters`` that belongs to ``site``."""
    part = None if site.layer_type is None else parameters.get(site.layer_type)
    return part if isinstance(part, dict) else parameters
