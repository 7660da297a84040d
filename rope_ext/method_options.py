"""The methods that a command names, with their options, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rope_ext import checkpoints
from rope_ext.errors import Mistakes, OptionError
from rope_ext.loading import SIDECAR
from rope_ext.methods import Method, build_method, method_class
from rope_ext.record import ARGUMENTS, Record, option_texts

UNPATCHED = "none"
"""In place of a method: the model without a patch."""
ADAPTER = "adapter"
"""In place of a method: the one under which the adapter was trained."""
_LONGEST = 40  # of an option in the name of a row, characters


def checked_methods(
    names: Sequence[str],
    factor: float,
    options: Mapping[str, Mapping[str, Any]],
    adapter: str | None = None,
    force: bool = False,
) -> dict[str, dict[str, Any]]:
    """Options of every method by its own name, after building each once to check them.

    Args:
        names: names or aliases; the unpatched model may be among them, or stand alone.
        factor: of every method but ``adapter``.
        options: further options, by name or alias.
        adapter: folder or Hub id; ``adapter`` among the names stands for the patch under which
            it was trained.
        force: accept another one.

    Raises:
        UnknownMethodError: there is no such method.
        OptionError: an option is unknown, missing, out of range, or of a method not in ``names``;
            or the adapter was trained under another patch.
        MeasureError: the adapter cannot be found.
        SeveralErrors: more than one of these.
    """
    mistakes = Mistakes()
    if not factor > 1:
        mistakes.add(
            OptionError(
                f"factor={factor:g} would not extend anything; give --factor a number above 1"
            )
        )
    if ADAPTER in options:
        mistakes.add(
            OptionError(f"--method {ADAPTER} has its options beside the adapter; give none")
        )
    if not names:
        mistakes.add(OptionError("no method is given; choose some, such as yarn,ntk,dynamic_yarn"))
    asked = [name for name in (*options, *names) if name not in (UNPATCHED, ADAPTER)]
    known = {name: mistakes.check(method_class, name) for name in asked}
    given = {known[name].name: dict(values) for name, values in options.items() if known.get(name)}
    before = len(mistakes.errors)
    record = None if adapter is None else mistakes.check(checkpoints.adapter_record, adapter)
    methods: dict[str, dict[str, Any]] = {}
    if ADAPTER in names and len(mistakes.errors) == before:
        methods |= mistakes.check(_of_adapter, adapter, record, default={})
    for cls in filter(None, map(known.get, names)):
        name, of_adapter = cls.name, methods.get(cls.name)
        methods[name] = {"factor": factor, **given.get(name, {})}
        if factor > 1:
            mistakes.check(_check, name, methods[name], of_adapter, adapter, record, force)
        methods[name] = of_adapter or methods[name]
    unused = [name for name in given if name not in methods]
    if unused and names:
        mistakes.add(
            OptionError(f"options are given for {', '.join(unused)}, which is not in use here")
        )
    mistakes.report()
    return methods


def _check(
    name: str,
    options: Mapping[str, Any],
    of_adapter: Mapping[str, Any] | None,
    adapter: str | None,
    record: Record | None,
    force: bool,
) -> None:
    """Raise OptionError for options that are not valid, or not those of the adapter's patch."""
    try:
        method = build_method(name, **options)
        method.check()
    except OptionError as error:
        raise OptionError(
            f"{error}; on the command line: --option {name}.NAME=VALUE, or leave {name} out"
        ) from None
    if record is None or _trained_under(record, method):
        return
    same_name = "" if of_adapter is None else f" (and only one {name} fits into one run)"
    if not force or same_name:
        raise OptionError(
            f"the adapter {adapter} was trained under {record.call()}, not under "
            f"{method}{same_name}; give --method {ADAPTER} for that, or --force and "
            f"{name} without {ADAPTER} to measure it all the same"
        )


def built(name: str, options: Mapping[str, Any]) -> Method:
    """A method of :func:`checked_methods`."""
    return build_method(name, **{k: v for k, v in options.items() if k not in ARGUMENTS})


def label(name: str, options: Mapping[str, Any], factor: float) -> str:
    """A method of :func:`checked_methods` as rows of reports call it.

    Options at their defaults are left out, and so is the factor that the whole run has. A value
    that is too long for a table is shown as dots.
    """
    if name == UNPATCHED:
        return name
    method = built(name, options)
    texts = [
        text
        for text in option_texts(method)
        if not (text.startswith("factor=") and method.factor == factor)
    ]
    texts += [f"{k}={getattr(v, 'name', v)}" for k, v in options.items() if k in ARGUMENTS]
    shown = [text if len(text) <= _LONGEST else f"{text.split('=')[0]}=..." for text in texts]
    return f"{name} ({', '.join(shown)})" if shown else name


def _of_adapter(adapter: str | None, record: Record | None) -> dict[str, dict[str, Any]]:
    if record is None:
        where = "no --adapter is given" if adapter is None else f"{adapter} has none"
        raise OptionError(
            f"--method {ADAPTER} stands for the patch in the {SIDECAR} beside an adapter, and "
            f"{where}; give --method the name of a method"
        )
    beside = {k: v for k, v in record.arguments.items() if v != ARGUMENTS[k]}
    return {record.method.name: {**record.method.options(), **beside}}


def _trained_under(record: Record, method: Method) -> bool:
    """Whether ``method`` by itself is the patch of an adapter."""
    alone = all(
        record.arguments[name] == ARGUMENTS[name]
        for name in ("frequency", "bias", "layers", "sliding_layers", "precise")
    )
    return alone and method in (record.method, record.resolved)


def saved_otherwise(configs: Mapping[str, Any]) -> Iterator[str]:
    """A note for every model with its configuration that comes with a patch, which is undone."""
    for model, config in configs.items():
        record = checkpoints.saved_under(config)
        if record is not None:
            yield (
                f"{model} was saved under {record.call()}; {UNPATCHED} is without that: ask for "
                f"this method, with its factor and options, to measure it as it was saved"
            )
