"""Recommends a method for a model and a target length.

``vendors.json`` lists how model vendors extend their models (2026), and methods with published
results, the best ones first.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedConfig

from rope_ext.advice.describe import call_text, require_length
from rope_ext.advice.evidence import measured_models, ranked, sentence, why
from rope_ext.advice.recommendation import Recommendation
from rope_ext.config.record import method_from_json
from rope_ext.config.settings import METHODS
from rope_ext.config.writing import is_scaled
from rope_ext.engines import check_engine, engines_for, export, serving_commands
from rope_ext.errors import (
    AlreadyScaledError,
    MeasureError,
    OptionError,
    RopeExtError,
    UnsupportedModelError,
)
from rope_ext.methods import Method, Rope, YaRN, all_methods, build_method
from rope_ext.methods.abf import smallest_base
from rope_ext.methods.checked import not_none
from rope_ext.methods.rope import factor_to
from rope_ext.patching import configuration_notes, current_patch, first_site, patched
from rope_ext.position.direction import generates_from
from rope_ext.position.layers import WINDOWS_ONLY, rotates_windows_only, survey
from rope_ext.rotary.sites import find_sites, text_config, text_decoder, unwrap
from rope_ext.saving import gguf_source
from rope_ext.saving.checkpoints import Purpose, is_embedder, purpose
from rope_ext.saving.folder import model_of, read_saved

# name and format of the file that rope_eval writes
NAME = "calibration"
FORMAT = 2


_VENDORS = json.loads(Path(__file__).with_name("vendors.json").read_text(encoding="utf-8"))
_RECIPES = [SimpleNamespace(**one) for one in _VENDORS["recipes"]]
"""YaRN for unscaled checkpoints of a family and of the ``configured`` lengths, up to ``factor`` on
``trained`` tokens, their ``original_max_position_embeddings``."""
_INTERPOLATED = 4
"""Largest factor with published results for YaRN without fine-tuning, arXiv 2402.13753. We measured
no method at a larger one (docs/evidence.md)."""
_UNTRAINED = 32
"""Largest factor to recommend without fine-tuning: published for position methods are 4096 to
100,000 tokens and more (arXiv 2402.17463)."""
_TRAINED_FACTOR = 32
"""Largest factor with published results for YaRN with fine-tuning, arXiv 2309.00071."""
_LARGEST_GROUP = 64
"""Largest group size that the authors of Self-Extend recommend, from their repository."""
_RAISED = (
    "the checkpoint's own scaling with a larger factor: after training under it, 11.8 % less "
    "perplexity than YaRN on top of YaRN (docs/using.md)."
)
_RAISED_DYNAMIC = (
    "the checkpoint's own scaling with a larger factor: no method goes on top of it, since its "
    "frequencies change with the sequence."
)


@dataclass(frozen=True)
class _Case:
    """The model and requirements to recommend a method for."""

    model: nn.Module
    purpose: Purpose
    rope: Rope  # the trained embedding
    target: int
    finetune: bool
    engine: str | None  # the engine that has to run it
    scaled: str | None  # the checkpoint's own RoPE scaling, as text
    unscaled: int | None  # the length that it is scaled from, tokens; None: not scaled, or unknown
    trained_scaled: bool  # whether it is known to be trained under its scaling
    recipe: Any  # the vendor's, or None
    length: int | None  # trained length to pass to `patch`; None: that of the configuration
    raised: Method | None  # the checkpoint's own scaling with a larger factor
    notes: tuple[str, ...]  # what the configuration says that is not in force

    @property
    def factor(self) -> int | float:
        return factor_to(self.target, self.rope.length)

    @cached_property
    def measured(self) -> Sequence[Mapping[str, Any]]:
        """The measured models to judge by."""
        config = text_config(text_decoder(self.model))
        return measured_models(config, self.rope.length, self.embeds)

    @cached_property
    def embeds(self) -> bool:
        """Whether the model is judged by embedders: it embeds texts, or reads both directions."""
        return self.purpose == "embeddings" or is_embedder(unwrap(self.model).config)

    @cached_property
    def looks_ahead(self) -> bool:
        """Whether a layer that rotates sees later keys, as a run without weights shows."""
        decoder = text_decoder(self.model)
        layers = survey(decoder, find_sites(decoder)) or []
        return any(layer.rotates and layer.ahead for layer in layers)

    def compose(self, method: Method) -> Any:
        return "raise" if method == self.raised else self.scaled is not None


class _Trial(NamedTuple):
    """A candidate, the reason to choose it, and whether the model and the engines support it."""

    method: Method
    why: str
    engines: tuple[str, ...] = ()
    refusal: RopeExtError | None = None


def recommend(
    model_or_config: nn.Module | PreTrainedConfig | str | Path,
    target_length: int,
    finetune: bool = False,
    calibration: Any = None,
    engine: str | None = None,
    original_max_position_embeddings: int | None = None,
) -> Recommendation:
    """Recommend a method for a model and a length, with reasons and their sources.

    The model vendor's recipe comes first, if there is one, then the result of a calibration. The
    others are ranked by measurements at this factor, of the model itself if we measured it, or else
    of two pretrained models (docs/evidence.md); with fine-tuning, ``yarn`` comes first. Every
    method is tried on the model, which stays unchanged; methods that it does not support are left
    out.

    Args:
        model_or_config: a loaded model that is not patched, or its configuration, directory or
            Hub ID; no weights are read for those, so that position methods cannot be tried.
        target_length: tokens.
        finetune: whether the model will be fine-tuned for this length.
        calibration: result of :func:`rope_ext.calibrate` for this model, or its file or directory.
            None uses the ``calibration.json`` in the model's directory if it matches. Not needed
            for fine-tuning.
        engine: an engine of :func:`rope_ext.export`: recommend only methods that it can run. None
            returns two methods: ``method`` for this process and ``serve`` for other engines.
        original_max_position_embeddings: trained length in tokens, if the configuration has
            another one, as for :func:`rope_ext.patch`. A vendor's recipe is left out then.

    Returns a recommendation to print, or to pass to :func:`rope_ext.patch`.

    Raises:
        OptionError: the target is within the trained length, too far for any method without
            fine-tuning, or the calibration does not fit.
        ExportError: there is no such engine, or it runs none of the methods on this model.
        MeasureError: there is no such calibration, or the directory has no configuration.
        AlreadyPatchedError: the model is patched.
        NoRopeError, UnsupportedModelError, AlreadyScaledError: ``patch`` accepts no method.
    """
    if engine is not None:
        check_engine(engine)  # report mistakes before contacting the Hub
    require_length("target_length", target_length)
    if original_max_position_embeddings is not None:
        require_length("original_max_position_embeddings", original_max_position_embeddings)
    model, notes = _without_patch(model_or_config, target_length)
    found = calibration_for(model_or_config, calibration)
    place = model if isinstance(model_or_config, PreTrainedConfig) else model_or_config
    use = purpose(unwrap(model).config, place)
    case = _case(
        model,
        use,
        target=target_length,
        finetune=finetune,
        engine=engine,
        length=original_max_position_embeddings,
    )
    decoder = text_decoder(model)
    if rotates_windows_only(decoder, find_sites(decoder)):
        raise UnsupportedModelError(f"{type(decoder).__name__}: {WINDOWS_ONLY}")
    name = type(text_decoder(model)).__name__
    trained = case.rope.length
    candidates = [*_candidates(case)]
    calibrated = None
    if found is not None and not finetune:
        calibrated = _calibrated(case, name, found, asked=calibration is not None)
    if calibrated is None:
        _require_carried(case, name)
    else:
        alone = _compares_nothing(calibrated[0], found)
        # Whoever names a calibration has chosen its method; one beside the model may be forgotten.
        if calibration is not None or not alone:
            # After a vendor's recipe, which comes first.
            candidates.insert(int(case.recipe is not None), calibrated)
        if alone:
            notes += (
                f"the calibration keeps the default options of {calibrated[0].name} and tried no "
                f"other method, so it does not say that this one is best.",
            )
    # All are tried on the model itself, so that a recommendation cannot be refused later.
    trials = [_tried(case, method, why) for method, why in candidates]
    accepted = [trial for trial in trials if _is_accepted(case, trial)]
    if not accepted:
        raise not_none(trials[0].refusal)
    first, *others = accepted
    others += [trial for trial in _others(case, candidates) if _is_accepted(case, trial)]
    before = trials[: trials.index(first)]
    refused = [f"{t.method.name} is left out: {t.refusal}" for t in before if t.refusal]
    recommended = Recommendation(
        model=name,
        method=first.method,
        factor=case.factor,
        target_length=target_length,
        trained_length=trained,
        finetune=finetune,
        engine=engine,
        compose=case.compose(first.method),
        original_max_position_embeddings=case.length,
        reasons=(
            *first.why.splitlines(),
            *_warnings(case, first),
            *_next_steps(case, first, found),
            *refused,
            *case.notes,
            *notes,
            *_own_scaling(case, first),
        ),
        alternatives=tuple((t.method, t.why.replace("\n", " ")) for t in others),
        unscaled_length=case.unscaled,
        raised=case.raised,
        calibrated=calibrated is not None and first.method is calibrated[0],
    )
    for trial in accepted:
        if engine is None and trial.engines:
            return replace(
                recommended,
                serve=trial.method,
                engines=trial.engines,
                serve_reasons=(*trial.why.splitlines(), *_warnings(case, trial)),
            )
    return recommended


def _calibrated(case: _Case, name: str, found: Any, asked: bool) -> tuple[Method, str] | None:
    """Return the method that a calibration found, with the reason; None if it does not fit.

    Raises OptionError instead where the calibration was ``asked`` for, not just lies beside the
    model.
    """
    trained = case.rope.length
    same = (found.model, found.trained_length) == (name, trained)
    if same and found.target_length >= case.target:
        return found.method, f"calibrated on a text: {found.sentence}"
    if asked:
        raise OptionError(
            f"leave calibration out: it is of {found.model}, {found.trained_length} -> "
            f"{found.target_length} tokens, not of {name}, {trained} -> {case.target}"
        )
    return None


def _compares_nothing(method: Method, found: Any) -> bool:
    """Whether a calibration tried this method only and changed none of its options."""
    with suppress(OptionError):  # options without a default
        default = build_method(method.name, factor=method.factor)
        return len(getattr(found, "choices", ())) == 1 and method == default
    return False


def _without_patch(
    given: nn.Module | PreTrainedConfig | str | Path, target: int
) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the model, or one without weights, and a note if it was saved under a patch."""
    if isinstance(given, nn.Module):
        text_decoder(given)  # raises NoRopeError without a configuration
        return given, gguf_source.scaling_notes(unwrap(given).config)
    saved = read_saved(given)
    state = current_patch(saved.model)
    if state is None:
        return saved.model, gguf_source.scaling_notes(saved.config)
    own = saved.source == "rope_parameters"  # plain transformers loads it
    beyond = target > state.target_length
    if beyond and not (own and state.method.is_dynamic):
        note = (
            f"It was saved under {state.record.call()}; this is about the model without that. For "
            f"the other, load it with rope_ext.from_pretrained and pass the model."
        )
        return model_of(given), () if own else (note,)
    commands = serving_commands(saved)
    loader = "AutoModelForCausalLM" if own else "rope_ext"
    next_step = f"serve it: {commands[0]}" if commands else f"load it with {loader}.from_pretrained"
    name = saved.name or type(state.decoder).__name__
    if beyond:
        raise AlreadyScaledError(
            f"{name} reaches {state.target_length} tokens by its own two tables (longrope), which "
            f"nothing stretches; up to there, {next_step}; for {target} tokens choose another "
            f"checkpoint, or search for a table with rope_ext.search and fine-tune"
        )
    raise OptionError(
        f"target_length={target} is within the {state.target_length} tokens that {name} reaches by "
        f"{call_text(state.method)}; {next_step}, or give a longer target"
    )


