"""Changes objects of other libraries, and records how to undo the changes.

A patch appends a call to its ``Changes`` for each change. The calls are bound methods or partials
of module functions, so that a copied or pickled model undoes its own changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Changes = list[Callable[[], Any]]
"""Calls that undo changes, in the order of the changes."""
ABSENT = ...
"""Stands for a missing attribute; pickling preserves its identity."""


def undo(changes: Changes) -> None:
    """Undo every change, starting with the last."""
    while changes:
        changes.pop()()


def set_attribute(holder: Any, name: str, value: Any, changes: Changes) -> None:
    """Set an attribute until ``changes`` are undone."""
    keep_attributes(holder, (name,), changes)
    setattr(holder, name, value)


def keep_attributes(holder: Any, names: tuple[str, ...], changes: Changes) -> None:
    """Restore an object's attributes to their current values when ``changes`` are undone."""
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
    """Replace a method, if it exists, by ``function(original, ...)``."""
    if hasattr(type(holder), name):
        original = getattr(holder, name)
        call: Any = functools.partial(function, original)
        call.__wrapped__ = original  # transformers inspects its signature
        set_attribute(holder, name, call, changes)


class Hooked:
    """First base class of modules with a patch's hook.

    Compiled graphs are guarded by a module's class and not by its hooks. If hooked modules kept
    their class, a graph compiled without the hook would be reused for them.
    """


def mark_hooked(module: Any, changes: Changes) -> None:
    """Replace a module's class with a subclass of the same name until ``changes`` are undone."""
    cls = type(module)
    if not issubclass(cls, Hooked):
        changes.append(functools.partial(setattr, module, "__class__", cls))
        module.__class__ = _hooked(cls)


@functools.cache
def _hooked(cls: type) -> type:
    def reduce(self: Any, protocol: int) -> tuple:  # copies and pickles keep the mark
        return _rebuild, (cls,), self.__dict__

    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (Hooked, cls), {**names, "__reduce_ex__": reduce})


def _rebuild(cls: type) -> Any:
    child: Any = _hooked(cls)  # pyright types `type.__new__` as returning classes
    return child.__new__(child)
