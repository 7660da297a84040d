"""Gathers weights partitioned by DeepSpeed ZeRO-3, for forwards outside its engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Gather every module's weights during its forward, as DeepSpeed's engine does.

    Needed before the engine exists. All processes must run the same forwards.
    """
    open_ones: list[Any] = []

    def enter(module: nn.Module, args: tuple) -> None:
        import deepspeed

        own = module.parameters(recurse=False)
        missing = [weight for weight in own if weight.numel() < size(weight)]
        open_ones.append(deepspeed.zero.GatheredParameters(missing))
        open_ones[-1].__enter__()

    def leave(module: nn.Module, args: tuple, output: Any) -> None:
        if open_ones:  # empty if an earlier pre-hook raised
            open_ones.pop().__exit__(None, None, None)

    with ExitStack() as stack:
        for module in model.modules():
            if any(hasattr(weight, "ds_id") for weight in module.parameters(recurse=False)):
                stack.callback(module.register_forward_pre_hook(enter).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


def size(weight: nn.Parameter) -> int:
    """Return the number of elements of a weight, partitioned or not."""
    return getattr(weight, "ds_numel", weight.numel())
