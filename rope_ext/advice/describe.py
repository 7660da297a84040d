"""What a model's rotary embedding is, and which methods there are, for people to read."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from rope_ext.apply import gguf_source
from rope_ext.config.record import option_texts, record_of
from rope_ext.methods import Method, all_methods
from rope_ext.patching import Patch, current_patch
from rope_ext.rotary.sites import RotarySite, find_sites, text_config, text_decoder

_SOURCES = {
    "record": "the patch recorded in the configuration",
    "rope_parameters": "rope_parameters in the configuration",
    "adapter": "rope_ext.json next to the adapter",
}


@dataclass(frozen=True)
class MethodInfo:
    """One method.

    Args:
        name: as ``patch`` takes it.
        aliases: other names for it.
        options: with their defaults; ``...`` where an option must be given.
        summary: what to choose it for.
        paper: its source.
    """

    name: str
    aliases: tuple[str, ...]
    options: dict[str, Any]
    summary: str
    paper: str


@dataclass(frozen=True)
class SiteDescription:
    """One set of rotary frequencies.

    Args:
        name: path of its module.
        layer_type: the layers that use it, ``"all"`` where there is one set.
        base: ``rope_theta`` of the checkpoint.
        inv_freq_before, inv_freq_after: radians per token, fastest pair first.
        attention_scaling: number on cosine and sine, now.
        status: ``"extended"``, ``"extended per sequence"``, ``"positions changed"``,
            ``"as trained"`` (with a bias or a temperature) or ``"unchanged"``.
    """

    name: str
    layer_type: str
    base: float
    inv_freq_before: tuple[float, ...]
    inv_freq_after: tuple[float, ...]
    attention_scaling: float
    status: str


@dataclass(frozen=True)
class Description:
    """A model's rotary embedding; ``print`` it.

    Args:
        model: class of the decoder.
        method: name of the active method; None: unpatched.
        options: of the method, with defaults filled in.
        length: trained length, tokens.
        target_length: tokens after the patch, or after the scaling in the configuration.
        sites: for each set of rotary frequencies, its frequencies (radians per token) before and
            after the patch, its scaling and status.
        notes: how the patch is saved, and other remarks.
        configured: the scaling in the configuration of an unpatched model; None: none.
        serve: commands that serve a saved model.
    """

    model: str
    method: str | None
    options: dict[str, Any]
    length: int
    target_length: int
    sites: tuple[SiteDescription, ...]
    notes: tuple[str, ...]
    configured: str | None = None
    serve: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.model}: trained for {self.length} tokens, not patched"]
        if self.configured is not None:
            lines = [
                f"{self.model}: {self.length} -> {self.target_length} tokens by its configuration, "
                f"{self.configured}; not patched"
            ]
        if self.method is not None:
            options = ", ".join(
                f"{name}={value}"
                for name, value in self.options.items()
                if value is not None and name != "published"  # the others say what holds
            )
            lines = [
                f"{self.model}: {self.length} -> {self.target_length} tokens by "
                f"{self.method}({options})"
            ]
        for site in self.sites:
            pairs = len(site.inv_freq_before)
            lines.append(
                f"  {site.name} [{site.layer_type}] {pairs} pairs, base {site.base:g}: "
                f"{site.status}, cos and sin x {site.attention_scaling:.4g}"
            )
            if site.inv_freq_after != site.inv_freq_before:
                lines += _spectrum(site)
        lines += [f"  {note}" for note in self.notes]
        return "\n".join([*lines, *(f"  serve it: {command}" for command in self.serve)])


def _spectrum(site: SiteDescription) -> list[str]:
    pairs = len(site.inv_freq_before)
    lines = ["    pair    wavelength before    after (tokens)    theta / new theta"]
    for i in sorted({round(k * (pairs - 1) / 4) for k in range(5)}):
        before, after = site.inv_freq_before[i], site.inv_freq_after[i]
        ratio = before / after if after else (1.0 if before == after else math.inf)
        old, new = (wavelength_text(wavelength(f)) for f in (before, after))
        lines.append(f"    {i:>4} {old:>20} {new:>17} {ratio:>20.4g}")
    return lines


def wavelength(inv_freq: float) -> float:
    """Tokens per full rotation of a pair with this many radians per token."""
    return 2 * math.pi / inv_freq if inv_freq else math.inf


def wavelength_text(tokens: float) -> str:
    return "never rotates" if tokens == math.inf else f"{tokens:.5g}"


def methods() -> list[MethodInfo]:
    """Every method with its options and defaults.

    Returns:
        Frequency methods, then position methods; in each group, the first to try comes first.
    """
    found = []
    for cls in all_methods():
        options = {
            option.name: ... if option.default is dataclasses.MISSING else option.default
            for option in dataclasses.fields(cls)
        }
        found.append(MethodInfo(cls.name, cls.aliases, options, cls.summary, cls.paper))
    return found


def describe(model: nn.Module | PreTrainedConfig | str | Path) -> Description:
    """Describe the rotary embedding of ``model``, patched or not.

    Args:
        model: loaded, as :func:`rope_ext.patch` takes it; or a configuration, directory (also of
            an adapter) or Hub ID, which is described as saved. No weights are read for those.

    Returns:
        Lengths, frequencies before and after, and notes; ``print`` it.

    Raises:
        MeasureError: the directory has no configuration.
        NoRopeError, UnsupportedModelError, RecordError: as :func:`rope_ext.patch`.
    """
    if not isinstance(model, nn.Module):
        return _described_as_saved(model)
    decoder = text_decoder(model)
    patch = current_patch(model)
    sites = find_sites(decoder) if patch is None else patch.sites
    length = target = sites[0].rope.length
    configured = None
    if patch is not None:
        length, target = patch.length, patch.target_length
    elif any(site.scaled for site in sites):
        from rope_ext.saving.folder import configured as method_configured

        found = method_configured(text_config(decoder))
        if found is not None:
            method, length = found
            configured = call_text(method)
    return Description(
        model=type(decoder).__name__,
        method=None if patch is None else patch.method.name,
        options={} if patch is None else patch.method.options(),
        length=length,
        target_length=target,
        sites=tuple(_site(site, patch) for site in sites),
        notes=_unpatched_notes(decoder, sites) if patch is None else patch.notes,
        configured=configured,
    )


def _described_as_saved(given: PreTrainedConfig | str | Path) -> Description:
    from rope_ext.engines import serving_commands
    from rope_ext.saving.folder import read_saved

    saved = read_saved(given)
    found = describe(saved.model)
    if saved.source is None:
        return found
    notes = (f"read from {_SOURCES[saved.source]}; no weights were read", *found.notes)
    serve = serving_commands(saved)
    if saved.source == "adapter":
        serve, merge = (), f"python recipes/merge.py {saved.name} --output MERGED"
        notes += (f"to serve it, merge the adapter: {merge}",)
    elif not serve:
        notes += (f"no engine can run it; load it with rope_ext.from_pretrained({saved.name!r})",)
    return dataclasses.replace(found, notes=notes, serve=serve)


def call_text(method: Method) -> str:
    """A method with the options that differ from its defaults."""
    return f"{method.name}({', '.join(option_texts(method))})"


def _site(site: RotarySite, patch: Patch | None) -> SiteDescription:
    after, scaling, status = site.rope.inv_freq, site.scaling, "unchanged"
    if patch is not None and site in patch.scaled:
        after, scaling = patch.frequencies_of(site)
        status = "positions changed" if patch.method.replaces_attention else "extended"
        if patch.method.kind == "rotation" and patch.frequencies is None:
            status = "as trained"
        if patch.method.is_dynamic:
            shown = patch.method.target_length(site.rope)
            status = f"extended per sequence, shown at {shown} tokens"
    return SiteDescription(
        name=site.name or "rotary",
        layer_type=site.layer_type or "all layers",
        base=site.rope.base,
        inv_freq_before=_floats(site.rope.inv_freq),
        inv_freq_after=_floats(after),
        attention_scaling=scaling,
        status=status,
    )


def _floats(values: torch.Tensor) -> tuple[float, ...]:
    return tuple(values.tolist())


def _unpatched_notes(decoder: nn.Module, sites: list[RotarySite]) -> tuple[str, ...]:
    notes = [*gguf_source.scaling_notes(decoder.config)]
    notes += [
        f"the checkpoint scales {site.name or 'it'} by itself: rope_type {site.rope_type}"
        for site in sites
        if site.scaled
    ]
    record = record_of(text_config(decoder))
    if record is not None:
        if record.plain:
            notes.append(f"saved under {record.call()}, whose larger base is in force")
        else:
            force = "only in part in force" if record.native else "not in force"
            notes.append(
                f"saved under a patch that is {force}, since plain transformers loaded it: "
                f"{record.call()}; rope_ext.from_pretrained reloads it as it was"
            )
    return tuple(notes)
