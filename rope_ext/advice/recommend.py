"""Which method for which length, and what a length does to every rotary pair.

Only published rules, each with its source, and what a calibration found. The rules come from other
models than yours: measure the advice with ``rope-ext compare``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from rope_ext.advice import calibrated as calibrations
from rope_ext.advice.calibrated import NAME, Calibrated
from rope_ext.advice.describe import describe, wavelength, wavelength_text
from rope_ext.errors import MeasureError, OptionError, RopeExtError, UnsupportedModelError
from rope_ext.methods import (
    ABF,
    PI,
    DualChunk,
    DynamicYaRN,
    Method,
    ReRoPE,
    Rope,
    SelfExtend,
    YaRN,
)
from rope_ext.methods.abf import bounded_length, smallest_base
from rope_ext.methods.rope import factor_to
from rope_ext.patching import Patch, current_patch, first_site, patched
from rope_ext.record import option_texts
from rope_ext.rotary.sites import RotarySite, find_sites, text_config, text_decoder
from rope_ext.saving.configuration import is_scaled

_INTERPOLATED = 4
"""Largest factor at which YaRN is published without fine-tuning, arXiv 2402.13753."""

_LARGEST_GROUP = 64
"""Of the groups that the authors of Self-Extend call reasonable, from their repository."""

_TRAINED_FACTOR = 32
"""Largest factor at which YaRN is published with fine-tuning, arXiv 2309.00071."""

_EQUAL = 1 + 1e-9  # theta / s * s * length is not theta * length to the last bit


@dataclass(frozen=True)
class Recommendation:
    """What to patch a model with; ``print`` it.

    Args:
        model: class of the decoder.
        method: with every option that matters filled in.
        factor: ``target_length`` through ``trained_length``, rounded up to hundredths.
        target_length: tokens.
        trained_length: tokens.
        finetune: whether the model will be fine-tuned.
        compose: whether ``patch`` needs ``compose=True``: the checkpoint is scaled already.
        reasons: sentences, each with its source.
        alternatives: further methods that the model accepts, and when to choose each.
    """

    model: str
    method: Method
    factor: float
    target_length: int
    trained_length: int
    finetune: bool
    compose: bool
    reasons: tuple[str, ...]
    alternatives: tuple[tuple[Method, str], ...]

    @property
    def call(self) -> str:
        """The call that makes the patch."""
        return self._call(self.method)

    def _call(self, method: Method) -> str:
        composes = self.compose and method.kind == "frequency"
        words = ["model", repr(method.name), *option_texts(method)]
        return f"rope_ext.patch({', '.join(words + ['compose=True'] * composes)})"

    def __str__(self) -> str:
        tuned = "with" if self.finetune else "without"
        lines = [
            f"{self.model}: {self.trained_length} -> {self.target_length} tokens, factor "
            f"{self.factor:g}, {tuned} fine-tuning",
            f"  {self.call}",
            *(f"  - {reason}" for reason in self.reasons),
        ]
        for method, when in self.alternatives:
            lines += [f"  or {self._call(method)}", f"  - {when}"]
        return "\n".join(lines)


@dataclass(frozen=True)
class PairDiagnosis:
    """One rotary pair before and after the patch.

    Args:
        wavelength_before: tokens for one turn; infinite for a pair at rest.
        wavelength_after: the same, under the patch.
        rotations: turns within the trained length.
        trained_angle: radians from the first token to the end of the trained length.
        angle_before: the same for the largest distance used at the length diagnosed.
        angle_after: the same, under the patch.
    """

    wavelength_before: float
    wavelength_after: float
    rotations: float
    trained_angle: float
    angle_before: float
    angle_after: float

    def _status(self, angle: float) -> str:
        seen = self.rotations >= 1 or angle <= self.trained_angle * _EQUAL
        return "in distribution" if seen else "out of distribution"

    @property
    def before(self) -> str:
        """``"in distribution"`` or ``"out of distribution"``, unpatched.

        A pair that makes a full turn within the trained length has met every angle there is; of
        any other, angles beyond the trained one are new (arXiv 2310.05209, section 3).
        """
        return self._status(self.angle_before)

    @property
    def after(self) -> str:
        """As :attr:`before`, under the patch."""
        return self._status(self.angle_after)


@dataclass(frozen=True)
class SiteDiagnosis:
    """One set of rotary frequencies at a length.

    Args:
        name: path of its module.
        layer_type: the layers that use it.
        base: ``rope_theta`` of the checkpoint.
        critical_dimension: columns of the pairs that make a full turn within the trained length
            (arXiv 2310.05209: ``2 ceil(d / 2 log_base(L / 2 pi))``).
        distances_before: how many distances are in use; a sliding window lets no others happen.
        distances_after: the same, under the patch; a position method lets no others happen. Of the
            pair with the most, where every pair uses its own.
        pairs: fastest first.
    """

    name: str
    layer_type: str
    base: float
    critical_dimension: int
    distances_before: float
    distances_after: float
    pairs: tuple[PairDiagnosis, ...]


@dataclass(frozen=True)
class Diagnosis:
    """What a length does to every rotary pair; ``print`` it.

    Args:
        model: class of the decoder.
        method: the patch in force, with its options; None: unpatched.
        length: diagnosed, tokens.
        trained_length: tokens.
        sites: one for each set of rotary frequencies.
        notes: what else to know, as :func:`rope_ext.describe` has it.
    """

    model: str
    method: str | None
    length: int
    trained_length: int
    sites: tuple[SiteDiagnosis, ...]
    notes: tuple[str, ...]

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
        states = [(pair.before, pair.after)[: 1 + patched] for pair in pairs]
        news = [
            sum(one.startswith("out") for one in column) for column in zip(*states, strict=True)
        ]
        lines = [
            f"  {site.name} [{site.layer_type}] {len(pairs)} pairs, base {site.base:g}, critical "
            f"dimension {site.critical_dimension} of {2 * len(pairs)}",
            f"    {news[0]} pairs out of distribution at {site.distances_before:g} distances",
            f"    pair {'wavelength':>12} {'turns':>8} {'trained angle':>14} {'angle':>10}  status",
        ]
        if patched:
            lines[1] += f" before the patch, {news[1]} at {site.distances_after:g} after"
            lines[2] += f"{'':>13} {'patched':>12} {'angle':>10}  status"
        borders = {
            i + j for i in range(len(pairs) - 1) for j in (0, 1) if states[i] != states[i + 1]
        }
        for i in sorted(borders | {round(k * (len(pairs) - 1) / 4) for k in range(5)}):
            pair = pairs[i]
            line = (
                f"    {i:>4} {wavelength_text(pair.wavelength_before):>12} {pair.rotations:>8.4g} "
                f"{pair.trained_angle:>14.5g} {pair.angle_before:>10.5g}  {pair.before:<19}"
            )
            if patched:
                line += f" {wavelength_text(pair.wavelength_after):>12} {pair.angle_after:>10.5g}"
                line += f"  {pair.after}"
            lines.append(line.rstrip())
        return lines


def recommend(
    model_or_config: nn.Module | PreTrainedConfig | str | Path,
    target_length: int,
    finetune: bool = False,
    calibration: Any = None,
) -> Recommendation:
    """The published choice for a model and a length, or what a calibration found.

    Without fine-tuning: ``self_extend`` with ``temperature="log_n"``, which holds at 4 and 8 times
    the length of both checkpoints in the box, while its groups have at most 64 tokens; then
    ``dual_chunk``. With it: ``yarn``. Every method is tried on the model, which stays as it was;
    what it refuses is left out, and where it refuses position methods, ``dynamic_yarn`` comes first
    (``yarn`` on top of a checkpoint that is scaled already).

    Args:
        model_or_config: a loaded model that is not patched, or its configuration, folder or Hub
            id; no weights are read for those, so that position methods cannot be tried.
        target_length: tokens.
        finetune: whether the model will be fine-tuned for it.
        calibration: what :func:`rope_ext.calibrate` found for this model, or its file or folder:
            that method comes first. None takes the ``calibration.json`` in the model's folder if
            there is one that fits. Fine-tuning needs none.

    Returns:
        Method, factor, the call, the reasons with their sources, and alternatives.

    Raises:
        OptionError: the target is within the trained length, or the calibration is of another
            model or length.
        MeasureError: there is no such calibration.
        AlreadyPatchedError: the model is patched.
        NoRopeError, UnsupportedModelError, AlreadyScaledError: as :func:`rope_ext.patch`, where
            it would accept none of the methods.
    """
    model, notes = _built(model_or_config)
    decoder = text_decoder(model)
    require_length("target_length", target_length)
    calibrated, given = _calibrated(model_or_config, calibration)
    site = first_site(model)
    trained = site.rope.length
    if target_length <= trained:
        raise OptionError(
            f"target_length={target_length} is within the {trained} tokens that "
            f"{type(decoder).__name__} was trained on, so there is nothing to extend; use it "
            f"unpatched, or give a target above {trained}"
        )
    factor = factor_to(target_length, trained)
    there = is_scaled(decoder, site)
    reasons, accepted, refusals = [], [], []
    candidates = [*_candidates(site.rope, target_length, factor, finetune, there is not None)]
    if calibrated is not None and not finetune:
        misfit = _misfit(calibrated, type(decoder).__name__, trained, target_length)
        if misfit is None:
            candidates.insert(
                0, (calibrated.method, f"Calibrated on a text. {calibrated.sentence}")
            )
        elif given:
            raise OptionError(
                f"this calibration is {misfit}; leave calibration out, or calibrate for this one"
            )
    for method, why in candidates:
        refusal = _refusal(model, method, there is not None)
        if refusal is None or _unproven(model, method, refusal):
            accepted.append((method, why, refusal))
        else:
            refusals.append(refusal)
            if not accepted:
                reasons.append(f"{method.name} is left out: {refusal}")
    if not accepted:
        raise refusals[0]
    (method, why, unproven), *others = accepted
    reasons = [why, *_more(site.rope, method, target_length, factor, finetune), *reasons, *notes]
    if unproven:
        reasons.append(
            "A configuration alone does not show whether this family accepts position methods: "
            "patch tells, once the weights are loaded (docs/FAMILIES.md)."
        )
    if not finetune and method is not getattr(calibrated, "method", None):
        reasons.append(
            f"How sharp attention must be, and how wide windows, belongs to the model: `rope-ext "
            f"calibrate --model MODEL --length {target_length} --methods {method.name} --output "
            f"FOLDER` finds it on a text, and calibration=FOLDER puts it here."
        )
    if there is not None:
        reasons.append(
            f"The checkpoint is scaled already ({there}): its {trained} tokens are taken for the "
            f"trained ones, and what is added goes on top."
        )
    return Recommendation(
        model=type(decoder).__name__,
        method=method,
        factor=factor,
        target_length=target_length,
        trained_length=trained,
        finetune=finetune,
        compose=there is not None,
        reasons=tuple(reasons),
        alternatives=tuple((other, when) for other, when, _ in others),
    )


def _calibrated(
    model: nn.Module | PreTrainedConfig | str | Path, given: Any
) -> tuple[Calibrated | None, bool]:
    """The calibration that was given, or lies in the model's folder; whether it was given."""
    if isinstance(given, (str, Path)):
        return _read(given), True
    if hasattr(given, "to_json"):
        return calibrations.from_json(given.to_json()), True
    if given is not None:
        raise OptionError(
            f"calibration={given!r} is not valid; give what rope_ext.calibrate returned, or its "
            f"file or folder"
        )
    if isinstance(model, (str, Path)) and (Path(model) / f"{NAME}.json").is_file():
        try:
            return _read(model), False
        except MeasureError:  # it may be somebody else's
            return None, False
    return None, False


