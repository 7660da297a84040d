"""Entry points that change a model: ``patch``, ``unpatch``, ``patched`` and ``unpatched``."""

import copy
import functools
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from rope_ext.advice.recommendation import Recommendation
from rope_ext.apply.method import Applied, apply_frequency, apply_position, raise_factor
from rope_ext.config import writing
from rope_ext.config.record import FIELD, SIDECAR, WRITTEN, Record
from rope_ext.config.settings import LONGEST
from rope_ext.config.writing import UNPATCHED
from rope_ext.encodings import Encoding
from rope_ext.errors import (
    AlreadyPatchedError,
    NotPatchedError,
    OptionError,
    UnsupportedModelError,
    brief,
)
from rope_ext.methods import FrequencyMethod, Method, build_method
from rope_ext.options import Options, SlidingLayers
from rope_ext.position.learned import Earlier
from rope_ext.rotary.context import LengthLimit, forget_pages
from rope_ext.rotary.sites import (
    PatchTarget,
    RotarySite,
    chosen_sites,
    find_sites,
    text_config,
    text_decoder,
    text_parts,
    text_root,
    unwrap,
)
from rope_ext.rotary.swapping import (
    Changes,
    Grown,
    guard_buffers,
    originals,
    separate_configurations,
    set_attribute,
    undo,
    wrap,
    written_back,
)
from rope_ext.saving import gguf_source

