"""Forwards under a method that follows sequences, as ``torch.compile`` traces them.

The eager path reads lengths off positions and masks, and makes frequencies once for all that are
alike. A graph has tensors only: in decoding the frequencies that the cache holds, and of a sequence
that begins those of every token's own length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rope_ext.caches import UNKNOWN
from rope_ext.methods.temperature import Temperature
from rope_ext.rotary import calls
from rope_ext.rotary.sequences import STARTED, Sequences, Started, documents, read
from rope_ext.rotary.sites import RotarySite
from rope_ext.under_way import here

_EMPTY = "in a compiled forward every row needs a token to begin with; make the chunks longer"
_FILLED = (
    "the layers of this cache were reset one by one: use its own reset(), or begin again with a "
    "forward that is not compiled"
)


class CompiledSequences(Sequences):
    """Sequences that a graph can follow, and where it cannot, the eager path."""

    def begin(self, decoder: nn.Module, args: tuple, kwargs: dict) -> None:
        traced = None
        if torch.compiler.is_compiling() and not calls.is_exporting():
            given = {**dict(zip(self.names, args, strict=False)), **kwargs}
            traced = self._understood(decoder, given)
        if traced is None:
            super().begin(decoder, args, kwargs)
        else:
            here.followed.append(traced)

    def end(self, decoder: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        traced = self.traced() if here.followed else None
        if traced is None:
            super().end(decoder, args, kwargs, output)
            return
        here.followed.remove(traced)
        for part in output if isinstance(output, tuple) else (output,):
            cache = getattr(part, "past_key_values", part)
            new = hasattr(cache, "get_seq_length") and traced.started is not None
            if new and getattr(cache, STARTED, None) is not traced.started:
                setattr(cache, STARTED, traced.started)

    def under_way(self) -> Any:
        traced = self.traced() if here.followed else None
        return super().under_way() if traced is None else traced

    def _understood(self, decoder: nn.Module, given: dict[str, Any]) -> Traced | None:
        """The forward in tensors; None: it cannot be said in them."""
        if given.get("cache") is not None or calls.is_sharded() or calls.runs_layers_again(decoder):
            return None
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        rows, length = tokens.shape[:2]
        cache, stored = given.get("past_key_values"), None
        filled = 0 if cache is None else cache.get_seq_length()
        if isinstance(filled, torch.Tensor) and not hasattr(cache, STARTED):
            torch._assert_async(filled == 0, UNKNOWN)
            filled = 0
        if isinstance(filled, torch.Tensor) or filled:
            stored = getattr(cache, STARTED, None)
            if stored is None or stored.method is not self.method or not stored.begun:
                return None
            if len(stored.lengths) not in (1, rows):
                return None
            if isinstance(filled, torch.Tensor):
                if length > 1:  # perhaps the first tokens of a cache that was reset
                    return None
                torch._assert_async(filled > 0, _FILLED)
        for request in here.requests:
            if request.sequences is self:
                if stored is None:  # which says how long they will be
                    return None
                request.due = False
        return Traced(self, rows, length, stored, given.get("attention_mask"))


class Traced:
    """One forward of the decoder, with everything that depends on its sequences in tensors.

    Args:
        sequences: of the decoder.
        rows: batch size.
        tokens: of this forward.
        stored: what the cache knows of its sequences; None: they begin.
        mask: the attention mask, as the decoder got it.
    """

    def __init__(
        self,
        sequences: CompiledSequences,
        rows: int,
        tokens: int,
        stored: Started | None,
        mask: Any,
    ) -> None:
        self.sequences, self.rows, self.tokens = sequences, rows, tokens
        self.started, self.mask = stored, mask
        self.positions: torch.Tensor | None = None
        self.lengths: torch.Tensor | None = None  # of sequences that begin, [rows, tokens]
        self.first: torch.Tensor | None = None  # likewise

    def locate(self, positions: torch.Tensor) -> None:
        """Find the sequences, from the position ids that the model itself uses."""
        if self.positions is not None:
            return
        self.positions = positions
        if self.started is not None:
            return
        if positions.ndim == 3:  # axes, rows, tokens
            positions = positions.amax(0)
        positions = positions.reshape(-1, positions.shape[-1])[-self.rows :]
        real, edges = read(self.mask, 0, self.tokens)
        lengths, first, _ = documents(positions.expand(self.rows, -1), real, edges)
        torch._assert_async((first[:, -1] >= 0).all(), _EMPTY)
        self.lengths, self.first = lengths.double(), first
        ends = self.lengths[:, -1].cpu(), first[:, -1].cpu()
        self.started = Started(self.sequences.method, *ends, self.tokens)

    def frequencies(
        self, site: RotarySite, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[rows, tokens, pairs]`` and ``[rows, tokens, 1]``, or 1 where all are equal."""
        key, made = (site.name, site.layer_type, positions.device, dtype), self.started.made
        if key not in made:
            made[key] = self._at(site, self.started.lengths[:, None], positions.device, dtype)
        if self.lengths is None or self.lengths.shape[1] != positions.shape[-1]:
            return made[key]
        return self._at(site, self.lengths.cpu(), positions.device, dtype)

    def _at(
        self, site: RotarySite, lengths: torch.Tensor, device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inv_freq, scaling = self.sequences.at_lengths(site, lengths.flatten())
        inv_freq = inv_freq.unflatten(0, lengths.shape)
        return inv_freq.to(device, dtype), scaling.view(*lengths.shape, 1).to(device, dtype)

    def query_scale(
        self, temperature: Temperature, device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor:
        """What multiplies queries, ``[rows or 1, 1, tokens, 1]``."""
        positions = self.counted(self.positions)
        if positions.ndim == 3:  # axes, rows, tokens
            positions = positions.amax(0)
        tau = temperature.at(positions.double().clamp(min=0)).to(device, dtype)
        return tau[:, None, :, None]

    def counted(self, positions: torch.Tensor) -> torch.Tensor:
        """``positions`` counted from the first token of each sequence."""
        first = self.first
        if first is None or first.shape[1] != positions.shape[-1]:
            first = self.started.first[:, None]
        return positions - first.to(positions.device)
