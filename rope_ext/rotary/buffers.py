"""Applies a frequency map: new values in the rotary buffers a model already has.

Cosines and sines are then computed by the model's own code, so caches, attention kernels and
compilation stay as they are. Two cases need a hook on the rotary module: frequencies that
differ between the rows of a batch, and angles beyond what float32 resolves.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rope_ext.errors import UnsupportedModelError
from rope_ext.rotary.sites import RotarySite, is_local

if TYPE_CHECKING:
    from rope_ext.rotary.sequences import Sequences

PRECISE_BEYOND = 131072
"""Tokens of target length beyond which angles are computed in float64 by default."""

ABSENT = ...  # survives pickling as itself
_MASTERS = "_rope_ext_masters"  # on a patched rotary module: buffer name -> float32 values
_NATIVE = "_rope_ext_native"  # on a cosine tensor: the unpatched cosine and sine


@dataclass
class SiteState:
    """What is needed to take a patch back from one site, bit for bit."""

    site: RotarySite
    buffers: dict[str, torch.Tensor]
    attributes: dict[str, Any]
    type: type[nn.Module]


@dataclass
class Applied:
    """A frequency map in force on some sites of a decoder."""

    states: list[SiteState] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    sequences: Sequences | None = None
    replaced: list[tuple[nn.Module, str, Any]] = field(default_factory=list)

    def undo(self) -> None:
        """Restore every buffer, attribute and method that was replaced."""
        for handle in self.handles:
            handle.remove()
        for model, name, own in self.replaced:
            if own is ABSENT:
                model.__dict__.pop(name, None)
            else:
                setattr(model, name, own)
        for state in reversed(self.states):
            _undo(state)


def write(site: RotarySite, inv_freq: torch.Tensor, scaling: float, hooked: bool) -> SiteState:
    """Put ``inv_freq`` (float32, CPU, ``[pairs]``) and ``scaling`` into the rotary module.

    The values survive ``.to(dtype)``, ``.half()``, ``.to_empty()`` and pickling: they are
    written again from a float32 master whenever the module's tensors are replaced.

    A module that is ``hooked``, by a :class:`RotaryHook`, gets a class of its own.
    """
    module = site.module
    state = _save(site)
    masters = {**module.__dict__.get(_MASTERS, {}), **dict.fromkeys(site.buffers, inv_freq)}
    module.__dict__[_MASTERS] = masters
    module.__dict__["_is_hf_initialized"] = True  # transformers must not initialise it again
    setattr(module, site.scaling_attribute, scaling)
    module.__class__ = _guarded(_plain(module), hooked)
    _rewrite(module)
    return state


def grow(site: RotarySite) -> SiteState:
    """Switch on transformers' own dynamic scaling, which follows the longest position seen.

    It reads its factor from ``module.config.rope_parameters``.
    """
    module = site.module
    counter = f"{site.prefix}max_seq_len_cached"
    lengths = ("max_seq_len_cached", "original_max_seq_len")
    state = _save(site, ("rope_type", *lengths, counter, "attention_scaling"))
    for name in lengths:
        setattr(module, name, site.rope.length)
    if isinstance(module.rope_type, dict):
        module.rope_type = {**module.rope_type, site.layer_type: "dynamic"}
    else:
        module.rope_type = "dynamic"
    return state


def _save(site: RotarySite, extra: tuple[str, ...] = ()) -> SiteState:
    names = (site.scaling_attribute, _MASTERS, "_is_hf_initialized", *extra)
    own = site.module.__dict__
    return SiteState(
        site=site,
        buffers={name: site.module._buffers[name].detach().clone() for name in site.buffers},
        attributes={name: own.get(name, ABSENT) for name in names},
        type=_plain(site.module),
    )


def _plain(module: nn.Module) -> type[nn.Module]:
    """The class that a rotary module came with: another of its sites may be patched already."""
    return getattr(type(module), "_rope_ext_plain", type(module))


def _undo(state: SiteState) -> None:
    module = state.site.module
    for name, value in state.attributes.items():
        if value is ABSENT:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = value
    module.__class__ = state.type
    for name, value in state.buffers.items():
        materialised = value.is_meta and not module._buffers[name].is_meta
        _put(module, name, state.site.loaded if materialised else value)


@torch.no_grad()
def _put(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Write a buffer in place where it can be: compiled graphs hold on to its memory."""
    buffer = module._buffers[name]
    if buffer.is_meta or buffer.dtype != value.dtype or buffer.shape != value.shape:
        module._buffers[name] = value.to(
            value.device if value.is_meta else buffer.device, copy=True
        )
    else:
        buffer.copy_(value)


