"""Applies a position map: a rotation that depends on whether a key is near or far.

Keys are cached with the rotation of the far band: the rotary module is hooked and returns that
one, so the model's own code and its own caches do the work. The attention function then turns
queries, and the few near keys, from there to the position that each band asks for.

What one forward needs to know travels with its attention mask, a :class:`Plan`: it reaches every
layer of every family, also when gradient checkpointing runs a layer again. The positions of
cached keys are kept on the cache itself.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from rope_ext import attention, frequency
from rope_ext.attention import bands as kernels
from rope_ext.attention import reference
from rope_ext.discovery import RotarySite, text_config
from rope_ext.errors import CacheError, OptionError, UnsupportedModelError
from rope_ext.heads import Head, find_heads
from rope_ext.methods import Map, PositionMethod, Rope
from rope_ext.methods.geometry import Distance, Geometry

NAME = "rope_ext"  # names with sdpa, flash, flex_attention or a slash take special paths
_LAYER = "_rope_ext_layer"  # on an attention module: its Layer
_PACKED = "packed_sequence_mask_function."
_LOG = "_rope_ext_positions"  # on a cache: the Log of its keys
_active = threading.local()


@dataclass(frozen=True)
class Log:
    """Positions of the keys in a cache, and the map under which they were turned.

    Args:
        key: what must be the same for the cache to be continued.
        positions: int64, ``[rows, keys]``; one row if all are alike.
    """

    key: tuple[Any, ...]
    positions: torch.Tensor


def _keep(cache: Cache, log: Log) -> None:
    """Put ``log`` on a cache, which then refuses to go on without its map."""
    setattr(cache, _LOG, log)
    cache.__class__ = _logged(getattr(type(cache), "_rope_ext_plain", type(cache)))


@functools.cache
def _logged(cls: type[Cache]) -> type[Cache]:
    """A cache class whose keys carry the rotation of a position map."""

    def update(self: Cache, *args: Any, **kwargs: Any) -> Any:
        if not any(forward.cache is self for forward in _stack()):
            raise CacheError(
                f"the keys in this cache carry the rotation of {getattr(self, _LOG).key[0]}, and "
                f"this model is not patched with it; start with an empty cache"
            )
        return super(logged, self).update(*args, **kwargs)

    def follow(name: str) -> Callable:
        """The method of that name, which moves rows, moves those of the log as well."""

        def moved(self: Cache, by: Any) -> Any:
            log = getattr(self, _LOG)
            if len(log.positions) > 1:
                if name == "batch_repeat_interleave":
                    positions = log.positions.repeat_interleave(by, dim=0)
                else:
                    positions = log.positions[by.to(log.positions.device)]
                setattr(self, _LOG, replace(log, positions=positions))
            return getattr(super(logged, self), name)(by)

        return moved

    def reduce(self: Cache, protocol: int) -> tuple:
        return _rebuild, (cls,), self.__dict__

    moves = ("reorder_cache", "batch_select_indices", "batch_repeat_interleave")
    names = {
        "update": update,
        **{name: follow(name) for name in moves},
        "__reduce_ex__": reduce,
        "_rope_ext_plain": cls,
    }
    names |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    logged = type(cls.__name__, (cls,), names)
    return logged


def _rebuild(cls: type[Cache]) -> Cache:
    logged = _logged(cls)
    return logged.__new__(logged)


@dataclass(frozen=True, eq=False)
class Layer:
    """What an attention module is to the map; ``head`` is None where it stays as it was."""

    mapping: Mapping
    head: Head | None


class Turns:
    """Cosines and sines of ``to(t) - stored(t)`` for t = 0, 1, 2, ..., made once, on demand.

    Args:
        to: where queries or keys are to be.
        stored: where they are.
        inv_freq: ``[pairs]``; its dtype is that of the angles.
    """

    def __init__(self, to: Map, stored: Map, inv_freq: torch.Tensor) -> None:
        self.to, self.stored, self.inv_freq = to, stored, inv_freq
        self.idle = to is stored or (to == stored and not callable(to))
        self.constant = not callable(to) and not callable(stored)
        self._made: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}

    def at(self, t: torch.Tensor, dtype: torch.dtype) -> kernels.Turn:
        """For any positions, ``[tokens, pairs]``."""
        if self.idle:
            return None
        t = t.double()
        by = _at(self.to, t) - _at(self.stored, t)
        angles = by.unsqueeze(-1).to(self.inv_freq.dtype) * self.inv_freq.to(t.device)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def between(
        self, first: int, last: int, device: torch.device, dtype: torch.dtype
    ) -> kernels.Turn:
        """For the positions from ``first`` to ``last - 1``; one row if all are alike."""
        if self.idle:
            return None
        if self.constant:
            first, last = 0, 1
        made = self._made.get((device, dtype))
        if made is None or len(made[0]) < last:
            size = last if made is None else max(last, 2 * len(made[0]))
            with torch.inference_mode(False):  # a table outlives the mode that it is made in
                made = self.at(torch.arange(size, device=device), dtype)
            self._made[device, dtype] = made
        return made[0][first:last], made[1][first:last]


def _at(to: Map, t: torch.Tensor) -> torch.Tensor:
    return to(t) if callable(to) else torch.full_like(t, to)


class Run(NamedTuple):
    """Tokens that follow each other without a gap, in rows that have them at the same place.

    ``queries`` and ``keys`` index the tokens of this forward and of the cache; the first key is
    at position ``start`` of its sequence. A ``None`` row index means all rows.
    """

    rows: list[int] | None
    queries: slice | torch.Tensor
    keys: slice | torch.Tensor
    start: int


class Stretch(NamedTuple):
    """A run, the turns of its queries and keys in every band, and what multiplies its queries."""

    run: Run
    bands: list[kernels.Band]
    temperature: torch.Tensor | None


class Forward:
    """One forward of the decoder: which tokens there are, and where.

    Args:
        mapping: the map in force.
        rows: batch size.
        tokens: of this forward.
        filled: tokens in the cache before.
        cache: may be None.
        padding: bool, ``[rows, keys]``, False where there is no token; None: no padding.
    """

    def __init__(
        self,
        mapping: Mapping,
        rows: int,
        tokens: int,
        filled: int,
        cache: Cache | None,
        padding: torch.Tensor | None,
    ) -> None:
        self.mapping, self.rows, self.tokens, self.filled = mapping, rows, tokens, filled
        self.cache, self.log = cache, None
        if padding is not None:
            padding = padding[:, : filled + tokens].bool()
            padding = nn.functional.pad(padding, (0, filled + tokens - padding.shape[1]))
            padding = None if bool(padding.all()) else padding
        self.padding = padding
        self.t: torch.Tensor | None = None
        self.documents: torch.Tensor | None = None
        self._embeddings: dict[int, Any] = {}

    def locate(self, positions: torch.Tensor) -> None:
        """Take note of the position ids that the model itself uses.

        Sets ``t``: int64, ``[rows or 1, keys]``, positions counted from the first real token of
        each sequence; negative for padding before it.
        """
        if self.t is not None:
            return
        if positions.ndim == 3:
            if not bool((positions == positions[:1]).all()):
                raise UnsupportedModelError(
                    "position methods know one axis of positions; this input has several (an "
                    "image or a video). Use a frequency method such as 'yarn'"
                )
            positions = positions[0]
        positions = positions.reshape(-1, positions.shape[-1]).long()
        if len(positions) > 1 and bool((positions == positions[:1]).all()):
            positions = positions[:1]
        if self.filled:
            positions = self._continued(positions)
        self.log = Log(self.mapping.key, positions)
        if self.cache is not None:
            _keep(self.cache, self.log)
        self._count()

    def split(self, documents: torch.Tensor) -> None:
        """Take note of the documents that transformers keeps apart, int64, ``[rows, keys]``."""
        self.documents = documents
        if self.t is not None:
            self._count()

    def _count(self) -> None:
        positions = self.log.positions
        if self.padding is not None:
            positions = positions.expand(self.rows, -1)
            first = self.padding.to(positions.device).int().argmax(1, keepdim=True)
        elif self.documents is not None:
            documents = self.documents.to(positions.device)
            positions = positions.expand(len(documents), -1)
            first = torch.searchsorted(documents, documents)  # where each document begins
        else:
            first = torch.zeros_like(positions[:, :1])
        self.t = positions - positions.gather(1, first)

    def _continued(self, positions: torch.Tensor) -> torch.Tensor:
        log = getattr(self.cache, _LOG, None)
        if log is None or log.positions.shape[1] < self.filled:
            raise CacheError(
                f"this cache was begun before the model was patched with "
                f"{self.mapping.method.name} (or by prefix tuning), so its keys carry other "
                f"rotations; start with an empty cache, or use a frequency method such as 'yarn'"
            )
        if log.key != self.mapping.key:
            raise CacheError(
                f"this cache was begun under another patch ({log.key[0]}) than the one in force "
                f"({self.mapping.key[0]}); start with an empty cache"
            )
        before = log.positions[:, : self.filled].to(positions.device)
        if len(before) != len(positions):
            rows = max(len(before), len(positions))
            if min(len(before), len(positions)) != 1:
                raise CacheError(
                    f"this cache was begun with {len(before)} rows and is continued with "
                    f"{len(positions)}; start again with an empty cache"
                )
            before, positions = before.expand(rows, -1), positions.expand(rows, -1)
        return torch.cat((before, positions), 1)

    def embeddings(self, site: RotarySite, like: Any) -> Any:
        """Cosine and sine with which the model turns its queries and keys."""
        made = self._embeddings.get(id(site))
        if made is None:
            t = self.t[:, self.filled :].double().clamp(min=0)
            stored = _at(self.mapping.stored, t)
            inv_freq, scaling = self.mapping.frequencies[site]
            precise = self.mapping.precise
            made = frequency.rotation(site, stored, inv_freq, scaling, precise, like)
            if not isinstance(like, torch.Tensor) and like[0].ndim == 4:
                made = tuple(part.expand(like[0].shape) for part in made)
            self._embeddings[id(site)] = made
        return made


class Plan:
    """The attention mask of one forward under a position map.

    Args:
        forward: whose; None: generation makes the masks of a static cache before the forward.
        arguments: with which transformers asked for a mask; None: a mask was given ready.
        given: that mask, bool or to be added, ``[rows, 1, queries, keys]``.
    """

    ndim = 4  # for transformers, which takes it for a mask made beforehand

    def __init__(
        self,
        forward: Forward | None,
        arguments: dict[str, Any] | None = None,
        given: torch.Tensor | None = None,
    ) -> None:
        self.forward, self.arguments, self.given = forward, arguments, given
        self._stretched: dict[tuple, list[Stretch] | None] = {}

    def contiguous(self) -> Plan:
        """As generation asks of a mask made beforehand."""
        return self

    @property
    def padding(self) -> torch.Tensor | None:
        """The two-dimensional mask of which it was made."""
        return None if self.arguments is None else self.arguments.get("attention_mask")

    @functools.cached_property
    def dense(self) -> torch.Tensor | None:
        """As the mask of a layer that stays as it was; None: plainly causal."""
        return self.given if self.arguments is None else sdpa_mask(**self.arguments)

    @functools.cached_property
    def offset(self) -> int:
        """Token of the sequence that is the first key; above 0 in sliding caches."""
        return 0 if self.arguments is None else self.arguments["kv_offset"]

    @property
    def keys(self) -> int:
        """Keys that are filled; a static cache has room for more."""
        return self.forward.filled + self.forward.tokens - self.offset

    @functools.cached_property
    def positions(self) -> torch.Tensor:
        """``t`` of every key, ``[rows or 1, keys]``."""
        return self.forward.t[:, self.offset :]

    @functools.cached_property
    def window(self) -> int | None:
        """Window to which the mask limits every token."""
        return None if self.arguments is None else self.arguments.get("local_size")

    @functools.cached_property
    def runs(self) -> list[Run] | None:
        """The batch as stretches of consecutive tokens; None: it has others, or another mask."""
        forward, keys = self.forward, self.keys
        if self.arguments is None or not _is_plain(self.arguments["mask_function"]):
            return None
        t = self.positions
        steady = t.diff() == 1
        valid = None if forward.padding is None else forward.padding[:, self.offset :]
        if valid is None and forward.documents is None:
            if not bool(steady.all()) or not bool((t[:, 0] == t[0, 0]).all()):
                return None
            everything = slice(0, forward.tokens)
            return [Run(None, everything, slice(0, keys), int(t[0, 0]))]
        found: dict[tuple, list[int]] = {}
        for row in range(forward.rows):
            for slots in self._stretches(row, valid):
                positions = t[row if len(t) > 1 else 0][slots]
                if not bool((positions.diff() == 1).all()):
                    return None
                first, last = int(slots[0]), int(slots[-1]) + 1
                whole = last - first == len(slots)
                place = (first, last) if whole else tuple(slots.tolist())
                found.setdefault((place, whole, int(positions[0])), []).append(row)
        return [self._run(*where, rows) for where, rows in found.items()]

    def stretches(
        self, head: Head, device: torch.device, dtype: torch.dtype
    ) -> list[Stretch] | None:
        """Every run with its turns, made once for all layers alike; None: not by runs."""
        key = (head, device, dtype)
        if key not in self._stretched:
            self._stretched[key] = self._stretch(head, device, dtype)
        return self._stretched[key]

    def _stretch(
        self, head: Head, device: torch.device, dtype: torch.dtype
    ) -> list[Stretch] | None:
        mapping = self.forward.mapping
        bands = _clipped(mapping.turns(head), self.window)
        if self.runs is None or bands is None:
            return None
        made = []
        for run in self.runs:
            last = run.start + _count(run.keys)
            first = last - _count(run.queries)
            turned = [
                kernels.Band(
                    geometry,
                    of_query.between(first, last, device, dtype),
                    of_key.between(run.start, last, device, dtype),
                )
                for geometry, of_query, of_key in bands
            ]
            t = torch.arange(first, last, device=device)
            made.append(Stretch(run, turned, mapping.temperature(t, dtype)))
        return made

    def goes_back(self, row: int) -> bool:
        """Whether a sequence has a token at an earlier position than the one before it."""
        if self.given is not None:  # a tree of drafts
            return False
        forward = self.forward
        t = self.positions[row if len(self.positions) > 1 else 0]
        back = t.diff() < 0
        if forward.documents is not None:
            back &= forward.documents[row if len(forward.documents) > 1 else 0].diff() == 0
        if forward.padding is not None:
            valid = forward.padding[row, self.offset :]
            back = t[valid].diff() < 0
        return bool(back.any())

    def _stretches(self, row: int, valid: torch.Tensor | None) -> Iterator[torch.Tensor]:
        """Slots of each document of a row, on the CPU; those without queries left out."""
        documents = self.forward.documents
        if documents is None:
            parts = [torch.nonzero(valid[row].cpu()).flatten()]
        else:
            of_row = documents[row if len(documents) > 1 else 0].cpu()
            parts = [torch.nonzero(of_row == i).flatten() for i in of_row.unique()]
        for slots in parts:
            if len(slots) and slots[-1] >= self.keys - self.forward.tokens:
                yield slots

    def _run(self, place: tuple[int, ...], whole: bool, start: int, rows: list[int]) -> Run:
        before = self.keys - self.forward.tokens
        if whole:
            first, last = place
            return Run(
                rows, slice(max(first - before, 0), last - before), slice(first, last), start
            )
        slots = torch.tensor(place)
        return Run(rows, slots[slots >= before] - before, slots, start)


def _count(index: slice | torch.Tensor) -> int:
    return index.stop - index.start if isinstance(index, slice) else len(index)


def _parts(function: Callable) -> Iterator[Callable]:
    """The simple mask functions of which transformers has combined ``function`` by and."""
    name = getattr(function, "__qualname__", "")
    combined = name.startswith(("and_masks.", "remap_positions_for_packed_sequence."))
    if not combined or function.__module__ != causal_mask_function.__module__:
        yield function
        return
    for cell in function.__closure__:
        inner = cell.cell_contents
        for part in inner if isinstance(inner, tuple) else (inner,):
            if callable(part):
                yield from _parts(part)


def _is_plain(function: Callable) -> bool:
    """Whether a mask function of transformers is causal, perhaps in a window or by document."""
    return all(
        part is causal_mask_function
        or (
            getattr(part, "__module__", None) == causal_mask_function.__module__
            and part.__qualname__.startswith((_PACKED, "sliding_window_overlay."))
        )
        for part in _parts(function)
    )


def _documents(function: Callable) -> torch.Tensor | None:
    """The documents that a mask function keeps apart, ``[rows, keys]``."""
    for part in _parts(function):
        if getattr(part, "__qualname__", "").startswith(_PACKED):
            return part.__closure__[0].cell_contents
    return None


class Mapping:
    """A position map in force on a decoder.

    Args:
        decoder: where.
        method: the map, resolved.
        rope: the trained embedding, after a frequency map if there is one.
        frequencies: inverse frequencies (float64) and scaling of each site.
        label: the patch in words; caches may only be continued under the same.
        precise: angles in float64, else in float32, as transformers computes them.
        kernel: as :func:`rope_ext.attention.attend` takes it.
        local_too: also layers with a limited window.
    """

    def __init__(
        self,
        decoder: nn.Module,
        method: PositionMethod,
        rope: Rope,
        frequencies: dict[RotarySite, tuple[torch.Tensor, float]],
        label: str,
        precise: bool,
        kernel: str,
        local_too: bool,
    ) -> None:
        self.method, self.rope, self.precise, self.kernel = method, rope, precise, kernel
        self.frequencies = frequencies
        self.bands = method.bands()
        self.stored = self.bands[-1].key
        self.key = (label, rope.length, precise, local_too)
        self.handles: list[Any] = []
        self._turns: dict[tuple, list[tuple[Geometry, Turns, Turns]]] = {}
        self._config = text_config(decoder)
        self._before = self._config._attn_implementation_internal
        heads = find_heads(decoder, list(frequencies))
        self.windowed = 0
        if not local_too:
            self.windowed = sum(head is not None and head.local for head in heads.values())
            heads = {m: None if h is not None and h.local else h for m, h in heads.items()}
        if not any(heads.values()):
            raise UnsupportedModelError(
                f"{type(decoder).__name__}: every layer with a rotary embedding sees a limited "
                f"window only, so {method.name} cannot lengthen its reach; pass "
                f"sliding_layers='scale' to change positions within the window all the same"
            )
        self.heads = heads

    @property
    def current(self) -> Forward | None:
        """The forward under way in this thread."""
        return next((f for f in reversed(_stack()) if f.mapping is self), None)

    def __getstate__(self) -> dict[str, Any]:
        made = {"bands", "stored", "_turns"}  # functions, and what follows from them
        return {name: value for name, value in self.__dict__.items() if name not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _turns={})
        self.bands = self.method.bands()
        self.stored = self.bands[-1].key

    def install(self, decoder: nn.Module) -> None:
        """Put hooks and the attention function in place."""
        for site in self.frequencies:
            hook = _RotaryHook(self, site)
            self.handles.append(site.module.register_forward_hook(hook, with_kwargs=True))
        if self.windowed and any(site.shared for site in self.frequencies):
            self.handles += frequency.keep_native(decoder, list(self._config.layer_types))
        for module, head in self.heads.items():
            module.__dict__[_LAYER] = Layer(self, head)
        self.handles.append(decoder.register_forward_pre_hook(self.begin, with_kwargs=True))
        self.handles.append(
            decoder.register_forward_hook(self.end, with_kwargs=True, always_call=True)
        )
        self._config._attn_implementation_internal = NAME  # the public name sets sub-configurations

    def notes(self) -> list[str]:
        """Sentences for ``describe``."""
        mapped = sum(head is not None for head in self.heads.values())
        notes = [f"positions: changed in {mapped} of {len(self.heads)} attention layers"]
        if self.windowed:
            notes.append(f"sliding layers: {self.windowed} see a limited window and stay")
        return notes

    def undo(self) -> None:
        """Take hooks and attention function back."""
        for handle in self.handles:
            handle.remove()
        for module in self.heads:
            module.__dict__.pop(_LAYER, None)
        if self._config._attn_implementation == NAME:  # else somebody has chosen another since
            self._config._attn_implementation_internal = self._before

    @torch.compiler.disable
    def begin(self, decoder: nn.Module, args: tuple, kwargs: dict) -> None:
        """Decoder pre-hook."""
        name = self.method.name
        if self._config._attn_implementation != NAME:
            raise UnsupportedModelError(
                f"the attention implementation was set to "
                f"{self._config._attn_implementation!r} after the model was patched with {name}, "
                f"which needs its own; call rope_ext.unpatch(model) first, or patch again with "
                f"replace=True"
            )
        given = {**dict(zip(frequency.parameters(type(decoder)), args, strict=False)), **kwargs}
        cache = given.get("past_key_values")
        if given.get("cache") is not None or (cache is not None and not isinstance(cache, Cache)):
            raise CacheError(
                f"continuous batching keeps keys in pages, and {name} needs them in order; "
                f"generate with a DynamicCache or a StaticCache, or use a frequency method such "
                f"as 'yarn'"
            )
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        mask = given.get("attention_mask")
        if isinstance(mask, dict):  # one for each kind of layer, made before the forward
            mask = next(iter(mask.values()), None)
        if isinstance(mask, Plan):
            mask = mask.padding
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
            mask = None
        filled = 0 if cache is None else int(cache.get_seq_length())
        rows, length = tokens.shape[:2]
        _stack().append(Forward(self, rows, length, filled, cache, mask))

    @torch.compiler.disable
    def end(self, decoder: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """Decoder hook: a cache that the decoder made itself gets the positions too."""
        forward = self.current
        if forward is None:  # refused before it began
            return
        _stack().remove(forward)
        for part in output if isinstance(output, tuple) else (output,):
            cache = getattr(part, "past_key_values", part)
            if isinstance(cache, Cache) and forward.log is not None:
                _keep(cache, forward.log)

    def turns(self, head: Head) -> list[tuple[Geometry, Turns, Turns]]:
        """For every band, the turns of queries and of keys."""
        key = (head.site, tuple(head.pair.tolist()))
        if key not in self._turns:
            dtype = torch.float64 if self.precise else torch.float32
            inv_freq = self.frequencies[head.site][0][head.pair].to(dtype)
            self._turns[key] = [
                (
                    band.geometry,
                    Turns(band.query, self.stored, inv_freq),
                    Turns(band.key, self.stored, inv_freq),
                )
                for band in self.bands
            ]
        return self._turns[key]

    def temperature(self, t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """``[tokens]``."""
        made = self.method.temperature(t.double().clamp(min=0), self.rope)
        return None if made is None else made.to(dtype)


def _stack() -> list[Forward]:
    """Forwards under way in this thread, the innermost last."""
    return _active.__dict__.setdefault("stack", [])


class _RotaryHook:
    """Forward hook of a rotary module: turns by the position under which keys are cached."""

    def __init__(self, mapping: Mapping, site: RotarySite) -> None:
        self.mapping, self.site = mapping, site

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        forward = self.mapping.current
        if forward is None or not self.site.called(args, kwargs):
            return None
        forward.locate(kwargs["position_ids"] if "position_ids" in kwargs else args[1])
        result = forward.embeddings(self.site, output)
        if self.site.shared:
            first = result if isinstance(result, torch.Tensor) else result[0]
            frequency.attach_native(first, output)
        return result


@torch.compiler.disable
def _mask(**arguments: Any) -> Any:
    """Mask function under :data:`NAME`."""
    for name in ("q_offset", "kv_offset"):  # a static cache's own counters, which move on
        arguments[name] = int(arguments.get(name, 0))
    if isinstance(arguments.get("attention_mask"), Plan):
        arguments["attention_mask"] = arguments["attention_mask"].padding
    stack = _stack()
    documents = _documents(arguments["mask_function"])
    if stack and documents is not None:
        stack[-1].split(documents)
    return Plan(stack[-1] if stack else None, arguments)


@torch.compiler.disable
def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function under :data:`NAME`.

    Takes ``query`` as ``[rows, heads, queries, columns]``, key and value with as many heads or
    fewer; returns ``[rows, queries, heads, columns of value]``.
    """
    layer = module.__dict__.get(_LAYER)
    if layer is None or layer.head is None:
        dense = attention_mask.dense if isinstance(attention_mask, Plan) else attention_mask
        return _unmapped(module, query, key, value, dense, dropout, scaling, softcap, s_aux, kwargs)
    mapping = layer.mapping
    plan = _plan(mapping, attention_mask)
    if dropout:
        raise OptionError(
            f"{mapping.method.name} has no attention dropout, and {type(module).__name__} asks for "
            f"{dropout}; set config.attention_dropout = 0 before the model is built"
        )
    if query.dtype != value.dtype:  # under autocast, which does not know this operator
        query, key = query.to(value.dtype), key.to(value.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    common = {"scale": scale, "softcap": softcap, "sinks": s_aux}
    key, value = key[:, :, : plan.keys], value[:, :, : plan.keys]
    stretches = plan.stretches(layer.head, query.device, _table_dtype(query))
    if stretches is None:
        out = _irregular(mapping, layer.head, plan, query, key, value, common)
    else:
        common["kernel"] = mapping.kernel
        out = _regular(layer.head, stretches, query, key, value, common)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)


