"""Decides whether attention reads later keys, and refuses that for rope_ext's own attention.

Its bands and biases are defined by how far a key lies before its query. This is the only place that
refuses other keys: at a patch by probing the layers, and for every call.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from rope_ext.errors import UnsupportedModelError

_WHOLE = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}


def visible_keys(arguments: Mapping[str, Any]) -> Tensor:
    """Return the mask that transformers requested, ``[rows, 1, queries, keys]``; True: visible.

    It is created even where transformers leaves it out, because attention without a mask may be
    causal or bidirectional. For a model on the meta device, it is on the CPU.
    """
    device = torch.device(arguments.get("device", "cpu"))
    if device.type == "meta":
        arguments = {**arguments, "device": torch.device("cpu"), "attention_mask": None}
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**{**arguments, **_WHOLE})


def sees_all(module: nn.Module, mask: Any, given: Mapping[str, Any]) -> bool:
    """Whether an attention layer shows queries every key where it gets no mask tensor.

    ``mask`` has the ``arguments`` with which transformers requested it, or is None; ``given`` are
    the further arguments of the attention call. As for transformers' attention, ``is_causal`` of
    the call is used first, then that of the module.
    """
    arguments = getattr(mask, "arguments", None) or {}
    if not arguments.get("allow_is_causal_skip", True):
        return False  # then transformers always creates the mask, which decides
    said = given.get("is_causal")
    return not (getattr(module, "is_causal", True) if said is None else said)


def sees_ahead(module: nn.Module, mask: Any, given: Mapping[str, Any]) -> bool:
    """Whether queries of an attention layer see later keys, with arguments as :func:`sees_all`.

    For a probe, whose tokens are those of one text without padding.
    """
    shows_later = mask is not None and bool(mask.visible.triu(1).any())
    return shows_later or sees_all(module, mask, given)


def is_causal(config: Any, given: Mapping[str, Any]) -> bool:
    """Whether a decoder's forward is causal by its arguments or, without, its configuration."""
    return given.get("is_causal", getattr(config, "is_causal", None)) is not False


def not_causal(what: str, named: str, instead: str) -> UnsupportedModelError:
    """Create the error for attention in both directions; ``what`` is a model or a call."""
    return UnsupportedModelError(
        f"{what} reads its text in both directions, and {named} is defined for causal attention, "
        f"where a query sees earlier keys only; {instead}"
    )
