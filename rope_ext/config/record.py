"""Patches as data, recorded in a configuration or next to an adapter."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import Self

from rope_ext.config.nested import configurations, text_of
from rope_ext.encodings import Encoding
from rope_ext.errors import RecordError
from rope_ext.methods import Method, build_method, method_class
from rope_ext.methods.rope import whole_number
from rope_ext.methods.temperature import Constant, Temperature
from rope_ext.options import Options

VERSION = 3
FIELD = "rope_ext"
"""Configuration field that stores a record."""
SIDECAR = "rope_ext.json"
"""File next to an adapter that records the patch it was trained under."""

EXPERTS = "experts_implementation"
"""A field of the saved top-level configuration."""

LENGTHS = ("original_max_position_embeddings", "max_position_embeddings")
HEAD = "head_dim"
FIELDS = ("rope_parameters", HEAD, *LENGTHS, FIELD)
"""All fields that a patch writes to the text model's configuration, in this order."""
OLDER = ("rope_theta", "rope_scaling")
"""Fields that transformers read before version 5, and that other programs still read."""
WRITTEN = (*FIELDS, *OLDER, EXPERTS)
"""All fields that a patch may write to a model's configurations."""

ARGUMENTS: Mapping[str, Any] = Options().recorded()
"""The keyword arguments of ``patch`` that a record stores, with their defaults."""


_KINDS = {
    **dict.fromkeys(("rope_parameters", FIELD), dict),
    **dict.fromkeys((HEAD, *LENGTHS), int),
    EXPERTS: str,
}


@dataclass(frozen=True)
class Record:
    """Everything needed to apply the same patch again."""

    method: Method  # as passed to patch
    resolved: Method  # the same with every option filled in
    arguments: Mapping[str, Any]  # the arguments of patch listed in ARGUMENTS
    trained_length: int  # trained_length, target_length: tokens
    target_length: int
    native: bool  # whether transformers builds scaled frequencies from the other fields
    plain: bool  # whether plain transformers reproduces the patch from the configuration
    config: Mapping[str, Any]  # its fields before the patch; None if absent

    @property
    def encoding(self) -> Encoding | None:
        """The encoding that adds to the logits: the method itself or its bias."""
        return self.method if isinstance(self.method, Encoding) else self.arguments["bias"]

    def to_json(self) -> dict[str, Any]:
        plain = {name: method_to_json(value) for name, value in vars(self).items()}
        plain["arguments"] = {name: method_to_json(x) for name, x in self.arguments.items()}
        return {"version": VERSION, **plain, "config": copy.deepcopy(dict(self.config))}

    @classmethod
    def from_json(cls, data: Any, where: str) -> Self:
        """Read a record as JSON from a place that errors name; raises RecordError."""
        version = data.get("version") if isinstance(data, Mapping) else None
        if type(version) is int and version > VERSION:
            raise RecordError(
                f"the record of a patch in {where} has version {version}, above {VERSION}; install "
                f"a newer rope_ext"
            )
        try:
            if version not in (1, 2, VERSION):
                raise ValueError(f"its version is {version!r}, not {VERSION}")
            if version == VERSION and data["arguments"].keys() != ARGUMENTS.keys():
                raise ValueError(f"its arguments are {sorted(data['arguments'])}")
            method, resolved = (method_from_json(data[x], version) for x in ("method", "resolved"))
            options = Options(**{name: _from_json(x) for name, x in data["arguments"].items()})
            config = dict(data["config"])
            # Records without it had rope_parameters of their own only where they scale.
            native = data.get("native", "rope_parameters" in config)
            record = cls(
                method=method,
                resolved=resolved,
                arguments=options.recorded(),
                trained_length=data["trained_length"],
                target_length=data["target_length"],
                native=native,
                plain=data["plain"],
                config=config,
            )
            record._check()
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise RecordError(
                f"the record of a patch in {where} cannot be read: {reason}. Save the patched "
                f"model (or its sidecar) again, or load the base model, or this one with rope_type "
                f"set back and rope_scaling removed in its config.json, and call "
                f"rope_ext.patch(model, METHOD, original_max_position_embeddings=TOKENS)"
            ) from error
        return record

    def _check(self) -> None:
        for name in ("trained_length", "target_length"):
            if whole_number(value := getattr(self, name)) is None:
                raise ValueError(f"{name}={value!r} is not a number of tokens")
        factor, filled = (getattr(x, "factor", None) for x in (self.method, self.resolved))
        if factor is not None and filled != factor:
            raise ValueError(f"its method has factor={factor!r}, but factor={filled!r} resolved")
        if not isinstance(self.native, bool) or not isinstance(self.plain, bool):
            raise ValueError(f"plain={self.plain!r} or native={self.native!r} is not True or False")
        for name, value in self.config.items():
            if name not in _KINDS:
                raise ValueError(f"no patch writes {name!r} into a configuration")
            if value is not None and type(value) is not _KINDS[name]:
                raise ValueError(f"{name}={value!r} of the configuration is no {_KINDS[name]}")

    def restored(self, config: Any) -> Any:
        """Return a copy of a configuration saved under the patch, as it was before.

        An encoder-decoder may have a record for each half.
        """
        config = copy.deepcopy(config)
        text = text_of(config)
        for part in list(configurations(config)):
            record = self if part is text else record_of(part)
            if record is not None and hasattr(part, FIELD):
                record._restore(part, config)
        return config

    def _restore(self, text: Any, outermost: Any) -> None:
        """Undo the patch in the configuration ``text`` of a text model within ``outermost``."""
        delattr(text, FIELD)
        for name in OLDER:  # most classes drop them when they read config.json
            if str(vars(text).get(name)).startswith("rope_ext:"):
                del vars(text)[name]
        for name, value in self.config.items():
            if name == EXPERTS:
                vars(outermost).pop(EXPERTS, None)  # of a model in memory
                outermost._experts_implementation = value  # transformers' attribute for this field
            elif value is not None:
                setattr(text, name, copy.deepcopy(value))
            elif hasattr(text, name):
                delattr(text, name)

    def same(self, other: Self) -> bool:
        """Whether both have the same effect on the same model."""
        free = ("kernel", "compose", "original_max_position_embeddings")  # see the lengths
        return (
            self.resolved == other.resolved
            and self.trained_length == other.trained_length
            and self.target_length == other.target_length
            and all(self.arguments[k] == other.arguments[k] for k in ARGUMENTS if k not in free)
        )

    def outcome(self) -> str:
        """Return what :meth:`same` compares, as text."""
        return f"{self.resolved} and {self.trained_length} -> {self.target_length} tokens"

    def difference(self, other: Self) -> str:
        """Describe another patch, with the outcome of both if their calls are the same."""
        if (self.method, self.arguments) != (other.method, other.arguments):
            return other.call()
        return f"the same call, which gives {other.outcome()} now, and {self.outcome()} then"

    def __str__(self) -> str:
        return ", ".join(_words(self.method, self.arguments))

    def call(self, *more: str) -> str:
        """Return the ``rope_ext.patch`` call that applies this patch, as text."""
        return patch_call(self.method, *more, **self.arguments)


