"""The attention function and the mask function of models under a position map."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

from rope_ext.attention import dispatch as attention
from rope_ext.attention import flash, reference
from rope_ext.attention.call import Call, Pairs, RotatedBand, Rotation
from rope_ext.attention.reference import Places
from rope_ext.errors import OptionError, UnsupportedModelError
from rope_ext.methods.geometry import Distance, Geometry
from rope_ext.position import bias, compiled
from rope_ext.position.layers import Layout
from rope_ext.position.map import PositionMap
from rope_ext.position.masks import documents_of
from rope_ext.position.segments import BatchMask, RotatedSegment
from rope_ext.position.tables import Decay, RotationTable
from rope_ext.position.tokens import current
from rope_ext.rotary.sites import text_config
from rope_ext.under_way import here

NAME = "rope_ext"  # names with sdpa, flash, flex_attention or a slash take special paths
LAYER = "_rope_ext_layer"  # on an attention module: its Layer
_NO_PAIRS = Pairs(slice(0, 0), slice(0, 0))
_FORWARD_AGAIN = {  # what to do where positions go back
    "document": "give packed documents no attention mask and use_cache=False, so that "
    "transformers keeps them apart",
    "padding": "it is padded on the right, behind which generation goes on; pad on the left "
    "(padding_side='left' of the tokenizer)",
}


@dataclass(frozen=True, eq=False)
class Layer:
    """What an attention module is to the map; ``layout`` is None where it stays as it was.

    ``biased`` is the module that has the bias of this one, ``turned`` what a graph needs
    of its layout.
    """

    map: PositionMap
    layout: Layout | None
    biased: nn.Module | None = None
    rotated: compiled.LayoutRotations | None = None

    def __getstate__(self) -> dict[str, Any]:  # without what is made of it: bands are functions
        return {**self.__dict__, "rotated": self.rotated and self.rotated.number}

    def __setstate__(self, state: dict[str, Any]) -> None:
        number = state["rotated"]
        if number is not None:
            rotations = state["map"].rotations(state["layout"])
            state = {**state, "rotated": compiled.LayoutRotations(number, rotations)}
        self.__dict__.update(state)

    def adding(self, call: Call, distances: int | torch.Tensor, like: torch.Tensor) -> Call:
        """``call`` with what is added to the logits of all distances below ``distances``.

        Or of all between tokens at certain places, ``[tokens]``.
        """
        if self.biased is None:
            return call
        if isinstance(distances, torch.Tensor):
            distances = int(distances.max() - distances.min()) + 1
        return replace(call, **self._added(distances, like)._asdict())

    def by_slot(self, mask: BatchMask, like: torch.Tensor) -> torch.Tensor | None:
        """What is added to the logits of the last token of ``mask``, ``[heads, keys]``."""
        if self.biased not in mask.added:
            made = self._added(mask.keys, like).bias
            mask.added[self.biased] = None if made is None else flash.by_key(made, mask.keys)
        return mask.added[self.biased]

    def _added(self, distances: int, like: torch.Tensor) -> bias.Added:
        module = getattr(self.biased, bias.NAME)  # which peft may have wrapped since
        return module(distances, like.device, _table_dtype(like))

    @property
    def scored(self) -> bool:
        """Whether more than a bias is added to its logits."""
        return self.biased is not None and self.map.encoding.scored()


@dataclass(frozen=True, eq=False)
class Dense:
    """One call of an attention layer in the terms of :mod:`rope_ext.attention.reference`.

    Args:
        query: ``[rows, heads, queries, columns]``, as the model turned it.
        key: ``[rows, kv_heads, keys, columns]``.
        call: but for its bands and its temperature, which follow from the next two.
        turns: of every band, which keys it shows, and how queries and keys are turned further.
        temperature: of queries at given positions; None: none.
        places: of queries and keys.
        reach: most tokens that queries turned together may be apart; None: any number.
    """

    query: torch.Tensor
    key: torch.Tensor
    call: Call
    rotations: list[tuple[Geometry, RotationTable | Decay | None, RotationTable | Decay | None]]
    temperature: Callable[[torch.Tensor, torch.dtype], torch.Tensor | None] | None
    places: Places
    reach: int | None = None

    def attend(self, value: torch.Tensor) -> torch.Tensor:
        """``[rows, heads, queries, columns of value]``."""
        parts = [
            reference.attend_blocked(self.query[:, :, part], self.key, value, *self._asked(part))
            for part in self._parts(slice(None))
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def weights(self, queries: slice) -> torch.Tensor:
        """What some of the queries give to every key, ``[rows, heads, queries, keys]``."""
        parts = [
            reference.weights(self.query[:, :, part], self.key, *self._asked(part))
            for part in self._parts(queries)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _parts(self, queries: slice) -> Iterator[slice]:
        """These queries, cut so that those of each part are within the reach."""
        if self.reach is None:
            yield queries
            return
        first, last, _ = queries.indices(len(self.places.query))
        low = high = None
        for index, t in enumerate(self.places.query[first:last].tolist(), first):
            low, high = (t, t) if low is None else (min(low, t), max(high, t))
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
"""Gets an attention module, what it attends with, and the window that it is told."""


@contextmanager
def watched(decoder: nn.Module, look: Look) -> Iterator[None]:
    """Show ``look`` the first row of everything that the layers of ``decoder`` attend with.

    Of an unpatched decoder and under a frequency method too: their layers attend through
    :data:`NAME` as well while it lasts.
    """
    config = text_config(decoder)
    before = config._attn_implementation_internal
    config._attn_implementation_internal = NAME  # the public name sets sub-configurations too
    here.look = look
    try:
        yield
    finally:
        config._attn_implementation_internal, here.look = before, None


def _mask(**arguments: Any) -> Any:
    """Mask function under :data:`NAME`."""
    if here.traced:
        return compiled.mask(arguments)
    return _untraced_mask(**arguments)


@torch.compiler.disable(reason=compiled.WHY)
def _untraced_mask(**arguments: Any) -> BatchMask:
    for name in ("q_offset", "kv_offset"):  # a static cache's own counters, which move on
        arguments[name] = int(arguments.get(name, 0))
    if isinstance(arguments.get("attention_mask"), BatchMask):
        arguments["attention_mask"] = arguments["attention_mask"].padding
    stack = here.positions
    documents = documents_of(arguments["mask_function"])
    if stack and documents is not None:
        stack[-1].split(documents)
    mask = BatchMask(stack[-1] if stack else None, arguments)
    if not stack:
        mask.prepare()
    return mask


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
    """Attention function under :data:`NAME`.

    Takes ``query`` as ``[rows, heads, queries, columns]``, key and value with as many heads or
    fewer; returns ``[rows, queries, heads, columns of value]``, and ``[rows, heads, queries,
    keys]`` if the forward is to return weights.
    """
    layer = getattr(module, LAYER, None)
    if not torch.compiler.is_compiling() and isinstance(attention_mask, BatchMask):
        step = attention_mask.steps.get(layer and layer.rotated and layer.rotated.number)
        alike = step is not None and query.dtype == key.dtype == value.dtype == step.dtype
        if alike and not dropout:
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            rotating = attention_mask.forward.rotating
            rings = rotating and rotating.rings(module, key)
            added = None if layer.biased is None else layer.by_slot(attention_mask, query)
            return step.attend(query, key, value, scale, s_aux, added, rings), None
    traced = None if layer is None or not here.traced else compiled.current(layer.map)
    given = (module, query, key, value, attention_mask, dropout, scaling, softcap, s_aux)
    if traced is None:
        return _untraced(*given, **kwargs)
    return _traced(traced, layer, *given, **kwargs), None


def _traced(
    traced: compiled.Traced,
    layer: Layer,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    **kwargs: Any,
) -> torch.Tensor:
    """:func:`_attend` in a graph."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    pairs = _NO_PAIRS if layer.layout is None else layer.layout.pairs
    call = Call((), pairs, scale, softcap=softcap, sinks=sinks)
    if layer.layout is not None:
        _refuse_dropout(layer, module, dropout)
        query, key = _of_dtype(value, query, key)
        call = layer.adding(call, traced.room, query)
        out = traced.attend(layer.rotated, query, key, value, call)
    else:
        if isinstance(mask, BatchMask):
            mask = traced.dense(mask)
        if softcap is None and sinks is None:
            return sdpa_attention_forward(
                module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
            )[0]
        out = _unmapped(query, key, mask, call).attend(value)
    return out.transpose(1, 2).contiguous()