def _case(
    model: nn.Module,
    use: Purpose,
    target: int,
    finetune: bool,
    engine: str | None,
    length: int | None,
) -> _Case:
    """Read what a recommendation depends on; raises OptionError if ``target`` tokens need none."""
    decoder = text_decoder(model)
    site = first_site(model, length=length)
    configured = site.rope.length
    kind = text_config(decoder).model_type
    scaled = is_scaled(decoder, site)
    recipe = None
    raised = None
    if target <= configured:
        how = "was trained on" if scaled is None else f"has by its own scaling ({scaled})"
        raise OptionError(
            f"target_length={target} is within the {configured} tokens that "
            f"{type(decoder).__name__} {how}; use it unpatched, or give a longer target"
        )
    unscaled = None
    shipped = False
    if scaled is not None:
        unscaled = site.settings.length
        for one in _VENDORS["shipped"]:
            if (one["model_type"], one["rope_type"]) == (kind, site.rope_type):
                scaled += f", as {one['models']}: {one['settings']}; {one['source']}"
                shipped = True
        # Other types were not measured; but nothing goes on top of the dynamic one.
        if site.rope_type in ("yarn", "dynamic"):
            factor = factor_to(target, not_none(site.settings.length))
            raised = build_method(METHODS[site.rope_type], factor=factor)
    elif not finetune and length is None and use == "text":  # published for chat models
        own = (r for r in _RECIPES if kind in r.model_types and configured in r.configured)
        recipe = next((r for r in own if target <= r.factor * r.trained), None)
    if recipe is not None and recipe.trained != configured:
        length = recipe.trained
        site = first_site(model, length=length)
    return _Case(
        model=model,
        purpose=use,
        rope=site.rope,
        target=target,
        finetune=finetune,
        engine=engine,
        scaled=scaled,
        unscaled=unscaled if unscaled != site.rope.length else None,
        trained_scaled=shipped,
        recipe=recipe,
        length=length,
        raised=raised,
        notes=configuration_notes([site]),
    )


