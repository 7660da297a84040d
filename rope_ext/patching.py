"""``patch`` and ``unpatch``: the one front door."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from rope_ext import stale
from rope_ext.advice.recommendation import Recommendation
from rope_ext.apply import APPLY
from rope_ext.encodings import Encoding
from rope_ext.errors import (
    AlreadyPatchedError,
    NotPatchedError,
    OptionError,
)
from rope_ext.methods import FrequencyMethod, Method, build_method
from rope_ext.options import Options, SlidingLayers
from rope_ext.position.bias import Earlier, learned
from rope_ext.record import FIELD, Record
from rope_ext.rotary import buffers
from rope_ext.rotary.buffers import Changes
from rope_ext.rotary.sites import (
    PatchTarget,
    RotarySite,
    chosen_sites,
    find_sites,
    text_config,
    text_decoder,
    unwrap,
)
from rope_ext.saving import configuration
from rope_ext.saving.second_load import SecondLoad

Model = TypeVar("Model", bound=nn.Module)
Function = TypeVar("Function", bound=Callable[..., Any])
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


@dataclass(frozen=True)
class Patch:
    """A patch in force: what was asked for, what was done, and the way back.

    ``target_length`` is the context after the extension in tokens; ``native`` says whether plain
    transformers reloads the patch from the configuration; ``outermost`` is the configuration in
    which that of the text model may be nested.
    """

    method: Method
    options: Options
    decoder: nn.Module
    outermost: Any
    sites: list[RotarySite]
    scaled: list[RotarySite]
    target_length: int
    precise: bool
    native: bool
    notes: tuple[str, ...]
    record: Record
    changes: Changes

    @property
    def frequencies(self) -> FrequencyMethod | None:
        """The frequency method in force, by itself or under a position method."""
        return self.method if self.method.kind == "frequency" else self.options.frequency

    @property
    def length(self) -> int:
        """Trained context, tokens."""
        return self.scaled[0].rope.length

    @property
    def cached_under(self) -> stale.FilledUnder:
        """What must be the same for a cache to be continued."""
        named = self.options.recorded()
        names = ("frequency", "bias", "layers", "sliding_layers")
        more = {"trained_length": self.record.trained_length, "precise": self.precise}
        more |= {name: named[name] for name in names}
        return stale.FilledUnder(self.record.method, more)

    def frequencies_of(self, site: RotarySite) -> tuple[torch.Tensor, float]:
        """Frequencies (float64, ``[pairs]``) and scaling now; at full length if they adapt."""
        if site not in self.scaled:
            return site.rope.inv_freq, site.scaling
        if self.method.kind == "frequency":
            return site.under(self.method)
        inv_freq, scaling = site.rope.inv_freq, site.scaling
        if self.frequencies is not None:
            inv_freq, scaling = site.under(self.frequencies)
        number = 1.0 if site.baked else self.method.attention_scaling(site.rope)
        return inv_freq, scaling * number


@_one_at_a_time
def patch(
    model: Model,
    method: str | Method | Recommendation = "yarn",
    *,
    frequency: str | FrequencyMethod | None = None,
    bias: str | Encoding | None = None,
    layers: str | Sequence[int] | None = None,
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

    Where a cast such as ``model.bfloat16()`` has rounded the rotary frequencies, they are built
    again from the configuration first; ``describe`` says so.

    Threads that patch or unpatch wait for each other. A forward in another thread does not wait:
    let those of this model end first.

    Args:
        model: a loaded transformers model with rotary embeddings, or a ``PeftModel``, compiled
            or data-parallel wrapper of one.
        method: name or alias of a method, a method object such as ``YaRN(factor=4)``, or what
            :func:`rope_ext.recommend` returned.
        frequency: a frequency method under a position method, such as ``NTK(factor=2)``. The
            position method takes the context it extends to for the trained one.
        bias: what is added to the logits by distance while the rotation stays: the name of an
            encoding, such as ``"alibi"``, or an object such as ``T5(num_buckets=16)``. For the
            rotation as it was trained, patch with ``"rope"``.
        layers: those that are patched, of the layers that rotate: numbers counted from 0, or
            ``"every 4th"``, which is 3, 7, 11 and so on. The others keep the trained rotation.
        kernel: for the attention of position methods, and of others with a bias or ``layers``:
            ``"flash"`` on CPUs, ``"flex"`` on GPUs, ``"reference"`` with dense logits; ``"auto"``
            chooses.
        replace: take back an earlier patch first instead of raising. The same encoding keeps what
            it has learned: its parameters as they are, longer tables with their trained rows. Where
            they cannot be kept, this raises an OptionError; call :func:`unpatch` first to start
            from new parameters.
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
    if isinstance(method, Recommendation):
        compose = compose or method.compose
        original_max_position_embeddings = (
            original_max_position_embeddings or method.original_max_position_embeddings
        )
        method = method.method
    method = _method(method, options)
    keywords = Options(
        frequency=frequency,
        bias=bias,
        layers=layers,
        kernel=kernel,
        compose=compose,
        sliding_layers=sliding_layers,
        precise=precise,
        original_max_position_embeddings=original_max_position_embeddings,
        tokenizer=tokenizer,
    )
    keywords.check(method)
    decoder = text_decoder(model)
    earlier = decoder.__dict__.get(_STATE)
    if earlier is not None and not replace:
        raise AlreadyPatchedError(
            f"this model is patched with {earlier.method}; call rope_ext.unpatch(model) first, or "
            f"pass replace=True"
        )
    interrupted = _Interrupted.from_decoder(decoder)
    random = torch.get_rng_state()
    if earlier is not None:
        unpatch(model)
    try:
        _patch(unwrap(model), decoder, method, keywords)
        dropped = interrupted.values.carry(decoder)
    except BaseException:
        if _STATE in decoder.__dict__:
            unpatch(model)
        interrupted.go_on(model)  # a refused replacement leaves the model as it was
        torch.set_rng_state(random)
        raise
    if dropped:
        _logger.warning(
            "rope_ext: %s replaces %s, and what that learned is no longer part of the model: %s",
            method.name,
            earlier.record.encoding.name,
            _listed(dropped),
        )
    state = decoder.__dict__[_STATE]
    prefix = "sequences: " if state.native else "saving: "  # what plain transformers does otherwise
    for note in (note.removeprefix(prefix) for note in state.notes if note.startswith(prefix)):
        _logger.warning("rope_ext: %s on %s: %s", method.name, type(decoder).__name__, note)
    return model


@_one_at_a_time
def unpatch(model: Model) -> Model:
    """Take a patch back: every buffer, scalar and configuration value as before, bit for bit.

    Frequencies that were rounded by a cast before the patch are rounded again afterwards.

    Args:
        model: as :func:`rope_ext.patch` took it, or any wrapper of it.

    Returns:
        ``model`` itself.

    Raises:
        NotPatchedError: there is no patch.
    """
    decoder = text_decoder(model)
    state = decoder.__dict__.get(_STATE)
    if state is None:
        raise NotPatchedError("this model is not patched, so there is nothing to take back")
    stale.mark(decoder, state.cached_under)
    del decoder.__dict__[_STATE]
    state.changes.undo()
    stale.refuse(decoder, None)
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
        interrupted = _Interrupted.from_decoder(decoder)
        patch(model, method, **kwargs)
    try:
        yield model
    finally:
        with _lock:
            if _STATE in decoder.__dict__:
                unpatch(model)
            interrupted.go_on(model)


@dataclass(frozen=True)
class _Interrupted:
    """A patch that is to come back as if nothing had happened.

    Args:
        patch: None: there is none.
        values: what was to learn.
        grown: the rotary sites that transformers changes from forward to forward.
    """

    patch: Patch | None
    values: Earlier
    grown: list[buffers.SiteState]

    @classmethod
    def from_decoder(cls, decoder: nn.Module) -> _Interrupted:
        earlier = decoder.__dict__.get(_STATE)
        return cls(
            earlier, Earlier.from_model(decoder), [] if earlier is None else earlier.changes.grown()
        )

    def go_on(self, model: nn.Module) -> None:
        """Put it in force again on a model that is not patched now."""
        if self.patch is None:
            return
        decoder = text_decoder(model)
        with torch.random.fork_rng(devices=[]):  # encodings draw what they then get back
            _patch(unwrap(model), decoder, self.patch.record.method, self.patch.options)
        self.values.give_back(decoder)
        buffers.go_on(self.grown)


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


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _patch(model: nn.Module, decoder: nn.Module, method: Method, options: Options) -> None:
    stale.mark(decoder, None)
    config = configuration.ConfigState(decoder, model)
    sites = find_sites(decoder, options.original_max_position_embeddings)
    scaled = chosen_sites(decoder, sites, options.sliding_layers)
    tokenizer, changes = options.tokenizer, Changes(parts=[config])
    attention = text_config(decoder)._attn_implementation
    try:
        place = PatchTarget(model, decoder, sites, scaled)
        rounded = [site for site in sites if site.rounded]
        changes.states += map(buffers.repair, rounded)
        applied = APPLY[method.kind](place, method, options, changes)
        record = Record(
            method=method,
            resolved=applied.method,
            arguments=options.recorded(),
            trained_length=scaled[0].rope.length,
            target_length=applied.target_length,
            native=applied.native,
            plain=applied.plain,
            config=config.before(applied.values),
        )
        values, notes = dict(applied.values), list(applied.notes)
        if rounded:
            notes.append(
                "frequencies: a cast to bfloat16 or float16 had rounded them; built again in "
                "float32 (unpatch restores the rounded ones)"
            )
        if not record.plain or not configuration.reports_scaling(values, scaled):
            values[FIELD] = record.to_json()
        if config.earlier is not None:
            notes.append(
                f"the configuration was saved under another patch ({config.earlier}), whose record "
                f"gives the trained length"
            )
        config.write(values)
        if tokenizer is not None:
            length = getattr(tokenizer, "model_max_length", None)
            changes.replaced.append((tokenizer, "model_max_length", length))
            tokenizer.model_max_length = applied.target_length
        again = functools.partial(_patch_alike, decoder)
        changes.parts.append(SecondLoad(model, config.configs, again, attention))
    except BaseException:
        changes.undo()
        raise
    decoder.__dict__[_STATE] = Patch(
        method=applied.method,
        options=options,
        decoder=decoder,
        outermost=model.config,
        sites=sites,
        scaled=scaled,
        target_length=applied.target_length,
        precise=applied.precise,
        native=applied.native,
        notes=tuple(notes),
        record=record,
        changes=changes,
    )
    stale.refuse(decoder, decoder.__dict__[_STATE].cached_under)


@_one_at_a_time
def _patch_alike(decoder: nn.Module, copy: nn.Module) -> None:
    """Give ``copy``, a second load of the same model, the patch on ``decoder``."""
    state = decoder.__dict__[_STATE]
    options = dataclasses.replace(state.options, tokenizer=None)
    other = text_decoder(copy)
    _patch(unwrap(copy), other, state.record.method, options)
    values = learned(decoder)
    with torch.no_grad():
        for name, value in learned(other).items():
            value.copy_(values.get(name, value))


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
