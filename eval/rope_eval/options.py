"""Dataclass fields that are also command-line options.

A field created by :func:`option` defines an option's name, help and parser in one place. Nothing
here imports torch, so that ``rope-ext --help`` is fast.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar

import typer

from rope_ext.command.arguments import parse_length, parse_lengths
from rope_ext.errors import OptionError

F = TypeVar("F", bound=Callable[..., Any])


def option(
    default: Any,
    help: str,
    read: Callable[..., Any] | None = None,
    *flags: str,
    repeat: bool | None = None,
    least: int = 1,
) -> Any:
    """Create a field that is also a command-line option: ``new_tokens`` is --new-tokens.

    A default of False makes a flag. ``read`` parses the text from the command line; None uses the
    field's type. ``flags`` replace the name of the field. With ``repeat`` the option is repeatable,
    and ``read`` gets all values; None repeats options with a tuple as default and reads each.
    ``least`` is the lowest value of a whole number, for :func:`check_options`.
    """
    metadata = {"help": help, "read": read, "flags": flags, "repeat": repeat, "least": least}
    # Dataclasses refuse a mutable default.
    how: Any = {"default_factory": dict} if default == {} else {"default": default}
    return dataclasses.field(**how, metadata=metadata)


def option_fields(cls: type) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(cls) if "help" in field.metadata]


def check_options(options: Any) -> None:
    """Raise OptionError for a whole number that is too low, or a word that is not a valid one."""
    for field in option_fields(type(options)):
        value = getattr(options, field.name)
        kind = _type(type(options), field)
        least = field.metadata["least"]
        words = typing.get_args(kind)
        wrong = ""
        several = value if isinstance(value, tuple) else (value,)
        if kind is int and any(type(one) is not int or one < least for one in several):
            wrong = f"a whole number of at least {least}"
        elif words and value not in words:
            wrong = f"one of {', '.join(words)}"
        if wrong and value is not None:
            raise OptionError(f"{field.name}={value!r} is not valid; it must be {wrong}")


def refuse(*faults: tuple[bool, str]) -> None:
    """Raise OptionError for the first of these faults that is found."""
    for found, fault in faults:
        if found:
            raise OptionError(fault)


def command_options(*classes: type, without: Sequence[str] = ()) -> Callable[[F], F]:
    """Decorator: replace ``**options`` of a typer command by the options of ``classes``.

    Options with the same name are merged, and fields ``without`` an option are left out. Values are
    as typed, or None; see :func:`read_options`.
    """

    def decorate(command: F) -> F:
        added: dict[str, inspect.Parameter] = {}
        for cls in classes:
            for field in option_fields(cls):
                if field.name in without:
                    continue
                added.setdefault(field.name, _typer_parameter(cls, field))
        # eval_str: typer needs types, and annotations are texts under ``from __future__``.
        signature = inspect.signature(command, eval_str=True)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        function: Any = command  # functions have no such attribute for type checkers
        function.__signature__ = signature.replace(parameters=[*own, *added.values()])
        function.__annotations__ = {one.name: one.annotation for one in (*own, *added.values())}
        return command

    return decorate


def keyword_options(cls: type) -> Callable[[F], F]:
    """Decorator: show the fields of ``cls`` in place of ``**options`` in a function's signature."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        of_class = inspect.signature(cls).parameters.values()
        taken = {one.name for one in own}  # a field may be called like **options
        fields = [one for one in of_class if one.name not in taken]
        shown: Any = function  # functions have no such attribute for type checkers
        shown.__signature__ = signature.replace(parameters=[*own, *fields])
        return function

    return decorate


def read_options(cls: type, typed: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the typed options of ``cls`` from the command line, by field name."""
    values = {}
    for field in option_fields(cls):
        value = typed.get(field.name)
        read = field.metadata["read"] or (lambda value: value)
        if value is None or value is False or value in ([], ()):
            continue
        if read in (parse_length, parse_lengths):  # its errors name the option
            read = partial(read, option=_flags(field)[0])
        each = isinstance(value, (list, tuple)) and not field.metadata["repeat"]
        values[field.name] = [read(one) for one in value] if each else read(value)
    return values


def _typer_parameter(cls: type, field: dataclasses.Field[Any]) -> inspect.Parameter:
    """Let typer parse a number or one of several words, and leave text for ``read``."""
    kind = str if field.metadata["read"] else _type(cls, field)
    default = field.default
    help = field.metadata["help"]
    repeated = field.metadata["repeat"]
    if repeated or (repeated is None and isinstance(default, tuple)):
        kind = list[kind]
    elif type(default) in (int, float, str) and default != "" and "default" not in help.lower():
        help = f"{help.rstrip('.')}; default: {default}{'.' * help.endswith('.')}"
    # None: not typed, so that ``read_options`` leaves the field its default.
    default = False if kind is bool else None
    kind = Annotated[kind if kind is bool else kind | None, typer.Option(*_flags(field), help=help)]
    only = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(field.name, only, default=default, annotation=kind)


def _flags(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    return field.metadata["flags"] or ("--" + field.name.replace("_", "-"),)


def _type(cls: type, field: dataclasses.Field[Any]) -> Any:
    """The type of a value, without ``None``: of ``int | None``, or of each in a tuple."""
    kind = typing.get_type_hints(cls)[field.name]
    while typing.get_origin(kind) not in (None, Literal):
        kind = next(one for one in typing.get_args(kind) if one not in (NoneType, ...))
    return kind