def _candidates(case: _Case) -> Iterator[tuple[Method, str]]:
    """Yield methods, the best first, and the reason to choose each."""
    factor = case.factor
    recipe = case.recipe
    elsewhere = case.finetune or case.engine is not None
    reason = _RAISED if isinstance(case.raised, YaRN) else _RAISED_DYNAMIC
    raised = [] if case.raised is None else [(case.raised, reason)]
    if elsewhere:
        yield from raised
    if recipe is not None:  # never for fine-tuning
        yield (
            YaRN(factor=factor),
            f"the vendor of {recipe.models} publishes YaRN up to factor {recipe.factor:g} on "
            f"{recipe.trained} tokens ({recipe.source}). {recipe.note}".rstrip(),
        )
    if elsewhere:
        yield from _published(case)
        return
    names = [name for name in ranked(factor, case.measured) if recipe is None or name != "yarn"]
    methods = [build_method(name, factor=factor).resolved(case.rope) for name in names]
    # sorted() is stable: only methods with too large a group move to the end.
    for method in sorted(methods, key=lambda m: getattr(m, "group", 0) > _LARGEST_GROUP):
        if not method.replaces_attention:
            yield from raised
            raised = []
        if case.scaled is None or not method.is_dynamic:  # dynamic methods cannot be composed
            yield method, why(method, factor, case.measured)


