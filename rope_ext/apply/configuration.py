"""Reads a model's configuration, and updates it for the patch."""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from torch import nn

from rope_ext.config.record import EXPERTS, FIELD, FIELDS, OLDER, Record, record_of
from rope_ext.errors import CURE, RecordError
from rope_ext.methods.temperature import yarn_factor
from rope_ext.rotary.sites import PatchTarget, RotarySite, text_config
from rope_ext.rotary.swapping import ABSENT, Changes, restore

STOP = "rope_ext: extended by rope_parameters, which this program does not read"
"""Written instead of the base, for readers that cannot compute the patch."""

_THETA, _SCALING = OLDER
_ALL = ("default", "linear", "yarn", "llama3", "longrope")
READ: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "olmo2", "olmoe"), _ALL),
        **dict.fromkeys(("granite", "granitemoe", "smollm3", "seed_oss", "dots1"), _ALL),
        **dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), ("default", "linear", "llama3")),
        **dict.fromkeys(("mixtral", "qwen2_moe", "starcoder2", "cohere", "gemma"), ("default",)),
        **dict.fromkeys(("ernie4_5", "hunyuan_v1_dense", "phi3", "nemotron"), ("default",)),
    }
)
"""For each family, the values of ``rope_type`` that mlx-lm 0.32.2 builds from the older fields."""


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
    place: PatchTarget, values: Mapping[str, Any], native: bool, is_dynamic: bool, changes: Changes
) -> None:
    """Write a patch into the configurations of the text model until ``changes`` are undone.

    The fields in ``OLDER`` only affect saved files: ``rope_scaling`` is a property of the class, so
    only ``to_dict`` sees a value on the instance. They are not written for classes that read their
    base from ``rope_theta``.

    Args:
        place: where the patch was applied.
        values: fields and their new values.
        native: whether transformers builds the patch from them.
        is_dynamic: whether frequencies depend on the sequence length.
        changes: the changes of the patch.
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
                vars(config).update(copy.deepcopy(_older_fields(place, native, is_dynamic)))
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


def _older_fields(place: PatchTarget, native: bool, is_dynamic: bool) -> dict[str, Any]:
    """Return the fields in ``OLDER`` for a configuration whose other fields describe the patch.

    mlx-lm, transformers 4 and older converters read them instead of ``rope_parameters``. Without
    them, they fall back to a default base and no scaling, and silently drop the patch. So they
    either describe the patch, or store a sentence instead of the base, which makes the reader fail.

    transformers 5 prefers ``rope_scaling`` to ``rope_parameters`` if both exist, and reads the base
    from it, so these fields never change what it builds.
    """
    config = text_config(place.decoder)
    parameters = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        return {_THETA: STOP if native else CURE}  # the older fields describe only one embedding
    if not native:
        refused = {_SCALING: copy.deepcopy(parameters)}
        return {_THETA: CURE, **(refused if parameters.get("rope_type") == CURE else {})}
    scaling = None if is_dynamic else _rope_scaling(config, parameters)
    if scaling is None or any(site.baked for site in place.sites):
        return {_THETA: STOP}
    fields = {_THETA: STOP}
    if parameters["rope_type"] in READ.get(config.model_type, ()):
        fields = {_THETA: parameters["rope_theta"]}
    return fields if parameters["rope_type"] == "default" else {**fields, _SCALING: scaling}


def _rope_scaling(config: Any, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a ``rope_scaling`` that mlx-lm and transformers interpret equally, or None.

    See ``mlx_lm/models/rope_utils.py`` in mlx-lm 0.32.2, which ignores ``attention_factor``,
    ``truncate`` and ``partial_rotary_factor``.
    """
    kind, given = parameters["rope_type"], parameters.get("attention_factor")
    scaling = copy.deepcopy(dict(parameters))
    if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
        return None
    if kind in ("default", "linear", "llama3"):
        return scaling
    if kind == "yarn":
        factor = parameters["factor"]
        if not parameters.get("truncate", True) or parameters.get("mscale_all_dim") or factor <= 1:
            return None
        usual = yarn_factor(factor)
        if given is not None and not math.isclose(given, usual, rel_tol=1e-9):
            # mlx-lm computes (0.1 mscale ln(factor) + 1) / 1.
            scaling |= {"mscale": (given - 1) / (usual - 1), "mscale_all_dim": 0}
        return scaling
    if kind == "longrope" and parameters["short_factor"] == parameters["long_factor"]:
        length = parameters["original_max_position_embeddings"]
        factor = config.max_position_embeddings / length
        computed = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
        if given is None or math.isclose(computed, given, rel_tol=1e-6):
            return scaling
    return None
