"""Applies methods to a model: writes rotary buffers, and adds hooks where that is not enough."""

import copy
import functools
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from rope_ext.config.settings import METHODS, has_mscale, method_of, mscale_factor
from rope_ext.config.writing import Written, is_scaled, unsaved, written
from rope_ext.encodings import Encoding, NoPE, RoPE
from rope_ext.errors import AlreadyScaledError, OptionError, UnsupportedModelError
from rope_ext.methods import Band, FrequencyMethod, Method, PositionMethod, Rope
from rope_ext.methods.checked import not_none
from rope_ext.methods.geometry import Distance, identity
from rope_ext.methods.rope import extended_length
from rope_ext.options import Options, refuse_moving
from rope_ext.position.layers import (
    WINDOWS_ONLY,
    find_layouts,
    ignores_scaling,
    rotates_windows_only,
)
from rope_ext.position.map import PositionMap
from rope_ext.rotary import hooks
from rope_ext.rotary.context import refuse_sharded, watch_generation
from rope_ext.rotary.sequences import Sequences
from rope_ext.rotary.sites import ROUNDING, PatchTarget, RotarySite, softmax_scales
from rope_ext.rotary.swapping import Changes, grow_buffers, set_attribute, write_buffers

TYPES = {kind: name for kind, name in METHODS.items() if kind != "longrope"}
"""Methods whose factor can be raised, by ``rope_type``."""

_logger = logging.getLogger("rope_ext")


@dataclass(frozen=True)
class Applied:
    """An applied method."""

    method: Method  # the method with every option filled in
    target_length: int  # extended length, tokens
    saved: Written  # what the configuration stores
    plain: bool  # whether plain transformers computes the same from it
    precise: bool  # whether angles are computed in float64
    notes: tuple[str, ...]  # sentences for describe


def refuse_scaled(
    decoder: nn.Module, site: RotarySite, method: FrequencyMethod, compose: bool | str
) -> None:
    """Raise AlreadyScaledError if ``method`` cannot extend the scaling of a checkpoint."""
    there = is_scaled(decoder, site)
    if there is None or site.raised is not None:
        return
    own = ""
    if raises := TYPES.get(site.rope_type):
        own = f", or pass method={raises!r} and compose='raise' to raise the checkpoint's factor"
    if site.moving:
        raise AlreadyScaledError(
            f"{type(decoder).__name__} is scaled by {there}, on top of which nothing can be "
            f"composed; load it with rope_type 'default' and patch that{own}"
        )
    if not compose:
        back = "it with rope_type 'default'" if site.scaled else "the model that it was made from"
        raise AlreadyScaledError(
            f"the rotary embedding of {type(decoder).__name__} is scaled by its configuration: "
            f"{there}. Pass compose=True to extend {site.rope.length} tokens, or load {back}{own}"
        )
    if method.is_dynamic:
        raise AlreadyScaledError(
            f"{method.name} changes with the sequence and cannot be composed with {there}; pass "
            f"length=TOKENS to fix it, or choose a fixed method such as 'yarn'"
        )


def require_scaling(place: PatchTarget, method: Method) -> None:
    """Raise if a given ``attention_factor`` would have no effect."""
    if method.attention_factor in (None, 1):
        return
    if all(ignores_scaling(place.decoder, site) for site in place.scaled):
        raise UnsupportedModelError(
            f"{type(place.decoder).__name__} normalizes queries and keys after the rotation, which "
            f"cancels attention_factor={method.attention_factor!r}; give temperature= a number"
        )


def scale_softmax(
    sites: list[RotarySite],
    methods: tuple[Method, ...],
    changes: Changes,
    only: Collection[nn.Module] | None = None,
) -> list[str]:
    """Apply the ``attention_factor`` of methods to the softmax scale, if the checkpoint needs it.

    See :meth:`RotarySite.factors`. ``only``: the attention layers to patch; None: all.
    Returns sentences for ``describe``.
    """
    notes = []
    for site in sites:
        _, number = site.factors(*methods)
        baked = [module for module in site.baked if only is None or module in only]
        if baked and number != 1:
            # On cos and sin it would count twice: in queries and in keys.
            scale_layers(baked, number**2, changes)
            notes.append(
                f"attention_factor: {number:.4g}, squared in the softmax scale of {len(baked)} "
                f"layers, where this checkpoint has its own (mscale_all_dim), not on cos and sin"
            )
    return notes