def _plan(mapping: Mapping, mask: Plan | torch.Tensor | None) -> Plan:
    """The plan for a mask, which may have been made before the forward."""
    if isinstance(mask, Plan) and mask.forward is not None:
        return mask
    forward = mapping.current
    if forward is None:
        raise UnsupportedModelError(
            f"an attention layer patched with {mapping.method.name} was run by itself, or again by "
            f"gradient checkpointing with a mask of your own; run the whole model, without that "
            f"mask or without checkpointing"
        )
    if isinstance(mask, Plan):
        mask.forward = forward
        return mask
    if mask is not None and mask.ndim == 4:
        return Plan(forward, given=mask)
    arguments = {
        "batch_size": forward.rows,
        "q_length": forward.tokens,
        "kv_length": forward.filled + forward.tokens,
        "q_offset": forward.filled,
        "kv_offset": 0,
        "mask_function": causal_mask_function,
        "attention_mask": forward.padding,
    }
    return Plan(forward, arguments)


def _clipped(
    bands: list[tuple[Geometry, Turns, Turns]], window: int | None
) -> list[tuple[Geometry, Turns, Turns]] | None:
    """The bands within a window; None where only a dense mask can say that."""
    if window is None:
        return bands
    clipped = []
    for geometry, *turns in bands:
        if not isinstance(geometry, Distance):
            return None
        last = window if geometry.last is None else min(window, geometry.last)
        if geometry.first < last:
            clipped.append((Distance(geometry.first, last), *turns))
    return clipped


