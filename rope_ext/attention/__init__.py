"""Attention that turns queries and keys differently in each band of the causal triangle."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rope_ext.attention import flash, flex, reference
from rope_ext.attention.bands import Band, Pairs, Turn
from rope_ext.errors import OptionError, nearest

__all__ = ["KERNELS", "Band", "Pairs", "Turn", "attend"]

KERNELS = ("auto", "flash", "flex", "reference")


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bands: Sequence[Band],
    pairs: Pairs,
    *,
    start: int = 0,
    scale: float,
    temperature: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    kernel: str = "auto",
) -> torch.Tensor:
    """:func:`rope_ext.attention.flash.attend` with the kernel that fits.

    With ``softcap`` the logits become ``softcap * tanh(logit / softcap)``. ``kernel`` is
    ``"flash"`` (CPU), ``"flex"`` (CUDA), ``"reference"`` (anywhere, slow), or ``"auto"``: the
    first of these that can do it. Under autocast query, key and value are cast as for torch's
    own attention.

    Raises:
        OptionError: the kernel is unknown or cannot do what is asked.
    """
    device = query.device.type
    if kernel not in KERNELS:
        raise OptionError(
            f"no attention kernel {kernel!r}{nearest(kernel, KERNELS)}; use one of {KERNELS}"
        )
    if kernel == "auto":
        kernel = {"cpu": "flash", "cuda": "flex"}.get(device, "reference")
        if kernel == "flash" and softcap is not None:
            kernel = "reference"
    if kernel == "flash" and device != "cpu":
        raise OptionError(
            f"kernel='flash' runs on the CPU, these tensors are on {device!r}; use kernel='auto'"
        )
    if kernel == "flash" and softcap is not None:
        raise OptionError("kernel='flash' has no soft cap; use kernel='reference' or 'auto'")
    wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if kernel == "flex" and device == "cpu" and wants_gradient:
        raise OptionError("kernel='flex' has no gradients on the CPU; use kernel='flash'")
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    options = {"scale": scale, "temperature": temperature, "sinks": sinks}
    if kernel == "flash":
        return flash.attend(query, key, value, bands, pairs, start=start, **options)
    if kernel == "flex":
        return flex.attend(query, key, value, bands, pairs, start=start, softcap=softcap, **options)
    positions = torch.arange(start, start + key.shape[2], device=query.device)
    return reference.attend_blocked(
        query,
        key,
        value,
        bands,
        pairs,
        query_positions=positions[key.shape[2] - query.shape[2] :],
        key_positions=positions,
        softcap=softcap,
        **options,
    )
