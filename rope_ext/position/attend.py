"""The attention function and the mask function of models under a position map."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

from rope_ext.attention import bands as plain
from rope_ext.attention import dispatch, reference, runs
from rope_ext.attention.call import Call, Pairs, Places, RotatedBand, Rotation
from rope_ext.errors import OptionError, UnsupportedModelError
from rope_ext.methods.geometry import Distance, Geometry
from rope_ext.position import bias, head_positions, head_scales, tensors
from rope_ext.position.forward import FEW, PositionForward
from rope_ext.position.layers import Layout
from rope_ext.position.map import PositionMap
from rope_ext.position.masks import BatchMask, clipped, shown
from rope_ext.position.tables import BandRotations, Decay, RotationTable
from rope_ext.rotary.context import current, forward_context, run_eagerly
from rope_ext.rotary.sites import text_config

NAME = "rope_ext"  # names with sdpa, flash, flex_attention or a slash take special paths
LAYER = "_rope_ext_layer"  # attribute of an attention module: its AttentionLayer
_NO_PAIRS = Pairs(slice(0, 0), slice(0, 0))


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """An attention layer on a patched decoder that the map leaves alone.

    Args:
        map: the map.
    """

    map: PositionMap


@dataclass(frozen=True, eq=False)
class MappedLayer(AttentionLayer):
    """An attention layer whose positions the map changes, or which gets a window.

    Args:
        layout: how the layer rotates its queries and keys.
        rotated: the rotations of that layout.
        biased: the module that has the bias of this layer; None: no bias.
        window: tokens that a layer attends to whose positions stay; None: positions change.
    """

    layout: Layout
    rotated: tensors.LayoutRotations
    biased: nn.Module | None = None
    window: int | None = None

    def __getstate__(self) -> dict[str, Any]:  # rotations hold functions, which do not pickle
        return {**self.__dict__, "rotated": self.rotated.number}

    def __setstate__(self, state: dict[str, Any]) -> None:
        rotated = tensors.rotations_of(
            state["map"], state["rotated"], state["layout"], state["window"]
        )
        self.__dict__.update(state, rotated=rotated)

    def adding(self, call: Call, distances: int, like: torch.Tensor) -> Call:
        """``call`` with the bias or the scores of this layer at all distances below some."""
        if self.biased is None:
            return call
        return replace(call, **self._added(self.biased, distances, like)._asdict())

    @staticmethod
    def _added(owner: nn.Module, distances: int, like: torch.Tensor) -> bias.Added:
        module = getattr(owner, bias.NAME)  # looked up each time: peft may have wrapped it
        return module(distances, like.device, _table_dtype(like), owner)


@dataclass(frozen=True, eq=False)
class Dense:
    """One call of an attention layer in terms of :mod:`rope_ext.attention.reference`.

    Args:
        query: ``[rows, heads, queries, columns]``, as the model rotated it.
        key: ``[rows, kv_heads, keys, columns]``.
        call: everything except bands and temperature, which follow from the next two.
        rotations: for every band, which keys it shows, and further rotations of queries and keys.
        temperature: factor of queries at given positions; None: no factor.
        places: positions of queries and keys.
        reach: largest distance between queries that are rotated together; None: any.
    """

    query: torch.Tensor
    key: torch.Tensor
    call: Call
    rotations: Sequence[tuple[Geometry, RotationTable | Decay | None, RotationTable | Decay | None]]
    temperature: Callable[[torch.Tensor, torch.dtype], torch.Tensor | None] | None
    places: Places
    reach: int | None = None

    def attend(self, value: torch.Tensor) -> torch.Tensor:
        """``[rows, heads, queries, columns of value]``."""
        parts = [
            plain.attend(self.query[:, :, part], self.key, value, *self._asked(part))
            for part in self._parts(slice(None))
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def weights(self, queries: slice) -> torch.Tensor:
        """Attention weights of some queries on every key, ``[rows, heads, queries, keys]``."""
        parts = [
            reference.weights(self.query[:, :, part], self.key, *self._asked(part))
            for part in self._parts(queries)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _parts(self, queries: slice) -> Iterator[slice]:
        """These queries, split so that those of each part are within ``reach``."""
        if self.reach is None:
            yield queries
            return
        first, last, _ = queries.indices(len(self.places.query))
        places = self.places.query[first:last].tolist()
        low, high = (places[0], places[0]) if places else (0, 0)
        for index, t in enumerate(places, first):
            low, high = min(low, t), max(high, t)
            if high - low > self.reach:
                yield slice(first, index)
                first, low, high = index, t, t
        yield slice(first, last)

    def _asked(self, queries: slice) -> tuple[Call, Places]:
        places, dtype = self.places, _table_dtype(self.query)
        of_query, of_key = places.query[queries], places.key

        middle = 0 if self.reach is None else int(of_query.min() + of_query.max()) // 2

        def rotation(by: RotationTable | Decay | None, t: torch.Tensor) -> Rotation:
            return None if by is None else by.about(middle).at(t, dtype)

        bands = [
            RotatedBand(seen, rotation(q, of_query), rotation(k, of_key))
            for seen, q, k in self.rotations
        ]
        temperature = self.temperature and self.temperature(of_query, dtype)
        mask = None if places.mask is None else places.mask[..., queries, :]
        newest = None if places.newest is None else places.newest[queries]
        return replace(self.call, bands=bands, temperature=temperature), Places(
            of_query, of_key, mask, newest
        )


Look = Callable[[nn.Module, Dense, int | None], None]
"""Called with an attention module, its call of attention, and its ``sliding_window``."""


@contextmanager
def watched(decoder: nn.Module, look: Look) -> Iterator[None]:
    """Pass the first row of every attention call of ``decoder`` to ``look``.

    Works for unpatched decoders and frequency methods too: meanwhile their layers attend through
    :data:`NAME` as well.
    """
    config = text_config(decoder)
    before = config._attn_implementation_internal
    config._attn_implementation_internal = NAME  # the public name sets sub-configurations too
    forward_context.look = look
    try:
        yield
    finally:
        config._attn_implementation_internal, forward_context.look = before, None


def _mask(**arguments: Any) -> Any:
    """Mask function under :data:`NAME`."""
    context = _innermost()
    if context is not None and context.traced:
        given = arguments.get("attention_mask")
        return given if isinstance(given, BatchMask) else BatchMask(None, arguments)
    return _mask_eagerly(**arguments)


def _innermost() -> PositionForward | None:
    """The innermost forward in progress under any position map."""
    for context in reversed(forward_context.stack):
        if isinstance(context, PositionForward):
            return context
    return None


@run_eagerly(tensors.WHY)
def _mask_eagerly(**arguments: Any) -> BatchMask:
    for name in ("q_offset", "kv_offset"):  # a static cache's own counters, which move on
        arguments[name] = int(arguments.get(name, 0))
    context = _innermost()
    given = arguments.get("attention_mask")
    if isinstance(given, BatchMask):  # made around the decoder, which asks once more
        return given
    mask = BatchMask(None, arguments)
    if context is None:  # generation and models around a decoder make masks before the forward
        mask.prepare()
    else:
        mask.belong_to(context)
    return mask


class Asked(NamedTuple):
    """One call of the attention function by a layer.

    Args:
        module: the attention layer.
        layer: its entry on a patched decoder; None if it has none.
        query: ``[rows, heads, queries, columns]``.
        key: ``[rows, kv_heads, keys, columns]``.
        value: ``[rows, kv_heads, keys, value columns]``.
        mask: a :class:`BatchMask`, or the mask of an unpatched layer.
        dropout: a probability.
        scale: factor of the logits; None: ``columns ** -0.5``.
        softcap: see :class:`Call`.
        sinks: see :class:`Call`.
        more: further arguments of the layer.
    """

    module: nn.Module
    layer: AttentionLayer | None
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: Any
    dropout: float
    scale: float | None
    softcap: float | None
    sinks: torch.Tensor | None
    more: dict[str, Any]

    @property
    def mapped(self) -> MappedLayer:
        """The layer, where the map changes its positions."""
        assert isinstance(self.layer, MappedLayer)
        return self.layer

    @property
    def call(self) -> Call:
        """The call for a kernel, without bands, bias and temperature."""
        layer, pairs = self.layer, _NO_PAIRS
        if isinstance(layer, MappedLayer) and layer.window is None:
            pairs = layer.layout.pairs
        return Call((), pairs, self.factor, softcap=self.softcap, sinks=self.sinks)

    @property
    def factor(self) -> float:
        """Factor of the logits."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale


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
    output_attentions: bool | None = None,  # not every layer passes it on; the forward knows
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention function registered as :data:`NAME`, the only entry point.

    Takes ``query`` as ``[rows, heads, queries, columns]``, key and value with as many heads or
    fewer. Returns ``[rows, queries, heads, columns of value]``, and weights, ``[rows, heads,
    queries, keys]``, if the forward returns them.
    """
    layer: AttentionLayer | None = getattr(module, LAYER, None)
    asked = Asked(
        module, layer, query, key, value, attention_mask, dropout, scaling, softcap, s_aux, kwargs
    )
    context = None if layer is None else current(layer.map)
    if layer is None or context is None or not context.traced:
        return _attend_eagerly(asked)
    return _by_way(asked, context), None


@run_eagerly(tensors.WHY)
def _attend_eagerly(asked: Asked) -> tuple[torch.Tensor, torch.Tensor | None]:
    layer, forward = asked.layer, getattr(asked.mask, "owner", None)
    if isinstance(layer, MappedLayer):
        mask = _batch_mask(layer.map, asked.mask)
        if layer.window is not None:  # its cache may have kept the last tokens only
            mask = mask.behind(max(0, mask.forward.room - asked.key.shape[2]))
        asked, forward = asked._replace(mask=mask), mask.forward
        if layer.map.computes_positions:
            query, key = head_positions.rotated(asked.module, asked.query, asked.key)
            asked = asked._replace(query=query, key=key)
    out = _by_way(asked, forward)
    watched = forward_context.look is not None or (forward is not None and forward.weights)
    return out, _watched_weights(asked, forward) if watched else None


def _by_way(asked: Asked, forward: Any) -> torch.Tensor:
    """Attention of a layer, ``[rows, queries, heads, columns of value]``."""
    layer = asked.layer
    if not isinstance(layer, MappedLayer):
        return _unmapped(asked, forward)
    _refuse_dropout(layer, asked.module, asked.dropout)
    asked = _head_scaled(asked, forward)
    if way_of(layer, forward, asked.mask) == "few":
        return _few(asked, forward)
    return _many_in_graph(asked, forward) if forward.traced else _many(asked, asked.mask)


def way_of(layer: AttentionLayer | None, forward: PositionForward, mask: Any) -> str:
    """How a layer attends.

    Returns:
        ``"native"``: as transformers does, in layers that the map leaves alone. ``"few"``: few
        queries on all slots, which are known by tensors. ``"many"``: by a kernel for each run of
        consecutive tokens, or densely under masks that are not causal.
    """
    if not isinstance(layer, MappedLayer):
        return "native"
    if forward.regular or forward.tokens > min(FEW, layer.map.reach or FEW):
        return "many"
    if not forward.traced:
        bands = clipped(layer.rotated.rotations, mask.window)
        if layer.map.kernel == "reference" or bands is None:
            return "many"
        if forward.documents is not None or not mask.causal:
            return "many"
    return "few"


def _head_scaled(asked: Asked, forward: PositionForward) -> Asked:
    """The same with queries times what their heads have learned as temperature, if they have."""
    temperature = asked.mapped.map.learned_temperature
    if temperature is None or not asked.mapped.rotated.tempered:
        return asked
    query = asked.query
    growth = forward.on(query.device).growth(temperature, _table_dtype(query))
    return asked._replace(query=getattr(asked.module, head_scales.NAME)(query, growth))


def _few(asked: Asked, forward: PositionForward) -> torch.Tensor:
    """Few queries on all slots, with what all layers of the layout share."""
    forward, layer = forward.on(asked.query.device), asked.mapped
    offset, window = (0, None) if forward.traced else (asked.mask.offset, asked.mask.window)
    query, key, value = _of_one_dtype(asked, None if forward.traced else forward.room - offset)
    call = layer.adding(asked.call, forward.room, query)
    step = tensors.step_of(forward, layer.rotated, offset, window)
    return step.attend(query, key, value, call).transpose(1, 2).contiguous()


def _many_in_graph(asked: Asked, forward: PositionForward) -> torch.Tensor:
    """Many queries in a graph."""
    layer = asked.mapped
    query, key, value = _of_one_dtype(asked, forward.tokens if forward.regular else None)
    call = layer.adding(asked.call, forward.room, query)
    out = tensors.many(forward, layer.rotated, query, key, value, call)
    return out.transpose(1, 2).contiguous()


def _many(asked: Asked, mask: BatchMask) -> torch.Tensor:
    """Every run of consecutive tokens by a kernel, or row by row with dense logits."""
    layer = asked.mapped
    query, key, value = _of_one_dtype(asked, mask.keys)
    rotations = clipped(layer.rotated.rotations, mask.window)
    if rotations is None or not mask.causal:
        out = [
            _irregular(asked, mask, row, query, key).attend(one)
            for row, one in enumerate(value.split(1))
        ]
        return torch.cat(out).transpose(1, 2).contiguous()
    name = layer.rotated.number, query.device, _table_dtype(query)
    if name not in mask.made:
        found = runs.within(mask.runs(), layer.map.reach)
        mask.made[name] = [(run, *_rotated(run, layer, rotations, *name[1:])) for run in found]
    widest = max((int(run.places.max() - run.places.min()) for run in mask.runs()), default=0)
    call = layer.adding(asked.call, max(widest + 1, mask.keys), query)
    calls = [
        (run, replace(call, bands=bands, temperature=temperature))
        for run, bands, temperature in mask.made[name]
    ]
    out = dispatch.attend_runs(query, key, value, calls, layer.map.kernel)
    return out.transpose(1, 2).contiguous()


def _rotated(
    run: runs.Run,
    layer: MappedLayer,
    rotations: BandRotations,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[list[RotatedBand], torch.Tensor | None]:
    """The bands of a run, and the factors of its queries."""
    count = run.queries_count
    queries = run.places[len(run.places) - count :].to(device)
    middle = int(queries[0] + queries[-1]) // 2 if layer.map.reach else 0

    def at(by: RotationTable | Decay, t: torch.Tensor) -> Rotation:
        if not run.steady:
            return by.about(middle).at(t.to(device), dtype)
        return by.about(middle).between(int(t[0]), int(t[-1]) + 1, device, dtype)

    bands = [
        RotatedBand(geometry, at(of_query, queries), at(of_key, run.places))
        for geometry, of_query, of_key in rotations
    ]
    return bands, layer.rotated.temperature(layer.map, queries, dtype)


def _unmapped(asked: Asked, where: Any) -> torch.Tensor:
    """A layer that the map leaves alone; ``where`` is its forward, if that is known."""
    mask = asked.mask
    if where is not None and where.traced:
        mask = tensors.dense_mask(where, mask) if isinstance(mask, BatchMask) else mask
    elif isinstance(mask, BatchMask):
        mask = mask.dense_on(asked.query.device)
    return _natively(asked, mask)


def _natively(asked: Asked, mask: torch.Tensor | None) -> torch.Tensor:
    """As transformers attends, ``[rows, queries, heads, columns of value]``."""
    if asked.softcap is None and asked.sinks is None:
        return sdpa_attention_forward(
            asked.module,
            asked.query,
            asked.key,
            asked.value,
            mask,
            dropout=asked.dropout,
            scaling=asked.scale,
            **asked.more,
        )[0]
    return _as_it_was(asked, mask).attend(asked.value).transpose(1, 2).contiguous()


def _watched_weights(asked: Asked, forward: PositionForward | None) -> torch.Tensor | None:
    """Pass the layer's dense attention to the observer, and return its weights if needed."""
    look, layer = forward_context.look, asked.layer
    forward = forward or (None if layer is None else current(layer.map))
    wanted = forward is not None and forward.weights
    if look is None and not wanted:
        return None
    if not isinstance(layer, MappedLayer):
        mask = asked.mask
        mask = mask.dense_on(asked.query.device) if isinstance(mask, BatchMask) else mask
        every = [_as_it_was(asked, mask)]
    else:
        query, key, _ = _of_one_dtype(asked, asked.mask.keys)
        rows = range(len(query) if wanted else 1)
        every = [_irregular(asked, asked.mask, row, query, key) for row in rows]
    if look is not None:
        look(asked.module, every[0], asked.more.get("sliding_window"))
    if not wanted:
        return None
    return torch.cat([dense.weights(slice(None)) for dense in every]).to(asked.query.dtype)


