"""Changes to objects of other libraries, and the list that undoes them.

A patch appends one call to its ``Changes`` for each thing that it changes. They are bound methods
or partials of functions of modules, so that a copied or pickled model undoes its own changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Changes = list[Callable[[], Any]]
"""Calls that undo what was changed, in the order in which it was changed."""
ABSENT = ...
"""The value of an attribute that is not there; the same object after pickling."""


def undo(changes: Changes) -> None:
    """Undo every change, the last one first."""
    while changes:
        changes.pop()()


def set_attribute(holder: Any, name: str, value: Any, changes: Changes) -> None:
    """Set an attribute until ``changes`` are undone."""
    keep_attributes(holder, (name,), changes)
    setattr(holder, name, value)


def keep_attributes(holder: Any, names: tuple[str, ...], changes: Changes) -> None:
    """Restore attributes of an object to what they are now when ``changes`` are undone."""
    own = {name: vars(holder).get(name, ABSENT) for name in names}
    changes.append(functools.partial(restore, holder, own))


def restore(holder: Any, own: dict[str, Any]) -> None:
    """Set attributes of an object; remove those that are ``ABSENT``."""
    for name, value in own.items():
        if value is ABSENT:
            vars(holder).pop(name, None)
        else:
            vars(holder)[name] = value


def wrap(holder: Any, name: str, function: Callable[..., Any], changes: Changes) -> None:
    """Call ``function(original, ...)`` in place of a method, if there is one."""
    if hasattr(type(holder), name):
        original = getattr(holder, name)
        call: Any = functools.partial(function, original)
        call.__wrapped__ = original  # transformers inspects its signature
        set_attribute(holder, name, call, changes)


class Hooked:
    """First base of the class of a module that has a hook of a patch.

    Compiled graphs are guarded by the class of a module and not by its hooks. With one class for
    both, a graph compiled without the hook would still serve a module that has it.
    """


def mark_hooked(module: Any, changes: Changes) -> None:
    """Give a module a class of its own, with the same name, until ``changes`` are undone."""
    cls = type(module)
    if not issubclass(cls, Hooked):
        changes.append(functools.partial(setattr, module, "__class__", cls))
        module.__class__ = _hooked(cls)


@functools.cache
def _hooked(cls: type) -> type:
    def reduce(self: Any, protocol: int) -> tuple:  # copies and pickles stay marked
        return _rebuild, (cls,), self.__dict__

    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (Hooked, cls), {**names, "__reduce_ex__": reduce})


def _rebuild(cls: type) -> Any:
    child: Any = _hooked(cls)  # `type.__new__`, as pyright reads it, makes classes
    return child.__new__(child)
