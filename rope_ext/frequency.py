"""Applies a frequency map: new values in the rotary buffers a model already has.

Cosines and sines are then computed by the model's own code, so caches, attention kernels and
compilation stay as they are. Two cases need a hook on the rotary module: frequencies that
differ between the rows of a batch, and angles beyond what float32 resolves.
"""

from __future__ import annotations

import functools
import inspect
import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rope_ext.discovery import RotarySite, is_local
from rope_ext.errors import CacheError, UnsupportedModelError
from rope_ext.methods import DynamicMethod

PRECISE_BEYOND = 131072
"""Tokens of target length beyond which angles are computed in float64 by default."""

_ABSENT = ...  # survives pickling as itself
_MASTERS = "_rope_ext_masters"  # on a patched rotary module: buffer name -> float32 values
_STARTED = "_rope_ext_started"  # on a cache: the sequences in it, a Started
_NATIVE = "_rope_ext_native"  # on a cosine tensor: the unpatched cosine and sine
_logger = logging.getLogger("rope_ext")


@dataclass
class SiteState:
    """What is needed to take a patch back from one site, bit for bit."""

    site: RotarySite
    buffers: dict[str, torch.Tensor]
    attributes: dict[str, Any]
    type: type[nn.Module]


@dataclass
class Applied:
    """A frequency map in force on some sites of a decoder."""

    states: list[SiteState] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    rows: RowLengths | None = None
    generators: list[tuple[nn.Module, Any]] = field(default_factory=list)

    def undo(self) -> None:
        """Restore every buffer, attribute and method that was replaced."""
        for handle in self.handles:
            handle.remove()
        for model, own in self.generators:
            if own is _ABSENT:
                model.__dict__.pop("generate", None)
            else:
                model.generate = own
        for state in reversed(self.states):
            _undo(state)


def write(site: RotarySite, inv_freq: torch.Tensor, scaling: float, hooked: bool) -> SiteState:
    """Put ``inv_freq`` (float32, CPU, ``[pairs]``) and ``scaling`` into the rotary module.

    The values survive ``.to(dtype)``, ``.half()``, ``.to_empty()`` and pickling: they are
    written again from a float32 master whenever the module's tensors are replaced.

    A module that is ``hooked``, by a :class:`RotaryHook`, gets a class of its own.
    """
    module = site.module
    state = _save(site)
    masters = {**module.__dict__.get(_MASTERS, {}), **dict.fromkeys(site.buffers, inv_freq)}
    module.__dict__[_MASTERS] = masters
    module.__dict__["_is_hf_initialized"] = True  # transformers must not initialise it again
    setattr(module, site.scaling_attribute, scaling)
    module.__class__ = _guarded(_plain(module), hooked)
    _rewrite(module)
    return state


def grow(site: RotarySite) -> SiteState:
    """Switch on transformers' own dynamic scaling, which follows the longest position seen.

    It reads its factor from ``module.config.rope_parameters``.
    """
    module = site.module
    counter = f"{site.prefix}max_seq_len_cached"
    lengths = ("max_seq_len_cached", "original_max_seq_len")
    state = _save(site, ("rope_type", *lengths, counter, "attention_scaling"))
    for name in lengths:
        setattr(module, name, site.rope.length)
    if isinstance(module.rope_type, dict):
        module.rope_type = {**module.rope_type, site.layer_type: "dynamic"}
    else:
        module.rope_type = "dynamic"
    return state


def _save(site: RotarySite, extra: tuple[str, ...] = ()) -> SiteState:
    names = (site.scaling_attribute, _MASTERS, "_is_hf_initialized", *extra)
    own = site.module.__dict__
    return SiteState(
        site=site,
        buffers={name: site.module._buffers[name].detach().clone() for name in site.buffers},
        attributes={name: own.get(name, _ABSENT) for name in names},
        type=_plain(site.module),
    )


def _plain(module: nn.Module) -> type[nn.Module]:
    """The class that a rotary module came with: another of its sites may be patched already."""
    return getattr(type(module), "_rope_ext_plain", type(module))


