"""Reads a model's configuration, and updates it for the patch."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from rope_ext.config.record import EXPERTS, FIELD, FIELDS, OLDER, Record, record_of
from rope_ext.errors import RecordError
from rope_ext.rotary.sites import PatchTarget, RotarySite, text_config
from rope_ext.rotary.swapping import ABSENT, Changes, restore


@contextmanager
def quieted(logger: logging.Logger, level: int) -> Iterator[None]:
    """Raise the level of ``logger`` to ``level`` inside a ``with`` block."""
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def write(
    place: PatchTarget,
    values: Mapping[str, Any],
    older: Callable[[], Mapping[str, Any]],
    changes: Changes,
) -> None:
    """Write a patch into the configurations of the text model until ``changes`` are undone.

    ``older`` returns the fields in ``OLDER`` once all others are written. They only affect saved
    files: ``rope_scaling`` is a property of the class, so only ``to_dict`` sees a value on the
    instance. They are not written for classes that read their base from ``rope_theta``.
    """
    outermost: Any = place.model.config
    texts = {id(config): config for config in map(text_config, (place.decoder, place.model))}
    before = [(c, dict(vars(c))) for c in {**texts, id(outermost): outermost}.values()]
    try:
        for config in texts.values():
            vars(config).pop(FIELD, None)  # the checkpoint was saved with another patch
            for name in FIELDS:  # in order: the original length before the maximum
                if name in values:
                    setattr(config, name, copy.deepcopy(values[name]))
        if EXPERTS in values:
            setattr(outermost, EXPERTS, values[EXPERTS])
        for config in texts.values():
            fields = getattr(type(config), "__dataclass_fields__", {})
            ours = type(config).__module__.startswith("transformers.") and OLDER[0] not in fields
            if ours and hasattr(config, "rope_parameters"):
                for name in OLDER:
                    vars(config).pop(name, None)
                vars(config).update(copy.deepcopy(dict(older())))
    finally:
        for config, old in before:
            now = vars(config)
            names = [k for k in old | now if old.get(k, ABSENT) is not now.get(k, ABSENT)]
            own = {name: old.get(name, ABSENT) for name in names}
            changes.append(functools.partial(restore, config, own))


def before(config: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return configuration fields from before any patch; None for fields that did not exist."""
    earlier, in_force = earlier_record(config), _record(config, native=True)
    fields = {name: getattr(config, name, None) for name in names}
    fields |= {} if earlier is None else earlier.config
    values = {name: copy.deepcopy(fields.get(name)) for name in names}
    return values if in_force is None else values | {FIELD: in_force.to_json()}


def earlier_record(config: Any) -> Record | None:
    """Return the record of the patch that the checkpoint was saved with, unless it is in force.

    A native record is in force, because transformers builds its patch from the other fields.
    """
    return _record(config, native=False)


def is_scaled(decoder: nn.Module, site: RotarySite) -> str | None:
    """Describe how the checkpoint's configuration scales a site; None if it does not."""
    factor = site.settings.factor
    if site.scaled or factor not in (None, 1, 1.0):
        return f"rope_type {site.rope_type!r} with factor {factor}"
    record = _record(text_config(decoder), native=True)
    return None if record is None else f"{record.call()}, which it was saved with"


def reports_scaling(values: dict[str, Any], scaled: list[RotarySite]) -> bool:
    """Whether the saved ``rope_type`` scales RoPE; a larger base alone does not count."""
    parts = [part_of(values["rope_parameters"], site) for site in scaled]
    return all(part["rope_type"] != "default" for part in parts)


def _record(config: Any, native: bool) -> Record | None:
    """Return the record in ``config`` if it is readable and its ``native`` flag matches."""
    try:
        record = record_of(config)
    except RecordError:  # only if the user passed the trained length
        return None
    return record if record is not None and record.native == native else None


def part_of(parameters: dict[str, Any], site: RotarySite) -> dict[str, Any]:
    """Return the entry of a configuration's ``rope_parameters`` that belongs to ``site``."""
    part = None if site.layer_type is None else parameters.get(site.layer_type)
    return part if isinstance(part, dict) else parameters
