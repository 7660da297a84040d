"""Patches a model that is loaded again by the name in a patched model's configuration.

TRL's trainers load the reference model from ``config._name_or_path`` of the trained model. Without
this, they would silently compare a patched model with an unpatched one.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

_ATTENTION = "attn_implementation"
_NAME = "_name_or_path"
_logger = logging.getLogger("rope_ext")


def fresh(name: str) -> str:
    """A new string object equal to ``name`` (CPython shares strings of one character)."""
    return "".join(list(name))


class SecondLoad:
    """Recognizes a load by the name stored in a patched model's configuration.

    The name is recognized by identity: the patched model's configuration gets a new string object
    with the same text. Loading the folder by any other string returns the model as it was saved,
    and the name still compares and pickles as before.

    Args:
        model: the outermost model.
        configs: its configuration, and that of its text model.
        repatch: applies the current patch of ``model`` to another model.
        attention: attention implementation of ``model`` without the patch.
    """

    def __init__(
        self,
        model: nn.Module,
        configs: list[Any],
        repatch: Callable[[nn.Module], None],
        attention: str | None,
    ) -> None:
        self.repatch, self.attention = repatch, attention
        self.before = getattr(model.config, _NAME, None)
        self.name = fresh(self.before or "")
        places: list[tuple[Any, str]] = [(model, "name_or_path")]
        places += [(config, _NAME) for config in (model.config, *configs)]
        self._holders = [(o, name) for o, name in places if getattr(o, name, None) == self.before]
        if len(self.name) > 1:  # shorter strings are shared, so identity means nothing
            self._put(self.name)
            _PATCHED[id(self)] = self
            _watch()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register copies and unpickled patched models, too."""
        self.__dict__.update(state)
        if len(self.name) > 1:
            _PATCHED[id(self)] = self

    def undo(self) -> None:
        """Restore the original string everywhere."""
        _PATCHED.pop(id(self), None)
        self._put(self.before)

    def _put(self, name: str | None) -> None:
        for holder, attribute in self._holders:
            setattr(holder, attribute, name)


_PATCHED: weakref.WeakValueDictionary[int, SecondLoad] = weakref.WeakValueDictionary()
"""One entry for each patched model that was loaded by name, by the ``id`` of the entry."""
_watching: set[Callable] = set()
"""Wrapped versions of ``PreTrainedModel.from_pretrained``; see :func:`_watch`."""


def _watch() -> None:
    """Make transformers' ``from_pretrained`` recognize the names of patched models."""
    function = PreTrainedModel.from_pretrained.__func__
    if function in _watching:
        return

    @functools.wraps(function)
    def from_pretrained(
        cls: type, pretrained_model_name_or_path: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        name = pretrained_model_name_or_path
        alive = (reference() for reference in _PATCHED.valuerefs())
        source = next((one for one in alive if one is not None and one.name is name), None)
        if source is None:
            return function(cls, name, *args, **kwargs)
        if str(kwargs.get(_ATTENTION)).startswith("rope_ext"):  # copied from the patched model
            kwargs[_ATTENTION] = source.attention
        loaded = function(cls, fresh(name), *args, **kwargs)
        source.repatch(loaded[0] if isinstance(loaded, tuple) else loaded)  # with loading info
        _logger.warning(
            "rope_ext: %s was loaded again by the name in a patched model's configuration, as TRL "
            "does for its reference model, so this copy gets the same patch; to get the model as "
            "it was saved, call rope_ext.unpatch on the copy",
            name,
        )
        return loaded

    _watching.add(from_pretrained)
    setattr(PreTrainedModel, "from_pretrained", classmethod(from_pretrained))  # noqa: B010
