"""Reports a model's rotary embedding, its angles at a length, and all methods; writes cards."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from rope_ext.config.record import option_texts, record_of
from rope_ext.config.settings import unread
from rope_ext.engines import engines_with_plugin, serving_commands
from rope_ext.errors import ExportError, OptionError, brief
from rope_ext.methods import Method, all_methods
from rope_ext.methods.rope import whole_number
from rope_ext.patching import Patch, configuration_notes, current_patch
from rope_ext.position.layers import WINDOWS_ONLY, rotates_windows_only
from rope_ext.quoting import Printed, command_line, in_markdown, inert_markdown, printable_lines
from rope_ext.rotary.sites import (
    RotarySite,
    find_sites,
    other_parts,
    text_config,
    text_decoder,
)
from rope_ext.saving import gguf_source
from rope_ext.saving.drafts import write_whole
from rope_ext.saving.folder import configured, read_saved
from rope_ext.version import __version__

_SOURCES = {
    "record": "the patch recorded in the configuration",
    "rope_parameters": "rope_parameters in the configuration",
    "adapter": "rope_ext.json next to the adapter",
}
_MARK = "<!-- written by rope-ext card; sha256 "
"""Ends a card, followed by the digest of the text above it: an edited card is never replaced."""
_EQUAL = 1 + 1e-9  # theta / s * s * length may differ from theta * length in the last bit


@dataclass(frozen=True)
class MethodInfo:
    """One method."""

    name: str
    aliases: tuple[str, ...]
    options: dict[str, Any]  # with their defaults; `...` if required
    summary: str  # when to use it
    paper: str


@dataclass(frozen=True)
class SiteDescription:
    """One set of rotary frequencies."""

    name: str  # path of its module
    layer_type: str  # the layers that use it
    base: float  # `rope_theta` of the checkpoint
    inv_freq_before: tuple[float, ...]  # radians per token, fastest pair first
    inv_freq_after: tuple[float, ...]
    attention_scaling: float  # current factor of cosine and sine
    status: str
    """``"extended"``, ``"extended per sequence"``, ``"positions changed"``, ``"as trained"`` (with
    a bias or a temperature) or ``"unchanged"``."""

    def __str__(self) -> str:
        pairs = len(self.inv_freq_before)
        lines = [
            f"  {self.name} [{self.layer_type}] {pairs} pairs, base {self.base:g}: {self.status}, "
            f"cos and sin x {self.attention_scaling:.4g}"
        ]
        if self.inv_freq_after != self.inv_freq_before:
            lines.append("    pair    wavelength before    after (tokens)    theta / new theta")
            for i in sorted(_spread(pairs)):
                before = self.inv_freq_before[i]
                after = self.inv_freq_after[i]
                ratio = 1.0 if before == after else math.inf  # of a pair that does not rotate
                if after:
                    ratio = before / after
                old, new = (_text(_wavelength(f)) for f in (before, after))
                lines.append(f"    {i:>4} {old:>20} {new:>17} {ratio:>20.4g}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Description(Printed):
    """A model's rotary embedding; ``print`` it."""

    model: str  # class of the decoder
    method: str | None  # name of the active method; None: unpatched
    options: dict[str, Any]  # the method's options, with defaults filled in
    length: int  # trained length, tokens
    target_length: int  # after the patch, or after the scaling in the configuration
    sites: tuple[SiteDescription, ...]
    notes: tuple[str, ...]  # how the patch is saved, and other remarks
    configured: str | None = None  # RoPE scaling in the configuration of an unpatched model
    serve: tuple[str, ...] = ()  # commands that serve a saved model

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        given = self.options.items()  # `published` repeats the others
        options = ", ".join(f"{k}={v}" for k, v in given if v is not None and k != "published")
        how = f"{self.length} -> {self.target_length} tokens by {self.method}({options})"
        if self.configured is not None:
            how = f"{self.length} -> {self.target_length} tokens by its configuration, "
            how += f"{self.configured}; not patched"
        elif self.method is None:
            how = f"trained for {self.length} tokens, not patched"
        notes = (f"  {note}" for note in (*self.notes, *(f"serve it: {s}" for s in self.serve)))
        return printable_lines("\n".join([f"{self.model}: {how}", *map(str, self.sites), *notes]))


def _wavelength(inv_freq: float) -> float:
    return 2 * math.pi / inv_freq if inv_freq else math.inf


def _text(wavelength: float) -> str:
    return "never rotates" if wavelength == math.inf else f"{wavelength:.5g}"


def _spread(pairs: int) -> set[int]:
    return {round(quarter * (pairs - 1) / 4) for quarter in range(5)}


