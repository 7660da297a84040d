"""A thread-local stack of forwards in progress, for all patches, and helpers for their hooks.

It is thread-local because several threads may serve the same model. State that outlives a single
call belongs to a request and is stored on its cache.
"""

import functools
import inspect
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from rope_ext.errors import CacheError, OptionError, UnsupportedModelError
from rope_ext.rotary.probe import package_of
from rope_ext.rotary.sites import text_config
from rope_ext.rotary.swapping import Changes, wrap

_logger = logging.getLogger("rope_ext")
UNKNOWN = (
    "this cache was taken for an empty one, and it has tokens that were put there without this "
    "patch, so its keys carry other rotations; start with an empty cache"
)
"""Error of a graph that starts with a static cache without metadata."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


_REROTATING_PRESSES = ("KeyRerotationPress", "FinchPress")  # these read inv_freq themselves
NOTE = "_rope_ext"
"""Cache attribute with metadata of its keys for the next forward, and ``rotated_by`` what."""


@dataclass(eq=False)
class ForwardContext:
    """One forward of a decoder."""

    patched_by: Any  # its position map or ``Sequences``
    rows: int
    tokens: int  # in each row
    filled: Any  # tokens already in the cache; a 0-d tensor if a graph runs steps of a static cache
    cache: Cache | None
    traced: bool  # by torch.compile or torch.export: it computes with tensors, and reads no values
    exported = False  # whether torch.export is tracing it
    running = False  # whether the decoder's own ``forward`` has begun
    replica: nn.Module | None = None  # the copy of the decoder by nn.DataParallel that runs it

    def __post_init__(self) -> None:
        """Set what a subclass derives from these."""


class _ThreadState(threading.local):
    """State of the current thread."""

    def __init__(self) -> None:
        self.stack: list[Any] = []  # ForwardContexts and calls of generate, innermost last
        # Called with an attention module, its attention call (Dense) and its ``sliding_window``.
        self.look: Callable[..., None] | None = None


forward_context = _ThreadState()


@contextmanager
def attending(decoder: nn.Module, name: str, look: Callable[..., None]) -> Iterator[None]:
    """Use another attention function in a block, with ``look`` as its observer in this thread."""
    config = text_config(decoder)
    before = forward_context.look
    own = config._attn_implementation_internal
    config._attn_implementation_internal = name  # the public attribute also sets sub-configurations
    forward_context.look = look
    try:
        yield
    finally:
        config._attn_implementation_internal = own
        forward_context.look = before


def current(patched_by: Any) -> Any:
    """Return this thread's innermost forward in progress that is ``patched_by`` this, or None."""
    for context in reversed(forward_context.stack):
        if context.patched_by is patched_by:
            return context
    return None


def run_eagerly(reason: str | None = None) -> Callable[[_Function], _Function]:
    """:func:`torch.compiler.disable` as a decorator that keeps the type of the function."""
    return cast("Callable[[_Function], _Function]", torch.compiler.disable(reason=reason))


def as_forward(hook: _Function) -> _Function:
    """Decorate a method of a :class:`Tracker`: part of a graph only if the forward is traced."""
    eagerly = run_eagerly()(hook)

    @functools.wraps(hook)
    def run(self: Any, *args: Any) -> Any:
        forward = current(self.patched_by)
        traced = forward is not None and forward.traced
        return hook(self, *args) if traced else eagerly(self, *args)

    return cast("_Function", run)


