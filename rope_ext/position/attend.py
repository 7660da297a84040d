"""Attention function and mask function of models under a position map.

A layer that the map does not change attends like transformers; for the others, ``tensors.Step``
chooses between plain operations (few queries, arbitrary masks) and kernels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_ext.attention import bands as plain
from rope_ext.attention.call import Call, Pairs, Places, RotatedBand, wide
from rope_ext.errors import OptionError
from rope_ext.methods.geometry import Distance
from rope_ext.position import inputs, learned
from rope_ext.position.forward import PositionForward
from rope_ext.position.layers import LAYER, Layout
from rope_ext.position.map import BandRotations, PositionMap
from rope_ext.position.masks import BatchMask, shown
from rope_ext.position.tensors import WHY, Dense, Step
from rope_ext.rotary.context import current, forward_context, run_eagerly
from rope_ext.rotary.sites import text_config

NAME = "rope_ext"  # names with sdpa, flash, flex_attention or a slash take special paths
_NO_PAIRS = Pairs(slice(0, 0), slice(0, 0))


@dataclass(eq=False)
class Layer:
    """A patch's state of an attention module."""

    map: PositionMap
    layout: Layout | None = None  # None: not changed by the map
    number: int = 0  # index of the layout, since graphs cannot use objects as keys
    window: int | None = None  # tokens that it attends to as trained; None: positions change
    biased: nn.Module | None = None  # the module with this layer's bias, if any

    def __post_init__(self) -> None:
        self.rotations: BandRotations = []
        if self.layout is not None:
            self.rotations = self.map.rotations(self.layout, self.window)

    def __getstate__(self) -> dict[str, Any]:  # rotations contain functions, which do not pickle
        return {**self.__dict__, "rotations": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    def adding(self, call: Call, distances: int, like: torch.Tensor) -> Call:
        """Return ``call`` with this layer's bias or scores for all distances below a limit."""
        if self.biased is None:
            return call
        module = getattr(self.biased, learned.BIAS)  # looked up each time, since peft may wrap it
        return replace(call, **module(distances, like.device, wide(like), self.biased))


Look = Callable[[nn.Module, Dense, int | None], None]
"""Called with an attention module, its attention call and its ``sliding_window``."""


@contextmanager
def watched(decoder: nn.Module, look: Look) -> Iterator[None]:
    """Pass every attention call of ``decoder`` to ``look``.

    Also works for unpatched decoders and frequency methods: inside the block, their layers use
    :data:`NAME`, too.
    """
    config = text_config(decoder)
    before = config._attn_implementation_internal
    config._attn_implementation_internal = NAME  # the public attribute also sets sub-configurations
    forward_context.look = look
    try:
        yield
    finally:
        config._attn_implementation_internal, forward_context.look = before, None


def _mask(**arguments: Any) -> Any:
    """Mask function under :data:`NAME`."""
    forward = _innermost()
    if forward is not None and forward.traced:
        given = arguments.get("attention_mask")
        return given if isinstance(given, BatchMask) else BatchMask(None, arguments)
    return _mask_eagerly(**arguments)


def _innermost() -> PositionForward | None:
    """The innermost forward in progress under any position map."""
    return next((x for x in forward_context.stack[::-1] if isinstance(x, PositionForward)), None)


@run_eagerly(WHY)
def _mask_eagerly(**arguments: Any) -> BatchMask:
    for name in ("q_offset", "kv_offset"):  # copies, since a static cache's counters move
        arguments[name] = int(arguments.get(name, 0))
    forward, given = _innermost(), arguments.get("attention_mask")
    if isinstance(given, BatchMask):  # the decoder requests it a second time
        return given
    mask = BatchMask(None, arguments)
    if forward is None:  # generate and outer models create masks before the forward
        mask.prepare()
    else:
        mask.belong_to(forward)
    return mask


class Asked(NamedTuple):
    """One call of the attention function by a layer."""

    module: nn.Module
    layer: Layer | None  # None: not on a patched decoder
    query: torch.Tensor  # [rows, heads, queries, columns]
    key: torch.Tensor  # [rows, kv_heads, keys, columns]
    value: torch.Tensor
    call: Call  # without bands and bias
    mask: Any  # a BatchMask, or the mask of an unpatched layer
    dropout: float
    more: dict[str, Any]  # the layer's further arguments


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
    output_attentions: bool | None = None,  # not every layer passes it on, so ask the forward
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention function under :data:`NAME`, the only entry point.

    Returns ``[rows, queries, heads, columns of value]``, and weights, ``[rows, heads, queries,
    keys]``, if the forward returns them.
    """
    layer: Layer | None = getattr(module, LAYER, None)
    layout = None if layer is None or layer.window is not None else layer.layout
    pairs = _NO_PAIRS if layout is None else layout.pairs
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    growth = None if layout is None else layer.map.growth(layout.site, query.device)
    call = Call((), pairs, scale, softcap=softcap, sinks=s_aux, growth=growth)
    asked = Asked(module, layer, query, key, value, call, attention_mask, dropout, kwargs)
    forward = None if layer is None else current(layer.map)
    if forward is not None and forward.traced:
        return _by_layer(asked, forward), None
    return _attend_eagerly(asked)


@run_eagerly(WHY)
def _attend_eagerly(asked: Asked) -> tuple[torch.Tensor, torch.Tensor | None]:
    layer, forward = asked.layer, getattr(asked.mask, "owner", None)
    if layer is not None and layer.layout is not None:
        mask = _batch_mask(layer.map, asked.module, asked.mask)
        asked, forward = asked._replace(mask=mask), mask.forward
        if layer.map.encoding.computes_positions():
            query, key = inputs.rotated(forward, asked.module, asked.query, asked.key)
            asked = asked._replace(query=query, key=key)
    out = _by_layer(asked, forward)
    forward = forward or (None if layer is None else current(layer.map))
    weights, look = forward is not None and forward.weights, forward_context.look
    if look is not None:
        look(asked.module, _dense(asked, forward), asked.more.get("sliding_window"))
    if not weights:
        return out, None
    return out, _dense(asked, forward).weights().to(asked.query.dtype)


def _by_layer(asked: Asked, forward: Any) -> torch.Tensor:
    """Compute the attention of a layer, ``[rows, queries, heads, columns of value]``."""
    layer = asked.layer
    if layer is None or layer.layout is None:
        return _natively(asked, forward)
    if asked.dropout:
        raise OptionError(
            f"{layer.map.method.name} has no attention dropout, and "
            f"{type(asked.module).__name__} asks for {asked.dropout}; set "
            f"config.attention_dropout = 0 before the model is built"
        )
    forward = forward.on(asked.query.device)
    query, key, value = _prepared(asked, layer, forward)
    call = layer.adding(asked.call, forward.distances, query)
    out = _step(asked, layer, forward).attend(query, key, value, call)
    return out.transpose(1, 2).contiguous()


def _prepared(
    asked: Asked, layer: Layer, forward: PositionForward
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value of filled slots in one dtype, with learned parts applied."""
    query, key, value = asked.query, asked.key, asked.value
    # Autocast does not apply to this function.
    query, key = (x if x.dtype == value.dtype else x.to(value.dtype) for x in (query, key))
    count = None if forward.traced else forward.room - _offset(asked, layer, forward)
    if forward.regular:
        count = forward.tokens
    if count is not None and count != key.shape[2]:  # a static cache has empty slots
        key, value = key[:, :, :count], value[:, :, :count]
    temperature = layer.map.learned_temperature
    if temperature is not None and layer.window is None:
        t, name = forward.query, ("growth", wide(query))
        growth = forward.shared(name, lambda: temperature.growth(t.double().clamp(min=0)))
        growth = growth[:, None, :, None].to(name[1])
        query = getattr(asked.module, learned.TEMPERATURE)(query, growth)
    return query, key, value


def _offset(asked: Asked, layer: Layer, forward: PositionForward) -> int:
    """Slot of the first key; layers with our own window may keep only the last tokens."""
    if layer.window is None:
        return asked.mask.offset
    return max(0, forward.room - asked.key.shape[2])


def _step(asked: Asked, layer: Layer, forward: PositionForward, whole: bool = False) -> Step:
    """Return the state that layers of this layout share."""
    given = forward, layer.rotations, layer.window is None, layer.biased is not None
    if forward.traced:
        make = lambda: Step(*given)  # noqa: E731
        return forward.shared(("step", layer.number), make)
    made, offset = asked.mask.made, _offset(asked, layer, forward)
    name = "step", layer.number, offset, forward.device, whole
    if name not in made:
        made[name] = Step(*given, offset, asked.mask, whole)
    return made[name]


def _natively(asked: Asked, forward: Any) -> torch.Tensor:
    """Compute attention like transformers; ``forward`` is the layer's, if known."""
    mask = asked.mask
    if isinstance(mask, BatchMask):
        if forward is None or not forward.traced:
            mask = mask.dense_on(asked.query.device)
        elif mask.ready is not None:
            mask = mask.ready
        else:
            arguments = {**(mask.arguments or {}), "q_offset": forward.filled}
            mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**arguments)
    if asked.call.softcap is None and asked.call.sinks is None:
        tensors = asked.query, asked.key, asked.value
        given = {"dropout": asked.dropout, "scaling": asked.call.scale, **asked.more}
        return ALL_ATTENTION_FUNCTIONS["sdpa"](asked.module, *tensors, mask, **given)[0]
    dense = _native_dense(asked, mask)
    out = plain.attend(dense.query, dense.key, asked.value, dense.call, dense.places)
    return out.transpose(1, 2).contiguous()


