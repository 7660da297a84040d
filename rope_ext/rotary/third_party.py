"""What other packages have put into a model: forwards of their own, and hooks that take keys away.

Unsloth and its like assign functions of their own to the classes of transformers. Those may rotate
queries and keys by something else than what the rotary module returns.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from rope_ext.errors import CacheError

_OURS = ("transformers", "torch", "rope_ext")  # what wraps or assigns forwards rightly
_REROTATING_PRESSES = ("KeyRerotationPress", "FinchPress")  # presses that read inv_freq itself


def replaced(decoder: nn.Module) -> list[str]:
    """What stands in place of transformers' own code between a decoder and its attention.

    Returns:
        ``"unsloth.models.llama.fast_forward in place of LlamaAttention.forward"``, and the like.
    """
    modules, found = dict(decoder.named_modules()), {}
    for name, module in modules.items():
        if any(buffer.endswith("inv_freq") for buffer in module._buffers):
            if _package(type(module)) not in (_package(type(decoder)), *_OURS):
                found[_path(type(module))] = "the rotary embedding"
        elif isinstance(getattr(module, "layer_idx", None), int):
            parts = name.split(".")
            for n in range(len(parts) + 1):  # the decoder, its layers, what attends
                found.update(_other_forward(modules[".".join(parts[:n])]))
    return [f"{there} in place of {what}" for there, what in found.items()]


def _other_forward(module: nn.Module) -> dict[str, str]:
    """A forward that is not of the class it is called on, and what it is in place of."""
    owner = next(base for base in type(module).__mro__ if "forward" in vars(base))
    forward = vars(owner)["forward"]
    if "forward" in module.__dict__ and "_hf_hook" not in module.__dict__:  # accelerate's wrapping
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


def refuse_presses(modules: Iterable[nn.Module], method: str, instead: str) -> None:
    """Raise if a press of kvpress is to drop keys of one of these attention modules.

    ``instead`` is the advice at the end.
    """
    for press in _presses(modules):
        raise CacheError(
            f"{press} of kvpress keeps other keys of each head, without their positions, and "
            f"judges them by the one rotation under which they are cached; {method} needs the "
            f"position of every key, and rotates it further; {instead}"
        )


def refuse_rerotation(modules: Iterable[nn.Module], method: str) -> None:
    """Raise if a press of kvpress is to rotate keys back by the frequencies in a buffer."""
    for press in _presses(modules):
        if press in _REROTATING_PRESSES:
            raise CacheError(
                f"{press} of kvpress turns keys by the frequencies in the rotary module, and "
                f"{method} has others for each sequence; pass length=TOKENS to fix them, or use "
                f"another press"
            )


def _presses(modules: Iterable[nn.Module]) -> Iterator[str]:
    """Names of what kvpress has hooked to modules, and of what that wraps."""
    for module in modules:
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
