"""Encodings for training from scratch, which no patch can add to a trained model.

A :class:`Positions` in each layer of the laboratory's decoder computes attention from queries and
keys without positions, and from the input of the layer. If an encoding needs the logits, memory is
quadratic in the length: this code is for comparing formulas, not for production.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, StableLmForCausalLM

from rope_ext.methods.rope import geometric

_NAME = "laboratory_scratch"
_ROWS = 256
"""Number of queries whose logits are computed at once."""


class Shape(NamedTuple):
    """A layer: hidden size, heads, columns of a head; RoPE's base; trained length in tokens."""

    width: int
    heads: int
    columns: int
    base: float
    length: int


class Positions(torch.nn.Module):
    """The attention of one layer; its parameters are what the encoding learns.

    As it is, this is RoPE, with frequencies ``theta`` in radians per token, ``[pairs]``. Subclasses
    override :meth:`turns`, :meth:`rotated` or :meth:`forward`, whichever is enough.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        theta = geometric(shape.base, shape.columns).to(torch.get_default_dtype())
        self.register_buffer("theta", theta)

    def prepare(self, attention: torch.nn.Module, initial: float) -> None:
        """Replace projections of the layer, if the encoding needs others.

        Args:
            attention: attention layer with ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj``.
            initial: standard deviation of the model's initial weights.
        """

    def turns(self, inputs: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of every angle, ``[1 or batch, 1 or heads, tokens, pairs]``.

        Args:
            inputs: see :meth:`forward`.
            t: likewise.
        """
        angle = t[:, None, :, None] * self.theta
        return angle.cos(), angle.sin()

    def rotated(
        self, query: torch.Tensor, key: torch.Tensor, inputs: torch.Tensor, t: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys with their positions, in the shapes of :meth:`forward`."""
        cos, sin = self.turns(inputs, t)
        return rotate(query, cos, sin), rotate(key, cos, sin)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        inputs: torch.Tensor,
        t: torch.Tensor,
    ) -> torch.Tensor:
        """The output for every token, ``[batch, heads, tokens, columns]``.

        Args:
            query: ``[batch, heads, tokens, columns]``, without positions.
            key: the same; it may have fewer heads than the output.
            value: values of the keys.
            inputs: normalized input of the layer's projections, ``[batch, tokens, width]``.
            t: positions, ``[1 or batch, tokens]``, in the dtype of ``query``.
        """
        query, key = self.rotated(query, key, inputs, t=t)
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of columns that are half the columns apart, as transformers does."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attend(logits: Callable[[slice], torch.Tensor], value: torch.Tensor) -> torch.Tensor:
    """Causal attention with logits computed for a few queries at a time.

    Args:
        logits: logits of the queries in a slice for all keys, ``[batch, heads, rows, tokens]``.
        value: ``[batch, heads, tokens, columns]``.
    """
    tokens = value.shape[-2]
    found = []
    at = torch.arange(tokens, device=value.device)
    for start in range(0, tokens, _ROWS):
        rows = slice(start, start + _ROWS)
        hidden = at[rows, None] < at
        found.append(logits(rows).masked_fill(hidden, float("-inf")).softmax(-1) @ value)
    return torch.cat(found, -2)


def attach(model: StableLmForCausalLM, encoding: Callable[[Shape], Positions]) -> None:
    """Give every layer an encoding, initialized by torch's seed.

    The model must not rotate queries and keys itself; rows have no padding.

    Raises:
        OptionError: the encoding does not support the shape of the layers.
    """
    config = model.config
    width = config.hidden_size
    heads = config.num_attention_heads
    base = config.rope_parameters["rope_theta"]
    length = config.max_position_embeddings
    shape = Shape(width=width, heads=heads, columns=width // heads, base=base, length=length)
    for layer in model.model.layers:
        positions = encoding(shape)
        positions.prepare(layer.self_attn, config.initializer_range)
        # The laboratory finds an encoding's parameters by "rope_ext" in their names.
        layer.self_attn.rope_ext_positions = positions
        layer.self_attn.register_forward_pre_hook(_with_inputs, with_kwargs=True)
    AttentionInterface.register(_NAME, _forward)
    model.set_attn_implementation(_NAME)


def _with_inputs(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
    """Pass the input of a layer on to its attention function, which gets projections only."""
    return args, {**kwargs, "inputs": kwargs["hidden_states"]}


def _forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    inputs: torch.Tensor,
    position_ids: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    found = module.rope_ext_positions(query, key, value, inputs, position_ids.to(query.dtype))
    return found.transpose(1, 2), None