def _read(path: str | Path) -> Calibrated:
    text = calibrations.read(path)
    try:
        return calibrations.from_json(text)
    except MeasureError as error:
        raise MeasureError(f"{path}: {error}") from None


def _misfit(found: Calibrated, model: str, trained: int, target: int) -> str | None:
    """Why a calibration is not for this model and length."""
    if (found.model, found.trained_length) != (model, trained):
        return (
            f"of {found.model} with {found.trained_length} trained tokens, and this is {model} "
            f"with {trained}"
        )
    if found.target_length < target:
        return f"for {found.target_length} tokens, and target_length={target}"
    return None


def model_of(given: nn.Module | PreTrainedConfig | str | Path) -> nn.Module:
    """The model, or one without weights; that of a configuration saved under a patch has none."""
    return _built(given)[0]


def _built(
    given: nn.Module | PreTrainedConfig | str | Path,
) -> tuple[nn.Module, tuple[str, ...]]:
    """As ``model_of``, and a note where a patch is left out."""
    from rope_ext.checkpoints import load_config, saved_under

    if isinstance(given, (str, Path)):
        given = load_config(str(given))
    if not isinstance(given, PreTrainedConfig):
        return given, ()
    config, notes = copy.deepcopy(given), ()
    record = saved_under(config)
    if record is not None:  # nothing can be built of it as it is
        record.restore(config)
        notes = (
            f"It was saved under {record.call()}; this is about the model without that. For the "
            f"other, load it with rope_ext.from_pretrained and pass the model.",
        )
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config), notes
    except Exception as error:
        raise UnsupportedModelError(
            f"no causal language model can be built of {type(given).__name__} ({error}); pass the "
            f"loaded model"
        ) from error