Model = TypeVar("Model", bound=nn.Module)
_STATE = "_rope_ext"
_logger = logging.getLogger("rope_ext")
after_patch: list[Callable[[], None]] = []
"""Called after each patch; ``saving/trainers.py`` is above this file and adds itself."""
_lock = threading.RLock()  # for all models, since they may share modules


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Let one thread patch at a time, since ``patch`` probes the model before marking it."""
    with _lock:
        yield


@dataclass(frozen=True)
class Patch(PatchTarget, Applied):
    """An active patch: what was requested, what was changed, and how to undo it."""

    options: Options
    record: Record
    changes: Changes

    @property
    def frequencies(self) -> FrequencyMethod | None:
        """The active frequency method, alone or under a position method."""
        return self.method if isinstance(self.method, FrequencyMethod) else self.options.frequency

    @property
    def length(self) -> int:
        """Trained length, tokens."""
        return self.scaled[0].rope.length

    def frequencies_of(
        self, site: RotarySite, length: int | None = None
    ) -> tuple[torch.Tensor, float]:
        """Return the frequencies in force, in radians per token, and the factor of cos and sin.

        Frequencies are float64, ``[pairs]``. Those of a dynamic method are for texts of ``length``
        tokens; None: of the target length. Raises OptionError as :meth:`RotarySite.under`.
        """
        if site not in self.scaled:
            return site.rope.inv_freq, site.scaling
        under = self.frequencies
        methods = [self.method] if under in (None, self.method) else [under, self.method]
        scaling, _ = site.factors(*methods)
        if under is None:
            return site.rope.inv_freq, scaling
        if length is not None:
            return under.frequencies(site.rope, length), scaling
        inv_freq, _ = site.under(under)
        return inv_freq, scaling


@_one_at_a_time()
def patch(
    model: Model,
    method: str | Method | Recommendation = "yarn",
    *,
    frequency: FrequencyMethod | None = None,
    bias: str | Encoding | None = None,
    layers: str | Sequence[int] | None = None,
    kernel: Literal["auto", "flash", "flex", "reference"] = "auto",
    replace: bool = False,
    compose: bool | Literal["raise"] = False,
    sliding_layers: SlidingLayers = "auto",
    precise: bool | Literal["auto"] = "auto",
    original_max_position_embeddings: int | None = None,
    tokenizer: Any = None,
    **options: Any,
) -> Model:
    """Extend the context of ``model``, in place.

    Frequencies that a cast such as ``model.bfloat16()`` has rounded are rebuilt first. Let forwards
    of this model in other threads finish before.

    Args:
        model: a loaded transformers model with rotary embeddings, or a ``PeftModel``, compiled
            or data-parallel wrapper around one; or a SentenceTransformer or CrossEncoder, whose
            ``max_seq_length`` is raised as well.
        method: name or alias of a method, a method object such as ``YaRN(factor=4)``, or the
            result of :func:`rope_ext.recommend`.
        frequency: a frequency method to use under a position method, such as ``NTK(factor=2)``.
            The position method then extends the length that it reaches.
        bias: an encoding that adds to the logits by distance while the rotation stays in place:
            its name, such as ``"alibi"``, or an object such as ``T5(num_buckets=16)``.
        layers: which of the rotating layers to patch: indices counted from 0, or ``"every 4th"``,
            which means 3, 7, 11 and so on. The others keep the trained rotation.
        kernel: attention kernel of position methods, and of other methods with ``bias`` or
            ``layers``: ``"flash"``, ``"flex"`` (FlexAttention, for GPUs) or ``"reference"`` (dense
            logits). ``"auto"`` takes the first of these that supports the call (docs/speed.md).
        replace: undo an earlier patch first instead of raising. The same encoding keeps its
            learned parameters, or raises an OptionError where it cannot.
        compose: patch on top of the checkpoint's existing RoPE scaling, multiplying it.
            ``"raise"`` raises the factor of that scaling instead: pass the method of its type
            (``"yarn"``, ``"llama3"``, ``"pi"`` or ``"dynamic_ntk"``) and the new factor, relative
            to ``original_max_position_embeddings``. The checkpoint's other options stay.
        sliding_layers: whether sliding-window layers are patched, which gain nothing from it:
            ``"scale"``, ``"keep"``, or with ``"auto"``, only under a frequency method, those that
            share their rotary embedding with other layers, as in transformers.
        precise: compute angles in float64. ``"auto"``: if the target length exceeds 131072 tokens.
        original_max_position_embeddings: trained context in tokens; overrides
            ``max_position_embeddings`` of the configuration.
        tokenizer: a tokenizer whose ``model_max_length`` to raise as well.
        **options: options of the method, usually ``factor``; see :func:`rope_ext.methods`.

    Returns:
        ``model`` itself.

    Raises:
        UnknownMethodError, OptionError: the method or one of its options is invalid.
        NoRopeError, UnsupportedModelError: there would be no effect, or none that is verified.
        AlreadyPatchedError, AlreadyScaledError: pass ``replace=True`` or ``compose=True``.
        RecordError: the model was saved under a patch whose record cannot be read.
    """
    length = original_max_position_embeddings
    if isinstance(method, Recommendation):
        compose = compose or method.compose
        length = length or method.original_max_position_embeddings
        method = method.method
    method = _method(method, options)
    given: dict[str, Any] = {  # unchecked until Options has converted names
        "frequency": frequency,
        "bias": bias,
        "layers": layers,
        "kernel": kernel,
        "compose": compose,
        "sliding_layers": sliding_layers,
        "precise": precise,
        "original_max_position_embeddings": length,
        "tokenizer": tokenizer,
    }
    keywords = Options(**given)
    keywords.check(method)
    decoder = text_decoder(model)
    root = text_root(model)
    before = _patches(model)
    earlier = current_patch(model)
    values = Earlier(root)
    grown = Grown(root)
    if earlier is not None and not replace:
        raise AlreadyPatchedError(
            f"this model is patched with {earlier.method}; call rope_ext.unpatch(model) first, or "
            f"pass replace=True"
        )
    # Initial values of learned parameters are drawn; a failed patch leaves the generator as it was.
    random = torch.get_rng_state()
    if earlier is not None:
        unpatch(model)
    try:
        _patch(model, method, keywords)
        dropped = values.carry(root)
    except BaseException:  # if the replacement fails, restore the model
        _go_back(model, earlier=before, values=values, grown=grown)
        torch.set_rng_state(random)
        raise
    if dropped and earlier is not None:
        _logger.warning(
            "rope_ext: %s replaces %s; %d learned parameters are no longer in the model, such as "
            "%s",
            method.name,
            _encoding(earlier) or earlier.method.name,
            len(dropped),
            dropped[0],
        )
    _log(method, decoder, earlier=earlier)
    for listener in after_patch:
        listener()
    return model


def _log(method: Method, decoder: nn.Module, earlier: Patch | None) -> None:
    """Log what the user should know about the new patch of a decoder."""
    state = decoder.__dict__[_STATE]
    family = type(decoder).__name__
    if _encoding(state) not in (None, _encoding(earlier)):
        _logger.warning(
            "rope_ext: %s on %s: the model was not trained with %s; train it before you use it "
            "(lab/surgery.py of the repository)",
            method.name,
            family,
            _encoding(state),
        )
    for text in _changed(state.sites):
        _logger.warning("rope_ext: %s on %s: configuration: %s", method.name, family, text)
    # A problem only if plain transformers silently computes something else.
    prefix = "sequences: " if state.saved.native else "saving: "
    for note in (note.removeprefix(prefix) for note in state.notes if note.startswith(prefix)):
        level = logging.WARNING if UNPATCHED in note else logging.INFO
        _logger.log(level, "rope_ext: %s on %s: %s", method.name, family, note)


@_one_at_a_time()
def unpatch(model: Model) -> Model:
    """Undo a patch, restore every buffer, scalar and configuration value bit for bit.

    ``model`` is the one that was passed to :func:`rope_ext.patch`, or any wrapper of it, and is
    returned. Halves of an encoder-decoder that were patched one by one are both undone. Raises
    NotPatchedError if it is not patched.
    """
    states = _patches(model)
    if not states:
        parts = [f"model.{name}" for name in _states(model)]
        how = f"; undo the patch of {' and '.join(parts)} by itself" if parts else ""
        raise NotPatchedError(f"this model is not patched, so there is nothing to undo{how}")
    with torch.inference_mode(False):
        for state in states:
            undo(state.changes)
    return model


def _forget(part: nn.Module) -> None:
    """Remove the state of a patch; both halves of an encoder-decoder share one list of changes."""
    del part.__dict__[_STATE]


@contextmanager
def patched(
    model: Model, method: str | Method | Recommendation = "yarn", **kwargs: Any
) -> Iterator[Model]:
    """Patch a model for the duration of a ``with`` block, even if it raises.

    With ``replace=True``, the earlier patch becomes active again afterwards.

    Takes the arguments of :func:`patch`, raises its errors, and yields ``model`` itself.
    """
    with _returning(model, functools.partial(patch, model, method, **kwargs)):
        yield model


@contextmanager
def unpatched(model: Model) -> Iterator[Model]:
    """Undo a patch for the duration of a ``with`` block, even if it raises.

    Use it to compare with the original model, or to train against it. The patch becomes active
    again afterwards, with its learned parameters. A model that is not patched is unchanged.
    Caches and compiled graphs of the patched model do not carry over. Yields ``model`` itself.
    """
    with _returning(model, lambda: current_patch(model) and unpatch(model)):
        yield model


@contextmanager
def _returning(model: nn.Module, change: Callable[[], Any]) -> Iterator[None]:
    """Apply ``change`` for the duration of a block, then restore the current patch, if any."""
    quiet = functools.partial(writing.quieted, _logger)  # only temporary
    with _lock, quiet():
        root = text_root(model)
        earlier = _patches(model)
        values = Earlier(root)
        grown = Grown(root)
        change()
    try:
        yield
    finally:
        with _lock, quiet():
            _go_back(model, earlier, values, grown=grown)


def _go_back(model: nn.Module, earlier: list[Patch], values: Earlier, grown: Grown) -> None:
    """Undo the model's patch, and apply earlier ones with their learned parameters."""
    if current_patch(model) is not None:
        unpatch(model)
    for state in earlier:
        given = model if state.model is unwrap(model) else state.model  # a half by itself
        with torch.random.fork_rng(devices=[]):  # initial values, replaced below
            _patch(given, state.record.method, state.options)
    values.carry(text_root(model))
    # In this mode, buffers may have grown with a sequence since they were patched.
    if any(getattr(state.record.method, "mode", None) == "growing" for state in earlier):
        grown.put_back()