def scale_layers(modules: list[nn.Module], number: float, changes: Changes) -> None:
    """Multiply the softmax scale of attention layers."""
    for module in modules:
        set_attribute(
            module, name="scaling", value=cast("float", module.scaling) * number, changes=changes
        )


def target(
    place: PatchTarget, site: RotarySite, method: FrequencyMethod, options: Options
) -> tuple[torch.Tensor, float]:
    """Return float64 frequencies and scaling after the patch; raises if it would extend nothing."""
    refuse_scaled(place.decoder, site, method, compose=options.compose)
    method.check(site.rope.length)
    inv_freq, scaling = site.under(method)
    if not method.extends(site.rope):
        given = ", ".join(f"{k}={v!r}" for k, v in method.options().items())
        raise OptionError(
            f"{method.name}({given}) extends nothing on {site.name or 'this model'}: no frequency "
            f"becomes smaller; choose a larger factor or other options"
        )
    return inv_freq, scaling


def apply_frequency(
    place: PatchTarget, method: FrequencyMethod, options: Options, changes: Changes
) -> Applied:
    """Apply a frequency method."""
    scaled = place.scaled
    temperature = method.tempered(scaled[0].rope)
    constant = None if temperature is None else temperature.constant
    tempered = [] if constant is None else _layers_with_scale(place, options)
    if _is_uneven(place, method, options) or (temperature is not None and not tempered):
        return apply_position(place, given=method, options=options, changes=changes)
    length = max(site.target_length(method) for site in scaled)
    targets = {site: target(place, site, method, options=options) for site in scaled}
    hooks.refuse_unused(place.decoder, scaled)
    idle = rotates_windows_only(place.decoder, place.sites)  # its configuration is still unpatched
    growing = _is_growing(method)
    precise = _is_precise(method, options, length)
    require_scaling(place, method)
    saved = _saved(place, method, length, tempered=bool(tempered))
    sequences = None
    if growing:
        _let_grow(method, scaled, changes)
    else:
        if method.is_dynamic:
            sequences = Sequences(place, method, changes)
        _write_all(targets, saved, precise, sequences=sequences, changes=changes)
    notes = _notes(place, precise, per_sequence=sequences is not None and saved.native)
    if idle:
        notes.append(f"sliding layers: {WINDOWS_ONLY}")
        family = type(place.decoder).__name__
        _logger.warning("rope_ext: %s on %s: %s", method.name, family, WINDOWS_ONLY)
    notes += scale_softmax(scaled, (method,), changes)
    if temperature is not None and constant is not None:
        scale_layers(tempered, constant, changes)
        notes.append(f"temperature: {temperature!r}, in {len(tempered)} attention layers")
    return Applied(
        method=method,
        target_length=length,
        saved=saved,
        # Plain transformers changes frequencies within a sequence, and only has float32 angles.
        plain=saved.native and not precise and sequences is None,
        precise=precise,
        notes=tuple(notes),
    )


def _is_uneven(place: PatchTarget, method: FrequencyMethod, options: Options) -> bool:
    """Whether layers or tokens differ in their frequencies, or there is a bias.

    A buffer, which all layers and tokens share, cannot express this.
    """
    keep = options.sliding_layers == "keep" and any(site.shared for site in place.scaled)
    return bool(keep or method.start_tokens or options.bias or options.layers)


def _is_growing(method: FrequencyMethod) -> bool:
    """Whether transformers' own code is to change the frequencies as a sequence grows."""
    return getattr(method, "mode", None) == "growing"


def _is_precise(method: FrequencyMethod, options: Options, length: int) -> bool:
    """Whether angles are computed in float64; raises OptionError where they cannot be."""
    growing = _is_growing(method)
    if growing and options.precise == "auto":
        return False
    precise = options.is_precise(length)
    if growing and precise:
        raise OptionError(
            f"{method.name}: mode='growing' is transformers' own code and cannot be combined with "
            f"precise=True; use mode='fixed'"
        )
    return precise