def record_within(config: Any, where: str = f"config.{FIELD}") -> Record | None:
    """Read the record of a whole model's configuration, which may be in that of its encoder."""
    parts = (part for part in configurations(config) if getattr(part, FIELD, None) is not None)
    found = record_of(text_of(config), where)
    return record_of(next(parts, None), where) if found is None else found


def record_of(config: Any, where: str = f"config.{FIELD}") -> Record | None:
    """Read the record in the configuration of a text model."""
    data = getattr(config, FIELD, None)
    return None if data is None else Record.from_json(data, where)


def method_to_json(value: Any) -> Any:
    """Convert a method, or an option of one, to JSON-serializable values."""
    if isinstance(value, Method):
        options = {name: method_to_json(option) for name, option in value.options().items()}
        return {"name": value.name, **options}
    if isinstance(value, Temperature):
        return value.to_json()
    return list(value) if isinstance(value, tuple) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, Mapping) and "name" in value:  # the others are a method's temperature
        return method_from_json(value)
    return tuple(value) if isinstance(value, list) else value


def method_from_json(data: Any, version: int = VERSION) -> Method:
    """Inverse of :func:`method_to_json`; AttributeError, KeyError, TypeError or ValueError."""
    options = {name: _from_json(value) for name, value in data.items() if name != "name"}
    if "published" in method_class(data["name"]).__dataclass_fields__:
        options.setdefault("published", True)  # saved when that was the only default
    if version == 1 and data["name"] in ("dual_chunk", "string"):
        options.setdefault("attention_factor", 1.0)  # they had none
    return build_method(data["name"], **options)


def patch_call(method: Method, *more: str, **arguments: Any) -> str:
    """Return the ``rope_ext.patch`` call with a method and arguments in ``ARGUMENTS``, as text."""
    return f"rope_ext.patch({', '.join(['model', *_words(method, arguments), *more])})"


def _words(method: Method, arguments: Mapping[str, Any]) -> list[str]:
    texts = [f"{k}={_text(value)}" for k, value in arguments.items() if value != ARGUMENTS[k]]
    return [repr(method.name), *option_texts(method), *texts]


def option_texts(method: Method) -> list[str]:
    """Format options that differ from their defaults; ``factor`` usually has no default."""
    return [f"{name}={_text(value)}" for name, value in method.changed().items()]


def _text(value: Any) -> str:
    if isinstance(value, Encoding) and not option_texts(value):
        return repr(value.name)
    if isinstance(value, Method):
        return f"rope_ext.{type(value).__name__}({', '.join(option_texts(value))})"
    if isinstance(value, Constant):
        return repr(value.value)
    if isinstance(value, Temperature):
        return f"rope_ext.{value!r}" if value != type(value)() else repr(value.name)
    if isinstance(value, tuple):
        shown = [repr(x) for x in value]
        return f"[{', '.join(shown if len(shown) <= 8 else [*shown[:3], '...', shown[-1]])}]"
    return repr(value)
