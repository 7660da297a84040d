"""``patch`` and ``unpatch``: the one front door."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from rope_ext import position
from rope_ext.errors import (
    AlreadyPatchedError,
    AlreadyScaledError,
    NotPatchedError,
    OptionError,
    UnsupportedModelError,
)
from rope_ext.methods import FrequencyMethod, Method, PositionMethod, Rope, build_method
from rope_ext.methods.rope import MOST_TOKENS, whole_number
from rope_ext.record import ARGUMENTS, FIELD, Record
from rope_ext.rotary import buffers, calls, hooks
from rope_ext.rotary.sequences import Sequences, follow
from rope_ext.rotary.sites import RotarySite, find_sites, text_config, text_decoder, unwrap
from rope_ext.saving import configuration

Model = TypeVar("Model", bound=nn.Module)
Function = TypeVar("Function", bound=Callable[..., Any])
SlidingLayers = Literal["auto", "keep", "scale"]
_STATE = "_rope_ext"
_lock = threading.RLock()  # one for all models: they may share a configuration
_logger = logging.getLogger("rope_ext")


def _one_at_a_time(function: Function) -> Function:
    """Let no two threads change or probe a model at the same time."""

    @functools.wraps(function)
    def waiting(*args: Any, **kwargs: Any) -> Any:
        with _lock:
            return function(*args, **kwargs)

    return waiting


@dataclass
class Patch:
    """A patch in force: what was asked for, what was done, and the way back.

    ``target_length`` is the context after the extension in tokens; ``native`` says whether plain
    transformers reloads the patch from the configuration.
    """

    method: Method
    arguments: dict[str, Any]
    sites: list[RotarySite]
    scaled: list[RotarySite]
    target_length: int
    precise: bool
    native: bool
    notes: list[str]
    changes: buffers.Changes
    config: configuration.ConfigState
    tokenizer: Any
    tokenizer_length: int | None
    plain: bool = False
    mapping: position.Installed | None = None
    record: Record | None = None

    @property
    def frequencies(self) -> FrequencyMethod | None:
        """The frequency method in force, by itself or under a position method."""
        if self.mapping is not None:
            return self.arguments["under"]
        return self.method

    @property
    def length(self) -> int:
        """Trained context, tokens."""
        return self.scaled[0].rope.length

    def frequencies_of(self, site: RotarySite) -> tuple[torch.Tensor, float]:
        """Frequencies (float64, ``[pairs]``) and scaling now; at full length if they adapt."""
        if self.frequencies is None or site not in self.scaled:
            return site.rope.inv_freq, site.scaling
        return site.under(self.frequencies)


@_one_at_a_time
def patch(
    model: Model,
    method: str | Method = "yarn",
    *,
    frequency: str | FrequencyMethod | None = None,
    kernel: Literal["auto", "flash", "flex", "reference"] = "auto",
    replace: bool = False,
    compose: bool = False,
    sliding_layers: SlidingLayers = "auto",
    precise: bool | Literal["auto"] = "auto",
    original_max_position_embeddings: int | None = None,
    tokenizer: Any = None,
    **options: Any,
) -> Model:
    """Extend the context of ``model``, in place.

    Threads that patch or unpatch wait for each other. A forward in another thread does not wait:
    let those of this model end first.

    Args:
        model: a loaded transformers model with rotary embeddings, or a ``PeftModel``, compiled
            or data-parallel wrapper of one.
        method: name or alias of a method, or a method object such as ``YaRN(factor=4)``.
        frequency: a frequency method under a position method, such as ``NTK(factor=2)``. The
            position method takes the context it extends to for the trained one.
        kernel: for the attention of position methods: ``"flash"`` on CPUs, ``"flex"`` on GPUs,
            ``"reference"`` with dense logits; ``"auto"`` chooses.
        replace: take back an earlier patch first instead of raising.
        compose: go on although the checkpoint's own configuration scales its rotary embedding;
            the patch then multiplies what is there.
        sliding_layers: layers with a limited window gain nothing. ``"auto"`` leaves them alone
            where they own a rotary set and scales them, as transformers does, where they share
            one; ``"keep"`` leaves them alone always; ``"scale"`` scales them always. Position
            methods leave them alone unless ``"scale"``.
        precise: angles in float64. ``"auto"``: where the target length is beyond 131072 tokens.
        original_max_position_embeddings: trained context in tokens, if the configuration does
            not say it rightly in ``max_position_embeddings``.
        tokenizer: its ``model_max_length`` is raised along.
        **options: of the method, usually ``factor``; see :func:`rope_ext.methods`.

    Returns:
        ``model`` itself.

    Raises:
        UnknownMethodError, OptionError: the method or one of its options is not valid.
        NoRopeError: the model has no rotary embedding.
        UnsupportedModelError: the effect on this family cannot be proven, or would be none.
        AlreadyPatchedError, AlreadyScaledError: say ``replace=True`` or ``compose=True``.
        RecordError: the model was saved under a patch, and its record cannot be read.
    """
    method = _method(method, options)
    under = _under(method, frequency)
    _check("kernel", kernel, ("auto", "flash", "flex", "reference"))
    _check("sliding_layers", sliding_layers, ("auto", "keep", "scale"))
    _check("precise", precise, ("auto", True, False))
    if original_max_position_embeddings is not None:
        given = original_max_position_embeddings
        original_max_position_embeddings = whole_number(given, minimum=2)
        if original_max_position_embeddings is None:
            raise OptionError(
                f"original_max_position_embeddings={given!r} is not valid; it must be a number of "
                f"tokens, from 2 to {MOST_TOKENS}"
            )
    decoder = text_decoder(model)
    earlier = decoder.__dict__.get(_STATE)
    if earlier is not None and not replace:
        raise AlreadyPatchedError(
            f"this model is patched with {earlier.method}; call rope_ext.unpatch(model) first, or "
            f"pass replace=True"
        )
    if earlier is not None:
        unpatch(model)
    try:
        _patch(
            unwrap(model),
            decoder,
            method,
            under=under,
            kernel=kernel,
            compose=compose,
            sliding_layers=sliding_layers,
            precise=precise,
            original_max_position_embeddings=original_max_position_embeddings,
            tokenizer=tokenizer,
        )
    except BaseException:
        if earlier is not None:  # a refused replacement leaves the model as it was
            _patch(unwrap(model), decoder, earlier.record.method, **earlier.arguments)
        raise
    state = decoder.__dict__[_STATE]
    prefix = "sequences: " if state.native else "saving: "  # what plain transformers does otherwise
    for note in (note.removeprefix(prefix) for note in state.notes if note.startswith(prefix)):
        _logger.warning("rope_ext: %s on %s: %s", method.name, type(decoder).__name__, note)
    return model


@_one_at_a_time
def unpatch(model: Model) -> Model:
    """Take a patch back: every buffer, scalar and configuration value as before, bit for bit.

    Args:
        model: as :func:`rope_ext.patch` took it, or any wrapper of it.

    Returns:
        ``model`` itself.

    Raises:
        NotPatchedError: there is no patch.
    """
    decoder = text_decoder(model)
    state = decoder.__dict__.pop(_STATE, None)
    if state is None:
        raise NotPatchedError("this model is not patched, so there is nothing to take back")
    _restore(state)
    return model


@contextmanager
def patched(model: Model, method: str | Method = "yarn", **kwargs: Any) -> Iterator[Model]:
    """:func:`patch` for the length of a ``with`` block, also when it ends in an exception.

    With ``replace=True`` the earlier patch is in force again afterwards.

    Args:
        model: as :func:`patch` takes it.
        method: as :func:`patch` takes it.
        **kwargs: all else that :func:`patch` takes, options of the method included.

    Yields:
        ``model`` itself.

    Raises:
        RopeExtError: as :func:`patch`.
    """
    decoder = text_decoder(model)
    with _lock, configuration.quieted(_logger, logging.ERROR):  # it is not there to be saved
        earlier = decoder.__dict__.get(_STATE)
        patch(model, method, **kwargs)
    try:
        yield model
    finally:
        with _lock:
            if _STATE in decoder.__dict__:
                unpatch(model)
            if earlier is not None:
                _patch(unwrap(model), decoder, earlier.record.method, **earlier.arguments)


def current_patch(model: nn.Module) -> Patch | None:
    """The patch in force on ``model``."""
    return text_decoder(model).__dict__.get(_STATE)


def _method(method: str | Method, options: dict[str, Any]) -> Method:
    if isinstance(method, str):
        method = build_method(method, **options)
    elif not isinstance(method, Method):
        raise OptionError(
            f"method={method!r} is not valid; it must be a method's name such as 'yarn', or a "
            f"method object such as rope_ext.YaRN(factor=4)"
        )
    elif options:
        raise OptionError(
            f"{', '.join(options)} given beside a method object; set it on the object: "
            f"{type(method).__name__}({', '.join(f'{k}={v!r}' for k, v in options.items())})"
        )
    method.check()
    return method


def _under(method: Method, frequency: str | FrequencyMethod | None) -> FrequencyMethod | None:
    """The frequency method under a position method."""
    if frequency is None:
        return None
    if not isinstance(method, PositionMethod):
        raise OptionError(
            f"frequency={frequency!r} goes under a position method such as 'rerope', and "
            f"{method.name} is a frequency method itself; leave one of them out"
        )
    if not isinstance(frequency, FrequencyMethod):
        raise OptionError(
            f"frequency={frequency!r} is not valid; it must be a frequency method object such as "
            f"rope_ext.NTK(factor=2)"
        )
    frequency.check()
    if frequency.adapts:
        raise OptionError(
            f"{frequency.name} changes with the sequence and cannot go under {method.name}; pass "
            f"length=TOKENS to fix it"
        )
    if frequency.start_tokens:
        raise OptionError(
            f"{frequency.name} with start_tokens={frequency.start_tokens} rotates by position, "
            f"which {method.name} changes; leave start_tokens out"
        )
    return frequency


def _check(option: str, value: Any, valid: tuple[Any, ...]) -> None:
    if not any(type(value) is type(x) and value == x for x in valid):  # an array is neither
        raise OptionError(
            f"{option}={value!r} is not valid; it must be one of {', '.join(map(repr, valid))}"
        )


def _patch(
    model: nn.Module,
    decoder: nn.Module,
    method: Method,
    *,
    under: FrequencyMethod | None,
    kernel: str,
    compose: bool,
    sliding_layers: SlidingLayers,
    precise: bool | Literal["auto"],
    original_max_position_embeddings: int | None,
    tokenizer: Any,
) -> None:
    arguments = {k: v for k, v in locals().items() if k not in ("model", "decoder", "method")}
    config = configuration.ConfigState(decoder, model)
    sites = find_sites(decoder, original_max_position_embeddings)
    scaled = chosen_sites(decoder, sites, sliding_layers)
    state = Patch(
        method=method,
        arguments=arguments,
        sites=sites,
        scaled=scaled,
        target_length=max(method.target_length(site.rope) for site in scaled),
        precise=False,
        native=False,
        notes=[],
        changes=buffers.Changes(),
        config=config,
        tokenizer=tokenizer,
        tokenizer_length=getattr(tokenizer, "model_max_length", None),
    )
    apply = _apply_positions if isinstance(method, PositionMethod) else _apply_frequencies
    try:
        values = apply(model, decoder, state)
        state.record = _record(state, method, config.before(values))
        if not state.record.plain or not configuration.tells(values, scaled):
            values[FIELD] = state.record.to_json()
        if config.earlier is not None:
            state.notes.append(
                f"the configuration was saved under another patch ({config.earlier}), whose record "
                f"gives the trained length"
            )
        config.write(values)
        if tokenizer is not None:
            tokenizer.model_max_length = state.target_length
    except BaseException:
        _restore(state)
        raise
    decoder.__dict__[_STATE] = state


def _record(state: Patch, given: Method, before: dict[str, Any]) -> Record:
    arguments = {**state.arguments, "frequency": state.arguments["under"]}
    return Record(
        method=given,
        resolved=state.method,
        arguments={name: arguments[name] for name in ARGUMENTS},
        trained_length=state.length,
        target_length=state.target_length,
        native=state.native,
        plain=state.plain,
        config=before,
    )


def _apply_frequencies(model: nn.Module, decoder: nn.Module, state: Patch) -> dict[str, Any]:
    """Put a frequency method in force; returns what to write into the configuration."""
    method, sites, scaled, changes = state.method, state.sites, state.scaled, state.changes
    sliding_layers, precise = state.arguments["sliding_layers"], state.arguments["precise"]
    for site in scaled:
        refuse_scaled(decoder, site, method, state.arguments["compose"])
    targets = {id(site): _target(method, site) for site in scaled}
    growing = getattr(method, "mode", None) == "growing"
    if precise == "auto":
        precise = state.target_length > hooks.PRECISE_BEYOND and not growing
    keep = sliding_layers == "keep" and any(site.shared for site in scaled)
    if growing and (precise or keep):
        raise OptionError(
            f"{method.name}: mode='growing' is transformers' own code and cannot be combined with "
            f"precise=True or sliding_layers='keep'; use mode='fixed'"
        )
    if keep or method.start_tokens:
        how = configuration.unsaved(model, decoder, sites, scaled, state.target_length)
    else:
        how = configuration.plan(model, decoder, sites, scaled, method, state.target_length)
    if growing and not how.native:
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: transformers cannot build its dynamic type for this "
            f"family; use mode='fixed'"
        )
    state.precise, state.native = precise, how.native
    per_sequence = method.adapts and not growing
    state.notes = _notes(sites, scaled, how.note, keep, precise, per_sequence and how.native)
    sequences = None
    if per_sequence or method.start_tokens:
        sequences = Sequences(method, min(site.rope.length for site in scaled))
        follow(decoder, model, sequences, changes)
    # Plain transformers lets frequencies grow within a sequence, and has float32 angles only.
    state.plain = how.native and not precise and sequences is None
    for site in scaled:
        inv_freq, scaling = targets[id(site)]
        if growing:
            changes.states.append(buffers.grow(site))
            continue
        native = keep and site.shared
        hooked = precise or native or sequences is not None
        if method.adapts:  # the hook replaces them; a fresh module holds the trained ones
            changes.states.append(buffers.write(site, site.loaded, site.scaling, hooked))
        else:
            buffer = how.built.get(id(site), inv_freq.float())
            changes.states.append(buffers.write(site, buffer, scaling, hooked))
        if hooked:
            hook = hooks.RotaryHook(
                site, inv_freq, scaling, precise, sequences, native, method.start_tokens
            )
            changes.handles.append(site.module.register_forward_hook(hook, with_kwargs=True))
    if growing:
        refuse = functools.partial(_refuse_sharded, method.name)
        changes.handles.append(decoder.register_forward_pre_hook(refuse))
    if keep:
        kinds = list(text_config(decoder).layer_types)
        changes.handles += hooks.keep_native(decoder, kinds)
    return how.values


def _refuse_sharded(name: str, decoder: nn.Module, args: tuple) -> None:
    calls.refuse_sharded(name)


def _apply_positions(model: nn.Module, decoder: nn.Module, state: Patch) -> dict[str, Any]:
    """Put a position method in force; returns what to write into the configuration."""
    scaled, under, method = state.scaled, state.arguments["under"], state.method
    local_too = state.arguments["sliding_layers"] == "scale"
    rope, label = scaled[0].rope, str(method)
    if under is not None:
        label = f"{method} on {under}"
        rope = Rope(under.inv_freq(rope), rope.base, under.target_length(rope))
    table = {}
    for site in scaled:
        if under is not None:
            refuse_scaled(decoder, site, under, state.arguments["compose"])
            inv_freq, scaling = _target(under, site)
            state.changes.states.append(buffers.write(site, inv_freq.float(), scaling, True))
        elif site.rope_type in ("dynamic", "longrope"):
            raise AlreadyScaledError(
                f"{type(decoder).__name__} has rope_type {site.rope_type!r}, whose frequencies "
                f"change with the sequence, so {method.name} cannot go on top of it; load it with "
                f"rope_type 'default'"
            )
        else:
            inv_freq, scaling = site.loaded.double(), site.scaling
            state.changes.states.append(buffers.write(site, site.loaded, scaling, True))
        table[site] = inv_freq, scaling
    reached = method.reached(rope)
    state.method = method.resolved(rope)
    state.target_length = method.target_length(rope)
    precise = state.arguments["precise"]
    state.precise = state.target_length > hooks.PRECISE_BEYOND if precise == "auto" else precise
    kernel = state.arguments["kernel"]
    position_map = position.PositionMap(
        state.method, rope, table, label, state.precise, kernel, local_too
    )
    state.mapping = position.install(decoder, position_map)
    how = configuration.unsaved(model, decoder, state.sites, scaled, state.target_length)
    state.notes = [f"saving: {how.note}", *state.mapping.notes()]
    if reached < state.target_length:
        note = (
            f"distances: {state.method} keeps to trained ones up to {reached} tokens only, of "
            f"{state.target_length}"
        )
        state.notes.append(note)
        _logger.warning("rope_ext: %s", note)
    return how.values


def _restore(state: Patch) -> None:
    if state.mapping is not None:
        state.mapping.undo()
    state.changes.undo()
    state.config.restore()
    if state.tokenizer is not None:
        state.tokenizer.model_max_length = state.tokenizer_length


def chosen_sites(
    decoder: nn.Module, sites: list[RotarySite], sliding_layers: SlidingLayers
) -> list[RotarySite]:
    """The sites to scale.

    Raises:
        UnsupportedModelError: there is none that it would gain anything to scale.
    """
    if sliding_layers == "scale":
        return sites
    chosen = [site for site in sites if not site.local]
    if not chosen:
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: every layer with a rotary embedding sees a limited window "
            f"only, so scaling cannot lengthen its reach; load it without its window first "
            f"(config.sliding_window = None, or no sliding kind in config.layer_types), or pass "
            f"sliding_layers='scale' to scale all the same"
        )
    return chosen


@_one_at_a_time
def first_site(
    model: nn.Module, sliding_layers: SlidingLayers = "auto", length: int | None = None
) -> RotarySite:
    """The set of frequencies that ``patch`` would scale, the first of several.

    Args:
        model: not patched.
        sliding_layers: as of :func:`patch`.
        length: trained context in tokens; None reads the configuration.

    Raises:
        AlreadyPatchedError: the model carries a patch.
        NoRopeError, UnsupportedModelError: as :func:`patch`.
    """
    there = current_patch(model)
    if there is not None:
        raise AlreadyPatchedError(
            f"this model is patched with {there.method}; call rope_ext.unpatch(model) first"
        )
    decoder = text_decoder(model)
    return chosen_sites(decoder, find_sites(decoder, length), sliding_layers)[0]


def refuse_scaled(
    decoder: nn.Module, site: RotarySite, method: FrequencyMethod, compose: bool
) -> None:
    """Raise AlreadyScaledError where ``method`` cannot go on top of what a checkpoint has."""
    there = configuration.is_scaled(decoder, site)
    if there is None:
        return
    if site.rope_type in ("dynamic", "longrope"):
        raise AlreadyScaledError(
            f"{type(decoder).__name__} is scaled by {there}, on top of which nothing can be "
            f"composed; load it with rope_type 'default' and patch that"
        )
    if not compose:
        back = "it with rope_type 'default'" if site.scaled else "the model that it was made from"
        raise AlreadyScaledError(
            f"the rotary embedding of {type(decoder).__name__} is scaled by its configuration "
            f"already: {there}. Pass compose=True to extend its {site.rope.length} tokens further, "
            f"or load {back} to start from the unscaled frequencies"
        )
    if method.adapts:
        raise AlreadyScaledError(
            f"{method.name} changes with the sequence and cannot go on top of {there}; pass "
            f"length=TOKENS to fix it, or choose a fixed method such as 'yarn'"
        )


def _target(method: FrequencyMethod, site: RotarySite) -> tuple[torch.Tensor, float]:
    """Float64 frequencies and scaling after the patch; raises if it would extend nothing."""
    method.check(site.rope.length)
    inv_freq, scaling = site.under(method)
    if not method.extends(site.rope):
        options = ", ".join(f"{k}={v!r}" for k, v in method.options().items())
        raise OptionError(
            f"{method.name}({options}) extends nothing on {site.name or 'this model'}: no "
            f"frequency becomes smaller; choose a larger factor or other options"
        )
    return inv_freq, scaling


def _notes(
    sites: list[RotarySite],
    scaled: list[RotarySite],
    saved: str,
    keep: bool,
    precise: bool,
    per_sequence: bool,
) -> list[str]:
    notes = [f"saving: {saved}"]
    left = [site for site in sites if site not in scaled]
    if left:
        names = ", ".join(sorted({site.layer_type or site.name for site in left}))
        notes.append(f"sliding layers: {names} see a limited window and stay as they were")
    if keep:
        notes.append("sliding layers: they share a rotary module and get its unpatched output")
    elif any(site.shared for site in scaled):
        notes.append(
            "sliding layers: they share the rotary module and are scaled along, as transformers "
            "does; sliding_layers='keep' leaves them alone"
        )
    if precise:
        notes.append("angles: computed in float64; by plain transformers, in float32")
    if per_sequence:
        notes.append(
            "sequences: each keeps the frequencies it starts with; plain transformers changes them "
            "as a sequence grows, a model reloaded with rope_ext.from_pretrained does not"
        )
    return notes
