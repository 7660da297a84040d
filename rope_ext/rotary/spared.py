"""Spares layers the model's own turn of queries and keys where it would turn nothing.

Under ReRoPE, and under encodings in place of the rotation, keys are cached as they were projected.
The function of a modeling file that turns them would multiply by one and add zero, in some fifteen
operations for every layer. Wrapped, it gives back what it gets if it is told :data:`NOTHING`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

_NAME = "apply_rotary_pos_emb"
_WRAPPED: dict[str, Callable] = {}
"""By the name of a modeling file what stands there in place of its function."""
_USERS: Counter[str] = Counter()
NOTHING = (None, None)
"""In place of cosine and sine: no token is turned."""


class Spared:
    """The wrapped functions of a decoder, for as long as it lives or until they are released.

    A copy holds none: they may go before it does, and then it turns by nothing as before.

    Args:
        decoder: whose layers are spared.
        files: names of their modeling files.
    """

    def __init__(self, decoder: nn.Module, files: Iterable[str]) -> None:
        self.files = tuple(files)
        _USERS.update(self.files)
        self.release = weakref.finalize(decoder, _leave, self.files)
        self.release.atexit = False

    @classmethod
    def of(
        cls, decoder: nn.Module, layers: Iterable[nn.Module], columns: int, like: torch.Tensor
    ) -> Spared | None:
        """Of attention layers; None: they turn by no such function, or one that does more.

        Args:
            decoder: whose layers they are.
            layers: which.
            columns: of cosine and sine.
            like: of the dtype of all.
        """
        files = {inspect.unwrap(type(layer).forward).__module__ for layer in layers}
        made = {}
        for file in files:
            function = getattr(sys.modules.get(file), _NAME, None)
            if function is None:
                return None
            if function is not _WRAPPED.get(file):
                if not _turns_nothing_by_nothing(function, columns, like):
                    return None
                made[file] = _sparing(function)
        for file, function in made.items():
            _WRAPPED[file] = function
            setattr(sys.modules[file], _NAME, function)
        return cls(decoder, files)

    def holds(self) -> bool:
        """Whether they are there: another package may have put its own in their place."""
        return all(
            file in _WRAPPED and getattr(sys.modules.get(file), _NAME, None) is _WRAPPED[file]
            for file in self.files
        )


def _leave(files: Iterable[str]) -> None:
    """Put the functions back that nobody uses any more."""
    _USERS.subtract(files)
    for file in files:
        wrapped = None if _USERS[file] > 0 else _WRAPPED.pop(file, None)
        if wrapped is not None and getattr(sys.modules.get(file), _NAME, None) is wrapped:
            setattr(sys.modules[file], _NAME, wrapped.__wrapped__)


def _sparing(function: Callable) -> Callable:
    @functools.wraps(function)
    def apply(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        if cos is None:
            return q, k
        return function(q, k, cos, sin, *args, **kwargs)

    return apply


def _turns_nothing_by_nothing(function: Callable, columns: int, like: torch.Tensor) -> bool:
    """Whether what it gets comes back if cosine is one and sine is zero."""
    try:
        names = list(inspect.signature(function).parameters)[:4]
        x = torch.arange(2 * 3 * columns, dtype=like.dtype, device="cpu").view(1, 2, 3, columns)
        cos = torch.ones(1, 3, columns, dtype=like.dtype, device="cpu")
        found = function(x, -x, cos, torch.zeros_like(cos))
        return names == ["q", "k", "cos", "sin"] and all(map(torch.equal, found, (x, -x)))
    except Exception:  # then it is another function of that name
        return False
