"""A second load of a patched model, by the name in its own configuration, carries the patch.

TRL's trainers load their reference model by ``config._name_or_path`` of the model that they train.
Without this, they would compare a patched model with an unpatched one, and report no error.
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
    """A string equal to ``name`` that is another object (CPython shares those of one character)."""
    return "".join(list(name))


class SecondLoad:
    """Recognizes loads by the name that the configuration of a patched model holds.

    Recognized by identity: the patched model's configuration gets an equal string of its own, so
    that whoever loads the folder by a name of theirs gets the model as it was saved, while the
    name reads, compares and pickles as before.

    Args:
        model: the outermost model.
        configs: its configuration, and that of its text model.
        repatch: puts the patch that is in force on ``model`` on another one too.
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
        if len(self.name) > 1:  # else it is no object of its own
            self._put(self.name)
            _PATCHED[id(self)] = self
            _watch()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copies and pickles of a patched model are patched models, too."""
        self.__dict__.update(state)
        if len(self.name) > 1:
            _PATCHED[id(self)] = self

    def undo(self) -> None:
        """Give every holder of the name the string that it had."""
        _PATCHED.pop(id(self), None)
        self._put(self.before)

    def _put(self, name: str | None) -> None:
        for holder, attribute in self._holders:
            setattr(holder, attribute, name)


_PATCHED: weakref.WeakValueDictionary[int, SecondLoad] = weakref.WeakValueDictionary()
"""Of every model that is patched now and was loaded by a name, by their ids."""
_watching: set[Callable] = set()
"""``PreTrainedModel.from_pretrained`` as :func:`_watch` has made it."""


def _watch() -> None:
    """Have ``from_pretrained`` of transformers look for names of patched models."""
    function = PreTrainedModel.from_pretrained.__func__
    if function in _watching:
        return

    @functools.wraps(function)
    def from_pretrained(
        cls: type, pretrained_model_name_or_path: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        name = pretrained_model_name_or_path
        there = (reference() for reference in _PATCHED.valuerefs())
        of = next((one for one in there if one is not None and one.name is name), None)
        if of is None:
            return function(cls, name, *args, **kwargs)
        if str(kwargs.get(_ATTENTION)).startswith("rope_ext"):  # copied from the patched model
            kwargs[_ATTENTION] = of.attention
        loaded = function(cls, fresh(name), *args, **kwargs)
        of.repatch(loaded[0] if isinstance(loaded, tuple) else loaded)  # with loading info
        _logger.warning(
            "rope_ext: %s was loaded again by the name in the configuration of a patched model, as "
            "TRL loads a reference model, so this copy carries the same patch; for the model as it "
            "was saved, call rope_ext.unpatch on the copy",
            name,
        )
        return loaded

    _watching.add(from_pretrained)
    setattr(PreTrainedModel, "from_pretrained", classmethod(from_pretrained))  # noqa: B010
