"""Fields of a dataclass that are options of a command line as well.

A field made by :func:`option` says once what an option is called, what it means and how it is
read; commands, the functions behind them and their logs all go by the dataclass. Nothing here
imports torch: ``rope-ext --help`` needs it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import typer

F = TypeVar("F", bound=Callable[..., Any])


def option(
    default: Any,
    help: str,
    read: Callable[..., Any] | None = None,
    flag: str | None = None,
    **words: Any,
) -> Any:
    """A field that is an option of the command line, too: ``new_tokens`` is --new-tokens.

    Args:
        default: False makes a flag. A tuple makes an option of a task that is repeated.
        help: the help text of the option.
        read: makes the value from the text that was typed; None uses the type of the field
            (tasks) or of the default (commands).
        flag: another name for the option, such as ``--trained-length``.
        words: for ``rope-ext eval``: the ``group`` of the option, and keywords of ``add_argument``.
    """
    metadata = {"help": help, "read": read, "flag": flag, "words": words}
    return dataclasses.field(default=default, metadata=metadata)


def option_fields(cls: type) -> list[dataclasses.Field[Any]]:
    """The fields of a dataclass that are options of the command line."""
    return [field for field in dataclasses.fields(cls) if "help" in field.metadata]


def flag_of(field: dataclasses.Field[Any]) -> str:
    """The option of a field: ``--new-tokens``."""
    return field.metadata["flag"] or "--" + field.name.replace("_", "-")


def keywords_of(cls: type) -> Callable[[F], F]:
    """Decorator: ``help()`` and editors list the fields of ``cls`` in place of ``**options``.

    A field that the function takes under its own name is left as it is.
    """

    def decorate(function: F) -> F:
        kinds = inspect.signature(function).parameters
        variable = inspect.Parameter.VAR_KEYWORD  # its name does not take that of a field
        own = {name for name, parameter in kinds.items() if parameter.kind != variable}
        return _with_parameters(
            function,
            [
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=field.default,
                    annotation=field.type,
                )
                for field in dataclasses.fields(cls)
                if field.name not in own
            ],
        )

    return decorate


def command_options(cls: type) -> Callable[[F], F]:
    """Decorator: a typer command gets the options of ``cls`` in place of ``**options``.

    Typer reads the signature. The values are those that were typed; see :func:`read_options`.
    """

    def decorate(command: F) -> F:
        added = [_typer_parameter(field) for field in option_fields(cls)]
        return _with_parameters(command, added, evaluated=True)

    return decorate


def read_options(cls: type, typed: Mapping[str, Any]) -> dict[str, Any]:
    """Values for the fields of ``cls`` from what was typed, without those left at their default.

    Raises:
        OptionError: an option cannot be read.
    """
    values: dict[str, Any] = {}
    for field in option_fields(cls):
        value, read = typed[field.name], field.metadata["read"]
        if value != _shown(field.default):
            values[field.name] = read(value) if read else value
    return values


def _typer_parameter(field: dataclasses.Field[Any]) -> inspect.Parameter:
    read, default = field.metadata["read"], field.default
    kind = read if read in (int, float) else str if read else type(default)
    names = () if kind is bool else (flag_of(field),)
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=_shown(default),
        annotation=Annotated[
            kind | None if default is None else kind,
            typer.Option(*names, help=field.metadata["help"]),
        ],
    )


def _shown(default: Any) -> Any:
    """A default as somebody would type it."""
    return ",".join(map(str, default)) if isinstance(default, tuple) else default


def _with_parameters(function: F, added: Sequence[inspect.Parameter], evaluated: bool = False) -> F:
    """``function`` with a signature that has these parameters in place of ``**options``."""
    signature = inspect.signature(function, eval_str=evaluated)
    own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    made: Any = function  # functions have no such attribute for type checkers
    made.__signature__ = signature.replace(parameters=[*own, *added])
    made.__annotations__ = {
        **{one.name: one.annotation for one in (*own, *added)},
        "return": signature.return_annotation,
    }
    return function
