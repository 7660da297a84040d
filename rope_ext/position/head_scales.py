"""The learned scales of a temperature: one number for every query head of an attention layer."""

from __future__ import annotations

import torch
from torch import nn

from rope_ext.errors import UnsupportedModelError
from rope_ext.methods.temperature import SSMax
from rope_ext.position.bias import Learning, like_weights

NAME = "rope_ext_temperature"  # name of the module within an attention module, and in checkpoints


class HeadScales(Learning):
    """The learned scales of one attention layer.

    Args:
        temperature: with every option filled in.
        heads: number of query heads.
        like: gives dtype and device of the parameter.
    """

    scale: nn.Parameter

    def __init__(self, temperature: SSMax, heads: int, like: torch.Tensor) -> None:
        super().__init__({"scale": torch.full((heads,), float(temperature.scale))}, like)
        self.encoding = temperature

    def forward(self, query: torch.Tensor, growth: torch.Tensor | None) -> torch.Tensor:
        """Multiply the queries, ``[rows, heads, tokens, columns]``, by ``1 + scale growth``.

        ``growth``: ``[rows or 1, 1, tokens, 1]``; None: 0 everywhere, so that no query changes.
        """
        # This is forward, and not another method, because wrappers gather parameters before it.
        scale = self.scale
        if growth is None:
            if not (torch.is_grad_enabled() and scale.requires_grad):
                return query
            # Data parallelism waits for a gradient of every parameter, if only a zero.
            growth = query.new_zeros(1, 1, 1, 1)
        if len(scale) != query.shape[1]:
            raise UnsupportedModelError(
                f"temperature='ssmax' has a scale for each of {len(scale)} heads, and an attention "
                f"layer runs {query.shape[1]}, as under tensor parallelism; run the model without "
                f"it, or patch with temperature='log_n'"
            )
        factor = 1 + growth * scale.to(growth)[:, None, None]
        return (query * factor).to(query.dtype)


def add(module: nn.Module, temperature: SSMax, heads: int) -> None:
    """Give an attention module its scales."""
    module.add_module(NAME, HeadScales(temperature, heads, like_weights(module)))


class Added:
    """Attention modules with scales, to take them away again.

    Args:
        modules: the attention modules.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules

    def undo(self) -> None:
        """Take the scales away."""
        for module in self.modules:
            module._modules.pop(NAME, None)
