"""Parses command-line values: lists, lengths such as 4k, and method options."""

import ast
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rope_ext.engine_names import check_name
from rope_ext.errors import MeasureError, OptionError, first_line, is_path

UNPATCHED = "unpatched"
"""Used instead of a method name: the model without a patch."""
NONE = "none"
"""An alias of ``UNPATCHED``."""


def method_names(names: Iterable[str]) -> list[str]:
    """Return names of methods with ``unpatched`` in place of its alias."""
    return [UNPATCHED if name == NONE else name for name in names]


def split(names: str | Iterable[str]) -> list[str]:
    """Split ``a,b`` or ``["a,b", "c"]`` into a list without blanks."""
    texts = [names] if isinstance(names, str) else names
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]


def parse_lengths(text: str | Iterable[str], option: str = "--lengths") -> tuple[int, ...]:
    """Parse ``512,4k,1m`` into token counts; k is 1024 and m is 1024 k."""
    lengths = []
    for word in split(text):
        match = re.fullmatch(r"([0-9]{1,15})([km]?)", word.lower())
        if match is None:
            raise OptionError(
                f"{option} {word!r} is not a number of tokens; use a number such as 32768, 32k or "
                f"1m{', or several, separated by commas' * (option == '--lengths')}"
            )
        lengths.append(int(match[1]) * 1024 ** " km".index(match[2] or " "))
    return tuple(lengths)


def parse_compose(text: str | bool) -> bool | Literal["raise"]:
    """Parse ``--compose`` into the ``compose`` argument of :func:`rope_ext.patch`."""
    if isinstance(text, bool):
        return text
    if text not in ("stack", "raise"):
        raise OptionError(
            f"--compose {text} is not valid; it must be stack (apply on top of the RoPE scaling) "
            f"or raise (raise its factor)"
        )
    return text == "stack" or "raise"


def command_words(command: str, model: object, **options: Any) -> list[str]:
    """Format ``rope-ext COMMAND MODEL --name value ...`` for the command line.

    None, False and "auto" are left out, True becomes a flag, and a list repeats the option.
    """
    words = ["rope-ext", command, str(model)]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif isinstance(value, (list, tuple)):
            words += [word for one in value for word in (flag, str(one))]
        elif value not in (None, False, "auto"):
            text = str(value)
            if isinstance(value, float):
                text = text.removesuffix(".0")
            words += [flag, text]
    return words


def parse_length(text: str, option: str = "--length") -> int:
    """Parse a single length; see :func:`parse_lengths`."""
    lengths = parse_lengths(text, option)
    if len(lengths) != 1:
        raise OptionError(f"{option} {text!r} is not a single length; use 32768, 32k or 1m")
    return lengths[0]


def check_early(given: Mapping[str, Any]) -> None:
    """Raise an error for a length that is no number, a folder or an engine that does not exist.

    For the texts of a command's options, before torch is imported, which takes seconds. A name that
    may be a Hub ID is looked for later.
    """
    for name in ("length", "lengths", "chunk", "target_length"):
        value = given.get(name)
        if isinstance(value, (str, list)):
            parse_lengths(value, f"--{name.replace('_', '-')}")
    if given.get("engine") is not None:
        check_name(given["engine"])
    models = given.get("models") or ()
    for model in (given.get("model"), *models):
        path = Path(os.path.expanduser(str(model)))
        if isinstance(model, str) and is_path(model) and not path.exists():
            raise MeasureError(
                f"there is no folder or file {model!r}; give a folder that save_pretrained wrote, "
                f"a .gguf file or a Hub ID"
            )


def take(option: str, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words of a command into others, and the values of ``OPTION[=]VALUE``."""
    others = []
    values = []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name != option:
            others.append(word)
        elif equals or (value := next(rest, "")):
            values.append(value)
        else:
            raise OptionError(f"{option} needs a value")
    return others, values


def parse_options(
    texts: Iterable[str] | None, methods: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Parse ``yarn.beta_fast=16``, ``beta_fast=16`` for one method, or ``longrope=found.json``."""
    options: dict[str, dict[str, Any]] = {}
    for text in texts or ():
        place, equals, value = text.partition("=")
        method, dot, name = place.partition(".")
        if equals and not dot and value.endswith(".json"):
            options.setdefault(place, {}).update(_file(value))
            continue
        if not dot and len(methods) == 1 and place != methods[0]:
            method = methods[0]
            name = place
        if not (equals and method and name):
            raise OptionError(
                f"--option {text!r} is not valid; use METHOD.NAME=VALUE, such as "
                f"yarn.beta_fast=16, or METHOD=FILE.json of rope-ext search"
            )
        given = options.setdefault(method, {})
        if name in given:
            raise OptionError(
                f"--option {text!r} sets {name} a second time, after {given[name]!r}; leave one out"
            )
        given[name] = _value(value)
    return options


def read_json(text: str) -> Any:
    """Parse JSON like ``json.loads``, but refuse duplicate keys."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                raise ValueError(f"{key!r} is given twice, as {values[key]!r} and as {value!r}")
            values[key] = value
        return values

    return json.loads(text, object_pairs_hook=unique)


def _file(path: str) -> dict[str, Any]:
    try:
        options = read_json(Path(path).read_text(encoding="utf-8"))
        if not isinstance(options, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise OptionError(
            f"cannot read options from {path} ({reason}); pass a file written by `rope-ext search`"
        ) from None
    return options


def _value(text: str) -> Any:
    """Parse a number, list, true, false or none; anything else is a string."""
    words = {"true": "True", "false": "False", "none": "None"}
    try:
        return ast.literal_eval(words.get(text.lower(), text))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text
