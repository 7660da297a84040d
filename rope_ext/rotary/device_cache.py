"""Constants where they are needed: copied to a device once, not in every forward."""

from __future__ import annotations

from typing import Any

import torch


def cached_on_device(owner: Any, name: str, device: torch.device) -> torch.Tensor:
    """The tensor ``owner.name``, which never changes, on a device; ``owner`` keeps the copy.

    A copy in every forward would wait for a GPU, and keep a compiled one from CUDA graphs.
    """
    x = getattr(owner, name)
    if x.device == device:
        return x
    kept = f"_{name}_on_{device.type}_{device.index}"
    copy = getattr(owner, kept, None)
    if copy is None:
        if torch.compiler.is_compiling():
            return x.to(device)
        with torch.inference_mode(False):  # it outlives the mode
            copy = x.to(device)
        owner.__dict__[kept] = copy
    return copy
