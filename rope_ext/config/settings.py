"""Reads RoPE settings from configurations as transformers does; no other module reads these fields.

Configurations may contradict themselves, with fields of both styles, or lengths that do not match
the factor. The value that transformers builds the frequencies from takes precedence.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rope_ext.config.nested import text_of
from rope_ext.config.record import FIELD, patch_call, record_of
from rope_ext.errors import RopeExtError
from rope_ext.methods import FrequencyMethod, LongRoPE, YaRN, method_class
from rope_ext.methods.kinds import MSCALES
from rope_ext.methods.rope import extended_length, plain_number, whole_number
from rope_ext.methods.temperature import yarn_factor

ORIGINAL = "original_max_position_embeddings"
LONGEST = "max_position_embeddings"
TRAINED = "max_trained_positions"
"""Trained length of checkpoints whose ``max_position_embeddings`` includes their scaling."""
METHODS: Mapping[str, str] = {
    "yarn": "yarn",
    "llama3": "llama3",
    "linear": "pi",
    "dynamic": "dynamic_ntk",
    "longrope": "longrope",
}
"""Method names by ``rope_type``."""
# Fields of a scaled entry besides its base; composing replaces all of them.
SCALING_FIELDS = (
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
    *MSCALES,
    "truncate",
    "type",
)
_SAME_NAMES = ("beta_fast", "beta_slow", "truncate", "low_freq_factor", "high_freq_factor")
"""Options of YaRN or Llama 3 that entries store under the same name."""

_RENAMED = {"su": "longrope", "mrope": "default"}
"""Older names of values of ``rope_type``."""
_ADDED = ("mscale", "mscale_all_dim")
"""Options that a patch writes into ``rope_scaling`` only, for mlx-lm."""


@dataclass(frozen=True)
class RopeSettings:
    """One rotary embedding according to a configuration."""

    parameters: Mapping[str, Any]  # its entry of rope_parameters
    rope_type: str  # "default": not scaled
    factor: float | None  # scaling factor; None: not scaled
    length: int | None  # trained length before scaling, tokens; None: not given
    target: int | None  # length with scaling, tokens; None: not given

    @property
    def is_dynamic(self) -> bool:
        """Whether transformers chooses frequencies by sequence length."""
        short, long = (self.parameters.get(name) for name in ("short_factor", "long_factor"))
        return self.rope_type == "dynamic" or (self.rope_type == "longrope" and short != long)


def rope_settings(config: Any, layer_type: str | None = None) -> RopeSettings:
    """Read the settings of the rotary embedding of a layer type, or of the only one."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if isinstance(parameters.get(layer_type), dict):
        parameters = parameters[layer_type]
    kind = parameters.get("rope_type") or "default"
    factor = plain_number(parameters.get("factor"))
    target = whole_number(getattr(config, LONGEST, None))
    length = target
    if kind == "default":
        target = _without_scaling(config, target)
        length = target
    elif kind in ("yarn", "llama3", "longrope"):
        length = whole_number(parameters.get(ORIGINAL) or getattr(config, ORIGINAL, None)) or length
        if factor is None and length and target:
            factor = target / length
        if kind == "yarn" and factor and length:  # YaRN ignores other lengths
            target = extended_length(factor, length)
    elif kind == "linear" and factor and target:
        length = round(target / factor)
    return RopeSettings(
        parameters=parameters, rope_type=kind, factor=factor, length=length, target=target
    )


def _without_scaling(config: Any, longest: int | None) -> int | None:
    """Return the trained length in tokens of a model without scaling."""
    trained = whole_number(getattr(config, TRAINED, None))
    # A patch raises the longest length, which is then what counts.
    patched = getattr(config, FIELD, None) is not None
    return min(trained, longest) if trained and longest and not patched else longest