@torch.compiler.disable(reason=compiled.WHY)
def _untraced(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """:func:`_attend` with numbers that are read off the tensors."""
    layer, look = module.__dict__.get(LAYER), here.look
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layout = None if layer is None else layer.layout
    pairs = _NO_PAIRS if layout is None else layout.pairs
    call = Call((), pairs, scale, softcap=softcap, sinks=s_aux)
    if layout is None:
        mask = attention_mask
        if isinstance(mask, BatchMask):
            mask = mask.dense_on(query.device)
        forward = getattr(attention_mask, "forward", None) or (layer and current(layer.map))
        wanted = forward is not None and forward.weights
        plain = softcap is None and s_aux is None
        if look is not None or wanted or not plain:
            as_it_was = _unmapped(query, key, mask, call)
        if look is not None:
            look(module, as_it_was, kwargs.get("sliding_window"))
        weights = as_it_was.weights(slice(None)).to(query.dtype) if wanted else None
        if plain:
            out, _ = sdpa_attention_forward(
                module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
            )
            return out, weights
        return as_it_was.attend(value).transpose(1, 2).contiguous(), weights
    position_map = layer.map
    mask = _batch_mask(position_map, attention_mask)
    _refuse_dropout(layer, module, dropout)
    if mask is attention_mask and _shares(layer, mask, query, key, value, softcap):
        step = mask.step(layout, query.dtype)
        if step is not None:
            mask.steps[layer.rotated.number] = step  # as the layers after this one find it
            return _attend(module, query, key, value, mask, dropout, scaling, softcap, s_aux)
    query, key = _of_dtype(value, query, key)
    key, value = key[:, :, : mask.keys], value[:, :, : mask.keys]

    def dense(row: int) -> Dense:
        return _irregular(layer, mask, row, query, key, call)

    if look is not None:
        look(module, dense(0), kwargs.get("sliding_window"))
    weights = None
    if mask.forward.weights:
        rows = [dense(row).weights(slice(None)) for row in range(len(query))]
        weights = torch.cat(rows).to(query.dtype)
    together = _together(layer, mask, query)
    if together is not None:
        biased = layer.adding(call, mask.keys, query)
        out = together.attend(layer.rotated, query, key, value, biased)
        return out.transpose(1, 2).contiguous(), weights
    rotated_segments = mask.rotated_segments(layout, query.device, _table_dtype(query))
    if rotated_segments is None:  # drafts in trees, masks of other shapes, gaps in positions
        out = torch.cat([dense(row).attend(one) for row, one in enumerate(value.split(1))])
    else:
        biased = layer.adding(call, mask.keys, query)
        out = _regular(rotated_segments, query, key, value, biased, position_map.kernel)
    return out.transpose(1, 2).contiguous(), weights


def _shares(
    layer: Layer,
    mask: BatchMask,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softcap: float | None,
) -> bool:
    """Whether the layers of this layout do the same in this forward, which decodes one token."""
    return (
        query.shape[2] == 1
        and not mask.forward.weights
        and query.dtype == key.dtype == value.dtype
        and not layer.scored
        and layer.map.reach is None
        and softcap is None
        and here.look is None
        and query.device.type == "cpu"
        and layer.map.kernel in ("auto", "flash")
        and query.shape[-1] == value.shape[-1]
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


def _together(layer: Layer, mask: BatchMask, query: torch.Tensor) -> compiled.Traced | None:
    """All rows at once, if it is worth while and right for this layer.

    The logits are rounded to half precision there, which a CPU need not put up with.
    """
    half = query.dtype in (torch.float16, torch.bfloat16) and query.device.type == "cpu"
    if half or layer.scored or layer.map.kernel == "reference":
        return None
    return compiled.together(mask, query.device)


def _refuse_dropout(layer: Layer, module: nn.Module, dropout: float) -> None:
    if dropout:
        raise OptionError(
            f"{layer.map.method.name} has no attention dropout, and "
            f"{type(module).__name__} asks for {dropout}; set config.attention_dropout = 0 before "
            f"the model is built"
        )


def _of_dtype(value: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    """In the dtype of the values: autocast does not know this operator."""
    return [x if x.dtype == value.dtype else x.to(value.dtype) for x in others]


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)


def _batch_mask(position_map: PositionMap, mask: BatchMask | torch.Tensor | None) -> BatchMask:
    """A mask with its forward, which may have been made before the forward."""
    if isinstance(mask, BatchMask) and mask.forward is not None:
        return mask
    forward = current(position_map)
    if forward is None:
        raise UnsupportedModelError(
            f"an attention layer patched with {position_map.method.name} was run by itself, or "
            f"again by gradient checkpointing with a mask of your own; run the whole model, "
            f"without that mask or without checkpointing"
        )
    if isinstance(mask, BatchMask):
        mask.forward = forward
        return mask
    if mask is not None and mask.ndim == 4:
        return BatchMask(forward, given=mask)
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


def _regular(
    rotated_segments: list[RotatedSegment],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
    kernel: str,
) -> torch.Tensor:
    """Every run by the kernel for consecutive tokens."""
    out = None
    for segment, bands, temperature in rotated_segments:
        whole = len(rotated_segments) == 1 and segment.rows is None
        q, k, v = (
            x if whole else x[slice(None) if segment.rows is None else segment.rows][:, :, at]
            for x, at in ((query, segment.queries), (key, segment.keys), (value, segment.keys))
        )
        of_segment = replace(call, bands=bands, start=segment.start, temperature=temperature)
        part = attention.attend(q, k, v, of_segment, kernel)
        if whole:
            return part
        if out is None:
            out = part.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[-1])
        rows = torch.arange(len(query), device=query.device)
        rows = (rows if segment.rows is None else rows[segment.rows]).unsqueeze(1)
        at = torch.arange(query.shape[2], device=query.device)[segment.queries]
        out[rows, at] = part.transpose(1, 2)
    return out.transpose(1, 2)


def _irregular(
    layer: Layer,
    mask: BatchMask,
    row: int,
    query: torch.Tensor,
    key: torch.Tensor,
    call: Call,
) -> Dense:
    """One row with dense logits."""
    position_map = layer.map
    back = mask.goes_back(row)
    if back is not None:
        raise UnsupportedModelError(
            f"the position ids of row {row} go back within one sequence, where "
            f"{position_map.method.name} would have to attend to the future; {_FORWARD_AGAIN[back]}"
        )
    places = mask.positions[row if len(mask.positions) > 1 else 0]
    t = places.to(query.device)
    dense = mask.dense_on(query.device)
    of_queries = Places.in_order(t[-query.shape[2] :], t)
    if dense is not None:
        dense = dense[row if len(dense) > 1 else 0, :, :, : len(t)]
        dense = dense if dense.dtype == torch.bool else _visible(dense)
        of_queries = replace(of_queries, mask=dense, newest=None)
    return Dense(
        query[row : row + 1],
        key[row : row + 1],
        layer.adding(call, places, query),
        position_map.rotations(layer.layout),
        position_map.temperature,
        of_queries,
        position_map.reach,
    )


def _visible(mask: torch.Tensor) -> torch.Tensor:
    """What a mask that is added to the logits shows.

    Raises:
        UnsupportedModelError: it is a bias, which does more than hide.
    """
    hidden = mask <= -1e4
    if not bool((hidden | (mask == 0)).all()):
        raise UnsupportedModelError(
            "an attention mask that adds to the logits instead of hiding tokens is not known to "
            "position methods; pass a mask of True and False, or use a frequency method"
        )
    return ~hidden


def _table_dtype(query: torch.Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _unmapped(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, call: Call
) -> Dense:
    """A layer that the map leaves alone, with dense logits.

    Without a mask a single query sees every key, and several are the first of the keys, as in
    transformers: behind them a static cache has room for more.
    """
    keys = torch.arange(key.shape[2], device=key.device)
    several = mask is None and query.shape[2] > 1
    queries = keys[: query.shape[2]] if several else keys[-1:].expand(query.shape[2])
    if mask is not None and mask.dtype != torch.bool:
        mask = _visible(mask)
    everything = (Distance(0, None), None, None)
    return Dense(query, key, call, [everything], None, Places(queries, keys, mask))