def _patches(model: nn.Module) -> list[Patch]:
    """Return the patches of ``model``, each once: halves may have been patched one by one."""
    states = [part.__dict__[_STATE] for part in text_parts(model) if _STATE in vars(part)]
    return [*{id(state.changes): state for state in reversed(states)}.values()]


def current_patch(model: nn.Module) -> Patch | None:
    """The active patch of ``model``, of an encoder-decoder its decoder's; None: not patched."""
    states = (part.__dict__.get(_STATE) for part in text_parts(model))
    return next(filter(None, states), None)


def whole_patch(model: nn.Module) -> Patch | None:
    """The active patch if the same call with ``model`` itself gives the same; else None.

    Not that of one half, or of a part that reads no text. As :func:`is_patched`, it takes models
    without RoPE.
    """
    state = current_patch(model) if is_patched(model) else None
    if state is None or state.model is unwrap(model):
        return state
    return state if text_parts(model) == [state.decoder] else None


@contextmanager
def saving_parts(model: nn.Module) -> Iterator[None]:
    """Let the configuration of ``model`` say what parts of it were patched by themselves.

    A patch of a part, such as ``model.get_encoder()``, does not know the model around it. Warns of
    a part whose patch cannot be saved there.
    """
    parts = {n: one for n, one in _states(model).items() if one.model is not unwrap(model)}
    if not parts:
        yield
        return
    with _lock:  # the configuration differs while the model is saved
        said = []
        for name, state in parts.items():
            if (reason := _not_saved(model, state)) is None:
                said.append(state.model)
            else:
                _logger.warning(
                    "rope_ext: %s is saved without the patch of %s (%s): patch it again after "
                    "loading",
                    type(model).__name__,
                    name,
                    reason,
                )
        with written_back(model, said, WRITTEN):
            yield