class Tracker:
    """Hooks that keep a decoder's forward on the stack of its thread from begin to end.

    ``patched_by`` is that of its forwards. A subclass defines ``trace``, which returns a traced
    forward, or None if tensors cannot express it; ``start``, which then puts one on the stack whose
    values can be read; and ``finish``, which records a forward on caches.
    """

    patched_by: Any
    trace: Callable[[dict[str, Any]], ForwardContext | None]
    start: Callable[[dict[str, Any]], None]
    finish: Callable[[Any, Any], None]

    def track(self, decoder: nn.Module, changes: Changes) -> None:
        begin = decoder.register_forward_pre_hook(self.begin, with_kwargs=True)
        end = decoder.register_forward_hook(self.end, with_kwargs=True, always_call=True)
        changes += [begin.remove, end.remove]
        wrap(
            decoder, name="forward", function=functools.partial(self.run, decoder), changes=changes
        )

    def run(self, decoder: nn.Module, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``decoder.forward``; called by itself, as sentence-transformers does, run its hooks.

        A forward that ``begin`` has put on the stack runs once. One that Ctrl-C has ended is still
        there and has run, so it is not taken for this one.
        """
        forward = current(self.patched_by)
        if forward is None or forward.running:
            return decoder(*args, **kwargs)
        forward.running = True
        if forward.replica is not None:  # ``original`` is bound to the module that was copied
            return type(decoder).forward(forward.replica, *args, **kwargs)
        return original(*args, **kwargs)

    def traceable(self) -> bool:
        """Whether a graph is being traced, and no device may get only part of every sequence."""
        whole = nn.functional.scaled_dot_product_attention is _ATTENTION
        return torch.compiler.is_compiling() and whole

    def begin(self, decoder: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Decoder pre-hook: starts a forward, and returns other arguments if it needs them."""
        stack = forward_context.stack
        if stack and not torch.compiler.is_compiling():  # as _forgetting, also if an export fails
            stack[:] = [x for x in stack if not x.exported and x.patched_by is not self.patched_by]
        given = arguments(decoder, args, kwargs)
        forward = None
        if self.traceable() and not is_paged(given) and not _runs_layers_again(decoder):
            forward = self.trace(given)
        if forward is None:
            self.start(given)
        else:
            stack.append(forward)
        if getattr(decoder, "_is_replica", False):
            current(self.patched_by).replica = decoder

    @as_forward
    def end(self, decoder: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """Decoder hook: ends a forward, also after an error."""
        forward = current(self.patched_by)
        if forward is not None:  # else an error was raised before it started
            forward_context.stack.remove(forward)
            self.finish(forward, output)


class LengthLimit:
    """Decoder pre-hook that warns once if a forward has more tokens than the patch reaches."""

    def __init__(self, method: str, trained: int, target: int) -> None:
        self.method = method
        self.trained = trained
        self.target = target
        self.told = self.told_of_draft = False

    def __call__(self, decoder: nn.Module, args: tuple, kwargs: dict) -> None:
        if torch.compiler.is_compiling() or self.told:
            return
        given = arguments(decoder, args, kwargs)
        inputs = input_of(given)
        cache = cache_among(given)
        filled = cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0
        if not isinstance(inputs, Tensor) or not isinstance(filled, int):
            return  # do not wait for a length on a device
        tokens = inputs.shape[1] + filled
        positions = given.get("position_ids")
        if tokens > self.target and isinstance(positions, Tensor) and not positions.is_meta:
            tokens = int(positions.max()) + 1  # packed and padded rows are longer
        if tokens > self.target:
            self.told = True
            _logger.warning(
                "rope_ext: this text has %d tokens, more than the %d that %s reaches; patch with "
                "factor=%g or more (replace=True)",
                tokens,
                self.target,
                self.method,
                math.ceil(tokens / self.trained * 100) / 100,
            )

    def generate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Check the draft model of assisted generation, then call ``model.generate``."""
        draft = kwargs.get("assistant_model")
        if isinstance(draft, nn.Module) and not self.told_of_draft:
            longest = getattr(text_config(draft), "max_position_embeddings", None)
            if isinstance(longest, int) and longest < self.target:
                self.told_of_draft = True
                _logger.warning(
                    "rope_ext: the assistant_model reaches %d tokens and this model %d; beyond, "
                    "fewer drafts are accepted; "
                    "call rope_ext.patch(assistant_model, ..., factor=%g)",
                    longest,
                    self.target,
                    math.ceil(self.target / longest * 100) / 100,
                )
        return original(*args, **kwargs)


def cache_among(given: Mapping[str, Any]) -> Any:
    """Return the cache from a decoder's arguments; transformers 5.24 renamed it to ``cache``."""
    cache = given.get("past_key_values")
    return given.get("cache") if cache is None else cache


def input_of(given: Mapping[str, Any]) -> Any:
    """Return the token ids or embeddings of a decoder's call, ``[rows, tokens, ...]``, or None."""
    tokens = given.get("input_ids")
    return given.get("inputs_embeds") if tokens is None else tokens


def shape_of(given: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of rows and tokens of a decoder's call.

    Raises OptionError if it has no input, as the decoder itself would.
    """
    inputs = input_of(given)
    if inputs is None:
        raise OptionError("the model was called without tokens; give it input_ids or inputs_embeds")
    rows, tokens = inputs.shape[:2]
    return rows, tokens


def mask_of_decoder(mask: Any) -> Any:
    """Return the mask from which padding is read, if there is one mask per kind of layer.

    It is that of layers which attend to every token. The dict's order is that of a set, so it
    depends on the hash seed, and masks of layers without attention cover only the new tokens.
    """
    if not isinstance(mask, dict):
        return mask
    if "full_attention" in mask:
        return mask["full_attention"]
    of_attention = [name for name in sorted(mask) if getattr(mask[name], "ndim", 0) == 4]
    return mask[of_attention[0]] if of_attention else None


def is_paged(given: Mapping[str, Any]) -> bool:
    """Whether the cache is for continuous batching, which is not a ``Cache``."""
    cache = given.get("cache")
    return cache is not None and not isinstance(cache, Cache)


def caches_in(output: Any) -> list[Any]:
    """Return the caches in a decoder's output, including one that the decoder created."""
    found = []
    for part in output if isinstance(output, tuple) else (output,):
        # transformers 5.24 warns if the older name is read.
        newer = hasattr(part, "cache")
        cache = part.cache if newer else getattr(part, "past_key_values", part)
        if hasattr(cache, "get_seq_length"):
            found.append(cache)
    return found


def as_argument(model: nn.Module, cache: Any) -> dict[str, Any]:
    """Return a cache as the keyword argument that this version of transformers has for it."""
    return {"cache" if "cache" in parameters(type(model)) else "past_key_values": cache}


@functools.cache
def parameters(cls: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(cls.forward).parameters)[1:]


def arguments(module: nn.Module, args: tuple, kwargs: dict) -> dict[str, Any]:
    return {**dict(zip(parameters(type(module)), args, strict=False)), **kwargs}


def cached_on_device(owner: Any, name: str, device: torch.device) -> Tensor:
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


def _runs_layers_again(decoder: nn.Module) -> bool:
    """Whether gradient checkpointing will rerun the layers after the forward."""
    trains = torch.is_grad_enabled() and decoder.training
    return trains and any(getattr(m, "gradient_checkpointing", False) for m in decoder.modules())


def watch_generation(model: nn.Module, batch: Callable[..., Any], changes: Changes) -> None:
    """Make ``generate`` clean up, and ``batch`` handle ``model.init_continuous_batching``."""
    # All entry points of continuous batching call this one, and would raise in a thread of theirs.
    wrap(model, name="init_continuous_batching", function=batch, changes=changes)
    wrap(model, name="generate", function=_forgetting, changes=changes)


def forget_pages(model: nn.Module) -> None:
    """Remove a manager kept by ``generate_batch``, since its pages hold keys as now rotated."""
    of_model: Any = model
    if getattr(of_model, "_cached_continuous_batching_manager", None) is not None:
        of_model.destroy_cached_continuous_batching_manager()


def refuse_batching(reason: str, *args: Any, **kwargs: Any) -> None:
    """Raise CacheError with a reason in place of ``model.init_continuous_batching``."""
    raise CacheError(reason)


def _forgetting(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``generate``; forget its request, and forwards whose hooks Ctrl-C kept from running."""
    stack = forward_context.stack
    count = len(forward_context.stack)
    try:
        return original(*args, **kwargs)
    finally:
        del stack[count:]


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


def refuse_presses(
    modules: Iterable[nn.Module], method: str, instead: str, rerotating: bool = False
) -> None:
    """Raise CacheError if a kvpress press drops keys of one of these attention modules.

    With ``rerotating``, only a press that rotates keys by the frequencies in the buffer counts.
    """
    hooks = (hook for module in modules for hook in module._forward_hooks.values())
    for press in (press for hook in hooks for press in _presses(getattr(hook, "__self__", hook))):
        if press in _REROTATING_PRESSES or not rerotating:
            raise CacheError(
                f"{press} of kvpress drops keys or rotates them by the frequencies in the rotary "
                f"module, and {method} needs the position of every key to rotate it; {instead}"
            )


def _presses(item: Any) -> Iterator[str]:
    """Yield the name of a press whose hook this is, and of those that it wraps."""
    if inspect.isfunction(item) and package_of(item) == "kvpress":
        yield item.__qualname__.partition(".")[0]
    elif any(package_of(cls) == "kvpress" for cls in type(item).__mro__):
        yield type(item).__name__
        for value in vars(item).values():
            for inner in value if isinstance(value, (list, tuple)) else (value,):
                yield from _presses(inner)
