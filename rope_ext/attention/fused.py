"""Functions that are compiled separately on GPUs, and never fall back to running unfused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
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
    sizes = alike([1, *(size for x in tensors for size in x.shape)])
    compiled = compiled_kernel(function, *kind, *_modes(), sizes, *map(_kind, tensors))
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
    """Properties that dynamo compiles a separate graph for; of sizes, head columns."""
    return x.dtype, x.device, x.requires_grad, x.is_inference(), x.dim(), x.shape[3:]


def alike(given: Iterable[int]) -> tuple[int, ...]:
    """Which of these are equal, as a kind: dynamo takes equal sizes for the same from then on."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(x, index) for index, x in enumerate(given))


def rotate(pairs: Pairs, *rotated: tuple[torch.Tensor, Rotation]) -> list[torch.Tensor]:
    """:meth:`Pairs.rotate` of several tensors, each by its rotation, fused on GPUs."""
    flat = [y for x, by in rotated if by is not None for y in (x, *by)]
    if not flat:
        return [x for x, _ in rotated]
    made = iter(run(_rotate, *flat, pairs.first, pairs.second, kind=alike(map(id, flat))))
    return [x if by is None else next(made) for x, by in rotated]


def _rotate(*given: Any) -> list[torch.Tensor]:
    *flat, first, second = given
    triples = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
    return [Pairs(first, second).rotate(x, (cos, sin)) for x, cos, sin in triples]