def _published(case: _Case) -> Iterator[tuple[Method, str]]:
    """Yield the methods with published results for fine-tuning or serving, and these results."""
    published = _VENDORS["published"]["finetuned" if case.finetune else "served"]
    for name, reason in published.items():
        if case.recipe is None or name != "yarn":  # else the recipe is YaRN already
            measured = "" if case.finetune else f"\n{_measured(case, name)}"
            yield build_method(name, factor=case.factor), reason + measured


def _measured(case: _Case, name: str) -> str:
    return f"{sentence(name, case.factor, case.measured)} (docs/evidence.md)."


def _others(case: _Case, candidates: Sequence[tuple[Method, str]]) -> Iterator[_Trial]:
    """Try all methods that are not among the candidates, with their default options."""
    named = {method.name for method, _ in candidates}
    for cls in all_methods():
        if cls.name not in named:
            with suppress(RopeExtError):  # longrope needs a table
                method = build_method(cls.name, factor=case.factor).resolved(case.rope)
                if case.scaled is None or not method.is_dynamic:
                    reason = why(method, case.factor, case.measured)
                    yield _tried(case, method, reason, serving=False)


def _require_carried(case: _Case, name: str) -> None:
    """Raise OptionError for a factor that no method is known to carry without fine-tuning.

    The rule: more than ``_UNTRAINED`` times the trained length is left to fine-tuning. Only a
    calibration of this model at such a length says more.
    """
    if case.finetune or case.factor <= _UNTRAINED:
        return
    longest = _UNTRAINED * case.rope.length
    raise OptionError(
        f"target_length={case.target} is {case.factor:g} times the {case.rope.length} tokens of "
        f"{name}, and no method is known to carry more than {_UNTRAINED} times without "
        f"fine-tuning; give at most {longest}, train it (finetune=True, or --finetune), or choose "
        f"another checkpoint"
    )


