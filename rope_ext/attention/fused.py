"""Functions that are compiled separately on GPUs, and never fall back to running unfused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch

from rope_ext.attention import cards
from rope_ext.attention.call import Pairs, Rotation

_copies = itertools.count()


def fuses(x: torch.Tensor) -> bool:
    """Whether compiling helps: on GPUs only, and a graph is compiled as a whole anyway."""
    return x.is_cuda and not torch.compiler.is_compiling() and cards.card(x.device).compiles


class NotCompiledError(Exception):
    """A function that must not run unfused could not be compiled; the cause says why."""


def run(
    function: FunctionType, *given: Any, kind: tuple[Any, ...] = (), unfused: bool = True
) -> Any:
    """``function(*given)``, compiled for calls of this kind if the first tensor is on a GPU.

    Args:
        function: without a closure.
        given: its arguments, tensors first.
        kind: hashable; whatever needs a separate kernel besides the properties of the tensors.
        unfused: whether it may run uncompiled if the compiler fails.

    Raises:
        NotCompiledError: the compiler failed, and it may not run uncompiled.
    """
    if not fuses(given[0]):
        return function(*given)
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    compiled = compiled_kernel(function, *kind, *_modes(), *map(_kind, tensors))
    try:
        return compiled(*given)
    except Exception as error:
        if not type(error).__module__.startswith(_COMPILERS):
            raise
        if not unfused:
            raise NotCompiledError(f"{type(error).__name__}: {error}"[:300]) from error
        return function(*given)


_COMPILERS = ("triton", "torch._inductor", "torch._dynamo")
"""Modules whose errors say that a kernel was not compiled, or does not fit on the GPU."""


@cache
def compiled_kernel(function: FunctionType, *_kind: Any) -> Callable:
    """``function`` with its own limit of recompilations.

    Dynamo counts them by code object. Beyond the limit it runs the function uncompiled, or raises
    under ``fullgraph``.
    """
    code = function.__code__
    code = code.replace(co_name=f"{code.co_name}_{next(_copies)}")
    own = FunctionType(code, function.__globals__, code.co_name, function.__defaults__)
    return torch.compile(own, dynamic=True, fullgraph=True)


def _modes() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def _kind(x: torch.Tensor) -> tuple[Any, ...]:
    """Properties that dynamo compiles a separate graph for; of sizes, head columns and ones."""
    ones = tuple(size == 1 for size in x.shape)
    return x.dtype, x.device, x.requires_grad, x.is_inference(), x.shape[3:], ones


def rotate(pairs: Pairs, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """:meth:`Pairs.rotate`, fused on GPUs."""
    return x if rotation is None else run(_rotate, x, *rotation, pairs.first, pairs.second)


def _rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    first: slice | torch.Tensor,
    second: slice | torch.Tensor,
) -> torch.Tensor:
    return Pairs(first, second).rotate(x, (cos, sin))