def _native_dense(asked: Asked, mask: torch.Tensor | None) -> Dense:
    """Return the call of a layer that the map does not change.

    Without a mask, a single query sees every key, and several queries are the first keys, as in
    transformers, where a static cache has empty slots after them.
    """
    count = asked.query.shape[2]
    keys = torch.arange(asked.key.shape[2], device=asked.key.device)
    queries = keys[:count] if mask is None and count > 1 else keys[-1:].expand(count)
    places = Places(queries, keys, None if mask is None else shown(mask))
    bands = [RotatedBand(Distance(0, None), None, None)]
    return Dense(asked.query, asked.key, replace(asked.call, bands=bands), places)


def _dense(asked: Asked, forward: PositionForward | None) -> Dense:
    layer, mask = asked.layer, asked.mask
    if layer is None or layer.layout is None or forward is None:
        mask = mask.dense_on(asked.query.device) if isinstance(mask, BatchMask) else mask
        return _native_dense(asked, mask)
    forward = forward.on(asked.query.device)
    query, key, _ = _prepared(asked, layer, forward)
    call = layer.adding(asked.call, forward.distances, query)
    return _step(asked, layer, forward, whole=True).dense(query, key, call)


def _batch_mask(position_map: PositionMap, module: nn.Module, mask: Any) -> BatchMask:
    """Return a mask with its forward, even if generate created it before the forward."""
    forward = inputs.forward_of(position_map, module, (mask,), {})
    if isinstance(mask, BatchMask):
        if mask.owner is None:
            mask.belong_to(forward)
        return mask
    if mask is not None and mask.ndim == 4:
        key = "given mask", id(mask)  # shared by layers; the BatchMask keeps it alive
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


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)
