"""SWAN by its definition, dense and in float64, in a model that is not patched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from tests.helpers.models import attending

WINDOW = 7
GIVEN = {"every": 2, "window": WINDOW, "factor": 4}


def _dense(module: nn.Module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Every second layer rotates back to nothing, the others see a window."""
    groups = query.shape[1] // key.shape[1]
    q, k, v = (x.double() for x in (query, key, value))
    t = torch.arange(q.shape[2])
    apart = t[:, None] - t
    visible = apart >= 0
    scale = torch.tensor(scaling, dtype=torch.float64)
    if module.layer_idx % 2 == 0:
        q, k = (_back(x, module.swan_inv_freq) for x in (q, k))
        scale = scale * ((t + 1).double().log() / torch.tensor(64.0).double().log()).clamp(min=1)
        scale = scale[:, None]
    else:
        visible = visible & (apart < WINDOW)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    weights = (q @ k.mT * scale).masked_fill(~visible, -torch.inf).softmax(-1)
    return (weights @ v).transpose(1, 2).to(query.dtype).contiguous(), None


def _back(x: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """``x`` before it was rotated to positions 0, 1, 2, ..."""
    angle = torch.arange(x.shape[2]).double()[:, None] * inv_freq.double()
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() + b * angle.sin(), b * angle.cos() - a * angle.sin()), -1)


AttentionInterface.register("swan_dense", _dense)
AttentionMaskInterface.register("swan_dense", lambda **arguments: None)


@contextmanager
def dense(model: nn.Module) -> Iterator[nn.Module]:
    inv_freq = next(b for n, b in model.named_buffers() if n.endswith("inv_freq")).clone()
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.swan_inv_freq = inv_freq
    with attending(model, "swan_dense"):
        yield model
