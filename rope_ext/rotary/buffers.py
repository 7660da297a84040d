"""Writes new values to the rotary buffers of a model, and restores the old ones.

The model's own code then computes cosines and sines, so caches, attention kernels and compilation
work as before; ``hooks`` has the cases for which that is not enough.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rope_ext.rotary.sites import RotarySite, buffer_of
from rope_ext.rotary.swapping import Changes, keep_attributes, swap, take_back

# A mixin: swapping.swap puts it in front of the class of a rotary module.
_ModuleMixin = nn.Module if TYPE_CHECKING else object
_MASTERS = "_rope_ext_masters"  # on a patched rotary module: buffer name -> float32 values


def write(
    site: RotarySite, inv_freq: torch.Tensor, scaling: float, hooked: bool, changes: Changes
) -> None:
    """Put ``inv_freq`` (float32, CPU, ``[pairs]``) and ``scaling`` into the rotary module.

    The values survive ``.to(dtype)``, ``.half()``, ``.to_empty()`` and pickling: they are
    written again from a float32 master whenever the module's tensors are replaced.

    A module that is ``hooked``, by one of ``hooks``, gets a separate class.
    """
    module = site.module
    _keep(site, changes)
    masters = {**vars(module).get(_MASTERS, {}), **dict.fromkeys(site.buffers, inv_freq)}
    vars(module)[_MASTERS] = masters
    vars(module)["_is_hf_initialized"] = True  # keeps transformers from initializing it again
    setattr(module, site.scaling_attribute, scaling)
    swap(module, _Hooked if hooked else _Guarded)
    _rewrite(module)


def guard(site: RotarySite, changes: Changes) -> None:
    """Write the loaded frequencies, whether or not a patch changes them.

    Undoes what a cast has rounded. A later cast changes none of the model's frequencies then, so
    that leaving and entering a patch again restores every one.
    """
    if not site.moving:
        write(site, site.loaded, site.scaling, False, changes)
        return
    _keep(site, changes)
    if site.rounded:
        for name in site.buffers:
            _put(site.module, name, site.loaded)


def grow(site: RotarySite, changes: Changes) -> None:
    """Switch on transformers' own dynamic scaling, which follows the longest position seen.

    It reads its factor from ``module.config.rope_parameters``.
    """
    module: Any = site.module
    lengths = ("max_seq_len_cached", "original_max_seq_len")
    counter = f"{site.prefix}max_seq_len_cached"
    _keep(site, changes, "rope_type", *lengths, counter)
    masters = vars(module).get(_MASTERS, {})
    vars(module)[_MASTERS] = {k: v for k, v in masters.items() if k not in site.buffers}
    for name in lengths:
        setattr(module, name, site.rope.length)
    if isinstance(module.rope_type, dict):
        module.rope_type = {**module.rope_type, site.layer_type: "dynamic"}
    else:
        module.rope_type = "dynamic"


def _keep(site: RotarySite, changes: Changes, *more: str) -> None:
    """Restore the buffers, class and attributes of a site when ``changes`` are undone."""
    module = site.module
    buffers = {name: buffer_of(module, name).detach().clone() for name in site.buffers}
    changes.append(functools.partial(_restore, site, buffers))
    names = ("attention_scaling", site.scaling_attribute, _MASTERS, "_is_hf_initialized", *more)
    keep_attributes(module, names, changes)


def _restore(site: RotarySite, buffers: dict[str, torch.Tensor]) -> None:
    take_back(site.module)
    for name, value in buffers.items():
        materialized = value.is_meta and not buffer_of(site.module, name).is_meta
        _put(site.module, name, site.loaded if materialized else value)


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
    for name, value in vars(module).get(_MASTERS, {}).items():
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
