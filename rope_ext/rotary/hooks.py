"""Hooks that replace the cosines and sines of a rotary module.

New values in its buffer are not enough if frequencies differ between the sequences of a batch, or
if angles need more precision than float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rope_ext.errors import UnsupportedModelError
from rope_ext.rotary.calls import cached_on_device
from rope_ext.rotary.context import run
from rope_ext.rotary.sequences import Sequences
from rope_ext.rotary.sites import RotarySite, evaluating, vocabulary_of
from rope_ext.rotary.swapping import Changes, mark_hooked
from rope_ext.rotary.third_party import replaced


class RotaryHook:
    """Forward hook of a rotary module that replaces cosine and sine, from float64 frequencies.

    Args:
        site: the rotary site.
        inv_freq: float64, ``[pairs]``; used unless frequencies depend on the sequence.
        scaling: factor of cosine and sine; used unless it depends on the sequence.
        precise: compute angles in float64; else in float32, as transformers does.
        sequences: the sequences of the batch, under a dynamic method.
    """

    def __init__(
        self,
        site: RotarySite,
        inv_freq: torch.Tensor,
        scaling: float,
        precise: bool,
        sequences: Sequences | None,
    ) -> None:
        self.site, self.inv_freq, self.scaling = site, inv_freq, scaling
        self.precise, self.sequences = precise, sequences

    def put(self, changes: Changes) -> None:
        """Hook the module of the site until ``changes`` are undone."""
        mark_hooked(self.site.module, changes)
        changes.append(self.site.module.register_forward_hook(self, with_kwargs=True).remove)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        if not self.site.called(args, kwargs):
            return None
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        inv_freq = cached_on_device(self, "inv_freq", positions.device)
        used: tuple[Any, Any] = inv_freq, self.scaling
        if self.sequences is not None:
            dtype = torch.float64 if self.precise else torch.float32
            used = run(self.sequences, self.sequences.frequencies, self.site, positions, dtype)
        return rotation(self.site, positions, *used, self.precise, output)


@torch.no_grad()
def refuse_unused(decoder: nn.Module, sites: list[RotarySite]) -> None:
    """Raise if another package's code ignores the output of the rotary modules.

    Runs the decoder only if some forward in it was replaced.
    """
    there = replaced(decoder)
    if not there:
        return
    vocabulary = vocabulary_of(decoder)
    tokens = torch.arange(16, device="cpu") * 37 % vocabulary.num_embeddings
    tokens = tokens.unsqueeze(0).to(vocabulary.weight.device)
    reason = "it does not use the output of the rotary module"

    def hidden() -> torch.Tensor:
        return decoder(input_ids=tokens, use_cache=False)[0].double()

    handles = []
    try:
        with evaluating(decoder):
            before = hidden()
            noise = (hidden() - before).abs().max()
            handles = [s.module.register_forward_hook(_still) for s in sites]
            used = bool((hidden() - before).abs().max() > 2 * noise)
    except Exception as error:
        used, reason = False, f"it cannot be run to see whether a patch does anything ({error})"
    finally:
        for handle in handles:
            handle.remove()
    if not used:
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: there is {'; '.join(there)}, and {reason}; load the model "
            f"in a process in which nothing has replaced code of transformers"
        )


def _still(module: nn.Module, args: tuple, output: Any) -> Any:
    """Forward hook of a rotary module: no token is rotated."""
    if isinstance(output, torch.Tensor):
        return torch.ones_like(output)
    return torch.ones_like(output[0]), torch.zeros_like(output[1])


def rotation(
    site: RotarySite,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    scaling: float | torch.Tensor,
    precise: bool,
    like: Any,
) -> Any:
    """Compute a rotary module's output for other frequencies or positions.

    Args:
        site: the rotary site.
        positions: ``[rows, tokens]`` or ``[axes, rows, tokens]``; need not be integers.
        inv_freq: ``[pairs]``, or ``[rows, tokens or 1, pairs]``.
        scaling: factor of cosine and sine.
        precise: compute angles in float64, else in float32, as transformers does.
        like: the module's own output, for its dtype.
    """
    dtype = torch.float64 if precise else torch.float32
    columns = site.columns
    inv_freq = inv_freq.to(positions.device, dtype)
    if isinstance(scaling, torch.Tensor):
        scaling = scaling.to(positions.device, dtype)
    pair = cached_on_device(columns, "pair", positions.device)
    if columns.axis is not None and positions.ndim == 3:
        of_column = positions[columns.axis.to(positions.device)].movedim(0, -1)
        angles = of_column.to(dtype) * inv_freq[..., pair]
        cos, sin = angles.cos() * scaling, angles.sin() * scaling
    else:
        angles = positions.unsqueeze(-1).to(dtype) * inv_freq
        cos, sin = ((f(angles) * scaling)[..., pair] for f in (torch.cos, torch.sin))
    if columns.complex:
        return torch.complex(cos, sin).to(like.dtype)
    return cos.to(like[0].dtype), sin.to(like[1].dtype)