def _undo(state: SiteState) -> None:
    module = state.site.module
    for name, value in state.attributes.items():
        if value is _ABSENT:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = value
    module.__class__ = state.type
    for name, value in state.buffers.items():
        materialised = value.is_meta and not module._buffers[name].is_meta
        _put(module, name, state.site.loaded if materialised else value)


@torch.no_grad()
def _put(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Write a buffer in place where it can be: compiled graphs hold on to its memory."""
    buffer = module._buffers[name]
    if buffer.is_meta or buffer.dtype != value.dtype or buffer.shape != value.shape:
        module._buffers[name] = value.to(
            value.device if value.is_meta else buffer.device, copy=True
        )
    else:
        buffer.copy_(value)


def _rewrite(module: nn.Module) -> None:
    for name, value in module.__dict__[_MASTERS].items():
        if not module._buffers[name].is_meta:  # written once it is materialised
            _put(module, name, value)


@functools.cache
def _guarded(cls: type[nn.Module], hooked: bool) -> type[nn.Module]:
    """A rotary class whose patched buffers follow the device but never the dtype.

    Compiled graphs are guarded by the class of a module and not by its hooks: with one class
    for both, a graph made without the hook would go on serving a module that has it.
    """

    def apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        super(guarded, self)._apply(fn, recurse)
        _rewrite(self)
        return self

    def reduce(self: nn.Module, protocol: int) -> tuple:
        return _rebuild, (cls, hooked), self.__dict__

    names = {"_apply": apply, "__reduce_ex__": reduce, "_rope_ext_plain": cls}
    names |= {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    guarded = type(cls.__name__, (cls,), names)
    return guarded


def _rebuild(cls: type[nn.Module], hooked: bool) -> nn.Module:
    guarded = _guarded(cls, hooked)
    return guarded.__new__(guarded)


class RotaryHook:
    """Computes cosine and sine in place of a rotary module, from float64 frequencies.

    Args:
        site: where.
        inv_freq: float64, ``[pairs]``; used without ``rows``.
        scaling: number on cosine and sine; likewise.
        precise: angles in float64; else in float32, as transformers computes them.
        rows: lengths of the rows of the batch, for methods that depend on them.
        native: also keep what the unpatched module would have returned.
        start: positions below it keep the trained frequencies.
    """

    def __init__(
        self,
        site: RotarySite,
        inv_freq: torch.Tensor,
        scaling: float,
        precise: bool,
        rows: RowLengths | None,
        native: bool,
        start: int,
    ) -> None:
        self.site, self.inv_freq, self.scaling = site, inv_freq, scaling
        self.precise, self.rows, self.native, self.start = precise, rows, native, start
        self._made: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        """Forward hook of the rotary module."""
        if not self.site.called(args, kwargs):
            return None
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        result = output
        if self.precise or self.rows is not None or self.start:
            inv_freq, scaling = self.inv_freq, self.scaling
            if self.rows is not None:
                inv_freq, scaling = self._frequencies(positions)
            if self.start:
                inv_freq = self._kept(positions, inv_freq)
            result = rotation(self.site, positions, inv_freq, scaling, self.precise, output)
        if self.native:
            theta, scaling = self.site.loaded, self.site.scaling
            first = result if isinstance(result, torch.Tensor) else result[0]
            attach_native(
                first, rotation(self.site, positions, theta, scaling, self.precise, output)
            )
        return result

    @torch.compiler.disable
    def _frequencies(self, positions: torch.Tensor) -> tuple[torch.Tensor, Any]:
        lengths = self.rows.lengths(positions)
        if self._made is None or self._made[0] is not lengths:  # a new sequence
            self._made = (lengths, *self.rows.frequencies(self.site, lengths))
        return self._made[1:]

    def _kept(self, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
        """Frequencies of every token, ``[rows, tokens, pairs]``: the first keep the trained."""
        place = positions.amax(0) if positions.ndim == 3 else positions
        dtype = torch.float64 if self.precise else torch.float32
        trained, inv_freq = (x.to(place.device, dtype) for x in (self.site.loaded, inv_freq))
        return torch.where((place < self.start).unsqueeze(-1), trained, inv_freq)


def rotation(
    site: RotarySite,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    scaling: float | torch.Tensor,
    precise: bool,
    like: Any,
) -> Any:
    """What a rotary module returns, of other frequencies or positions.

    Args:
        site: of the module.
        positions: ``[rows, tokens]``, or ``[axes, rows, tokens]``, whole or not.
        inv_freq: ``[pairs]``, or ``[rows, tokens or 1, pairs]``.
        scaling: number on cosine and sine.
        precise: angles in float64, else in float32, as transformers computes them.
        like: the module's own output, for its dtype.
    """
    dtype = torch.float64 if precise else torch.float32
    columns = site.columns
    inv_freq = inv_freq.to(positions.device, dtype)
    if isinstance(scaling, torch.Tensor):
        scaling = scaling.to(positions.device, dtype)
    pair = columns.pair.to(positions.device)
    if columns.axis is not None and positions.ndim == 3:
        of_column = positions[columns.axis.to(positions.device)].movedim(0, -1)
        angles = of_column.to(dtype) * inv_freq[..., pair]
        cos, sin = angles.cos() * scaling, angles.sin() * scaling
    else:
        angles = positions.unsqueeze(-1).to(dtype) * inv_freq
        cos, sin = ((f(angles) * scaling)[..., pair] for f in (torch.cos, torch.sin))
    if columns.complex:
        return torch.complex(cos, sin).to(like.dtype)
    return cos.to(like[0].dtype), sin.to(like[1].dtype)


# Not traced: a compiled graph can neither put an attribute on a tensor nor see one.
@torch.compiler.disable
def attach_native(first: torch.Tensor, native: Any) -> None:
    """Let ``first`` carry what the unpatched module would have returned."""
    first.__dict__[_NATIVE] = native


@dataclass(frozen=True)
class Started:
    """The rows of a batch, whose frequencies stay what they are until the end.

    Args:
        lengths: tokens that the frequencies of each row are made for, float64, ``[rows]``.
        room: the same for the whole batch, with the padding, as a cache counts them.
    """

    lengths: torch.Tensor
    room: int


class RowLengths:
    """Keeps the frequencies of every sequence fixed from its first token to its last.

    A decoder pre-hook sets the lengths of the rows at hand: those stored on the cache if the
    sequence is under way, else those of the sequences that start now.

    Args:
        method: the frequencies of each length.
        trained: tokens below which no method changes anything.
    """

    def __init__(self, method: DynamicMethod, trained: int) -> None:
        self.method, self.trained = method, trained
        self.current: Started | None = None
        self.announced: Started | None = None  # by generate, which knows what will come
        self.warned = False

    def lengths(self, positions: torch.Tensor) -> torch.Tensor:
        """Length of each row, float64; from ``positions`` outside the decoder's forward."""
        if self.current is not None:
            return self.current.lengths
        return positions.max().double().cpu().reshape(1) + 1

    def frequencies(
        self, site: RotarySite, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[rows, 1, pairs]`` and ``[rows, 1, 1]``, float64; one row if all are equal."""
        if bool((lengths == lengths[0]).all()):
            lengths = lengths[:1]
        inv_freq = self.method.inv_freq_at(site.rope, lengths)
        # A row that needs no extension gets the very numbers the checkpoint came with.
        same = torch.isclose(inv_freq, site.rope.inv_freq, rtol=1e-12, atol=0)
        inv_freq = torch.where(same, site.loaded.double(), inv_freq)
        scaling = self.method.attention_scaling_at(site.rope, lengths) * site.scaling
        return inv_freq.unsqueeze(1), scaling[:, None, None]

    @torch.compiler.disable
    def begin(self, decoder: nn.Module, args: tuple, kwargs: dict) -> None:
        """Decoder pre-hook."""
        refuse_sharded(self.method.name)
        if torch.compiler.is_exporting():
            raise UnsupportedModelError(
                f"{self.method.name} chooses the frequencies of every sequence as it comes, which "
                f"an exported graph cannot do; pass length=TOKENS to fix them"
            )
        given = {**dict(zip(parameters(type(decoder)), args, strict=False)), **kwargs}
        if given.get("cache") is not None:  # a paged one; all others are past_key_values
            raise CacheError(
                f"continuous batching packs many sequences into one row, and {self.method.name} "
                f"gives each its own frequencies; pass length=TOKENS to fix them"
            )
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        cache = given.get("past_key_values")
        rows = tokens.shape[0]
        stored = getattr(cache, _STARTED, None)
        filled = 0 if cache is None else int(cache.get_seq_length())
        if filled > 0:
            if stored is None:
                raise CacheError(
                    f"this cache was begun before the model was patched with {self.method.name} "
                    f"(or by prefix tuning), so the length of its sequences is not known; start "
                    f"with an empty cache, or pass length=TOKENS to fix the frequencies"
                )
            if len(stored.lengths) not in (1, rows):
                raise CacheError(
                    f"this cache was begun with {len(stored.lengths)} rows and is continued with "
                    f"{rows}; start again with an empty cache, or set length= to fix the "
                    f"frequencies"
                )
            self.current = stored
            self._warn(filled + tokens.shape[1])
            return
        self.current = self._starting(given, tokens, rows)
        if cache is not None:
            setattr(cache, _STARTED, self.current)

    def _warn(self, reached: int) -> None:
        """Say once that a sequence has become longer than its frequencies are made for."""
        room = self.current.room
        if self.warned or reached <= max(room, self.trained):
            return
        self.warned = True
        _logger.warning(
            "rope_ext: %s: a sequence of %d tokens keeps the frequencies it started with, which "
            "are made for %d: by generate on a patched model (not its decoder), prompt plus "
            "max_new_tokens; else the first forward. To go on with a cache beyond that, in a "
            "chat for instance, pass length=TOKENS to rope_ext.patch",
            self.method.name,
            reached,
            room,
        )

    def _starting(self, given: dict[str, Any], tokens: torch.Tensor, rows: int) -> Started:
        announced = self.announced
        if announced is not None and rows % len(announced.lengths) == 0:
            repeats = rows // len(announced.lengths)
            return Started(announced.lengths.repeat_interleave(repeats), announced.room)
        lengths = self._longest(given, tokens, rows)
        return Started(lengths, max(tokens.shape[1], int(lengths.max())))

    def _longest(self, given: dict[str, Any], tokens: torch.Tensor, rows: int) -> torch.Tensor:
        positions, mask = given.get("position_ids"), given.get("attention_mask")
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        if positions.ndim == 3:  # axes, rows, tokens
            positions = positions.amax(0)
        positions = positions.reshape(-1, positions.shape[-1])
        if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape == tokens.shape[:2]:
            positions = positions.expand(rows, -1) if len(positions) == 1 else positions[-rows:]
            positions = positions.masked_fill(mask == 0, 0)
        longest = positions.amax(-1).double().cpu() + 1
        return longest.expand(rows) if len(longest) == 1 else longest[-rows:]

    @torch.compiler.disable
    def end(self, decoder: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """Decoder hook: a cache that the decoder made itself carries the lengths too."""
        cache = getattr(output, "past_key_values", None)
        if cache is not None and self.current is not None:
            setattr(cache, _STARTED, self.current)
        self.current = None

    def generate(self, model: nn.Module, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Announce prompt plus new tokens of every row, then generate."""
        if self.announced is not None:  # the model drafts for itself: it is the same sequence
            return original(*args, **kwargs)
        names = tuple(inspect.signature(type(model).generate).parameters)[1:]
        self.announced = _announced(model, {**dict(zip(names, args, strict=False)), **kwargs})
        try:
            return original(*args, **kwargs)
        finally:
            self.announced = None


def _announced(model: nn.Module, given: dict[str, Any]) -> Started | None:
    """What a call of ``generate`` will make of each row, if its arguments say it."""
    tokens = given.get("inputs") if given.get("input_ids") is None else given["input_ids"]
    embeds = given.get("inputs_embeds")
    prompt = tokens if embeds is None else embeds
    if not isinstance(prompt, torch.Tensor):
        return None  # every row keeps the length of its prompt
    configs = (given.get("generation_config"), model.generation_config)

    def setting(name: str) -> Any:  # in the order of transformers
        values = (given.get(name), *(getattr(config, name, None) for config in configs))
        return next((value for value in values if value is not None), None)

    mask, pad, eos = given.get("attention_mask"), setting("pad_token_id"), setting("eos_token_id")
    ends = eos if isinstance(eos, (list, tuple)) else [eos]
    if mask is None and embeds is None and pad is not None and pad not in ends:
        mask = prompt.ne(pad)  # as generate infers it
    real = torch.full((len(prompt),), prompt.shape[1], dtype=torch.float64)
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        real = mask.sum(-1).double().cpu()
    new = setting("max_new_tokens")
    if new is None:
        total = setting("max_length")
        new = 20 if total is None else max(0, total - prompt.shape[1])
    return Started(real + new, prompt.shape[1] + new)


@functools.cache
def parameters(cls: type[nn.Module]) -> tuple[str, ...]:
    """Names of the arguments of a module's forward."""
    return tuple(inspect.signature(cls.forward).parameters)[1:]


@torch.compiler.disable
def refuse_sharded(name: str) -> None:
    """Raise if each device of a context-parallel group gets a part of every sequence.

    torch's ``context_parallel``, accelerate's too, replaces one function as long as it lasts.
    """
    module = getattr(nn.functional.scaled_dot_product_attention, "__module__", None)
    if str(module).startswith("torch.distributed."):
        raise UnsupportedModelError(
            f"context parallelism gives every device a part of each sequence, and {name} needs "
            f"its positions whole; use a fixed frequency method such as 'yarn', or one device "
            f"for each sequence (cp_size 1)"
        )


def follow_rows(decoder: nn.Module, model: nn.Module, applied: Applied) -> None:
    """Tell ``applied.rows`` of every sequence that ``decoder`` or ``model.generate`` starts."""
    rows = applied.rows
    applied.handles.append(decoder.register_forward_pre_hook(rows.begin, with_kwargs=True))
    applied.handles.append(decoder.register_forward_hook(rows.end, with_kwargs=True))
    if hasattr(type(model), "generate"):
        applied.generators.append((model, model.__dict__.get("generate", _ABSENT)))
        model.generate = functools.partial(rows.generate, model, model.generate)


def keep_native(decoder: nn.Module, layer_types: list[str]) -> list[Any]:
    """Give limited-window attention layers the unpatched cosine and sine.

    Raises:
        UnsupportedModelError: an attention module does not receive them as an argument.
    """
    handles = []
    for name, module in decoder.named_modules():
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or "Attention" not in type(module).__name__:
            continue
        if not is_local(layer_types[index]):
            continue
        if "position_embeddings" not in inspect.signature(module.forward).parameters:
            raise UnsupportedModelError(
                f"{type(decoder).__name__}: {name} takes no position_embeddings, so its sliding "
                f"layers cannot be kept apart; use sliding_layers='scale'"
            )
        handles.append(module.register_forward_pre_hook(_use_native, with_kwargs=True))
    return handles


@torch.compiler.disable
def _use_native(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    given = {**dict(zip(parameters(type(module)), args, strict=False)), **kwargs}
    embeddings = given["position_embeddings"]
    first = embeddings if isinstance(embeddings, torch.Tensor) else embeddings[0]
    native = getattr(first, _NATIVE, None)
    if native is None:
        raise UnsupportedModelError(
            "the unpatched position embeddings did not reach a sliding layer (a wrapper copied "
            "them); use sliding_layers='scale'"
        )
    if "position_embeddings" in kwargs:
        return args, {**kwargs, "position_embeddings": native}
    return tuple(native if arg is embeddings else arg for arg in args), kwargs