def _tried(case: _Case, method: Method, why: str, serving: bool = True) -> _Trial:
    compose = method.kind == "frequency" and case.compose(method)
    options = {"compose": compose, "original_max_position_embeddings": case.length}
    try:
        with patched(case.model, method, **options):
            if case.engine is not None:
                export(case.model, case.engine)
            return _Trial(method, why, engines_for(case.model) if serving else ())
    except RopeExtError as error:
        return _Trial(method, why, refusal=error)


def _is_accepted(case: _Case, trial: _Trial) -> bool:
    return trial.refusal is None or _unproven(case, trial)


def _unproven(case: _Case, trial: _Trial) -> bool:
    """Whether checking that the model supports the method would need its weights."""
    refused = isinstance(trial.refusal, UnsupportedModelError) and not case.engine
    on_meta = any(parameter.is_meta for parameter in case.model.parameters())
    if not (on_meta and refused and trial.method.replaces_attention):
        return False
    if not case.looks_ahead:
        return True
    generates = getattr(case.model, "can_generate", bool)()
    if generates_from(text_config(text_decoder(case.model)), generates):
        return False
    return not getattr(trial.method, "causal_only", "")


def _warnings(case: _Case, chosen: _Trial) -> Iterator[str]:
    """Yield what to know before using a method, one sentence per line.

    The same for every form of the question: in this process, to serve, and to fine-tune. A factor
    beyond what was published or measured is said, and a base too small for the target, except of
    methods that keep distances within the trained range.
    """
    method = chosen.method
    factor = case.factor
    raises = chosen.method == case.raised
    if case.finetune and factor > _TRAINED_FACTOR:
        yield (
            f"factor {factor:g} is beyond the published {_TRAINED_FACTOR}: use two steps, or "
            f"another checkpoint."
        )
    elif factor > _INTERPOLATED and not case.finetune and method.replaces_attention:
        yield f"factor {factor:g} is beyond {_INTERPOLATED}, the largest that we measured."
    elif factor > _INTERPOLATED and not case.finetune:
        yield (
            f"factor {factor:g} is beyond {_INTERPOLATED}, the largest published without "
            f"fine-tuning: train it."
        )
    if chosen.refusal is not None:
        yield (
            "not tried yet, which needs the model's weights: `patch` raises an error if the model "
            "does not support it (docs/FAMILIES.md)."
        )
    bound = smallest_base(case.target)
    if case.rope.base < bound and not (method.replaces_attention or raises):
        task = "passkeys, not perplexity alone" if case.purpose == "text" else "retrieval"
        yield (
            f"the base {case.rope.base:g} is below {bound:.3g}, which {case.target} tokens need: "
            f"measure {task} (arXiv 2405.14591)."
        )


