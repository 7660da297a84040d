"""Puts a method in force: one file for each kind of method, which knows no single method.

A kind is a function of a place, a method, the options and the list of changes, to which it adds
whatever it changes as it goes. Where it fails, the caller takes those back.
"""

from collections.abc import Callable
from types import MappingProxyType

from rope_ext.apply import frequency, position
from rope_ext.apply.base import Applied

APPLY: MappingProxyType[str, Callable[..., Applied]] = MappingProxyType(
    {
        "frequency": frequency.apply,
        "position": position.apply,
        "encoding": position.apply,
        "rotation": position.apply,
    }
)
"""By the ``kind`` of a method."""
