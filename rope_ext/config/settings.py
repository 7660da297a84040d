"""Reads what a configuration says about RoPE, as transformers does. Nothing else reads the fields.

Configurations contradict themselves: they hold fields of both styles, or lengths that do not fit
the factor. The value counts from which transformers builds the frequencies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rope_ext.config.record import FIELD, record_of
from rope_ext.methods.rope import plain_number, reach, whole_number

ORIGINAL, LONGEST = "original_max_position_embeddings", "max_position_embeddings"
_STYLES = ("rope_parameters", "rope_scaling")
_FACTS = ("rope_type", "rope_theta", "factor", ORIGINAL, "partial_rotary_factor")
_OLD_NAMES = {"su": "longrope", "mrope": "default"}


@dataclass(frozen=True)
class RopeSettings:
    """One rotary embedding according to a configuration.

    Args:
        parameters: its entry of ``rope_parameters``.
        rope_type: ``"default"``: not scaled.
        base: ``rope_theta``; None: not given.
        factor: of its scaling; None: not scaled.
        length: context that it was trained for before its scaling, tokens; None: not given.
        target: context that it reaches with its scaling, tokens; None: not given.
    """

    parameters: Mapping[str, Any]
    rope_type: str
    base: float | None
    factor: float | None
    length: int | None
    target: int | None

    @property
    def is_dynamic(self) -> bool:
        """Whether transformers chooses the frequencies by the length of the sequence."""
        short, long = (self.parameters.get(name) for name in ("short_factor", "long_factor"))
        return self.rope_type == "dynamic" or (self.rope_type == "longrope" and short != long)


def rope_settings(config: Any, layer_type: str | None = None) -> RopeSettings:
    """The settings of one rotary embedding.

    Args:
        config: of a text model.
        layer_type: the layers that the embedding serves; None: the only one.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    if isinstance(parameters.get(layer_type), dict):
        parameters = parameters[layer_type]
    kind = parameters.get("rope_type") or "default"
    factor = plain_number(parameters.get("factor"))
    length = target = whole_number(getattr(config, LONGEST, None))
    if kind in ("yarn", "llama3", "longrope"):
        original = parameters.get(ORIGINAL) or getattr(config, ORIGINAL, None)
        length = whole_number(original) or length
        if factor is None and length and target:
            factor = target / length
        if kind == "yarn" and factor and length:  # it takes no other length
            target = reach(factor, length)
    elif kind == "linear" and factor and target:
        length = round(target / factor)
    base = parameters.get("rope_theta")
    return RopeSettings(parameters, kind, base, factor, length, target)


def all_settings(config: Any) -> dict[str | None, RopeSettings]:
    """The settings of every rotary embedding, by layer type; by None if there is only one."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind, part in parameters.items() if isinstance(part, dict)]
    return {kind: rope_settings(config, kind) for kind in kinds or [None]}


def trained_length(config: Any) -> int | None:
    """Context in tokens that a text model is loaded with; None: not given.

    Raises:
        RecordError: the configuration has a record that cannot be read.
    """
    record = record_of(config)
    if record is not None and not record.native:
        return record.trained_length  # the maximum is the extended one
    lengths = [settings.target for settings in all_settings(config).values()]
    return max(lengths, key=lambda length: length or 0)


def path_to_text(config: Any) -> tuple[str, ...]:
    """Names of the sub-configurations that lead to the text model's; none if it is not nested."""
    text = config.get_text_config(decoder=True)

    def path(part: Any) -> tuple[str, ...] | None:
        if part is text:
            return ()
        inner = {name: path(x) for name, x in vars(part).items() if hasattr(x, "get_text_config")}
        return next(((name, *rest) for name, rest in inner.items() if rest is not None), None)

    return path(config) or ()


def contradictions(config: Any, saved: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on what a configuration says twice and differently, and on what counts.

    Args:
        config: as transformers loaded it.
        saved: the values in its ``config.json``.
    """
    for name in path_to_text(config):
        saved = saved.get(name) or {}
    if FIELD in saved:  # what a patch wrote fits
        return
    settings = rope_settings(config.get_text_config(decoder=True))
    entries = {name: saved[name] for name in _STYLES if isinstance(saved.get(name), dict)}
    for fact in _FACTS:
        counts = settings.rope_type if fact == "rope_type" else settings.parameters.get(fact)
        given = {"the top level": saved.get(fact)}
        for style, entry in entries.items():
            given[style] = entry.get(fact)
            if fact == "rope_type":
                given[f"type of {style}"] = _OLD_NAMES.get(entry.get("type"), entry.get("type"))
        others = {place: x for place, x in given.items() if x is not None and x != counts}
        ours = any(str(x).startswith("rope_ext:") for x in others.values())
        if others and counts is not None and not ours:
            told = " and ".join(f"{value!r} ({place})" for place, value in others.items())
            yield f"{fact} is given as {told}, but transformers uses {counts!r}"
    longest, target = getattr(config.get_text_config(decoder=True), LONGEST, None), settings.target
    if settings.rope_type == "yarn" and target not in (None, longest):
        missing = not any(ORIGINAL in part for part in (saved, *entries.values()))
        told = (
            f"{LONGEST} for the missing {ORIGINAL}" if missing else f"{ORIGINAL}={settings.length}"
        )
        yield (
            f"{LONGEST}={longest} does not fit factor={settings.factor:g}: transformers uses the "
            f"factor, and {told}, which together reach {target} tokens"
        )