def require_length(name: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise OptionError(
            f"{name}={brief(value)} is not valid; it must be a positive number of tokens"
        )


def methods() -> list[MethodInfo]:
    """List all methods with their options and defaults; within each kind, the best ones first."""
    found = []
    for cls in all_methods():
        defaults = {option.name: option.default for option in dataclasses.fields(cls)}
        options = {k: ... if v is dataclasses.MISSING else v for k, v in defaults.items()}
        found.append(
            MethodInfo(
                name=cls.name,
                aliases=cls.aliases,
                options=options,
                summary=cls.summary,
                paper=cls.paper,
            )
        )
    return found


def describe(model: nn.Module | PreTrainedConfig | str | Path) -> Description:
    """Describe the rotary embedding of ``model``, patched or not.

    ``model`` is a loaded model, as for :func:`rope_ext.patch`; or a configuration, directory (also
    of an adapter) or Hub ID, which is described as saved. No weights are read for those. Raises
    MeasureError if the directory has no configuration, or the errors of :func:`rope_ext.patch`.
    """
    if not isinstance(model, nn.Module):
        return _described_as_saved(model)
    state = current_patch(model)
    decoder = text_decoder(model) if state is None else state.decoder  # it may be the encoder alone
    name = type(decoder).__name__
    sites = find_sites(decoder) if state is None else state.sites
    shown = tuple(_site(site, state) for site in sites)
    rest = tuple(
        f"{part}: rotates by itself, and a patch of the whole model leaves it as it was trained; "
        f"rope_ext.describe(model.{part}) shows it, and rope_ext.patch(model.{part}, ...) patches "
        f"it"
        for part in other_parts(model)
    )
    if state is not None:
        return Description(
            model=name,
            method=state.method.name,
            options=state.method.options(),
            length=state.length,
            target_length=state.target_length,
            sites=shown,
            notes=(*state.notes, *rest),
        )
    notes = (*_unpatched_notes(decoder, sites), *rest)
    target = sites[0].rope.length
    changed = any(site.changed for site in sites)
    found = None if changed else configured(text_config(decoder))
    length, scaling = (target, None) if found is None else (found[1], call_text(found[0]))
    return Description(
        model=name,
        method=None,
        options={},
        length=length,
        target_length=target,
        sites=shown,
        notes=notes,
        configured=scaling,
    )


def _described_as_saved(given: PreTrainedConfig | str | Path) -> Description:
    saved = read_saved(given)
    found = describe(saved.model)
    if saved.source is None:
        return found
    notes = (f"read from {_SOURCES[saved.source]}; no weights were read", *found.notes)
    serve = serving_commands(saved)
    if saved.source == "adapter":
        serve = ()
        merge = command_line(["python", "recipes/merge.py", saved.name, "--output", "MERGED"])
        notes += (f"to serve it, merge the adapter: {merge}",)
    elif not serve:
        able = engines_with_plugin(saved.model, saved)
        where = f"only {' and '.join(able)} with rope_ext installed" if able else "no engine"
        notes += (f"{where} can run it; load it with rope_ext.from_pretrained({saved.name!r})",)
    return dataclasses.replace(found, notes=notes, serve=serve)


def call_text(method: Method) -> str:
    """Format a method with the options that differ from its defaults."""
    return f"{method.name}({', '.join(option_texts(method))})"


def _site(site: RotarySite, state: Patch | None) -> SiteDescription:
    """Describe one set of frequencies, under a patch (``state``) if it is in force there."""
    after = site.rope.inv_freq
    scaling = site.scaling
    status = "unchanged"
    if state is not None and site in state.scaled:
        after, scaling = state.frequencies_of(site)
        status = "positions changed" if state.method.replaces_attention else "extended"
        if state.method.kind == "rotation" and state.frequencies is None:
            status = "as trained"
        if state.method.is_dynamic:
            shown = state.method.target_length(site.rope)
            status = f"extended per sequence, shown at {shown} tokens"
    before = tuple(site.rope.inv_freq.tolist())
    after = tuple(after.tolist())
    name = site.name or "rotary"
    layers = site.layer_type or "all layers"
    return SiteDescription(
        name=name,
        layer_type=layers,
        base=site.rope.base,
        inv_freq_before=before,
        inv_freq_after=after,
        attention_scaling=scaling,
        status=status,
    )


def _unpatched_notes(decoder: nn.Module, sites: list[RotarySite]) -> Iterator[str]:
    """Yield what of a configuration or record is not in force, or may surprise."""
    yield from gguf_source.scaling_notes(decoder.config)
    yield from configuration_notes(sites)
    yield from unread(text_config(decoder))
    for site in sites:
        if site.scaled:
            yield f"the checkpoint scales {site.name or 'it'} by itself: rope_type {site.rope_type}"
    if rotates_windows_only(decoder, sites):
        yield f"sliding layers: {WINDOWS_ONLY}"
    record = record_of(text_config(decoder))
    if record is not None and record.plain:
        yield f"saved under {record.call()}, whose larger base is in force"
    elif record is not None:
        force = "only in part in force" if record.native else "not in force"
        yield (
            f"saved under a patch that is {force}, since plain transformers loaded it: "
            f"{record.call()}; rope_ext.from_pretrained reloads it as it was"
        )


@dataclass(frozen=True)
class PairDiagnosis:
    """One rotary pair before and after the patch."""

    wavelength_before: float  # tokens per full rotation; infinite if the pair does not rotate
    wavelength_after: float
    rotations: float  # within the trained length
    trained_angle: float  # radians from the first token to the end of the trained length
    angle_before: float  # the same, for the largest distance in use at the diagnosed length
    angle_after: float
    before: str  # "in distribution" or "out of distribution", unpatched
    after: str  # the same, with the patch


@dataclass(frozen=True)
class SiteDiagnosis:
    """One set of rotary frequencies at a length."""

    name: str  # path of its module
    layer_type: str  # the layers that use it
    base: float  # `rope_theta` of the checkpoint
    critical_dimension: int
    """Columns whose pairs make a full rotation within the trained length (arXiv 2310.05209:
    ``2 ceil(d / 2 log_base(L / 2 pi))``)."""
    distances_before: float
    """Number of distances in use, which sliding windows and position methods limit; the largest
    if pairs differ."""
    distances_after: float
    pairs: tuple[PairDiagnosis, ...]  # fastest first


@dataclass(frozen=True)
class Diagnosis(Printed):
    """Rotary pairs of a model at a given length; ``print`` it."""

    model: str  # class of the decoder
    method: str | None  # the active patch, with its options; None: unpatched
    length: int  # diagnosed length, tokens
    trained_length: int
    sites: tuple[SiteDiagnosis, ...]
    notes: tuple[str, ...]  # as in `rope_ext.describe`

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        how = "not patched" if self.method is None else f"patched with {self.method}"
        line = (
            f"{self.model} at {self.length} tokens: trained for {self.trained_length} tokens, {how}"
        )
        tables = (line for site in self.sites for line in self._table(site))
        return "\n".join([line, *tables, *(f"  {note}" for note in self.notes)])

    def _table(self, site: SiteDiagnosis) -> list[str]:
        pairs = site.pairs
        count = len(site.pairs)
        patched = self.method is not None
        states = [(pair.before, pair.after if patched else "") for pair in pairs]
        new = [sum(state[i].startswith("out") for state in states) for i in (0, 1)]
        title = f"    pair {'wavelength':>12} {'rotations':>9} {'trained angle':>14} {'angle':>10}"
        said = f"at {site.distances_before:g} distances"
        title = f"{title}  status"
        if patched:
            said += f" before the patch, {new[1]} at {site.distances_after:g} after"
            title += f"{'':>13} {'patched':>12} {'angle':>10}  status"
        lines = [
            f"  {site.name} [{site.layer_type}] {count} pairs, base {site.base:g}, critical "
            f"dimension {site.critical_dimension} of {2 * count}",
            f"    {new[0]} pairs out of distribution {said}",
            title,
        ]
        borders = {i + j for i in range(count - 1) for j in (0, 1) if states[i] != states[i + 1]}
        for i in sorted(borders | _spread(count)):
            pair = pairs[i]
            line = (
                f"    {i:>4} {_text(pair.wavelength_before):>12} {pair.rotations:>9.4g} "
                f"{pair.trained_angle:>14.5g} {pair.angle_before:>10.5g}  {pair.before:<19}"
            )
            if patched:
                line += f" {_text(pair.wavelength_after):>12} {pair.angle_after:>10.5g}"
            lines.append(f"{line}  {states[i][1]}".rstrip())
        return lines


def diagnose(model: nn.Module | PreTrainedConfig | str | Path, length: int) -> Diagnosis:
    """Show which rotary pairs reach untrained angles at ``length`` tokens.

    ``model`` is as for :func:`describe`, ``length`` counts tokens. Returns wavelength, rotations
    and angles of every pair, before and after the patch. Raises OptionError if the length is not a
    positive number, or the errors of :func:`describe`.
    """
    require_length("length", length)
    if not isinstance(model, nn.Module):
        model = read_saved(model).model
    state = current_patch(model)
    decoder = text_decoder(model) if state is None else state.decoder
    described = describe(model)
    method = None if state is None else call_text(state.method)
    sites = find_sites(decoder) if state is None else state.sites
    shown = tuple(
        _diagnosed(text_config(decoder), site=site, state=state, length=length) for site in sites
    )
    return Diagnosis(
        model=described.model,
        method=method,
        length=length,
        trained_length=described.length,
        sites=shown,
        notes=described.notes,
    )


def _diagnosed(config: Any, site: RotarySite, state: Patch | None, length: int) -> SiteDiagnosis:
    """Diagnose one set of frequencies at a ``length`` in tokens."""
    rope = site.rope
    frequencies = rope.inv_freq
    active = state if state is not None and site in state.scaled else None
    before = after = torch.tensor([length], dtype=torch.float64, device="cpu")
    if site.local:
        names = ("sliding_window", "attention_window_size", "attention_chunk_size")
        windows = (whole_number(getattr(config, name, None)) for name in names)
        before = after = before.clamp(max=next(filter(None, windows), rope.length))
    elif active is not None:
        after = active.method.span(rope, length)
    if active is not None:
        frequencies, _ = active.frequencies_of(site, length)
    by_pair = zip(
        rope.inv_freq.tolist(),
        frequencies.tolist(),
        rope.rotations.tolist(),
        (rope.length * rope.inv_freq).tolist(),
        (before * rope.inv_freq).tolist(),
        (after * frequencies).tolist(),
        strict=True,
    )
    pairs = tuple(
        PairDiagnosis(
            wavelength_before=_wavelength(trained),
            wavelength_after=_wavelength(patched),
            rotations=rotations,
            trained_angle=trained_angle,
            angle_before=angle_before,
            angle_after=angle_after,
            before=_status(rotations, trained_angle, angle_before),
            after=_status(rotations, trained_angle, angle_after),
        )
        for trained, patched, rotations, trained_angle, angle_before, angle_after in by_pair
    )
    return SiteDiagnosis(
        name=site.name or "rotary",
        layer_type=site.layer_type or "all layers",
        base=rope.base,
        critical_dimension=2 * int((rope.rotations >= 1).sum()),
        distances_before=float(before),
        distances_after=float(after.max()),
        pairs=pairs,
    )


def _status(rotations: float, trained: float, angle: float) -> str:
    # A pair that makes a full rotation within the trained length was trained on every angle;
    # for other pairs, larger angles are untrained (arXiv 2310.05209, section 3).
    return f"{'in' if rotations >= 1 or angle <= trained * _EQUAL else 'out of'} distribution"


def write_card(
    folder: str | Path, base: str | None = None, report: str | Path | None = None
) -> Path:
    """Write a model card to ``README.md`` in the folder; replaces an earlier card only if unedited.

    It has the method, lengths, how to load and serve the model, and results. ``base`` names the
    model that was extended; ``report``, the output folder of ``rope-ext compare`` or ``rope-ext
    eval``, has a ``table.md`` to include.
    """
    saved = read_saved(folder)
    state = current_patch(saved.model)
    found = describe(saved.model)
    if state is None:
        raise ExportError(
            f"{folder} holds no extended model to write a card about; save a patched one there"
        )
    name = " ".join(Path(folder).resolve().name.split()) or "model"
    lines = ["---", "library_name: transformers", "tags:", "- rope_ext", "- long-context"]
    if base and not Path(base).exists():  # a local path is useless to readers
        lines.append(f"base_model: {json.dumps(base)}")
    loader = "rope_ext"
    package = "import rope_ext"
    if saved.source == "rope_parameters" or state.record.plain:
        loader = "AutoModelForCausalLM"
        package = "from transformers import AutoModelForCausalLM"
    call = f"model = {loader}.from_pretrained({json.dumps(name)})"
    lines += [
        "---",
        "",
        f"# {in_markdown(name)}",
        "",
        f"{in_markdown(found.model)}, extended from {found.length} to {found.target_length} tokens "
        f"with `{call_text(state.record.method)}` ({state.method.paper}) "
        f"by rope_ext {__version__}.",
        "",
        "```python",
        package,
        "",
        call,
        "```",
    ]
    commands = serving_commands(dataclasses.replace(saved, name=name))
    lines += ["", "```bash", *commands, "```"] if commands else []
    if report is not None:
        try:
            table = (Path(report) / "table.md").read_text(encoding="utf-8").strip()
        except OSError:
            raise ExportError(
                f"{report} has no table.md; give the output folder of rope-ext compare or eval"
            ) from None
        lines += ["", "## Evaluation", "", inert_markdown(table)]
    path = Path(folder) / "README.md"
    text = "\n".join(lines) + "\n"
    if path.exists():
        before, mark, end = path.read_text(encoding="utf-8", errors="replace").rpartition(_MARK)
        if not mark or _end(before) != mark + end:
            raise ExportError(
                f"{path} exists and is not an unedited card of rope_ext; move it away to write one"
            )
    write_whole(path, f"{text}{_end(text)}")
    return path


def _end(text: str) -> str:
    return f"{_MARK}{hashlib.sha256(text.encode()).hexdigest()} -->\n"