def _states(model: nn.Module) -> dict[str, Patch]:
    """Return all patches in a model, each once, by the name of what they changed."""
    found: dict[int, tuple[str, Patch]] = {}
    for name, part in model.named_modules():
        state = vars(part).get(_STATE)
        if isinstance(state, Patch):
            found.setdefault(id(state.changes), (name, state))
    return dict(found.values())


def _not_saved(model: nn.Module, state: Patch) -> str | None:
    """Return why the configuration of a model cannot say that a part is patched; None: it can."""
    parts = text_parts(model)
    if parts == [state.decoder]:  # it is all that a patch of the whole would change
        return None
    if getattr(text_config(state.decoder), FIELD, None) is not None:
        return "its record would be read as one of the whole model"
    shared = originals(state.model)
    if any(text_config(part) is one for part in parts for one in shared):
        return "both halves read one configuration"
    return None


def is_patched(model: Any) -> bool:
    """Whether any object is a model with a patch; unlike others, it takes models without RoPE."""
    return isinstance(model, nn.Module) and any(_STATE in vars(part) for part in model.modules())


def _encoding(state: Patch | None) -> str | None:
    """Name of the encoding that adds to the logits under a patch, if any."""
    return None if state is None or state.record.encoding is None else state.record.encoding.name


def _method(method: str | Method, options: dict[str, Any]) -> Method:
    """Return the method that is named or given, with its options checked; raises OptionError."""
    if isinstance(method, str):
        method = build_method(method, **options)
    elif not isinstance(method, Method):
        raise OptionError(
            f"method={brief(method)} is not valid; call rope_ext.patch(model, method) with a name "
            f"such as 'yarn', or an object such as rope_ext.YaRN(factor=4)"
        )
    elif options:
        raise OptionError(
            f"{', '.join(options)} given together with a method object; set it on the object: "
            f"{type(method).__name__}({', '.join(f'{k}={v!r}' for k, v in options.items())})"
        )
    method.check()
    return method


@torch.inference_mode(False)  # inference tensors could not be moved later
def _patch(
    model: Any, method: Method, options: Options, apply: Callable[..., Applied] | None = None
) -> None:
    """Apply a method to all text models of ``model``, write their configuration, or change nothing.

    ``apply`` takes the place of what applies the method, for models without weights.
    """
    given = model
    model = unwrap(model)
    gguf_source.adopt(model)
    decoder, *others = text_parts(model)
    if options.original_max_position_embeddings is not None:
        _refuse_two_lengths(model)
    # Whatever can be refused without a change is refused before the first one.
    places = [_place(model, decoder, options)]
    _refuse_unsaved(model)
    left: dict[nn.Module, UnsupportedModelError] = {}
    for encoder in others:
        try:
            places.append(_place(model, encoder, options))
        except UnsupportedModelError as error:
            left[encoder] = error
    changes: Changes = []
    forget_pages(model)
    try:
        changes.append(functools.partial(forget_pages, model))
        separate_configurations(given, WRITTEN, changes)
        halves = [_decoder_half(places, method, options, apply=apply, changes=changes)]
        for place in places[1:]:
            # Of its own: an encoder that refuses the method is undone, and the decoder stays
            # patched.
            own: Changes = []
            try:
                halves.append(_half(place, method, options, apply=apply, changes=own))
            except UnsupportedModelError as error:
                undo(own)
                left[place.decoder] = error
            # Empty if it was undone.
            changes += own
        for encoder, error in left.items():
            halves[0].notes.append(_left_alone(halves[0], encoder, error))
        # ``describe`` shows the notes of the decoder, which is the first half.
        for half in halves[1:]:
            halves[0].notes.append(_patched_too(half, tried=apply is None))
        for half in halves:
            # After all halves: each reads the configuration as it was before the patch.
            writing.write(half.place, half.values, half.record, changes=changes)
        if options.tokenizer is not None:  # the encoder reads what it makes
            reached = min(half.applied.target_length for half in halves)
            set_attribute(
                options.tokenizer, name="model_max_length", value=reached, changes=changes
            )
        tokenizer = options.tokenizer
        halves[0].notes.extend(_lengthen(given, halves[0].record, tokenizer, changes=changes))
        for half in halves:
            _add_warnings(half.place, half.record, changes)
            # Last, since a decoder with a state counts as patched.
            changes.append(functools.partial(_forget, half.place.decoder))
            half.place.decoder.__dict__[_STATE] = half.state(options, changes)
    except BaseException:
        undo(changes)
        raise


