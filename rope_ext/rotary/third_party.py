"""Detects other packages' changes to a model: replaced forwards, and hooks that drop keys.

Unsloth and similar packages replace methods of transformers classes. Their replacements may ignore
the output of the rotary module.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from rope_ext.errors import CacheError

_OURS = ("transformers", "torch", "rope_ext")  # packages that may wrap or assign a forward
_REROTATING_PRESSES = ("KeyRerotationPress", "FinchPress")  # these read inv_freq themselves


def replaced(decoder: nn.Module) -> list[str]:
    """List replaced code between a decoder and its attention layers.

    Returns:
        Entries such as ``"unsloth.models.llama.fast_forward in place of LlamaAttention.forward"``.
    """
    modules, found = dict(decoder.named_modules()), {}
    for name, module in modules.items():
        if any(buffer.endswith("inv_freq") for buffer in module._buffers):
            if _package(type(module)) not in (_package(type(decoder)), *_OURS):
                found[_path(type(module))] = "the rotary embedding"
        elif isinstance(getattr(module, "layer_idx", None), int):
            parts = name.split(".")
            for n in range(len(parts) + 1):  # the decoder, its layers, their attention
                found.update(_other_forward(modules[".".join(parts[:n])]))
    return [f"{there} in place of {what}" for there, what in found.items()]


def _other_forward(module: nn.Module) -> dict[str, str]:
    """Return a forward from outside the module's own package, and what it replaces."""
    owner = next(base for base in type(module).__mro__ if "forward" in vars(base))
    forward = vars(owner)["forward"]
    if "forward" in module.__dict__ and "_hf_hook" not in module.__dict__:  # not accelerate's
        forward = module.__dict__["forward"]
    while isinstance(forward, functools.partial):
        forward = forward.func
    function = getattr(forward, "__func__", forward)
    inner = inspect.unwrap(function)
    wrapper = getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0]
    known = (_package(owner), *_OURS)
    if _package(inner) in known and wrapper in (*known, ""):
        return {}
    return {_path(function if wrapper not in known else inner): f"{owner.__name__}.forward"}


def refuse_presses(
    modules: Iterable[nn.Module], method: str, instead: str, rerotating: bool = False
) -> None:
    """Raise CacheError if a kvpress press drops keys of one of these attention modules.

    Args:
        modules: attention layers.
        method: name of the patch, for the error.
        instead: advice at the end of the error.
        rerotating: only if the press rotates keys by the frequencies in the buffer.
    """
    for press in (press for module in modules for press in _presses(module)):
        if press in _REROTATING_PRESSES or not rerotating:
            raise CacheError(
                f"{press} of kvpress drops keys or rotates them by the frequencies in the rotary "
                f"module, and {method} needs the position of every key to rotate it; {instead}"
            )


def _presses(module: nn.Module) -> Iterator[str]:
    """Yield names of the presses that kvpress hooked to a module, and of those they wrap."""
    for hook in module._forward_hooks.values():
        owner = getattr(hook, "__self__", None)
        if owner is None and _package(hook) == "kvpress":
            yield hook.__qualname__.partition(".")[0]
        yield from _wrapped(owner)


def _wrapped(press: Any) -> Iterator[str]:
    if any(_package(cls) == "kvpress" for cls in type(press).__mro__):
        yield type(press).__name__
        for value in vars(press).values():
            for inner in value if isinstance(value, (list, tuple)) else (value,):
                yield from _wrapped(inner)


def _module(item: Any) -> str:
    return getattr(item, "__module__", None) or type(item).__module__


def _package(item: Any) -> str:
    return _module(item).partition(".")[0]


def _path(item: Any) -> str:
    return f"{_module(item)}.{getattr(item, '__qualname__', type(item).__qualname__)}"
