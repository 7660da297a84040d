"""A thread-local stack of forwards in progress, for all patches, and helpers for their hooks.

It is thread-local because several threads may serve the same model. State that outlives a single
call belongs to a request and is stored on its cache.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers.cache_utils import Cache

from rope_ext.errors import CacheError, UnsupportedModelError
from rope_ext.rotary.swapping import Changes, wrap

UNKNOWN = (
    "this cache was taken for an empty one, and it has tokens that were put there without this "
    "patch, so its keys carry other rotations; start with an empty cache"
)
"""Error of a graph that starts with a static cache without metadata."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


NOTE = "_rope_ext"
"""Cache attribute with metadata of its keys for the next forward; ``patch`` computed them."""


class ForwardContext:
    """One forward of a decoder, with ``tokens`` in each row.

    ``patch`` is its position map or ``Sequences``. ``filled`` is the number of tokens already in
    the cache, a 0-dimensional tensor if one graph runs every step of a static cache. If ``traced``
    by torch.compile or torch.export, it computes with tensors, and values must not be read.
    """

    exported = False  # whether torch.export is tracing it

    def __init__(
        self, patch: Any, rows: int, tokens: int, filled: Any, cache: Cache | None, traced: bool
    ) -> None:
        self.patch, self.rows, self.tokens = patch, rows, tokens
        self.filled: Any = filled
        self.cache, self.traced = cache, traced

    def require(self, holds: torch.Tensor, error: type[Exception], message: str) -> None:
        """Raise ``error`` unless ``holds``; graphs raise RuntimeError when they run."""
        if self.traced:
            torch._assert_async(holds, message)
        elif not bool(holds):
            raise error(message)


class _ThreadState(threading.local):
    """State of the current thread."""

    def __init__(self) -> None:
        self.stack: list[Any] = []  # ForwardContexts and calls of generate, innermost last
        self.look: Callable[..., None] | None = None  # callback that observes attention layers


forward_context = _ThreadState()


def current(patch: Any) -> Any:
    """Return this thread's innermost forward in progress under ``patch``, or None."""
    for context in reversed(forward_context.stack):
        if context.patch is patch:
            return context
    return None


def forget_failed_exports() -> None:
    """Drop forwards of failed exports, since torch runs no hooks after such an error."""
    stack = forward_context.stack
    if stack and not torch.compiler.is_compiling():
        stack[:] = [context for context in stack if not context.exported]


def run(patch: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)``, as part of the graph only if the forward in progress is traced."""
    context = current(patch)
    return function(*args) if context is not None and context.traced else _run(function, *args)


def run_eagerly(reason: str | None = None) -> Callable[[_Function], _Function]:
    """:func:`torch.compiler.disable` as a decorator that keeps the type of the function."""
    return cast("Callable[[_Function], _Function]", torch.compiler.disable(reason=reason))


@run_eagerly()
def _run(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def cache_among(given: Mapping[str, Any]) -> Any:
    """Return the cache from a decoder's arguments; transformers 5.24 renamed it to ``cache``."""
    cache = given.get("past_key_values")
    return given.get("cache") if cache is None else cache


def shape_of(given: Mapping[str, Any]) -> tuple[int, int]:
    """Return rows and tokens of a forward from a decoder's arguments."""
    tokens = given.get("input_ids")
    rows, length = (given["inputs_embeds"] if tokens is None else tokens).shape[:2]
    return rows, length


def is_paged(given: Mapping[str, Any]) -> bool:
    """Whether the cache is for continuous batching, which is not a ``Cache``."""
    cache = given.get("cache")
    return cache is not None and not isinstance(cache, Cache)


def caches_in(output: Any) -> list[Any]:
    """Return the caches in a decoder's output, including one that the decoder created."""
    found = []
    for part in output if isinstance(output, tuple) else (output,):
        cache = getattr(part, "past_key_values", getattr(part, "cache", part))
        if hasattr(cache, "get_seq_length"):
            found.append(cache)
    return found


@functools.cache
def parameters(cls: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(cls.forward).parameters)[1:]


def arguments(module: nn.Module, args: tuple, kwargs: dict) -> dict[str, Any]:
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