def all_settings(config: Any) -> dict[str | None, RopeSettings]:
    """Read the settings of every rotary embedding, by layer type; by None if there is only one."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind, part in parameters.items() if isinstance(part, dict)]
    return {kind: rope_settings(config, kind) for kind in kinds or [None]}


def trained_length(config: Any) -> int | None:
    """Context length in tokens of a text model as loaded; None: not given."""
    record = record_of(config)
    if record is not None and not record.native:
        return record.trained_length  # the maximum field holds the extended length
    lengths = [settings.target for settings in all_settings(config).values()]
    return max(lengths, key=lambda length: length or 0)


def unscaled(settings: RopeSettings, base: float, length: int | None) -> RopeSettings:
    """Return the settings without their scaling, with another base and trained length."""
    drop = (*SCALING_FIELDS, ORIGINAL)
    kept = {name: value for name, value in settings.parameters.items() if name not in drop}
    parameters = {**kept, "rope_theta": base, "rope_type": "default"}
    return replace(
        settings,
        parameters=parameters,
        rope_type="default",
        factor=None,
        length=length,
        target=length,
    )


def patch_for(settings: RopeSettings, loaded: RopeSettings) -> str:
    """Return the ``patch`` call with which ``loaded`` frequencies become those of ``settings``."""
    base = plain_number(settings.parameters.get("rope_theta"))
    if settings.rope_type == "default" and base is not None:
        return f"rope_ext.patch(model, 'abf', base={base:g}, factor=FACTOR)"
    try:
        method = method_of(dict(settings.parameters), settings.factor or 0.0)
        length = settings.parameters.get(ORIGINAL)
        own = {} if length in (None, loaded.length) else {ORIGINAL: length}
        if method is not None:
            return patch_call(method, **own)
    except (RopeExtError, KeyError, TypeError):
        pass  # an incomplete entry
    return "rope_ext.patch(model, METHOD, factor=FACTOR)"


def path_to_text(config: Any) -> tuple[str, ...]:
    """Path of sub-configuration names to the text model's configuration; empty if not nested."""
    text = text_of(config)
    for name, part in vars(config).items() if text is not config else ():
        if hasattr(part, "get_text_config") and text_of(part) is text:
            return (name, *path_to_text(part))
    return ()


def method_of(entry: Mapping[str, Any], factor: float) -> FrequencyMethod | None:
    """Return the method that computes an entry of ``rope_parameters``, or None.

    Raises KeyError, TypeError or RopeExtError if it is incomplete, or its values are not valid.
    """
    kind = entry["rope_type"]
    if kind not in METHODS:
        return None
    cls: Any = method_class(METHODS[kind])
    same = (name for name in _SAME_NAMES if name in cls.__dataclass_fields__)
    options: dict[str, Any] = {name: entry[name] for name in same if entry.get(name) is not None}
    if cls is LongRoPE:
        long = tuple(entry["long_factor"])
        short = tuple(entry["short_factor"])
        # Equal tables apply at every length.
        options |= {"long_factor": long, "short_factor": None if short == long else short}
    given = entry.get("attention_factor")
    if given is None and cls is YaRN and has_mscale(entry):
        given = mscale_factor(entry, factor)
    if cls in (LongRoPE, YaRN) and given is not None:
        usual = cls is YaRN and math.isclose(given, yarn_factor(factor))
        options["attention_factor"] = None if usual else given
    return cls(factor=factor, **options)


def has_mscale(entry: Mapping[str, Any]) -> bool:
    """Whether transformers computes the attention factor from ``mscale`` and the factor."""
    return bool(entry.get("mscale") and entry.get("mscale_all_dim"))


def mscale_factor(entry: Mapping[str, Any], factor: float) -> float:
    """Return the attention factor of an entry with ``mscale`` and ``mscale_all_dim``."""
    grown = yarn_factor(factor) - 1
    return (entry["mscale"] * grown + 1) / (entry["mscale_all_dim"] * grown + 1)


