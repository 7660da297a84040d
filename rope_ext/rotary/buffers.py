"""New values in the rotary buffers that a model already has, and the way back.

Cosines and sines are then computed by the model's own code, so caches, attention kernels and
compilation stay as they are; ``hooks`` has the cases for which that is not enough.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from rope_ext.rotary.sites import RotarySite
from rope_ext.swapping import plain, swap

ABSENT = ...  # survives pickling as itself
_MASTERS = "_rope_ext_masters"  # on a patched rotary module: buffer name -> float32 values


@dataclass
class SiteState:
    """What is needed to take a patch back from one site, bit for bit."""

    site: RotarySite
    buffers: dict[str, torch.Tensor]
    attributes: dict[str, Any]
    type: type[nn.Module]
    grows: bool = False  # transformers changes it from forward to forward


@dataclass
class Changes:
    """What was changed on a model, and the way back.

    Args:
        parts: whatever has an ``undo`` of its own.
        states: of the rotary sites that were written to, as they were.
        handles: of hooks.
        replaced: attributes: whose, the name, what it held there itself or ABSENT.
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
        """What transformers has made so far of the sites that :func:`grow` left to it."""
        return [
            replace(_save(state.site, tuple(state.attributes)), type=type(state.site.module))
            for state in self.states
            if state.grows
        ]


def write(site: RotarySite, inv_freq: torch.Tensor, scaling: float, hooked: bool) -> SiteState:
    """Put ``inv_freq`` (float32, CPU, ``[pairs]``) and ``scaling`` into the rotary module.

    The values survive ``.to(dtype)``, ``.half()``, ``.to_empty()`` and pickling: they are
    written again from a float32 master whenever the module's tensors are replaced.

    A module that is ``hooked``, by one of ``hooks``, gets a class of its own.
    """
    module = site.module
    state = _save(site)
    masters = {**module.__dict__.get(_MASTERS, {}), **dict.fromkeys(site.buffers, inv_freq)}
    module.__dict__[_MASTERS] = masters
    module.__dict__["_is_hf_initialized"] = True  # transformers must not initialise it again
    setattr(module, site.scaling_attribute, scaling)
    swap(module, _Hooked if hooked else _Guarded)
    _rewrite(module)
    return state


def complete(site: RotarySite) -> SiteState:
    """Have a meta set that stays as it is written, too, when its patched module is materialised.

    transformers does that for whole modules only, and not for those that :func:`write` has marked.
    """
    module = site.module
    state = _save(site)
    module.__dict__[_MASTERS] = {
        **module.__dict__[_MASTERS],
        **dict.fromkeys(site.buffers, site.loaded),
    }
    return state


def repair(site: RotarySite) -> SiteState:
    """Write the loaded frequencies into buffers that a cast has rounded."""
    state = _save(site)
    for name in site.buffers:
        _put(site.module, name, site.loaded)
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
    return replace(state, grows=True)


def go_on(grown: list[SiteState]) -> None:
    """Let sites that grow again go on from where they were."""
    for state in grown:
        _undo(state)


def _save(site: RotarySite, extra: tuple[str, ...] = ()) -> SiteState:
    names = (site.scaling_attribute, _MASTERS, "_is_hf_initialized", *extra)
    own = site.module.__dict__
    return SiteState(
        site=site,
        buffers={name: site.module._buffers[name].detach().clone() for name in site.buffers},
        attributes={name: own.get(name, ABSENT) for name in names},
        type=plain(site.module),  # another of its sites may be patched already
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


class _Guarded:
    """Of a rotary module whose patched buffers follow the device but never the dtype."""

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        _rewrite(self)
        return self


class _Hooked(_Guarded):
    """Of one with a hook besides.

    Compiled graphs are guarded by the class of a module and not by its hooks: with one class
    for both, a graph made without the hook would go on serving a module that has it.
    """
