"""Spares layers the model's own turn of queries and keys where it would turn nothing.

Under ReRoPE, and under encodings in place of the rotation, keys are cached as they were projected.
The function of a modeling file that turns them would multiply by one and add zero, in some fifteen
operations for every layer. Wrapped, it gives back what it gets if it is told :data:`IDENTITY`.

It stays wrapped: what another thread compiles may hold it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

_NAME = "apply_rotary_pos_emb"
_WRAPPED: set[Callable] = set()
"""What has been put in place of such functions."""
IDENTITY = (None, None)
"""In place of cosine and sine: no token is turned."""


def skip_identity(
    layers: Iterable[nn.Module], columns: int, like: torch.Tensor
) -> tuple[str, ...] | None:
    """Wrap the functions that turn queries and keys of attention layers.

    Args:
        layers: which.
        columns: of cosine and sine.
        like: of the dtype of all.

    Returns:
        Names of their modeling files; None: one has no such function, or it does something else.
    """
    files = {inspect.unwrap(type(layer).forward).__module__ for layer in layers}
    for file in files:
        function = _function_of(file)
        if function not in _WRAPPED:
            if not _keeps_input_under_identity(function, columns, like):
                return None
            wrapper = _skipping(function)
            _WRAPPED.add(wrapper)
            setattr(sys.modules[file], _NAME, wrapper)
    return tuple(files)


def skips_identity(files: Iterable[str]) -> bool:
    """Whether they are wrapped still: another package may have put its own in their place."""
    return all(_function_of(file) in _WRAPPED for file in files)


def _function_of(file: str) -> Callable | None:
    return getattr(sys.modules.get(file), _NAME, None)


def _skipping(function: Callable) -> Callable:
    @functools.wraps(function)
    def apply(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        if cos is None:
            return q, k
        return function(q, k, cos, sin, *args, **kwargs)

    return apply


def _keeps_input_under_identity(
    function: Callable | None, columns: int, like: torch.Tensor
) -> bool:
    """Whether what it gets comes back if cosine is one and sine is zero."""
    try:
        names = list(inspect.signature(function).parameters)[:4]
        x = torch.arange(2 * 3 * columns, dtype=like.dtype, device="cpu").view(1, 2, 3, columns)
        cos = torch.ones(1, 3, columns, dtype=like.dtype, device="cpu")
        found = function(x, -x, cos, torch.zeros_like(cos))
        return names == ["q", "k", "cos", "sin"] and all(map(torch.equal, found, (x, -x)))
    except Exception:  # there is none, or another of that name
        return False
