"""Chooses the kernel that computes attention."""

from __future__ import annotations

import functools
import logging

import torch

from rope_ext.attention import cards, flash, flex, fused
from rope_ext.attention.call import Block, Call, Pairs, RotatedBand, Rotation, Scores
from rope_ext.errors import OptionError, nearest

__all__ = ["KERNELS", "Block", "Call", "Pairs", "RotatedBand", "Rotation", "Scores", "attend"]

_logger = logging.getLogger("rope_ext")
_PLAIN = "runs by plain operations of torch, which are slower"
KERNELS = ("auto", "flash", "flex", "reference")


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
    kernel: str = "auto",
) -> torch.Tensor:
    """Attention as :class:`Call` describes it, by the chosen kernel.

    ``kernel`` is ``"flash"`` (CPU, or half precision on CUDA), ``"flex"`` (CUDA), ``"reference"``
    (any device, slow), or ``"auto"``: the first of these that supports the call on its device.
    Under autocast, query, key and value are cast as for torch's ``scaled_dot_product_attention``.

    Raises:
        OptionError: the kernel is unknown or does not support the call.
    """
    device, asked = query.device.type, kernel
    if kernel not in KERNELS:
        raise OptionError(
            f"no attention kernel {kernel!r}{nearest(kernel, KERNELS)}; use one of {KERNELS}"
        )
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if call.scores is not None:
        if kernel not in ("auto", "reference"):
            raise OptionError(
                f"kernel={kernel!r} cannot have logits as this encoding makes them; use "
                f"kernel='auto'"
            )
        return flash.attend_plainly(query, key, value, call)
    card = cards.card(query.device) if device == "cuda" and kernel != "reference" else None
    if kernel == "auto":
        kernel, why = chosen(query, value, call, card)
        if why is not None and not torch.compiler.is_compiling():
            log_once(f"attention on {query.device} {_PLAIN}: {why}")
    elif kernel != "reference":
        why = refusal(kernel, query, value, call, card)
        if why is not None:
            raise OptionError(f"kernel={kernel!r} cannot run this: {why}; use kernel='auto'")
    wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if kernel == "flex" and device == "cpu" and wants_gradient:
        raise OptionError("kernel='flex' has no gradients on the CPU; use kernel='flash'")
    if kernel == "flash":
        return flash.attend(query, key, value, call)
    if kernel == "flex":
        try:
            return flex.attend(query, key, value, call)
        except fused.NotCompiledError as error:
            if asked != "auto":
                raise OptionError(
                    f"kernel='flex' was not compiled for this GPU ({error}); use kernel='auto'"
                ) from error
            why = f"FlexAttention was not compiled ({error})"
            log_once(f"attention on {query.device} {_PLAIN}: {why}")
    return flash.attend_plainly(query, key, value, call)


def chosen(
    query: torch.Tensor, value: torch.Tensor, call: Call, card: cards.Card | None
) -> tuple[str, str | None]:
    """What ``kernel="auto"`` runs, and why it is not a fused kernel on a GPU.

    ``card`` is the GPU of the tensors; None on other devices.
    """
    flash_refuses = refusal("flash", query, value, call, card)
    if flash_refuses is None:
        return "flash", None
    if card is None:
        return "reference", None
    flex_refuses = refusal("flex", query, value, call, card)
    if flex_refuses is None:
        return "flex", None
    return "reference", f"flash: {flash_refuses}; flex: {flex_refuses}"


def refusal(
    kernel: str, query: torch.Tensor, value: torch.Tensor, call: Call, card: cards.Card | None
) -> str | None:
    """Why ``"flash"`` or ``"flex"`` cannot have a call; None: it can."""
    if kernel == "flash":
        return flash.refusal(query, value, call, card)
    return None if card is None else flex.refusal(query, value, call, card)


@functools.cache
def log_once(sentence: str) -> None:
    """Once for each sentence."""
    _logger.warning("rope_ext: %s", sentence)
