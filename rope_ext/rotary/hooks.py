"""Replaces the cosines and sines of rotary modules.

New values in a buffer are not enough if frequencies differ between the sequences of a batch, or if
angles need more precision than float32.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext.errors import UnsupportedModelError
from rope_ext.rotary import context
from rope_ext.rotary.probe import replaced
from rope_ext.rotary.sequences import Sequences
from rope_ext.rotary.sites import RotarySite, run, vocabulary_of
from rope_ext.rotary.swapping import Changes, mark_hooked


@dataclass(eq=False)
class RotaryHook:
    """Forward hook of a rotary module that replaces cosine and sine."""

    site: RotarySite
    inv_freq: Tensor  # float64, [pairs]
    scaling: float
    precise: bool  # compute angles in float64; else in float32, as transformers does
    sequences: Sequences | None  # a dynamic method's; they have their own frequencies and scaling

    def put(self, changes: Changes) -> None:
        """Hook the module of the site until ``changes`` are undone."""
        mark_hooked(self.site.module, changes)
        changes.append(self.site.module.register_forward_hook(self, with_kwargs=True).remove)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        positions = positions_given(self.site, args, kwargs)
        if positions is None:
            return None
        if self.sequences is None:
            inv_freq = context.cached_on_device(self, "inv_freq", positions.device)
            return rotation(
                site=self.site,
                t=positions,
                inv_freq=inv_freq,
                scaling=self.scaling,
                precise=self.precise,
                like=output,
            )
        dtype = torch.float64 if self.precise else torch.float32
        inv_freq, scaling = self.sequences.frequencies(self.site, positions, dtype)
        return rotation(
            site=self.site,
            t=positions,
            inv_freq=inv_freq,
            scaling=scaling,
            precise=self.precise,
            like=output,
        )


def positions_given(site: RotarySite, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the ``position_ids`` that a rotary module is called with, ``[..., rows, tokens]``.

    None if the call asks for the frequencies of another layer type than the site's.
    """
    layer_type = kwargs.get("layer_type", args[2] if len(args) > 2 else None)
    if layer_type != site.layer_type:
        return None
    return kwargs["position_ids"] if "position_ids" in kwargs else args[1]


def refuse_unused(decoder: nn.Module, sites: list[RotarySite]) -> None:
    """Raise if another package's code ignores the output of the rotary modules.

    Runs the decoder only if some forward in it was replaced.
    """
    there = replaced(decoder)
    if not there:
        return
    tokens = torch.arange(16, device="cpu")[None] * 37 % vocabulary_of(decoder).num_embeddings
    reason = "it does not use the output of the rotary module"
    handles = [site.module.register_forward_hook(_spoil) for site in sites]
    try:
        used = bool(run(decoder, tokens)[0].isnan().any())
    except Exception as error:
        used = False
        reason = f"it cannot be run to see whether a patch does anything ({error})"
    finally:
        for handle in handles:
            handle.remove()
    if not used:
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: there is {'; '.join(there)}, and {reason}; load the model "
            f"in a process in which nothing has replaced code of transformers"
        )


def _spoil(module: nn.Module, args: tuple, output: Any) -> Any:
    """Forward hook of a rotary module, after which whatever uses its output is NaN."""
    return output * math.nan if isinstance(output, Tensor) else tuple(x * math.nan for x in output)


def rotation(
    site: RotarySite, t: Tensor, inv_freq: Tensor, scaling: float | Tensor, precise: bool, like: Any
) -> Any:
    """Compute a rotary module's output for other frequencies or positions.

    Positions ``t`` are ``[rows, tokens]`` or ``[axes, rows, tokens]`` and need not be integers,
    ``inv_freq`` is ``[pairs]`` or ``[rows, tokens or 1, pairs]``, ``scaling`` multiplies cosine and
    sine, and ``like`` is the module's own output, for its dtype.
    """
    dtype = torch.float64 if precise else torch.float32
    columns = site.columns
    inv_freq = inv_freq.to(t.device, dtype)
    pair = context.cached_on_device(columns, "pair", t.device)
    if columns.axis is not None and t.ndim == 3:
        of_column = t[columns.axis.to(t.device)].movedim(0, -1)
        angles = of_column.to(dtype) * inv_freq[..., pair]
        cos = angles.cos() * scaling
        sin = angles.sin() * scaling
    else:
        angles = t.unsqueeze(-1).to(dtype) * inv_freq
        cos, sin = ((f(angles) * scaling)[..., pair] for f in (torch.cos, torch.sin))
    if columns.complex:
        return torch.complex(cos, sin).to(like.dtype)
    if cos.ndim < like[0].ndim:  # axes kept separate, and all are equal
        cos = cos.expand(like[0].shape)
        sin = sin.expand(like[0].shape)
    return cos.to(like[0].dtype), sin.to(like[1].dtype)