def _regular(
    head: Head,
    stretches: list[Stretch],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    common: dict[str, Any],
) -> torch.Tensor:
    """Every run by the kernel for consecutive tokens."""
    out = None
    for run, bands, temperature in stretches:
        whole = run.rows is None
        q, k, v = (
            x if whole else x[run.rows][:, :, at]
            for x, at in ((query, run.queries), (key, run.keys), (value, run.keys))
        )
        part = attention.attend(
            q, k, v, bands, head.pairs, start=run.start, temperature=temperature, **common
        )
        if whole:
            return part
        if out is None:
            out = part.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[-1])
        rows = torch.tensor(run.rows, device=query.device).unsqueeze(1)
        at = torch.arange(query.shape[2], device=query.device)[run.queries]
        out[rows, at] = part.transpose(1, 2)
    return out.transpose(1, 2)


def _irregular(
    mapping: Mapping,
    head: Head,
    plan: Plan,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    common: dict[str, Any],
) -> torch.Tensor:
    """Row by row with dense logits: drafts in trees, masks of other shapes, gaps in positions."""
    dtype = _table_dtype(query)
    dense, tokens = plan.dense, query.shape[2]
    parts = []
    for row in range(len(query)):
        t = plan.positions[row if len(plan.positions) > 1 else 0].to(query.device)
        of_query = t[-tokens:]
        if plan.goes_back(row):
            raise UnsupportedModelError(
                f"the position ids of row {row} go back within one sequence, where "
                f"{mapping.method.name} would have to attend to the future; give packed documents "
                f"no attention mask and use_cache=False, so that transformers keeps them apart"
            )
        if dense is None:
            mask = None
        else:
            mask = dense[row if len(dense) > 1 else 0, :, :, : len(t)]
            mask = mask if mask.dtype == torch.bool else mask >= 0
        turned = [
            kernels.Band(geometry, at_query.at(of_query, dtype), at_key.at(t, dtype))
            for geometry, at_query, at_key in mapping.turns(head)
        ]
        parts.append(
            reference.attend_blocked(
                query[row : row + 1],
                key[row : row + 1],
                value[row : row + 1],
                turned,
                head.pairs,
                query_positions=of_query,
                key_positions=t,
                temperature=mapping.temperature(of_query, dtype),
                mask=mask,
                **common,
            )
        )
    return torch.cat(parts)


def _table_dtype(query: torch.Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _unmapped(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """A layer that the map leaves alone."""
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )
    keys = torch.arange(key.shape[2], device=key.device)
    queries = keys[-query.shape[2] :] if mask is None else keys[-1:].expand(query.shape[2])
    out = reference.attend_blocked(
        query,
        key,
        value,
        [kernels.Band(Distance(0, None), None, None)],
        kernels.Pairs(slice(0, 0), slice(0, 0)),
        query_positions=queries,
        key_positions=keys,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        sinks=s_aux,
        mask=mask,
    )
    return out.transpose(1, 2).contiguous(), None
