"""Verifies how a rotary module uses its frequencies, and detects other packages' changes.

A copy of the module runs once with synthetic frequencies. If the output is not their cosine and
sine, the family is not supported.

Unsloth and similar packages replace methods of transformers classes. Their replacements may ignore
the output of the rotary module. Hooks of kvpress drop keys.
"""

import copy
import functools
import inspect
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext.errors import UnsupportedModelError

_OURS = ("transformers", "torch", "rope_ext")  # packages that may wrap or assign a forward


@dataclass(frozen=True)
class Columns:
    """The column layout of a rotary module's output."""

    pair: Tensor  # pair index of each output column, int64, [columns]
    axis: Tensor | None  # position axis of each column, for embeddings with several axes
    complex: bool  # whether the output is one complex tensor instead of cosine and sine


@torch.no_grad()
def prove(decoder: nn.Module, module: nn.Module, layer_type: str | None, pairs: int) -> Columns:
    """Run a copy of ``module`` with synthetic frequencies and infer its layout from the output.

    ``layer_type`` selects the frequencies of a module with several sets. Raises
    UnsupportedModelError if the module does not use its buffer as frequencies.
    """
    inv_freq = 0.05 + 0.9 * torch.arange(pairs, dtype=torch.float64, device="cpu") / pairs
    scaling = 1.25
    twin = _twin(module, layer_type, inv_freq, scaling=scaling)
    positions = torch.tensor([[0, 1, 2, 3, 5, 8, 13, 21]], device="cpu")
    # Far enough apart that a column of one axis cannot be mistaken for another's.
    axes = torch.stack((positions, positions + 40, positions + 90))
    extra = {} if layer_type is None else {"layer_type": layer_type}
    columns = error = None
    x = torch.zeros(1, positions.shape[-1], 1, dtype=torch.float32, device="cpu")
    for ids in (positions, axes, axes[:2]):
        try:
            output = twin(x, position_ids=ids, **extra)
        except Exception as raised:
            error = raised
            continue
        found = _read(output, ids, inv_freq, scaling=scaling)
        if found is not None and (columns is None or found.axis is not None):
            columns = found
        if (found is None and ids is positions) or (columns and columns.axis is not None):
            break
    if columns is None:
        reason = f" ({error})" if error else ""
        found_code = "; ".join(replaced(decoder))
        reason += f" (found {found_code})" if found_code else ""
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: {type(module).__name__} does not return the cosine and "
            f"sine of position times its inv_freq buffer{reason}: this family is not supported"
        )
    return columns


def _twin(module: nn.Module, layer_type: str | None, inv_freq: Tensor, scaling: float) -> nn.Module:
    """Return a shallow copy on the CPU, without hooks, with other frequencies and scaling."""
    prefix = f"{layer_type}_" if layer_type else ""
    twin = copy.copy(module)
    for name in ("forward", "_old_forward", "_hf_hook"):  # accelerate wraps forward
        twin.__dict__.pop(name, None)
    twin._forward_hooks = OrderedDict()
    twin._forward_pre_hooks = OrderedDict()
    own = {f"{prefix}inv_freq", f"{prefix}original_inv_freq"}
    twin._buffers = {k: inv_freq.float() if k in own else v for k, v in module._buffers.items()}
    twin.__dict__[f"{prefix}attention_scaling"] = scaling
    kinds = getattr(module, "rope_type", None)
    plain = "default"
    twin.__dict__["rope_type"] = dict.fromkeys(kinds, plain) if isinstance(kinds, dict) else plain
    return twin


def _read(output: Any, ids: Tensor, inv_freq: Tensor, scaling: float) -> Columns | None:
    """Return the layout of ``output``; None if it is not scaling * cos/sin of ids * inv_freq."""
    is_complex = isinstance(output, Tensor) and output.is_complex()
    parts = (output.real, output.imag) if is_complex else output
    if not isinstance(parts, tuple) or len(parts) != 2 or parts[0].shape != parts[1].shape:
        return None
    axis = None
    if parts[0].shape[:-1] == ids.shape:  # [..., tokens, columns], axes kept separate
        candidates = ids.reshape(-1, 1, 1).double() * inv_freq  # [tokens, 1, pairs]
    elif ids.ndim == 3 and parts[0].shape[:-1] == ids.shape[1:]:  # axes mixed over columns
        candidates = ids.reshape(len(ids), -1, 1, 1).double() * inv_freq
        candidates = candidates.permute(1, 2, 0, 3).flatten(-2)  # [tokens, 1, axes * pairs]
        axis = torch.arange(len(ids), device="cpu").repeat_interleave(len(inv_freq))
    else:
        return None
    cos, sin = (part.reshape(-1, part.shape[-1], 1).double() for part in parts)
    away = (cos - scaling * candidates.cos()).abs() + (sin - scaling * candidates.sin()).abs()
    worst, best = away.amax(0).min(-1)  # over tokens, then the nearest candidate per column
    if worst.max() > 1e-3:  # float32 angles up to 111 rad are accurate to 1e-5
        return None
    pair = best % len(inv_freq)
    if len(pair.unique()) != len(inv_freq):
        return None
    return Columns(pair, None if axis is None else axis[best], is_complex)


def replaced(decoder: nn.Module) -> list[str]:
    """List replaced code between a decoder and its attention layers.

    An entry is ``"unsloth.models.llama.fast_forward in place of LlamaAttention.forward"``.
    """
    modules = dict(decoder.named_modules())
    found = {}
    for name, module in modules.items():
        if any(buffer.endswith("inv_freq") for buffer in module._buffers):
            if package_of(type(module)) not in (package_of(type(decoder)), *_OURS):
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
    known = (package_of(owner), *_OURS)
    if package_of(inner) in known and wrapper in (*known, ""):
        return {}
    there = _path(inner) if wrapper in known else _own_path(function)
    return {there: f"{owner.__name__}.forward"}


def _module(item: Any) -> str:
    return getattr(item, "__module__", None) or type(item).__module__


def package_of(item: Any) -> str:
    """Return the top-level package that defines a function or class, or an object's class."""
    return _module(item).partition(".")[0]


def _own_path(function: Any) -> str:
    """Return where a function is defined, although ``functools.wraps`` gave it another's name."""
    code = getattr(function, "__code__", None)
    if code is None:
        return _path(function)
    name = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
    return f"{function.__globals__['__name__']}.{name}"


def _path(item: Any) -> str:
    return f"{_module(item)}.{getattr(item, '__qualname__', type(item).__qualname__)}"
