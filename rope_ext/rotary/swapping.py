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


class Swapped:
    """The last base of a class that :func:`swap` made; the second is the original class."""


def swap(instance: Any, parent: type) -> None:
    """Put the methods of ``parent``, a module-level class, before those of ``instance``.

    The class keeps its name, and copies and pickles of ``instance`` keep the swap. A second call
    replaces the first; :func:`take_back` undoes it.
    """
    instance.__class__ = _child(plain(instance), parent)


def take_back(instance: Any) -> None:
    """Restore the original class of an object."""
    instance.__class__ = plain(instance)


def plain(instance: Any) -> type:
    """The original class of an object."""
    cls = type(instance)
    return cls.__bases__[1] if cls.__bases__[-1] is Swapped else cls


@functools.cache
def _child(cls: type, parent: type) -> type:
    def reduce(self: Any, protocol: int) -> tuple:
        return _rebuild, (cls, parent), self.__dict__

    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (parent, cls, Swapped), {**names, "__reduce_ex__": reduce})


def _rebuild(cls: type, parent: type) -> Any:
    child: Any = _child(cls, parent)  # `type.__new__`, as pyright reads it, makes classes
    return child.__new__(child)