def _saved(place: PatchTarget, method: FrequencyMethod, length: int, tempered: bool) -> Written:
    """Return what the configuration says of the patch, which reaches ``length`` tokens."""
    saved = written(place, method, length)
    if tempered:  # the frequencies stay the same, but no rope_type expresses it
        saved = replace(unsaved(place, length), built=saved.built)
    if _is_growing(method) and not saved.native:
        raise UnsupportedModelError(
            f"transformers cannot build its dynamic type for {type(place.decoder).__name__}; use "
            f"mode='fixed'"
        )
    return saved


def _layers_with_scale(place: PatchTarget, options: Options) -> list[nn.Module]:
    """Return the attention layers whose softmax scale a constant temperature multiplies.

    Empty if one of them has no such attribute; queries are multiplied then.
    """
    found = find_layouts(place.decoder, place.scaled, "leave temperature out")
    every = options.sliding_layers == "scale"
    chosen = {module: x for module, x in found.items() if x and (every or not x.local)}
    return [*chosen] if all(layout.scales for layout in chosen.values()) else []


def _let_grow(method: FrequencyMethod, scaled: list[RotarySite], changes: Changes) -> None:
    """Let transformers' own dynamic type compute the frequencies."""
    instead = "use a fixed frequency method such as 'yarn'"
    refuse = functools.partial(refuse_sharded, method.name, instead)
    for site in scaled:
        grow_buffers(site, changes)
        changes.append(site.module.register_forward_pre_hook(refuse).remove)


def _write_all(
    targets: Mapping[RotarySite, tuple[torch.Tensor, float]],
    saved: Written,
    precise: bool,
    sequences: Sequences | None,
    changes: Changes,
) -> None:
    """Write the frequencies of every site, and add hooks where a buffer is not enough."""
    for site, (inv_freq, scaling) in targets.items():
        if sequences is None:
            # As transformers rounds them, so that a model reloaded without rope_ext is equal bit
            # for bit.
            write_buffers(site, saved.built.get(site, inv_freq.float()), scaling)
        else:  # the hook replaces them; the buffer keeps the trained ones
            write_buffers(site, site.loaded, site.scaling)
        if precise or sequences is not None:
            hooks.RotaryHook(
                site=site, inv_freq=inv_freq, scaling=scaling, precise=precise, sequences=sequences
            ).put(changes)


def _notes(place: PatchTarget, precise: bool, per_sequence: bool) -> list[str]:
    """Return sentences for ``describe`` about layers and tokens that are treated otherwise."""
    notes = []
    left = [site for site in place.sites if site not in place.scaled]
    for local, why in ((True, "see a limited window"), (False, "are not scaled by the checkpoint")):
        names = sorted({site.layer_type or site.name for site in left if site.local == local})
        if names:
            kind = "sliding layers" if local else "layers"
            notes.append(f"{kind}: {', '.join(names)} {why} and stay as they were")
    if any(site.shared for site in place.scaled):
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


@dataclass(frozen=True, kw_only=True)
class _Standing(RoPE):
    """Wraps a frequency method as a position method that leaves positions unchanged.

    Only its ``start_tokens`` get positions at which the new frequencies give the trained angles.
    """

    of: FrequencyMethod
    divisors: torch.Tensor  # trained frequencies divided by the new ones, float64, [pairs]

    @property
    def name(self) -> str:
        return self.of.name

    @property
    def start_tokens(self) -> int:
        return self.of.start_tokens

    @property
    def by_pair(self) -> bool:
        return bool(self.start_tokens)

    def bands(self) -> tuple[Band, ...]:
        to = self._placed if self.start_tokens else identity
        return (Band(Distance(0, None), to, to),)

    def _placed(self, t: torch.Tensor) -> torch.Tensor:
        t = t.unsqueeze(-1)
        return torch.where(t < self.start_tokens, t * self.divisors.to(t), t)


