"""Warns once where a forward has more tokens than its patch reaches."""

from __future__ import annotations

import logging
import math

import torch
from torch import nn

from rope_ext.methods import Method
from rope_ext.rotary.calls import parameters
from rope_ext.rotary.context import cache_among
from rope_ext.rotary.sites import PatchTarget
from rope_ext.rotary.swapping import Changes

_logger = logging.getLogger("rope_ext")


class Limit:
    """Decoder pre-hook that warns once if a forward has more tokens than the patch reaches."""

    def __init__(self, method: str, trained: int, target: int) -> None:
        self.method, self.trained, self.target, self.told = method, trained, target, False

    def __call__(self, decoder: nn.Module, args: tuple, kwargs: dict) -> None:
        if torch.compiler.is_compiling() or self.told:
            return
        given = {**dict(zip(parameters(type(decoder)), args, strict=False)), **kwargs}
        inputs = given.get("input_ids")
        inputs = given.get("inputs_embeds") if inputs is None else inputs
        cache = cache_among(given)
        filled = cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0
        if not isinstance(inputs, torch.Tensor) or not isinstance(filled, int):
            return  # a length on a device is not waited for
        tokens, positions = inputs.shape[1] + filled, given.get("position_ids")
        if tokens > self.target and isinstance(positions, torch.Tensor) and not positions.is_meta:
            tokens = int(positions.max()) + 1  # packed or padded rows are longer than their texts
        if tokens > self.target:
            self.told = True
            _logger.warning(
                "rope_ext: this text has %d tokens, more than the %d that %s reaches; patch with "
                "factor=%g or more (replace=True)",
                *(tokens, self.target, self.method, math.ceil(tokens / self.trained * 100) / 100),
            )


def warn_beyond(place: PatchTarget, method: Method, target: int, changes: Changes) -> None:
    """Warn once if the patch is used beyond ``target`` tokens, unless it follows the sequence."""
    if not method.is_dynamic and method.kind in ("frequency", "position"):
        limit = Limit(method.name, place.scaled[0].rope.length, target)
        changes.append(place.decoder.register_forward_pre_hook(limit, with_kwargs=True).remove)