@dataclass(frozen=True)
class _Half:
    """A method applied to a text model; an encoder-decoder has two."""

    place: PatchTarget
    applied: Applied
    record: Record
    values: dict[str, Any]  # configuration fields and their new values
    notes: list[str]

    def state(self, options: Options, changes: Changes) -> Patch:
        applied = replace(self.applied, notes=tuple(self.notes))
        return Patch(
            **vars(self.place),
            **vars(applied),
            options=options,
            record=self.record,
            changes=changes,
        )


def _place(model: Any, part: nn.Module, options: Options) -> PatchTarget:
    """Find what to patch in a text model of ``model``."""
    length = options.original_max_position_embeddings
    sites = find_sites(part, length)
    scaled = chosen_sites(part, sites, options.sliding_layers)
    refuse_changed(part, scaled, length)
    _refuse_tables(part)
    return PatchTarget(model=model, decoder=part, sites=sites, scaled=scaled)


def _refuse_tables(part: nn.Module) -> None:
    """Raise if a text model also has a table of learned positions, which a patch cannot extend."""
    config = text_config(part)
    length: Any = getattr(config, LONGEST, None)
    named = [(name, one) for name, one in part.named_modules() if isinstance(one, nn.Embedding)]
    tables = [(name, one) for name, one in named if one.num_embeddings == length]
    if not tables:
        return
    longer = copy.deepcopy(config)
    try:
        setattr(longer, LONGEST, 2 * length)
        with torch.device("meta"):
            # Only building it tells whether a table follows the length, or has as many rows by
            # chance.
            built = type(part)(longer)
    except Exception:  # it cannot be told what the table is for
        return
    for name, one in tables:
        if built.get_submodule(name).num_embeddings != one.num_embeddings:
            raise UnsupportedModelError(
                f"{type(part).__name__}: its table {name} has a row for each of {length} positions "
                f"({LONGEST}), which a patch cannot extend: this family is not supported"
            )


def _half(
    place: PatchTarget,
    method: Method,
    options: Options,
    apply: Callable[..., Applied] | None,
    changes: Changes,
) -> _Half:
    """Apply a method to a text model, without writing its configuration."""
    config = text_config(place.decoder)
    writing.correct(place.decoder, place.sites)
    rounded = [site for site in place.sites if site.rounded]
    for site in place.sites:
        # Casts and moves come later; from here on, buffers keep their float32 values.
        guard_buffers(site, changes)
    used = method
    raised = []
    if options.compose == "raise":
        place, used, raised = raise_factor(place, method, options, changes=changes)
    if apply is None:
        apply = apply_frequency if used.kind == "frequency" else apply_position
    applied = apply(place, used, options=options, changes=changes)
    saved = applied.saved
    record = Record(
        method=method,
        resolved=applied.method,
        arguments=options.recorded(),
        trained_length=place.scaled[0].rope.length,
        target_length=applied.target_length,
        native=saved.native,
        plain=applied.plain,
        config=writing.before(config, saved.values),
    )
    values = dict(saved.values)
    notes = [f"saving: {saved.note}", *applied.notes, *raised]
    notes += [f"configuration: {text}" for text in _changed(place.sites)]
    if rounded:
        notes.append(
            "frequencies: a cast to bfloat16 or float16 had rounded them; rebuilt in float32 "
            "(unpatch restores the rounded values)"
        )
    parts = (writing.part_of(values["rope_parameters"], site) for site in place.scaled)
    # A larger base alone is not reported as scaling by any rope_type.
    if not record.plain or any(part["rope_type"] == "default" for part in parts):
        values[FIELD] = record.to_json()
    earlier = writing.saved_record(config)
    if earlier is not None and not earlier.native:
        notes.append(
            f"the configuration was saved under another patch ({earlier}), whose record gives "
            f"the trained length"
        )
    return _Half(place=place, applied=applied, record=record, values=values, notes=notes)


