"""Chooses the kernel that computes attention."""

from __future__ import annotations

import torch

from rope_ext.attention import (
    blocked,
    fire,  # noqa: F401
    flash,
    flash_cuda,
    flex,
    reference,
    relative,
)
from rope_ext.attention.call import Block, Call, Pairs, RotatedBand, Rotation, Scores
from rope_ext.attention.faster import faster
from rope_ext.encodings.tables import ByTables
from rope_ext.encodings.transformer_xl import BySinusoid
from rope_ext.errors import OptionError, nearest

__all__ = ["KERNELS", "Block", "Call", "Pairs", "RotatedBand", "Rotation", "Scores", "attend"]

_BY_DEVICE = {"cpu": "flash", "cuda": "flex"}
KERNELS = ("auto", "flash", "flex", "reference")

faster.register(ByTables, relative.by_tables)
faster.register(BySinusoid, relative.by_sinusoid)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
    kernel: str = "auto",
) -> torch.Tensor:
    """Attention as :class:`Call` describes it, by the chosen kernel.

    ``kernel`` is ``"flash"`` (CPU, or half precision on CUDA), ``"flex"`` (CUDA), ``"reference"``
    (any device, slow), or ``"auto"``: ``"flash"`` on a CPU and ``"flex"`` on CUDA if they support
    the call, else ``"reference"``. Under autocast, query, key and value are cast as for torch's
    ``scaled_dot_product_attention``.

    Raises:
        OptionError: the kernel is unknown or does not support the call.
    """
    device = query.device.type
    if kernel not in KERNELS:
        raise OptionError(
            f"no attention kernel {kernel!r}{nearest(kernel, KERNELS)}; use one of {KERNELS}"
        )
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if call.scores is not None and kernel != "reference":
        out = faster(call.scores, query, key, value, call)
        if out is None and kernel != "auto":
            raise OptionError(
                f"kernel={kernel!r} cannot have logits as this encoding makes them; use "
                f"kernel='auto'"
            )
        return blocked.attend(query, key, value, call) if out is None else out
    if kernel == "auto":
        kernel = _BY_DEVICE.get(device, "reference")
        if kernel == "flash" and (call.softcap is not None or not flash.takes(call)):
            kernel = "reference"
        if kernel == "flex" and not flex.takes(query, value):
            kernel = "reference"
    if kernel == "flash" and device not in flash.BY_DEVICE:
        raise OptionError(
            f"kernel='flash' runs on CPUs and GPUs of CUDA, these tensors are on {device!r}; use "
            f"kernel='auto'"
        )
    if kernel == "flash" and device == "cuda" and not flash_cuda.takes(query, value, call):
        raise OptionError(
            f"kernel='flash' has float16 and bfloat16 on a GPU, heads of a multiple of 8 up to 256 "
            f"columns, and no bias; this is {query.dtype} with {query.shape[-1]} columns"
            f"{'' if call.bias is None else ' and a bias'}; use kernel='auto'"
        )
    if kernel == "flash" and call.softcap is not None:
        raise OptionError("kernel='flash' has no soft cap; use kernel='reference' or 'auto'")
    if kernel == "flash" and not flash.takes(call):
        raise OptionError(
            "kernel='flash' has biases for bands of distances only, not for chunks or first "
            "tokens; use kernel='reference' or 'auto'"
        )
    if kernel == "flex" and device == "cuda" and not flex.takes(query, value):
        raise OptionError(
            f"kernel='flex' has heads of {flex.LEAST_COLUMNS} columns or more on a GPU, and no "
            f"float64; this is {query.dtype} with {min(query.shape[-1], value.shape[-1])} columns; "
            f"use kernel='auto'"
        )
    wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if kernel == "flex" and device == "cpu" and wants_gradient:
        raise OptionError("kernel='flex' has no gradients on the CPU; use kernel='flash'")
    run = {"flash": flash.attend, "flex": flex.attend, "reference": reference.attend_blocked}
    return run[kernel](query, key, value, call)
