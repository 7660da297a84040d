"""Helpers for hooks: inspect a call, and reject unsupported ones."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from rope_ext.errors import CacheError, UnsupportedModelError
from rope_ext.rotary.context import run_eagerly
from rope_ext.rotary.swapping import Changes, wrap


@functools.cache
def parameters(cls: type[nn.Module]) -> tuple[str, ...]:
    """Return the argument names of a module's forward."""
    return tuple(inspect.signature(cls.forward).parameters)[1:]


def arguments(module: nn.Module, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Return all arguments of a call of a module, by name."""
    return {**dict(zip(parameters(type(module)), args, strict=False)), **kwargs}


def cached_on_device(owner: Any, name: str, device: torch.device) -> torch.Tensor:
    """Return the constant tensor ``owner.name`` on ``device``; the copy is cached on ``owner``.

    Copying in every forward would synchronize with the GPU and prevent CUDA graphs.
    """
    x = getattr(owner, name)
    if x.device == device:
        return x
    kept = f"_{name}_on_{device.type}_{device.index}"
    copy = getattr(owner, kept, None)
    if copy is None:
        if torch.compiler.is_compiling():
            return x.to(device)
        with torch.inference_mode(False):  # the copy outlives inference mode
            copy = x.to(device)
        owner.__dict__[kept] = copy
    return copy


_ATTENTION = nn.functional.scaled_dot_product_attention


def is_exporting() -> bool:
    """Whether torch.export is tracing.

    ``torch.compiler.is_exporting()`` is True in every graph of torch 2.11 (pytorch issue 176347).
    """
    return torch.compiler._is_exporting_flag


def is_sharded() -> bool:
    """Whether each device may get only part of every sequence; traceable."""
    return nn.functional.scaled_dot_product_attention is not _ATTENTION


def runs_layers_again(decoder: nn.Module) -> bool:
    """Whether gradient checkpointing will rerun the layers after the forward."""
    trains = torch.is_grad_enabled() and decoder.training
    return trains and any(getattr(m, "gradient_checkpointing", False) for m in decoder.modules())


def refuse_continuous_batching(model: nn.Module, reason: str, changes: Changes) -> None:
    """Make continuous batching (``model.generate_batch``) raise CacheError with ``reason``.

    Otherwise the error would come from a worker thread, or transformers would reject the attention
    implementation.
    """
    # All of its entry points call this one.
    wrap(model, "init_continuous_batching", functools.partial(_refuse, reason), changes)


def _refuse(reason: str, *args: Any, **kwargs: Any) -> None:
    raise CacheError(reason)


@run_eagerly()
def refuse_sharded(name: str, instead: str, *hooked: Any) -> None:
    """Raise if each device of a context-parallel group gets only part of every sequence.

    ``context_parallel`` of torch and of accelerate replaces ``scaled_dot_product_attention`` while
    it is active. As a pre-hook, it is given the module and arguments, too.
    """
    module = getattr(nn.functional.scaled_dot_product_attention, "__module__", None)
    if str(module).startswith("torch.distributed."):
        raise UnsupportedModelError(
            f"context parallelism gives every device a part of each sequence, and {name} needs "
            f"its positions whole; {instead}, or use one device for each sequence (cp_size 1)"
        )