def _decoder_half(
    places: list[PatchTarget],
    method: Method,
    options: Options,
    apply: Callable[..., Applied] | None,
    changes: Changes,
) -> _Half:
    """Apply a method to the first of ``places``; if it is refused, say whether the encoder is."""
    try:
        return _half(places[0], method=method, options=options, apply=apply, changes=changes)
    except UnsupportedModelError as error:
        if not any(_is_accepted(place, method, options, apply=apply) for place in places[1:]):
            raise
        raise UnsupportedModelError(
            f"{error}; rope_ext.patch(model.get_encoder(), ...) patches the encoder alone"
        ) from error


def _is_accepted(
    place: PatchTarget, method: Method, options: Options, apply: Callable[..., Applied] | None
) -> bool:
    """Whether a method can be applied to a text model; leaves it unchanged."""
    changes: Changes = []
    try:
        _half(place, method, options, apply=apply, changes=changes)
    except UnsupportedModelError:
        return False
    finally:
        undo(changes)
    return True


def _patched_too(half: _Half, tried: bool) -> str:
    """Return a sentence for ``describe`` about the encoder of an encoder-decoder."""
    name = type(half.place.decoder).__name__
    lengths = f"{half.record.trained_length} -> {half.applied.target_length} tokens"
    if not tried:  # without weights
        return f"encoder: {name} is patched, too, if it accepts the method, {lengths}"
    return (
        f"encoder: {name} is patched, too, {lengths}; rope_ext.describe(model.get_encoder()) "
        f"shows it"
    )


def _left_alone(decoder: _Half, encoder: nn.Module, error: UnsupportedModelError) -> str:
    """Say that the encoder stays as it was trained; raise ``error`` if plain transformers cannot.

    ``decoder`` is the half that is patched.
    """
    if decoder.applied.saved.native and text_config(encoder) is text_config(decoder.place.decoder):
        raise error
    note = f"encoder: it stays as it was trained ({error})"
    _logger.warning("rope_ext: %s", note)
    return note


def _refuse_two_lengths(model: nn.Module) -> None:
    """Raise if one trained length is given for halves whose configurations have different ones."""
    configs = map(text_config, text_parts(model))
    lengths = {getattr(config, LONGEST, None) for config in configs}  # a record may be damaged
    if len(lengths) > 1:
        raise OptionError(
            f"original_max_position_embeddings is one length, and the encoder and decoder of "
            f"{type(unwrap(model)).__name__} have different ones "
            f"({' and '.join(map(str, sorted(lengths, key=str)))}); leave it out, or patch each: "
            f"rope_ext.patch(model.get_encoder(), ...)"
        )


@_one_at_a_time()
def note_patch(model: Model, method: Method, **keywords: Any) -> Model:
    """Record a method on a model without weights, for ``describe``, ``diagnose`` and ``export``.

    Whether a family supports a method that changes attention can only be checked with weights, so
    this neither checks nor changes the model's computation. ``keywords`` are those of ``patch``.
    """
    options = Options(**keywords)
    options.check(method)
    _patch(model, method, options, apply=_noted)
    return model


def _noted(place: PatchTarget, method: Method, options: Options, changes: Changes) -> Applied:
    rope = options.rope(place.scaled[0].rope)
    length = method.target_length(rope)
    note = "whether this family accepts it is checked when the weights are loaded"
    saved = writing.unsaved(place, length)
    return Applied(
        method=method.resolved(rope),
        target_length=length,
        saved=saved,
        plain=False,
        precise=options.is_precise(length),
        notes=(note,),
    )


def configuration_notes(sites: Sequence[RotarySite]) -> tuple[str, ...]:
    """Say what the configuration was changed to after loading, which changes nothing."""
    changed = dict.fromkeys(site.changed for site in sites if site.changed is not None)
    return tuple(f"configuration: {text}; {cure}" for text, cure in changed)


