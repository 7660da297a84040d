"""Decides whether attention reads later keys, at a patch by probing the layers, and per call.

Keys after a query have the negative distances of keys before it (``methods.geometry.both_ways``).
What is defined for causal attention only is refused here.
"""

from collections.abc import Iterable, Mapping
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
    said = given.get("is_causal")
    causal = getattr(module, "is_causal", True) if said is None else said
    if causal:
        return False  # before reading the arguments, whose offset would recompile every step
    arguments = getattr(mask, "arguments", None) or {}
    # Without this permission, transformers always creates the mask, which decides.
    return arguments.get("allow_is_causal_skip", True)


def sees_ahead(module: nn.Module, mask: Any, given: Mapping[str, Any]) -> bool:
    """Whether queries of an attention layer see later keys, with arguments as :func:`sees_all`.

    For a probe, whose tokens are those of one text without padding.
    """
    shows_later = mask is not None and bool(mask.visible.triu(1).any())
    return shows_later or (not by_mask(module, given) and sees_all(module, mask, given))


def by_mask(module: nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether a causal layer says ``is_causal=False`` itself because it has a mask, as Moonshine's.

    For a probe with a mask, whose call of the decoder says nothing about it.
    """
    return getattr(module, "is_causal", None) is True and given.get("is_causal") is False


def is_causal(config: Any, given: Mapping[str, Any]) -> bool:
    """Whether a decoder's forward is causal by its arguments or, without, its configuration."""
    return _said(config, given) is not False


def _said(config: Any, given: Mapping[str, Any]) -> Any:
    """Return ``is_causal`` of the call or, without, of the configuration; None: neither says it."""
    said = given.get("is_causal")
    return getattr(config, "is_causal", None) if said is None else said


def reads_both_ways(config: Any, given: Mapping[str, Any], modules: Iterable[nn.Module]) -> bool:
    """Whether queries see later keys: by the call, the configuration, or the attention modules."""
    said = _said(config, given)
    if said is not None:
        return not said
    found = {bool(getattr(module, "is_causal", True)) for module in modules}
    if len(found) > 1:
        raise UnsupportedModelError(
            "some attention layers have is_causal=False and others do not, so it is not known "
            "whether the text is read in both directions; set config.is_causal"
        )
    return found == {False}


def refuse(what: str, causal_only: str, named: str, instead: str) -> None:
    """Raise if a position map is defined for causal attention only; ``what``: a model or a call.

    ``causal_only`` is the reason, or empty if it is defined for both directions.
    """
    if causal_only:
        raise not_causal(what, f"{named} {causal_only}", instead)


def generates_from(config: Any, generates: bool) -> bool:
    """Whether a model in both directions still generates, and so reads only prompts that way.

    ``generates``: whether it can. Then the modules alone do not decide: PaliGemma reads prompts in
    both directions, and other tokens causally.
    """
    return generates and getattr(config, "is_causal", None) is not False


def refuse_generating(family: str, named: str, instead: str) -> None:
    """Raise the error for a model of :func:`generates_from`."""
    why = (
        f"{named} cannot tell a whole text from a prompt that it continues; if it does not "
        f"generate, set config.is_causal = False or load it with AutoModel"
    )
    raise not_causal(family, why, instead)


def not_causal(what: str, why: str, instead: str) -> UnsupportedModelError:
    """Create the error for attention in both directions; ``what`` is a model or a call."""
    return UnsupportedModelError(f"{what} reads its text in both directions, and {why}; {instead}")