@dataclass(frozen=True)
class _Described:
    """A position method to apply, and how errors name it."""

    method: PositionMethod
    options: Options
    label: str  # of the patch, for describe and errors
    named: str  # the method and what is added to it
    instead: str  # what to do where it is refused


def _described(given: PositionMethod, options: Options) -> _Described:
    """Return a position method with the words of its errors."""
    label = str(given) if options.frequency is None else f"{given} on {options.frequency}"
    return _Described(
        method=given,
        options=options,
        label=label,
        named=given.name,
        instead="use a frequency method such as 'yarn'",
    )


def _standing(place: PatchTarget, given: FrequencyMethod, options: Options) -> _Described:
    """Return a frequency method as a position method, with the words of its errors."""
    trained = place.scaled[0].rope
    temperature = given.tempered(trained)
    if given.is_dynamic:  # with layers that share a rotary module, or a layer without a scale
        refuse_moving(given, "sliding_layers='keep'" if temperature is None else "temperature=")
    instead = f"patch with {given.name!r}"
    if options.bias is None and options.layers is None:
        instead = "patch every layer, with sliding_layers='scale'"
        if given.start_tokens:
            instead = "leave start_tokens out"
        elif temperature is not None:
            instead = "give temperature= a number"
    divisors = (trained.inv_freq / given.inv_freq(trained)).nan_to_num(1.0)  # 0 / 0: at rest
    method = _Standing(of=given, divisors=divisors, temperature=temperature)
    label = str(given) if options.frequency is None else f"{given} on {options.frequency}"
    return _Described(
        method=method,
        options=replace(options, frequency=given),
        label=label,
        named=method.name,
        instead=instead,
    )


def _with_added(one: _Described) -> _Described:
    """Add ``bias=`` and ``layers=`` to the words, if they are given."""
    options = one.options
    added = [name for name in ("bias", "layers") if getattr(options, name) is not None]
    if not added:
        return one
    words = " and ".join(f"{option}=" for option in added)
    values = (f"{name}={getattr(options, name)}" for name in added)
    return replace(
        one,
        label=", ".join([one.label, *values]),
        named=f"{one.named} with {words}",
        instead=f"{one.instead} without {words}",
    )


def apply_position(
    place: PatchTarget, given: PositionMethod | FrequencyMethod, options: Options, changes: Changes
) -> Applied:
    """Apply a position method, or a frequency method whose layers or queries differ.

    That is one with ``layers``, a bias, a temperature that is not a constant, or layers with a
    window that share the rotary module and keep its trained frequencies.
    """
    from rope_ext.position.install import Installed  # here, since it loads every kernel

    standing = isinstance(given, FrequencyMethod)
    described = _standing(place, given, options) if standing else _described(given, options)
    described = _with_added(described)
    options = described.options
    named = described.named
    instead = described.instead
    under = options.frequency
    rope = options.rope(place.scaled[0].rope)
    methods = (described.method,) if under is None else (under, described.method)
    for each in methods:
        require_scaling(place, each)
    table = {site: _write(place, site, methods, options=options) for site in place.scaled}
    if described.method.by_pair and any(site.rope.dim != rope.dim for site in place.scaled):
        raise UnsupportedModelError(
            f"{described.method.name} needs one number of pairs in all patched layers, and those "
            f"of {type(place.decoder).__name__} differ; use another position method, such as "
            f"'self_extend'"
        )
    reached = described.method.reached(rope)
    length = described.method.target_length(rope)
    method = cast("PositionMethod", described.method.resolved(rope))
    precise = options.is_precise(length)
    position_map = PositionMap(
        method=method,
        rope=rope,
        frequencies=table,
        label=described.label,
        precise=precise,
        kernel=options.kernel,
        include_sliding=options.sliding_layers == "scale",
        encoding=_encoding(place, method, rope, options=options),
        layers=options.layers,
        named=named,
        instead=instead,
    )
    # Layers with a window that share the rotary module are scaled along by a frequency method.
    whole = options.sliding_layers == "auto" and options.layers is options.bias is None
    installed = Installed(
        place.decoder,
        position_map,
        changes,
        follow=standing and whole,
        generates=not place.is_encoder and getattr(place.model, "can_generate", bool)(),
    )
    if not place.is_encoder:
        watch_generation(place.model, installed.batch, changes)
    notes = [*installed.notes]
    if any("mrope_section" in site.settings.parameters for site in place.scaled):
        notes.append(
            f"images: their positions have several axes, and {named} attends by one, so that "
            f"inputs with images or videos will be refused; for these, {instead}"
        )
        _logger.warning("rope_ext: %s", notes[-1])
    notes += scale_softmax(place.scaled, methods=methods, changes=changes, only=installed.mapped)
    temperature = method.tempered(rope)
    if temperature is not None:
        notes.append(f"temperature: {temperature!r}, in those attention layers")
    if reached < length:
        notes.append(
            f"distances: {method} keeps to trained ones up to {reached} tokens only, of {length}"
        )
        _logger.warning("rope_ext: %s", notes[-1])
    return Applied(
        method=given if standing else method,
        target_length=length,
        saved=unsaved(place, length),
        plain=False,
        precise=precise,
        notes=tuple(notes),
    )