def _changed(sites: Sequence[RotarySite]) -> list[str]:
    return [*dict.fromkeys(site.changed[0] for site in sites if site.changed is not None)]


def refuse_changed(decoder: nn.Module, sites: list[RotarySite], length: int | None) -> None:
    """Raise if the configuration of a scaled checkpoint was changed, so that its length is lost."""
    for site in sites if length is None else ():
        if site.changed is not None and site.rope_type != "default":
            raise UnsupportedModelError(
                f"{type(decoder).__name__} was loaded with rope_type {site.rope_type!r}, and its "
                f"configuration was changed since: {'; '.join(site.changed)}"
            )


def _refuse_unsaved(model: nn.Module) -> None:
    """Raise if transformers only copies the decoder's configuration from the one that it saves."""
    if text_config(model) is not text_config(model):
        raise UnsupportedModelError(
            f"{type(model).__name__}: transformers copies the configuration of its decoder from "
            f"{type(model.config).__name__}, so a patch of it cannot be saved; pass the whole "
            f"model, or one whose decoder has a configuration of its own"
        )


def note_target(model: nn.Module, target: int) -> None:
    """Set the target length of a patched model if its configuration gives a different one."""
    decoder = text_decoder(model)
    state = decoder.__dict__[_STATE]
    text_config(decoder).max_position_embeddings = target
    decoder.__dict__[_STATE] = replace(state, target_length=target)


@_one_at_a_time()
def first_site(
    model: nn.Module, sliding_layers: SlidingLayers = "auto", length: int | None = None
) -> RotarySite:
    """The rotary site that ``patch`` would scale; the first if there are several.

    ``length`` is the trained context in tokens; None reads it from the configuration.
    """
    there = current_patch(model)
    if there is not None:
        raise AlreadyPatchedError(
            f"this model is patched with {there.method}; call rope_ext.unpatch(model) first"
        )
    decoder = text_decoder(model)
    sites = chosen_sites(decoder, find_sites(decoder, length), sliding_layers)
    refuse_changed(decoder, sites, length)
    return sites[0]


def _lengthen(given: Any, record: Record, tokenizer: Any, changes: Changes) -> list[str]:
    """Raise the length at which sentence-transformers cuts texts, and return a note about it.

    It is raised by as much as the trained length, so a shorter one that the user chose stays so.
    """
    length = getattr(given, "max_seq_length", None)
    if unwrap(given) is given or tokenizer is not None or not isinstance(length, int):
        return []
    reached = min(record.target_length, length * record.target_length // record.trained_length)
    if reached <= length:  # without a limit
        return []
    set_attribute(given.tokenizer, name="model_max_length", value=reached, changes=changes)
    if given.max_seq_length != reached:  # before sentence-transformers 6, of the module
        set_attribute(given[0], name="max_seq_length", value=reached, changes=changes)
    return [f"texts: cut at {reached} tokens (max_seq_length; without the patch {length})"]


def _add_warnings(place: PatchTarget, record: Record, changes: Changes) -> None:
    """Warn about longer texts, shorter drafts, and adapters that were trained otherwise."""
    method = record.resolved
    if not method.is_dynamic and method.kind in ("frequency", "position"):
        limit = LengthLimit(method.name, record.trained_length, record.target_length)
        changes.append(place.decoder.register_forward_pre_hook(limit, with_kwargs=True).remove)
        if not place.is_encoder:
            wrap(place.model, name="generate", function=limit.generate, changes=changes)
    if not place.is_encoder:
        wrap(
            place.model,
            name="load_adapter",
            function=functools.partial(_load_adapter, record),
            changes=changes,
        )


def _load_adapter(record: Record, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Load an adapter, and warn if it was trained under another patch than this one."""
    folder = kwargs.get("peft_model_id", args[0] if args else None)
    file = Path(str(folder)) / SIDECAR
    trained = record
    try:
        trained = Record.from_json(json.loads(file.read_text(encoding="utf-8")), str(file))
    except FileNotFoundError:  # on the Hub, or trained without a patch
        pass
    except (OSError, ValueError, RecursionError) as error:
        _logger.warning("rope_ext: which patch the adapter needs is unknown: %s: %s", file, error)
    if not trained.same(record):
        _logger.warning(
            "rope_ext: the adapter in %s was trained under %s, and this model is patched by %s; "
            "patch it like that (replace=True)",
            folder,
            trained.call(),
            trained.difference(record),
        )
    return original(*args, **kwargs)