def unread(config: Any) -> Iterator[str]:
    """Describe what a configuration says about its scaling, but transformers does not read."""
    for kind, settings in all_settings(config).items():
        of = "" if kind is None else f" of {kind}"
        given = settings.parameters.get("type") or settings.rope_type
        named = _RENAMED.get(given, given)
        if named != settings.rope_type:
            yield (
                f"rope_parameters{of} give {named!r} as type, which transformers does not read: "
                f"rope_type {settings.rope_type!r} counts; write rope_type to scale it"
            )
    longest = getattr(config, LONGEST, None)
    trained = trained_length(config)
    if trained is not None and trained == getattr(config, TRAINED, None) and trained != longest:
        yield f"{TRAINED}={trained} is its trained length, not {LONGEST}={longest}"


def contradictions(config: Any, saved: Mapping[str, Any]) -> Iterator[str]:
    """Describe contradictions in ``saved``, the ``config.json`` of ``config``, and what is used."""
    for name in path_to_text(config):
        saved = saved.get(name) or {}
    if FIELD in saved:  # fields written by a patch are consistent
        return
    settings = rope_settings(text_of(config))
    styles = ("rope_parameters", "rope_scaling")
    entries = {name: saved[name] for name in styles if isinstance(saved.get(name), dict)}
    for fact in ("rope_type", "rope_theta", "factor", ORIGINAL, "partial_rotary_factor"):
        counts = settings.rope_type if fact == "rope_type" else settings.parameters.get(fact)
        given = _given(fact, saved, entries)
        others = {place: value for place, value in given.items() if value not in (None, counts)}
        ours = any(str(value).startswith("rope_ext:") for value in others.values())
        if others and counts is not None and not ours:
            told = " and ".join(f"{value!r} ({place})" for place, value in others.items())
            yield f"{fact} is given as {told}, but transformers uses {counts!r}"
    longest = getattr(text_of(config), LONGEST, None)
    if settings.rope_type == "yarn" and settings.target not in (None, longest):
        given = any(ORIGINAL in part for part in (saved, *entries.values()))
        told = f"{ORIGINAL}={settings.length}" if given else f"{LONGEST} for the missing {ORIGINAL}"
        yield (
            f"{LONGEST}={longest} does not fit factor={settings.factor:g}: transformers uses the "
            f"factor, and {told}, which together reach {settings.target} tokens"
        )


def _given(
    fact: str, saved: Mapping[str, Any], entries: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the values of a field in ``config.json``, by where they are; None: not there.

    ``entries`` are its ``rope_parameters`` and ``rope_scaling``, as far as it has them.
    """
    given: dict[str, Any] = {"the top level": saved.get(fact)}
    given |= {style: entry.get(fact) for style, entry in entries.items()}
    if fact == "rope_type":  # older files name it "type", and some types otherwise
        kinds: dict[str, Any] = {
            f"type of {style}": entry.get("type") for style, entry in entries.items()
        }
        given |= {place: _RENAMED.get(name, name) for place, name in kinds.items()}
    return given


def edits(config: Any, saved: Mapping[str, Any]) -> Iterator[str]:
    """Describe changes by hand in ``saved``, the ``config.json`` of ``config``, written by a patch.

    A patch writes every value twice, into ``rope_parameters`` and the older fields, of which a
    reader uses one.
    """
    for name in path_to_text(config):
        saved = saved.get(name) or {}
    parameters = saved.get("rope_parameters")
    scaling = saved.get("rope_scaling")
    if not isinstance(parameters, dict):
        return
    twice = False
    if isinstance(scaling, dict) and "rope_theta" in scaling:  # others write no base there
        twice = True
        names = {*parameters, *scaling} - ({*_ADDED} - {*parameters})
        for name in sorted(names):
            one = parameters.get(name)
            other = scaling.get(name)
            if one != other:
                yield f"{name} is {one!r} in rope_parameters, but {other!r} in rope_scaling"
    base = saved.get("rope_theta")
    theta = parameters.get("rope_theta")
    if (twice or FIELD in saved) and not isinstance(base, (str, type(None))) and base != theta:
        yield f"rope_theta is {theta!r} in rope_parameters, but {base!r} at the top level"
