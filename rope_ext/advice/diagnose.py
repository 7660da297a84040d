"""Which rotary pairs meet new angles at a length, before and after a patch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from rope_ext.advice.describe import (
    call_text,
    describe,
    require_length,
    wavelength,
    wavelength_text,
)
from rope_ext.patching import Patch, current_patch
from rope_ext.rotary.sites import RotarySite, find_sites, text_config, text_decoder
from rope_ext.saving.folder import read_saved

_EQUAL = 1 + 1e-9  # theta / s * s * length is not theta * length to the last bit


@dataclass(frozen=True)
class PairDiagnosis:
    """One rotary pair before and after the patch."""

    wavelength_before: float  # tokens per full rotation; infinite: it does not rotate
    wavelength_after: float
    rotations: float  # within the trained length
    trained_angle: float  # radians from the first token to the end of the trained length
    angle_before: float  # the same for the largest distance used at the length diagnosed
    angle_after: float

    def _status(self, angle: float) -> str:
        # A pair that makes a full rotation within the trained length has met every angle there is;
        # of any other, angles beyond the trained one are new (arXiv 2310.05209, section 3).
        seen = self.rotations >= 1 or angle <= self.trained_angle * _EQUAL
        return "in distribution" if seen else "out of distribution"

    @property
    def before(self) -> str:
        """``"in distribution"`` or ``"out of distribution"``, unpatched."""
        return self._status(self.angle_before)

    @property
    def after(self) -> str:
        """As :attr:`before`, under the patch."""
        return self._status(self.angle_after)


@dataclass(frozen=True)
class SiteDiagnosis:
    """One set of rotary frequencies at a length."""

    name: str  # path of its module
    layer_type: str  # the layers that use it
    base: float  # `rope_theta` of the checkpoint
    critical_dimension: int
    """Columns of the pairs that make a full rotation within the trained length (arXiv 2310.05209:
    ``2 ceil(d / 2 log_base(L / 2 pi))``)."""
    distances_before: float
    """Number of distances in use, which a sliding window or a position method limits; the largest
    if every pair has its own."""
    distances_after: float
    pairs: tuple[PairDiagnosis, ...]  # fastest first


@dataclass(frozen=True)
class Diagnosis:
    """What a length does to every rotary pair; ``print`` it."""

    model: str  # class of the decoder
    method: str | None  # the patch in force, with its options; None: unpatched
    length: int  # diagnosed, tokens
    trained_length: int
    sites: tuple[SiteDiagnosis, ...]
    notes: tuple[str, ...]  # as in `rope_ext.describe`

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        how = "not patched" if self.method is None else f"patched with {self.method}"
        lines = [
            f"{self.model} at {self.length} tokens: trained for {self.trained_length} tokens, {how}"
        ]
        for site in self.sites:
            lines += self._table(site)
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def _table(self, site: SiteDiagnosis) -> list[str]:
        patched, pairs = self.method is not None, site.pairs
        count, columns = len(pairs), 1 + patched
        states = [(pair.before, pair.after)[:columns] for pair in pairs]
        new = [sum(state[i].startswith("out") for state in states) for i in range(columns)]
        lines = [
            f"  {site.name} [{site.layer_type}] {count} pairs, base {site.base:g}, critical "
            f"dimension {site.critical_dimension} of {2 * count}",
            f"    {new[0]} pairs out of distribution at {site.distances_before:g} distances",
            f"    pair {'wavelength':>12} {'rotations':>9} {'trained angle':>14} {'angle':>10}"
            f"  status",
        ]
        if patched:
            lines[1] += f" before the patch, {new[1]} at {site.distances_after:g} after"
            lines[2] += f"{'':>13} {'patched':>12} {'angle':>10}  status"
        borders = {i + j for i in range(count - 1) for j in (0, 1) if states[i] != states[i + 1]}
        for i in sorted(borders | {round(k * (count - 1) / 4) for k in range(5)}):
            pair = pairs[i]
            line = (
                f"    {i:>4} {wavelength_text(pair.wavelength_before):>12} {pair.rotations:>9.4g} "
                f"{pair.trained_angle:>14.5g} {pair.angle_before:>10.5g}  {pair.before:<19}"
            )
            if patched:
                line += f" {wavelength_text(pair.wavelength_after):>12} {pair.angle_after:>10.5g}"
                line += f"  {pair.after}"
            lines.append(line.rstrip())
        return lines


def diagnose(model: nn.Module | PreTrainedConfig | str | Path, length: int) -> Diagnosis:
    """Show which rotary pairs reach untrained angles at ``length`` tokens.

    Args:
        model: a loaded model, patched or not; or a configuration, directory or Hub ID, which
            is diagnosed as saved. No weights are read for those.
        length: tokens; below the trained length nothing is out of distribution.

    Returns:
        Wavelength, rotations and angles of every pair, before and after the patch.

    Raises:
        OptionError: the length is not a positive number.
        MeasureError: the directory has no configuration.
        NoRopeError, UnsupportedModelError, RecordError: as :func:`rope_ext.patch`.
    """
    require_length("length", length)
    if not isinstance(model, nn.Module):
        model = read_saved(model).model
    decoder, patch, described = text_decoder(model), current_patch(model), describe(model)
    method = None if patch is None else call_text(patch.method)
    sites = find_sites(decoder) if patch is None else patch.sites
    shown = tuple(_site(text_config(decoder), site, patch, length) for site in sites)
    return Diagnosis(described.model, method, length, described.length, shown, described.notes)


def _site(config: Any, site: RotarySite, patch: Patch | None, length: int) -> SiteDiagnosis:
    rope, frequencies = site.rope, site.rope.inv_freq
    active = patch if patch is not None and site in patch.scaled else None
    before = after = torch.tensor([length], dtype=torch.float64, device="cpu")
    if site.local:
        names = ("sliding_window", "attention_window_size", "attention_chunk_size")
        windows = (getattr(config, name, None) for name in names)
        before = after = before.clamp(max=next(filter(None, windows), rope.length))
    elif active is not None:
        after = active.method.span(rope, length)
    if active is not None and active.frequencies is not None:
        frequencies = active.frequencies.frequencies(rope, length)
    columns = (
        [wavelength(f) for f in rope.inv_freq.tolist()],
        [wavelength(f) for f in frequencies.tolist()],
        rope.rotations.tolist(),
        (rope.length * rope.inv_freq).tolist(),
        (before * rope.inv_freq).tolist(),
        (after * frequencies).tolist(),
    )
    name, layers = site.name or "rotary", site.layer_type or "all layers"
    critical = 2 * int((rope.rotations >= 1).sum())
    pairs = tuple(PairDiagnosis(*values) for values in zip(*columns, strict=True))
    distances = float(before), float(after.max())
    return SiteDiagnosis(name, layers, rope.base, critical, *distances, pairs)
