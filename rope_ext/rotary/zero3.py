"""Gathers weights that DeepSpeed ZeRO-3 has partitioned, for forwards outside its engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Gather every module's weights during its forward, as DeepSpeed's engine does.

    Needed before the engine exists. All processes have to run the same forwards.
    """
    handles: list[Any] = []
    for module in model.modules():
        if any(hasattr(weight, "ds_id") for weight in module.parameters(recurse=False)):
            whole = _Whole()
            handles.append(module.register_forward_pre_hook(whole.enter))
            handles.append(module.register_forward_hook(whole.leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def size(weight: nn.Parameter) -> int:
    """Number of elements of a weight, whether it is partitioned or not."""
    return getattr(weight, "ds_numel", weight.numel())


class _Whole:
    """Hooks that gather and release the weights of one module."""

    def __init__(self) -> None:
        self.open: list[Any] = []

    def enter(self, module: nn.Module, args: tuple) -> None:
        import deepspeed

        own = module.parameters(recurse=False)
        missing = [weight for weight in own if weight.numel() < size(weight)]
        context = deepspeed.zero.GatheredParameters(missing)
        context.__enter__()
        self.open.append(context)

    def leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self.open:  # empty if an earlier pre-hook raised
            self.open.pop().__exit__(None, None, None)
