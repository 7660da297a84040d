"""Writes new values to the rotary buffers of a model, and restores the old ones.

The model's own code then computes cosines and sines, so caches, attention kernels and compilation
work as before; ``hooks`` has the cases for which that is not enough.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rope_ext.rotary.sites import RotarySite, buffer_of
from rope_ext.rotary.swapping import plain, swap

# A mixin: swapping.swap puts it in front of the class of a rotary module.
_ModuleMixin = nn.Module if TYPE_CHECKING else object
ABSENT = ...  # stays the same object when it is pickled
_MASTERS = "_rope_ext_masters"  # on a patched rotary module: buffer name -> float32 values


@dataclass
class SiteState:
    """What is needed to undo a patch of one site bit for bit."""

    site: RotarySite
    buffers: dict[str, torch.Tensor]
    attributes: dict[str, Any]
    type: type[nn.Module]
    grows: bool = False  # transformers changes it from forward to forward


@dataclass
class Changes:
    """What a patch changed on a model, and how to undo it.

    Args:
        parts: objects with an ``undo`` method.
        states: previous states of the rotary sites that were written to.
        handles: handles of hooks.
        replaced: replaced attributes: object, name, and previous value in the ``__dict__`` of the
            object or ABSENT.
    """

    parts: list[Any] = field(default_factory=list)
    states: list[SiteState] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    replaced: list[tuple[Any, str, Any]] = field(default_factory=list)

    def undo(self) -> None:
        """Restore everything as it was."""
        for part in reversed(self.parts):
            part.undo()
        for handle in self.handles:
            handle.remove()
        for holder, name, own in reversed(self.replaced):
            if own is ABSENT:
                holder.__dict__.pop(name, None)
            else:
                setattr(holder, name, own)
        for state in reversed(self.states):
            _undo(state)

    def grown(self) -> list[SiteState]:
        """Current states of the sites that :func:`grow` left to transformers."""
        return [
            replace(_save(state.site, tuple(state.attributes)), type=type(state.site.module))
            for state in self.states
            if state.grows
        ]


def write(site: RotarySite, inv_freq: torch.Tensor, scaling: float, hooked: bool) -> SiteState:
    """Put ``inv_freq`` (float32, CPU, ``[pairs]``) and ``scaling`` into the rotary module.

    The values survive ``.to(dtype)``, ``.half()``, ``.to_empty()`` and pickling: they are
    written again from a float32 master whenever the module's tensors are replaced.

    A module that is ``hooked``, by one of ``hooks``, gets a separate class.
    """
    module = site.module
    state = _save(site)
    masters = {**module.__dict__.get(_MASTERS, {}), **dict.fromkeys(site.buffers, inv_freq)}
    module.__dict__[_MASTERS] = masters
    module.__dict__["_is_hf_initialized"] = True  # keeps transformers from initializing it again
    setattr(module, site.scaling_attribute, scaling)
    swap(module, _Hooked if hooked else _Guarded)
    _rewrite(module)
    return state


def guard(site: RotarySite) -> SiteState:
    """Write the loaded frequencies, whether or not a patch changes them.

    Undoes what a cast has rounded. A later cast changes none of the model's frequencies then, so
    that leaving and entering a patch again restores every one.
    """
    if not site.moving:
        return write(site, site.loaded, site.scaling, hooked=False)
    state = _save(site)
    if site.rounded:
        for name in site.buffers:
            _put(site.module, name, site.loaded)
    return state


def grow(site: RotarySite) -> SiteState:
    """Switch on transformers' own dynamic scaling, which follows the longest position seen.

    It reads its factor from ``module.config.rope_parameters``.
    """
    module: Any = site.module
    counter = f"{site.prefix}max_seq_len_cached"
    lengths = ("max_seq_len_cached", "original_max_seq_len")
    state = _save(site, ("rope_type", *lengths, counter, "attention_scaling"))
    masters = module.__dict__.get(_MASTERS, {})
    module.__dict__[_MASTERS] = {k: v for k, v in masters.items() if k not in site.buffers}
    for name in lengths:
        setattr(module, name, site.rope.length)
    if isinstance(module.rope_type, dict):
        module.rope_type = {**module.rope_type, site.layer_type: "dynamic"}
    else:
        module.rope_type = "dynamic"
    return replace(state, grows=True)


def go_on(grown: list[SiteState]) -> None:
    """Let sites that grow again continue from their earlier states."""
    for state in grown:
        _undo(state)


def _save(site: RotarySite, extra: tuple[str, ...] = ()) -> SiteState:
    names = (site.scaling_attribute, _MASTERS, "_is_hf_initialized", *extra)
    own = site.module.__dict__
    return SiteState(
        site=site,
        buffers={name: buffer_of(site.module, name).detach().clone() for name in site.buffers},
        attributes={name: own.get(name, ABSENT) for name in names},
        type=plain(site.module),  # another site of the module may be patched already
    )


def _undo(state: SiteState) -> None:
    module = state.site.module
    for name, value in state.attributes.items():
        if value is ABSENT:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = value
    module.__class__ = state.type
    for name, value in state.buffers.items():
        materialized = value.is_meta and not buffer_of(module, name).is_meta
        _put(module, name, state.site.loaded if materialized else value)


@torch.no_grad()
def _put(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Write a buffer, in place if possible, since compiled graphs keep its memory address."""
    buffer = buffer_of(module, name)
    replaced = buffer.is_meta or buffer.is_inference()
    if replaced or buffer.dtype != value.dtype or buffer.shape != value.shape:
        module._buffers[name] = value.to(
            value.device if value.is_meta else buffer.device, copy=True
        )
    else:
        buffer.copy_(value)


def _rewrite(module: nn.Module) -> None:
    for name, value in module.__dict__.get(_MASTERS, {}).items():
        if not buffer_of(module, name).is_meta:  # written once it is materialized
            _put(module, name, value)


class _Guarded(_ModuleMixin):
    """Mixin for rotary modules whose patched buffers follow the device but never the dtype."""

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        _rewrite(self)
        return self


class _Hooked(_Guarded):
    """Mixin for rotary modules that also have a hook.

    Compiled graphs are guarded by the class of a module and not by its hooks. With one class for
    both, a graph compiled without the hook would still serve a module that has it.
    """
