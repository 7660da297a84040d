"""The registry of methods."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from rope_ext.errors import OptionError, RopeExtError, UnknownMethodError, nearest
from rope_ext.methods.kinds import Method

_REGISTRY: dict[str, type[Method]] = {}
M = TypeVar("M", bound=type[Method])
_OWN = {
    "attention_scaling": "own_scaling",
    "attention_scaling_at": "own_scaling_at",
    "temperature": "own_temperature",
}


def _key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


def register(cls: M) -> M:
    """Class decorator: registers a method under its name and aliases.

    Raises:
        RopeExtError: the name or an alias is taken, or the class overrides something that options
            decide; nothing is registered then.
    """
    for name, own in _OWN.items():
        overridden = [c for c in cls.__mro__ if c.__module__ != Method.__module__]
        if any(callable(vars(c).get(name)) for c in overridden):
            raise RopeExtError(
                f"{cls.__name__} overrides {name}, which the options attention_factor and "
                f"temperature control; override {own} to set the default"
            )
    names = (cls.name, *cls.aliases)
    for name in names:
        holder = _REGISTRY.get(_key(name), cls)
        if holder is not cls:
            raise RopeExtError(
                f"method name {name!r} is taken by {holder.__name__}; give {cls.__name__} another"
            )
    _REGISTRY.update((_key(name), cls) for name in names)
    return cls


def unregister(cls: type[Method]) -> None:
    """Remove a method from the registry, for example to redefine its class in a notebook."""
    for key in [key for key, held in _REGISTRY.items() if held is cls]:
        del _REGISTRY[key]


def all_methods() -> list[type[Method]]:
    """Registered methods that extend RoPE, in order of registration."""
    return [cls for cls in _all() if cls.kind not in ("encoding", "rotation")]


def all_encodings() -> list[type[Method]]:
    """Registered position encodings other than RoPE, in order of registration."""
    return [cls for cls in _all() if cls.kind == "encoding"]


def _all() -> list[type[Method]]:
    return list(dict.fromkeys(_REGISTRY.values()))


def method_class(name: str) -> type[Method]:
    """Look up a method class by name or alias; ignores case, hyphens and underscores.

    Raises:
        UnknownMethodError: there is no such method.
    """
    try:
        return _REGISTRY[_key(name)]
    except KeyError:
        names = [cls.name for cls in _all()]
        aliases = [alias for cls in _all() for alias in cls.aliases]
        raise UnknownMethodError(
            f"unknown method {name!r}{nearest(name.lower(), names + aliases) or '.'} "
            f"Methods: {', '.join(cls.name for cls in all_methods())}. "
            f"Encodings: {', '.join(cls.name for cls in all_encodings())}. "
            f"RoPE as trained: rope"
        ) from None


def build_method(name: str, /, **options: Any) -> Method:
    """Build a method by name.

    Raises:
        UnknownMethodError: there is no method with that name.
        OptionError: an option is unknown, missing or out of range.
    """
    cls = method_class(name)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for option in options:
        if option not in fields:
            raise OptionError(
                f"{cls.name} has no option {option!r}{nearest(option, fields) or '.'} "
                f"Options: {', '.join(fields)}"
            )
    missing = [
        field.name
        for field in fields.values()
        if field.name not in options
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise OptionError(f"{cls.name} needs {', '.join(f'{option}=...' for option in missing)}")
    return cls(**options)