def _next_steps(case: _Case, chosen: _Trial, found: Any) -> Iterator[str]:
    """Yield commands that measure or tune the method, unless it is tuned or published so."""
    if case.purpose == "labels":
        yield (
            "nothing here measures classifiers, rerankers and reward models: the numbers above are "
            "of other models, so score your own texts with and without the patch."
        )
        return
    if case.embeds:
        yield (
            f"measure it, and embed queries and documents under the same patch: rope-ext eval "
            f"MODEL --tasks embedding --methods {chosen.method.name} --factor {case.factor:g} "
            f"--lengths {case.target}"
        )
        return
    if not (
        case.finetune
        or chosen.method == case.raised
        or chosen.method is getattr(found, "method", None)
    ):
        yield (
            f"tune it: rope-ext calibrate --model MODEL --length {case.target} --methods "
            f"{chosen.method.name} --output FOLDER"
        )


def _own_scaling(case: _Case, chosen: _Trial) -> Iterator[str]:
    """Yield how the checkpoint is scaled already, and whether that says that it was trained so.

    A configuration does not tell: a patch that was saved untrained has the same fields as a
    checkpoint that was trained under it. Only the scaling that a vendor ships is known.
    """
    if case.scaled is None:
        return
    how = "its own factor grows" if chosen.method == case.raised else "this patch applies on top"
    of = f" of {case.unscaled}" if case.unscaled else ""
    yield f"already scaled to {case.rope.length} tokens{of} ({case.scaled}): {how}."
    if not (case.trained_scaled or case.finetune):
        yield (
            "whether it was trained under that scaling is not in its configuration; if it was not, "
            "start from the checkpoint without it, and measure."
        )


@contextmanager
def calibration_in(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Read a calibration file, or the one in a folder; bad data in the block is a MeasureError."""
    file = Path(path)
    file = file / f"{NAME}.json" if file.is_dir() else file
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data[NAME] != FORMAT:
            raise ValueError(f"its format is {data[NAME]!r}, not {FORMAT}")
        yield data
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise MeasureError(
            f"cannot read the calibration {file}: {getattr(error, 'strerror', None) or reason}; "
            f"give the {NAME}.json of `rope-ext calibrate`"
        ) from None


def calibration_for(model: Any, given: Any) -> Any:
    """Return the given calibration, or the one in the model's folder, or None."""
    if given is None:
        here = isinstance(model, (str, Path)) and (Path(model) / f"{NAME}.json").is_file()
        try:
            return calibration_for(model, model) if here else None
        except MeasureError:  # it may belong to another program
            return None
    if not isinstance(given, (str, Path)):
        if not all(hasattr(given, name) for name in ("model", "method", "sentence", "to_json")):
            raise OptionError(
                f"calibration={given!r} is not a result of rope_ext.calibrate, its file or folder"
            )
        return given
    with calibration_in(given) as data:
        lengths = data["trained_length"], data["target_length"]
        if any(type(value) is not int for value in lengths):
            raise TypeError(f"trained_length and target_length are {lengths}")
        method = method_from_json(data["method"])
        texts = {name: str(data[name]) for name in ("model", "sentence")}
        return SimpleNamespace(**data | texts | {"method": method})