def _rewrite(module: nn.Module) -> None:
    for name, value in module.__dict__.get(_MASTERS, {}).items():
        if not module._buffers[name].is_meta:  # written once it is materialised
            _put(module, name, value)


@functools.cache
def _guarded(cls: type[nn.Module], hooked: bool) -> type[nn.Module]:
    """A rotary class whose patched buffers follow the device but never the dtype.

    Compiled graphs are guarded by the class of a module and not by its hooks: with one class
    for both, a graph made without the hook would go on serving a module that has it.
    """

    def apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        super(guarded, self)._apply(fn, recurse)
        _rewrite(self)
        return self

    def reduce(self: nn.Module, protocol: int) -> tuple:
        return _rebuild, (cls, hooked), self.__dict__

    names = {"_apply": apply, "__reduce_ex__": reduce, "_rope_ext_plain": cls}
    names |= {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    guarded = type(cls.__name__, (cls,), names)
    return guarded


def _rebuild(cls: type[nn.Module], hooked: bool) -> nn.Module:
    guarded = _guarded(cls, hooked)
    return guarded.__new__(guarded)


class RotaryHook:
    """Computes cosine and sine in place of a rotary module, from float64 frequencies.

    Args:
        site: where.
        inv_freq: float64, ``[pairs]``; used unless they follow the sequence.
        scaling: number on cosine and sine; likewise.
        precise: angles in float64; else in float32, as transformers computes them.
        sequences: those of the batch, for methods that depend on them.
        native: also keep what the unpatched module would have returned.
        start: the first tokens of a sequence, which keep the trained frequencies.
    """

    def __init__(
        self,
        site: RotarySite,
        inv_freq: torch.Tensor,
        scaling: float,
        precise: bool,
        sequences: Sequences | None,
        native: bool,
        start: int,
    ) -> None:
        self.site, self.inv_freq, self.scaling = site, inv_freq, scaling
        self.precise, self.sequences, self.native, self.start = precise, sequences, native, start

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        """Forward hook of the rotary module."""
        if not self.site.called(args, kwargs):
            return None
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        result = output
        if self.precise or self.sequences is not None:
            turned, inv_freq, scaling = positions, self.inv_freq, self.scaling
            if self.sequences is not None:
                turned, inv_freq, scaling = self._followed(positions)
            result = rotation(self.site, turned, inv_freq, scaling, self.precise, output)
        if self.native:
            theta, scaling = self.site.loaded, self.site.scaling
            first = result if isinstance(result, torch.Tensor) else result[0]
            attach_native(
                first, rotation(self.site, positions, theta, scaling, self.precise, output)
            )
        return result

    @torch.compiler.disable
    def _followed(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Positions, frequencies and scaling of the sequences at hand."""
        forward = self.sequences.at(positions)
        dtype = torch.float64 if self.precise else torch.float32
        inv_freq, scaling = self.inv_freq, self.scaling
        if self.sequences.method.adapts:
            inv_freq, scaling = forward.frequencies(self.site, positions, dtype)
        if self.start:
            positions = forward.counted(positions)
            inv_freq = self._kept(positions, inv_freq, dtype)
        return positions, inv_freq, scaling

    def _kept(
        self, positions: torch.Tensor, inv_freq: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Frequencies of every token, ``[rows, tokens, pairs]``: the first keep the trained."""
        place = positions.amax(0) if positions.ndim == 3 else positions
        trained, inv_freq = (x.to(place.device, dtype) for x in (self.site.loaded, inv_freq))
        return torch.where((place < self.start).unsqueeze(-1), trained, inv_freq)


def rotation(
    site: RotarySite,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    scaling: float | torch.Tensor,
    precise: bool,
    like: Any,
) -> Any:
    """What a rotary module returns, of other frequencies or positions.

    Args:
        site: of the module.
        positions: ``[rows, tokens]``, or ``[axes, rows, tokens]``, whole or not.
        inv_freq: ``[pairs]``, or ``[rows, tokens or 1, pairs]``.
        scaling: number on cosine and sine.
        precise: angles in float64, else in float32, as transformers computes them.
        like: the module's own output, for its dtype.
    """
    dtype = torch.float64 if precise else torch.float32
    columns = site.columns
    inv_freq = inv_freq.to(positions.device, dtype)
    if isinstance(scaling, torch.Tensor):
        scaling = scaling.to(positions.device, dtype)
    pair = columns.pair.to(positions.device)
    if columns.axis is not None and positions.ndim == 3:
        of_column = positions[columns.axis.to(positions.device)].movedim(0, -1)
        angles = of_column.to(dtype) * inv_freq[..., pair]
        cos, sin = angles.cos() * scaling, angles.sin() * scaling
    else:
        angles = positions.unsqueeze(-1).to(dtype) * inv_freq
        cos, sin = ((f(angles) * scaling)[..., pair] for f in (torch.cos, torch.sin))
    if columns.complex:
        return torch.complex(cos, sin).to(like.dtype)
    return cos.to(like[0].dtype), sin.to(like[1].dtype)


# Not traced: a compiled graph can neither put an attribute on a tensor nor see one.
@torch.compiler.disable
def attach_native(first: torch.Tensor, native: Any) -> None:
    """Let ``first`` carry what the unpatched module would have returned."""
    first.__dict__[_NATIVE] = native


@functools.cache
def parameters(cls: type[nn.Module]) -> tuple[str, ...]:
    """Names of the arguments of a module's forward."""
    return tuple(inspect.signature(cls.forward).parameters)[1:]


@torch.compiler.disable
def refuse_sharded(name: str) -> None:
    """Raise if each device of a context-parallel group gets a part of every sequence.

    torch's ``context_parallel``, accelerate's too, replaces one function as long as it lasts.
    """
    module = getattr(nn.functional.scaled_dot_product_attention, "__module__", None)
    if str(module).startswith("torch.distributed."):
        raise UnsupportedModelError(
            f"context parallelism gives every device a part of each sequence, and {name} needs "
            f"its positions whole; use a fixed frequency method such as 'yarn', or one device "
            f"for each sequence (cp_size 1)"
        )


def keep_native(decoder: nn.Module, layer_types: list[str]) -> list[Any]:
    """Give limited-window attention layers the unpatched cosine and sine.

    Raises:
        UnsupportedModelError: an attention module does not receive them as an argument.
    """
    handles = []
    for name, module in decoder.named_modules():
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or "Attention" not in type(module).__name__:
            continue
        if not is_local(layer_types[index]):
            continue
        if "position_embeddings" not in inspect.signature(module.forward).parameters:
            raise UnsupportedModelError(
                f"{type(decoder).__name__}: {name} takes no position_embeddings, so its sliding "
                f"layers cannot be kept apart; use sliding_layers='scale'"
            )
        handles.append(module.register_forward_pre_hook(_use_native, with_kwargs=True))
    return handles


@torch.compiler.disable
def _use_native(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    given = {**dict(zip(parameters(type(module)), args, strict=False)), **kwargs}
    embeddings = given["position_embeddings"]
    first = embeddings if isinstance(embeddings, torch.Tensor) else embeddings[0]
    native = getattr(first, _NATIVE, None)
    if native is None:
        raise UnsupportedModelError(
            "the unpatched position embeddings did not reach a sliding layer (a wrapper copied "
            "them); use sliding_layers='scale'"
        )
    if "position_embeddings" in kwargs:
        return args, {**kwargs, "position_embeddings": native}
    return tuple(native if arg is embeddings else arg for arg in args), kwargs
