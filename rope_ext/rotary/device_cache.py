"""Copies constants to a device once instead of in every forward."""

from __future__ import annotations

from typing import Any

import torch


def cached_on_device(owner: Any, name: str, device: torch.device) -> torch.Tensor:
    """Return the constant tensor ``owner.name`` on ``device``; the copy is cached on ``owner``.

    Copying in every forward would synchronize with the GPU and rule out CUDA graphs.
    """
    x = getattr(owner, name)
    if x.device == device:
        return x
    kept = f"_{name}_on_{device.type}_{device.index}"
    copy = getattr(owner, kept, None)
    if copy is None:
        if torch.compiler.is_compiling():
            return x.to(device)
        with torch.inference_mode(False):  # the copy outlives the mode
            copy = x.to(device)
        owner.__dict__[kept] = copy
    return copy
