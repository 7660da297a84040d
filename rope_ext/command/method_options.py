"""Checks the methods and options of a command before anything is loaded."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rope_ext.command.arguments import UNPATCHED, method_names
from rope_ext.config.record import ARGUMENTS, SIDECAR, Record
from rope_ext.errors import Mistakes, OptionError
from rope_ext.methods import build_method, method_class
from rope_ext.saving.checkpoints import saved_under
from rope_ext.saving.load import read_sidecar

ADAPTER = "adapter"
"""Used instead of a method name: the method that the adapter was trained with."""


def checked_methods(
    names: Sequence[str],
    factor: float | None,
    options: Mapping[str, Mapping[str, Any]],
    adapter: str | None = None,
    force: bool = False,
) -> dict[str, dict[str, Any]]:
    """Check methods by building each once, and return their options by canonical name.

    ``names`` and ``options`` may use aliases; ``adapter`` in ``names`` is the patch that an adapter
    was trained with. ``force``: also accept other methods with the adapter.
    """
    mistakes = Mistakes()
    names = method_names(names)
    if factor is not None and not factor > 1:
        mistakes.add(
            f"factor={factor:g} would not extend anything; set --factor to a number above 1"
        )
    if ADAPTER in options:
        mistakes.add(f"--method {ADAPTER} reads its options from the adapter; remove the others")
    if not names:
        mistakes.add("no method given; choose one or more, such as yarn,ntk,dynamic_yarn")
    requested = [name for name in (*options, *names) if name not in (UNPATCHED, ADAPTER)]
    known = {name: mistakes.check(method_class, name) for name in requested}
    given = {known[name].name: dict(values) for name, values in options.items() if known.get(name)}
    wrong = bool(mistakes)
    sidecar = None if adapter is None else mistakes.check(read_sidecar, adapter)
    record = sidecar and sidecar.record
    methods: dict[str, dict[str, Any]] = {}
    if ADAPTER in names and not wrong:
        methods |= mistakes.check(_of_adapter, adapter, record, default={})
    for cls in filter(None, map(known.get, names)):
        name = cls.name
        twice = cls.name in methods
        values = {**({} if factor is None else {"factor": factor}), **given.get(name, {})}
        if factor is None or factor > 1:
            with mistakes.collected():
                _check(
                    name=name,
                    options=values,
                    adapter=adapter,
                    record=record,
                    force=force and not twice,
                )
        methods.setdefault(name, values)
    unused = [name for name in given if name not in methods]
    if unused and names:
        mistakes.add(f"options given for {', '.join(unused)}, which is not among the methods")
    mistakes.report()
    return methods


def _check(
    name: str, options: Mapping[str, Any], adapter: str | None, record: Record | None, force: bool
) -> None:
    """Raise an OptionError for invalid options, or options that differ from the adapter's patch."""
    try:
        method = build_method(name, **options)
        method.check()
    except OptionError as error:
        raise OptionError(f"{error}; on the command line: {_typed(name, str(error))}") from None
    beside = ("frequency", "bias", "layers", "sliding_layers", "precise")
    if record is None or force:
        return
    alone = all(record.arguments[name] == ARGUMENTS[name] for name in beside)
    if not alone or method not in (record.method, record.resolved):
        raise OptionError(
            f"the adapter {adapter} was trained with {record.call()}, not with {method}; use "
            f"--method {ADAPTER}, or --force and {name} without {ADAPTER}"
        )


def _typed(name: str, message: str) -> str:
    """Describe how to set the options named in a method's error on the command line."""
    names = [field.name for field in dataclasses.fields(method_class(name))]
    message = message.partition("Options: ")[0]  # that part lists all options
    named = [one for one in names if re.search(rf"\b{one}\b", message)]
    words = [f"--option {name}.{one}=VALUE" for one in named or ["NAME"]]
    if "needs factor=" in message:
        words[named.index("factor")] = "--factor NUMBER"
    table = f" (or --option {name}=FILE.json of rope-ext search)" if "long_factor" in named else ""
    return " ".join(words) + table


def _of_adapter(adapter: str | None, record: Record | None) -> dict[str, dict[str, Any]]:
    if record is None:
        where = "no --adapter is given"
        if adapter is not None:
            where = f"{adapter} {'has none' if Path(adapter).exists() else 'does not exist'}"
        raise OptionError(
            f"--method {ADAPTER} uses the patch in the {SIDECAR} of an adapter, but {where}; set "
            f"--method to the name of a method"
        )
    beside = {k: v for k, v in record.arguments.items() if v != ARGUMENTS[k]}
    return {record.method.name: {**record.method.options(), **beside}}


def saved_otherwise(configs: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note for each model whose saved patch is removed."""
    for model, config in configs.items():
        record = saved_under(config)
        if record is not None:
            yield (
                f"{model} was saved with {record.call()}, which {UNPATCHED} removes; to measure "
                f"it, add this method"
            )