def _encoding(place: PatchTarget, method: PositionMethod, rope: Rope, options: Options) -> Encoding:
    """Return what is added to the logits: the method itself, the bias, or one that adds nothing."""
    bias: Any = options.bias or NoPE()
    encoding = method if isinstance(method, Encoding) else bias.resolved(rope)
    windowed = any(site.local or site.shared for site in place.sites)
    if windowed and encoding.window_beside() is not None:
        raise UnsupportedModelError(
            f"{type(place.decoder).__name__} has layers with a window already, and {encoding.name} "
            f"chooses its own; to remove positions of the others, patch with 'nope' and layers="
        )
    return encoding


def _write(
    place: PatchTarget, site: RotarySite, methods: tuple[Method, ...], options: Options
) -> tuple[torch.Tensor, float]:
    """Write a site's frequencies (float64, ``[pairs]``) and scaling under ``methods``."""
    inv_freq = site.loaded.double()
    if options.frequency is not None:
        inv_freq, _ = target(place, site, method=options.frequency, options=options)
    elif site.moving:
        raise AlreadyScaledError(
            f"{methods[-1].name} cannot go on top of rope_type {site.rope_type!r}, which changes "
            f"with the sequence; load {type(place.decoder).__name__} with rope_type 'default'"
        )
    scaling, _ = site.factors(*methods)
    write_buffers(site, inv_freq.float(), scaling)
    return inv_freq, scaling


def raise_factor(
    place: PatchTarget, method: Method, options: Options, changes: Changes
) -> tuple[PatchTarget, FrequencyMethod, list[str]]:
    """Return the unscaled sites, the checkpoint's own method with a larger factor, and notes.

    YaRN on top of YaRN is not YaRN with a larger factor: the second ramp starts from the pairs that
    the first one left. Only the factor of ``method`` counts.
    """
    _require_raisable(place, method, options)
    family = type(place.decoder).__name__
    scaled = [site for site in place.scaled if site.scaled]
    raised = {site: _raised(family, site, method.factor) for site in scaled}
    methods = {own for _, own in raised.values()}
    if len(methods) > 1:
        raise UnsupportedModelError(
            f"{family} scales its kinds of layers by different options; pass compose=True instead"
        )
    for site in scaled:
        if site.rope_type == "dynamic":  # transformers changes these frequencies in every forward
            set_attribute(site.module, name="rope_type", value="default", changes=changes)
    scales = _raised_scales(place, scaled, float(method.factor))
    for module, scale in scales.items():
        set_attribute(module, name="scaling", value=scale, changes=changes)
    notes = []
    if scales:
        notes.append(f"softmax scale: that of the raised factor in {len(scales)} layers")
    sites = [raised[site][0] if site in raised else site for site in place.sites]
    place = replace(place, sites=sites, scaled=[raised[site][0] for site in scaled])
    return place, methods.pop(), notes