def _of_one_dtype(
    asked: Asked, keys: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value in the dtype of the values, with the first ``keys`` keys; None: all.

    Autocast does not cast for this function.
    """
    query, key, value = asked.query, asked.key, asked.value
    query, key = (x if x.dtype == value.dtype else x.to(value.dtype) for x in (query, key))
    return (query, key, value) if keys is None else (query, key[:, :, :keys], value[:, :, :keys])


def _refuse_dropout(layer: MappedLayer, module: nn.Module, dropout: float) -> None:
    if dropout:
        raise OptionError(
            f"{layer.map.method.name} has no attention dropout, and "
            f"{type(module).__name__} asks for {dropout}; set config.attention_dropout = 0 before "
            f"the model is built"
        )


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)


def _batch_mask(position_map: PositionMap, mask: BatchMask | torch.Tensor | None) -> BatchMask:
    """A mask with its forward, even if generation made it before the forward."""
    if isinstance(mask, BatchMask) and mask.owner is not None:
        return mask
    forward = current(position_map)
    if forward is None:
        raise UnsupportedModelError(
            f"an attention layer patched with {position_map.method.name} was run by itself, or "
            f"again by gradient checkpointing with a mask of your own; run the whole model, "
            f"without that mask or without checkpointing"
        )
    if isinstance(mask, BatchMask):
        mask.belong_to(forward)
        return mask
    if mask is not None and mask.ndim == 4:
        key = "given mask", id(mask)  # the same for many layers; kept alive by what is made of it
        return forward.made.setdefault(key, BatchMask(forward, given=mask))
    arguments = {
        "batch_size": forward.rows,
        "q_length": forward.tokens,
        "kv_length": forward.filled + forward.tokens,
        "q_offset": forward.filled,
        "kv_offset": 0,
        "mask_function": causal_mask_function,
        "attention_mask": forward.padding,
    }
    return BatchMask(forward, arguments)


def _irregular(
    asked: Asked, mask: BatchMask, row: int, query: torch.Tensor, key: torch.Tensor
) -> Dense:
    """One row with dense logits."""
    layer = asked.mapped
    position_map = layer.map
    if mask.given is None:
        mask.runs()  # raises where positions go back
    places = mask.positions[row if len(mask.positions) > 1 else 0]
    t = places.to(query.device)
    dense = mask.dense_on(query.device)
    of_queries = Places.in_order(t[-query.shape[2] :], t)
    rotations = layer.rotated.rotations
    if dense is not None:
        dense = shown(dense[row if len(dense) > 1 else 0, :, :, : len(t)])
        of_queries = replace(of_queries, mask=dense, newest=None)
        rotations = _seeing_ahead(layer, rotations, mask.ahead[row])
    return Dense(
        query[row : row + 1],
        key[row : row + 1],
        layer.adding(asked.call, int(places.max() - places.min()) + 1, query),
        rotations,
        partial(layer.rotated.temperature, position_map),
        of_queries,
        position_map.reach,
    )


def _seeing_ahead(layer: MappedLayer, rotations: BandRotations, ahead: int) -> BandRotations:
    """The same where a mask shows queries up to ``ahead`` tokens after them, as within an image.

    Those keys have the rotations of the nearest keys before a query.

    Raises:
        UnsupportedModelError: they are further away than the nearest band reaches, or an encoding
            counts distances from 0 on.
    """
    if ahead == 0:
        return rotations
    reach, seeing = 0, []
    for geometry, *rotated in rotations:
        if isinstance(geometry, Distance) and geometry.first == 0 and layer.biased is None:
            reach = math.inf if geometry.last is None else geometry.last - 1
            geometry = replace(geometry, first=-ahead)
        seeing.append((geometry, *rotated))
    if ahead > reach:
        wider = "choose a larger window, or " if reach else ""
        raise UnsupportedModelError(
            f"the attention mask shows a token another one that is {ahead} tokens after it (the "
            f"tokens of an image, or a prompt that is read in both directions), and "
            f"{layer.map.named} can express {reach} here; {wider}{layer.map.instead}"
        )
    return seeing


def _table_dtype(query: torch.Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _as_it_was(asked: Asked, mask: torch.Tensor | None) -> Dense:
    """A layer that the map leaves alone, with dense logits.

    Without a mask, a single query sees every key, and several queries are the first of the keys, as
    in transformers, where a static cache has empty slots after them.
    """
    query, key = asked.query, asked.key
    keys = torch.arange(key.shape[2], device=key.device)
    several = mask is None and query.shape[2] > 1
    queries = keys[: query.shape[2]] if several else keys[-1:].expand(query.shape[2])
    if mask is not None:
        mask = shown(mask)
    everything = (Distance(0, None), None, None)
    return Dense(query, key, asked.call, [everything], None, Places(queries, keys, mask))
