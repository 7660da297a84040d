"""Gives one object a class of its own, and says which class it came with."""

from __future__ import annotations

import functools
from typing import Any

_PLAIN = "_rope_ext_plain"  # on a class made here: the class that it stands in for


def swap(instance: Any, parent: type) -> None:
    """Let the methods of ``parent``, a module-level class, come before those of ``instance``.

    It keeps its name and all else, and copies and pickles come out likewise. A second call takes
    the place of the first; :func:`take_back` takes it back.
    """
    instance.__class__ = _child(plain(instance), parent)


def take_back(instance: Any) -> None:
    """Give an object the class again that it came with."""
    instance.__class__ = plain(instance)


def plain(instance: Any) -> type:
    """The class that an object came with."""
    return getattr(type(instance), _PLAIN, type(instance))


@functools.cache
def _child(cls: type, parent: type) -> type:
    def reduce(self: Any, protocol: int) -> tuple:
        return _rebuild, (cls, parent), self.__dict__

    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (parent, cls), {**names, "__reduce_ex__": reduce, _PLAIN: cls})


def _rebuild(cls: type, parent: type) -> Any:
    child = _child(cls, parent)
    return child.__new__(child)