def _require_raisable(place: PatchTarget, method: Method, options: Options) -> None:
    """Raise unless the checkpoint is scaled by ``method``, of which only the factor is given."""
    scaled = [site for site in place.scaled if site.scaled]
    if not scaled:
        family = type(place.decoder).__name__
        raise UnsupportedModelError(
            f"{family} has no RoPE scaling whose factor compose='raise' could raise; leave it out"
        )
    kind = scaled[0].rope_type
    if kind not in TYPES:
        raise AlreadyScaledError(
            f"the checkpoint is scaled by {kind!r}, a table for one length, which no factor "
            f"stretches; load it with rope_type 'default', or call rope_ext.search"
        )
    name = TYPES[kind]
    if method.name != name:
        raise OptionError(
            f"compose='raise' raises the factor of the checkpoint's own {kind!r}, not of "
            f"{method.name!r}; pass method={name!r}, or compose=True to put {method.name!r} on top"
        )
    given = [option for option in method.changed() if option != "factor"]
    own = ("bias", "layers", "original_max_position_embeddings")
    given += [f"{option}=" for option in own if getattr(options, option) is not None]
    if given:
        raise OptionError(f"compose='raise' takes the factor only; leave {', '.join(given)} out")


def _raised_scales(
    place: PatchTarget, scaled: Sequence[RotarySite], factor: float
) -> dict[nn.Module, float]:
    """Return the softmax scale of each attention layer that the factor changes."""
    if not any(site.settings.parameters.get("mscale_all_dim") for site in scaled):
        return {}
    scales = softmax_scales(place.decoder, factor=factor)
    if scales is None:
        raise UnsupportedModelError(
            f"{type(place.decoder).__name__} cannot be built from its configuration, which would "
            f"tell the softmax scale of the raised factor; pass compose=True instead"
        )
    return scales


def _raised(family: str, site: RotarySite, factor: float) -> tuple[RotarySite, FrequencyMethod]:
    """Return the site without its scaling, and its own method with this factor.

    Raises:
        OptionError: the factor is not larger than the checkpoint's.
        UnsupportedModelError: the site's frequencies are not those of its configuration.
    """
    own = site.settings.parameters
    kind = site.rope_type
    settings = site.settings
    old = not_none(settings.factor)
    length = not_none(settings.length)
    if factor <= old:
        raise OptionError(
            f"factor={factor!r} does not raise the checkpoint's own {old!r}; pass a larger one"
        )
    rope = Rope.geometric(site.rope.base, site.rope.dim, length)
    published = not_none(method_of(own, old))
    raised = published
    follows = _follows_mscale(own, old)
    if follows:
        published = replace(published, attention_factor=mscale_factor(own, old))
        raised = replace(published, attention_factor=mscale_factor(own, factor))
    raised = replace(raised, factor=float(factor))
    target = extended_length(factor, length)
    loaded = site.loaded
    if kind == "llama3":  # its context does not grow by exactly the factor
        target = extended_length(factor / old, not_none(settings.target))
    if kind == "dynamic":  # the buffer may have grown with a sequence
        loaded = rope.inv_freq.float()
    elif not (
        torch.allclose(published.inv_freq(rope), loaded.double(), rtol=ROUNDING, atol=0)
        and math.isclose(published.attention_scaling(rope), site.scaling, rel_tol=1e-6)
    ):
        raise UnsupportedModelError(
            f"{family}: its frequencies are not those of rope_type {kind!r} in its configuration; "
            f"pass compose=True to extend them further"
        )
    entry = {**copy.deepcopy(dict(own)), **raised.rope_parameters(rope)}
    if follows:
        del entry["attention_factor"]  # transformers computes it from the factor
    unscaled = {"rope": rope, "loaded": loaded, "scaling": 1.0, "rope_type": "default", "baked": ()}
    return replace(site, **unscaled, raised=(entry, target)), raised


def _follows_mscale(entry: Mapping[str, Any], old: float) -> bool:
    """Whether the attention factor is what transformers computes from ``mscale`` and the factor."""
    if not has_mscale(entry):
        return False
    given = entry.get("attention_factor")
    return given is None or math.isclose(given, mscale_factor(entry, old), rel_tol=1e-6)
