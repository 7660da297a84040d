"""Gives a single object a class of its own, and remembers its original class."""

from __future__ import annotations

import functools
from typing import Any

_PLAIN = "_rope_ext_plain"  # on a class made here: the original class


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
    return getattr(type(instance), _PLAIN, type(instance))


@functools.cache
def _child(cls: type, parent: type) -> type:
    def reduce(self: Any, protocol: int) -> tuple:
        return _rebuild, (cls, parent), self.__dict__

    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (parent, cls), {**names, "__reduce_ex__": reduce, _PLAIN: cls})


def _rebuild(cls: type, parent: type) -> Any:
    child: Any = _child(cls, parent)  # `type.__new__`, as pyright reads it, makes classes
    return child.__new__(child)
