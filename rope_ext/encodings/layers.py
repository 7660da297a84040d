"""Layers of the small networks in encodings."""

from __future__ import annotations

import torch


def linear(name: str, outputs: int, inputs: int, *kernel: int) -> dict[str, torch.Tensor]:
    """Weight and bias of a linear layer or convolution, with torch's default initialization."""
    fan = inputs
    for size in kernel:
        fan *= size
    shapes = {f"{name}_weight": (outputs, inputs, *kernel), f"{name}_bias": (outputs,)}
    return {key: (2 * torch.rand(shape) - 1) / fan**0.5 for key, shape in shapes.items()}