def require_length(name: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise OptionError(f"{name}={value!r} is not valid; it must be a positive number of tokens")


def _candidates(
    rope: Rope, target: int, factor: float, finetune: bool, scaled: bool
) -> Iterator[tuple[Method, str]]:
    """Methods, the best first, and the reason to choose each."""
    yarn = YaRN(factor=factor)
    if finetune:
        yield (
            yarn,
            "Fine-tuned, YaRN took Llama-2-7B to 32 times its 4096 tokens: perplexity 2.37 on "
            "Proof-pile, 99.4 % of passkeys at 131072 (arXiv 2309.00071, section 4).",
        )
        yield (
            ABF(factor=factor),
            "For long continued training: nothing but a larger base (arXiv 2309.16039), here the "
            "smallest that arXiv 2405.14591 finds enough.",
        )
        yield (
            PI(factor=factor),
            "The simplest; published after 1000 steps of fine-tuning (arXiv 2306.15595).",
        )
        return
    steady = [
        (
            yarn,
            "The same frequencies at every length, which plain transformers loads; costs something "
            "on short prompts (arXiv 2309.00071).",
        )
    ]
    if not scaled:  # a method that adapts cannot go on top of another
        steady.insert(
            0,
            (
                DynamicYaRN(factor=factor),
                "Every sequence is scaled by as much as it needs: short prompts stay exactly as "
                "they were (arXiv 2309.00071, section 3.3).",
            ),
        )
    far = _position_methods(rope, target, factor)
    yield from [*far, *steady] if factor > _INTERPOLATED else [far[0], *steady, *far[1:]]


def _position_methods(rope: Rope, target: int, factor: float) -> list[tuple[Method, str]]:
    extend = SelfExtend(factor=factor, temperature="log_n").resolved(rope)
    chunk = DualChunk(factor=factor).resolved(rope)
    rerope = ReRoPE(factor=factor).resolved(rope)
    reach = extend.window + (target - extend.window) / extend.group
    found: list[tuple[Method, str]] = [
        (
            extend,
            f"Neighbours up to W={extend.window} tokens keep their distances, farther ones share "
            f"them in groups of G={extend.group}, the fewest with W + (N - W) / G = {reach:.5g} < "
            f"2/3 L = {2 * rope.length / 3:.5g} (arXiv 2401.01325; its authors "
            f"advise 1/2 to 2/3). log_n makes queries sharper as tokens become more, and changes "
            f"nothing within the trained length (Su 2023, kexue.fm/archives/8823): with it, both "
            f"checkpoints in the box keep perplexity and passkeys at 8 times their length "
            f"(docs/temperature.md). It decodes slower than the unpatched model, and no other "
            f"engine runs it.",
        ),
        (
            chunk,
            f"Positions start again in chunks and never pass {chunk.chunk}: chunk 3/4 L, local "
            f"window L/8, as in the authors' code. Takes Llama-2 70B from 4096 to more than 100000 "
            f"tokens (arXiv 2402.17463).",
        ),
    ]
    if extend.group > _LARGEST_GROUP:
        found.reverse()
    return [
        *found,
        (
            rerope,
            f"Distances stop growing at a quarter of L, {rerope.window} tokens: far tokens are "
            f"found but not ordered (Su 2023, kexue.fm/archives/9708).",
        ),
    ]


def _refusal(model: nn.Module, method: Method, scaled: bool) -> RopeExtError | None:
    """Why ``model`` does not accept ``method``."""
    composed = scaled and method.kind == "frequency"
    try:
        with patched(model, method, compose=composed):
            return None
    except RopeExtError as error:
        return error


def _unproven(model: nn.Module, method: Method, refusal: RopeExtError) -> bool:
    """Whether nothing but missing weights stood against a method."""
    meta = any(parameter.is_meta for parameter in model.parameters())
    return meta and method.attends and isinstance(refusal, UnsupportedModelError)


def _more(rope: Rope, method: Method, target: int, factor: float, finetune: bool) -> Iterator[str]:
    """Further reasons for ``method``, and warnings."""
    positions = method.attends
    if factor > _INTERPOLATED and not finetune:
        cure = "so distances are kept within the trained ones" if positions else "so fine-tune it"
        yield (
            f"Factor {factor:g} is beyond the 2 and 4 at which YaRN is published without "
            f"fine-tuning (arXiv 2402.13753), {cure}."
        )
    if isinstance(method, DualChunk):
        yield (
            f"Self-Extend would need groups of more than {_LARGEST_GROUP} tokens, beyond the 2 to "
            f"64 that its authors call reasonable; fine-tune if you can."
        )
    if positions:
        return
    turns = rope.rotations
    whole = int((turns >= 1).sum())
    if isinstance(method, (YaRN, DynamicYaRN)):
        kept = YaRN(factor=factor).kept(rope)
        yield (
            f"Of {len(turns)} pairs, {int((kept == 1).sum())} keep their frequency, about those "
            f"with 32 turns within {rope.length} tokens; {int((kept == 0).sum())} are divided by "
            f"{factor:g}, about those with less than one (arXiv 2309.00071, section 3.2)."
        )
    if whole < len(turns):
        yield (
            f"Unpatched, {len(turns) - whole} pairs meet new angles beyond {rope.length} tokens: "
            f"the critical dimension is {2 * whole} of {rope.dim} (arXiv 2310.05209)."
        )
    if finetune:
        yield (
            "Recipe: 400 steps of 64 rows, learning rate 2e-5, warm-up 20 steps (arXiv 2309.00071, "
            "section 4.1; recipes/llama2_7b_yarn_128k.yaml); with PoSE on short rows, about 1000 "
            "steps (arXiv 2309.10400)."
        )
        if factor > _TRAINED_FACTOR:
            yield f"Factor {factor:g} is beyond the published {_TRAINED_FACTOR}: go in two steps."
    elif factor <= _INTERPOLATED:
        yield (
            "Without fine-tuning Llama-2-7B has a perplexity of 3.49 and 3.25 at 2 and 4 times its "
            "length with YaRN, 3.50 and 3.87 with dynamic NTK, 3.65 and 4.93 with PI "
            "(arXiv 2402.13753)."
        )
    bound = smallest_base(target)
    if rope.base < bound:
        yield (
            f"Warning: for {target} tokens the base should be at least {bound:.3g}; {rope.base:g} "
            f"is enough for {bounded_length(rope.base):.0f}. Below the bound text stays fluent and "
            f"retrieval fails: measure passkeys, not perplexity alone (arXiv 2405.14591)."
        )


def diagnose(model: nn.Module | PreTrainedConfig | str | Path, length: int) -> Diagnosis:
    """Which rotary pairs meet angles at ``length`` tokens that they were not trained on.

    Args:
        model: a loaded model, patched or not, or a configuration, folder or Hub id.
        length: tokens; below the trained length nothing is out of distribution.

    Returns:
        Wavelength, turns and angles of every pair, before and after the patch.

    Raises:
        OptionError: the length is no positive number.
        NoRopeError, UnsupportedModelError, RecordError: as :func:`rope_ext.patch`.
    """
    model, notes = _built(model)
    decoder = text_decoder(model)
    require_length("length", length)
    patch, described = current_patch(model), describe(model)
    sites = find_sites(decoder) if patch is None else patch.sites
    return Diagnosis(
        model=described.model,
        method=None if patch is None else _text(patch.method),
        length=length,
        trained_length=described.length,
        sites=tuple(_site(decoder, site, patch, length) for site in sites),
        notes=(*described.notes, *notes),
    )


def _site(decoder: nn.Module, site: RotarySite, patch: Patch | None, length: int) -> SiteDiagnosis:
    rope, inside = site.rope, patch is not None and site in patch.scaled
    before, after = length, None
    if site.local:
        before = min(length, _window(text_config(decoder)) or rope.length)
    elif inside:
        after = patch.method.span(rope, length)
    before = torch.tensor([before], dtype=torch.float64, device="cpu")
    after = before if after is None else after
    frequencies = rope.inv_freq
    if inside and patch.frequencies is not None:
        frequencies = patch.frequencies.frequencies(rope, length)
    columns = (
        [wavelength(f) for f in rope.inv_freq.tolist()],
        [wavelength(f) for f in frequencies.tolist()],
        rope.rotations.tolist(),
        (rope.length * rope.inv_freq).tolist(),
        (before * rope.inv_freq).tolist(),
        (after * frequencies).tolist(),
    )
    return SiteDiagnosis(
        name=site.name or "rotary",
        layer_type=site.layer_type or "all layers",
        base=rope.base,
        critical_dimension=2 * int((rope.rotations >= 1).sum()),
        distances_before=float(before),
        distances_after=float(after.max()),
        pairs=tuple(PairDiagnosis(*values) for values in zip(*columns, strict=True)),
    )


def _text(method: Method) -> str:
    return f"{method.name}({', '.join(option_texts(method))})"


def _window(config: Any) -> int | None:
    names = ("sliding_window", "attention_window_size", "attention_chunk_size")
    return next((w for w in (getattr(config, name, None) for name in names) if w), None)
