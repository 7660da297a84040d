"""Attention function and mask function of models under a position map.

A layer that the map does not change attends like transformers; for the others, ``steps.Step``
chooses between plain operations (few queries, arbitrary masks) and kernels.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_ext.attention import bands as plain
from rope_ext.attention.call import Call, Pairs, Places, RotatedBand, wide
from rope_ext.errors import OptionError
from rope_ext.methods.geometry import Distance
from rope_ext.position import direction, inputs, learned, pages
from rope_ext.position.forward import PositionForward
from rope_ext.position.layers import LAYER
from rope_ext.position.map import PositionMap
from rope_ext.position.masks import BatchMask, StepKey, shown
from rope_ext.position.paged import ARGUMENTS, PagedForward
from rope_ext.position.steps import WHY, Dense, Layer, LayerCall, Step
from rope_ext.rotary.context import current, forward_context, run_eagerly

NAME = "rope_ext"  # names with sdpa, flash, flex_attention or a slash take special paths
"""Of the attention function; ``attending(decoder, NAME, look)`` makes unpatched layers use it."""
_NO_PAIRS = Pairs(slice(0, 0), slice(0, 0))
_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")
"""Fields that set the dropout of attention weights; a family has one of them."""


def _mask(**arguments: Any) -> BatchMask:
    """Mask function under :data:`NAME`."""
    given = arguments.get("attention_mask")
    stack = forward_context.stack
    if isinstance(given, BatchMask):  # the decoder requests it a second time
        return given
    forward = next((x for x in stack[::-1] if isinstance(x, PositionForward)), None)
    if forward is not None and forward.traced:
        return BatchMask(None, arguments)
    return _mask_eagerly(forward, arguments)


@run_eagerly(WHY)
def _mask_eagerly(forward: PositionForward | None, arguments: dict[str, Any]) -> BatchMask:
    for name in ("q_offset", "kv_offset"):  # copies, since a static cache's counters move
        arguments[name] = int(arguments.get(name, 0))
    mask = BatchMask(None, arguments)
    if forward is None:  # generate and outer models create masks before the forward
        mask.prepare()
    else:
        mask.belong_to(forward)
    return mask


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    output_attentions: bool | None = None,  # not every layer passes it on, so ask the forward
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function under :data:`NAME`, the only entry point.

    Returns ``[rows, queries, heads, columns of value]``, and weights, ``[rows, heads, queries,
    keys]``, if the forward returns them.

    Raises:
        OptionError: the layer asks for dropout.
        UnsupportedModelError: the call or its mask cannot be expressed under this patch.
        CacheError: the keys are not those of a cache that the patch can continue.
    """
    layer: Layer | None = getattr(module, LAYER, None)
    layout = None if layer is None or layer.window is not None else layer.layout
    pairs = _NO_PAIRS if layout is None else layout.pairs
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer_call = LayerCall(
        module=module,
        layer=layer,
        query=query,
        key=key,
        value=value,
        call=Call(bands=(), pairs=pairs, scale=scale, softcap=softcap, sinks=s_aux),
        mask=attention_mask,
        dropout=dropout,
        more=kwargs,
    )
    forward = None if layer is None else current(layer.map)
    if layer is not None and layer.layout is not None:
        # Gradient checkpointing reruns layers when no forward is in progress.
        of_mask = getattr(attention_mask, "owner", None)
        if not getattr(forward or of_mask, "both", False) and not layer.layout.by_mask:
            _require_causal(layer_call, layer)
    if forward is not None and forward.traced:
        return _by_layer(layer_call, forward), None
    return _attend_eagerly(layer_call)


@run_eagerly(WHY)
def _attend_eagerly(layer_call: LayerCall) -> tuple[Tensor, Tensor | None]:
    layer = layer_call.layer
    forward = getattr(layer_call.mask, "owner", None)
    if layer is not None and layer.layout is not None:
        mask = _batch_mask(layer.map, layer_call.module, layer_call.mask)
        layer_call = layer_call._replace(mask=mask)
        forward = mask.forward
        if layer.map.encoding.computes_positions():
            query, key = inputs.rotated(
                forward, module=layer_call.module, query=layer_call.query, key=layer_call.key
            )
            layer_call = layer_call._replace(query=query, key=key)
    if isinstance(forward, PagedForward):
        return _attend_paged(layer_call, forward), None
    out = _by_layer(layer_call, forward)
    forward = forward or (None if layer is None else current(layer.map))
    weights = forward is not None and forward.weights
    look = forward_context.look
    if look is not None:
        look(layer_call.module, _dense(layer_call, forward), layer_call.more.get("sliding_window"))
    if not weights:
        return out, None
    return out, _dense(layer_call, forward).weights().to(layer_call.query.dtype)


def _attend_paged(layer_call: LayerCall, row: PagedForward) -> Tensor:
    """Cache the keys of a row of requests in pages, and compute the attention of every request."""
    number = layer_call.module.layer_idx
    lengths = row.pages.layer_to_allocator[number]  # layers with a window keep fewer keys
    if pages.supported(layer_call, lengths):
        return pages.attend(layer_call, row)
    given = dict(layer_call.more)
    key, value = row.pages.update(
        key_states=layer_call.key, value_states=layer_call.value, layer_idx=number, kwargs=given
    )
    more = {name: x for name, x in layer_call.more.items() if name not in ARGUMENTS}
    heads, tokens = layer_call.query.shape[1:3]
    out = value.new_zeros(1, tokens, heads, value.shape[-1])
    first = 0
    for at, request in row.requests:
        last = first + lengths.get_seqlen_k(request.filled, request.tokens)
        one = layer_call._replace(
            query=layer_call.query[:, :, at],
            key=key[:, :, first:last],
            value=value[:, :, first:last],
            mask=row.mask_of(layer_call.mask, request, last - first),
            more=more,
        )
        out[:, at] = _by_layer(one, request)
        first = last
    return out


def _require_causal(layer_call: LayerCall, layer: Layer) -> None:
    """Raise if a call without a mask tensor shows later keys, as the patch found that none does."""
    if layer_call.query.shape[2] > 1 and _sees_all(layer_call):
        what = f"{type(layer_call.module).__name__} with is_causal=False"
        why = f"{layer.map.named} takes the model for causal: set config.is_causal = False"
        raise direction.not_causal(what, why, layer.map.instead)


def _sees_all(layer_call: LayerCall) -> bool:
    """Whether queries see every key; a mask tensor decides by itself."""
    given = (
        layer_call.mask
        if isinstance(layer_call.mask, Tensor)
        else getattr(layer_call.mask, "given", None)
    )
    return given is None and direction.sees_all(layer_call.module, layer_call.mask, layer_call.more)


def _by_layer(layer_call: LayerCall, forward: Any) -> Tensor:
    """Compute the attention of a layer, ``[rows, queries, heads, columns of value]``."""
    layer = layer_call.layer
    if layer is None or layer.layout is None:
        return _natively(layer_call, forward)
    if layer_call.dropout:
        config = getattr(layer_call.module, "config", None)
        field = next((name for name in _DROPOUTS if getattr(config, name, 0)), _DROPOUTS[0])
        raise OptionError(
            f"{layer.map.method.name} has no attention dropout, and "
            f"{type(layer_call.module).__name__} asks for {layer_call.dropout}; set "
            f"config.{field} = 0 before the model is built"
        )
    found = _prepared(layer_call, layer, forward)
    out = found.step.attend(found.query, found.key, found.value, call=found.call)
    return out.transpose(1, 2).contiguous()


class _Prepared(NamedTuple):
    """What layers of one layout share, and the arguments of its methods for one of them."""

    step: Step
    query: Tensor  # in the dtype of value, as key
    key: Tensor  # of filled slots, as value
    value: Tensor
    call: Call  # with the layer's learned parts


def _prepared(
    layer_call: LayerCall, layer: Layer, forward: PositionForward, whole: bool = False
) -> _Prepared:
    """Return the step of a layer, made in the first one of its layout, and its own arguments.

    ``whole``: the attention weights of all queries are needed.
    """
    forward = forward.on(layer_call.query.device)
    value = layer_call.value
    # Under autocast they may differ, and autocast does not apply to this function.
    query = layer_call.query.to(value.dtype)
    key = layer_call.key.to(value.dtype)
    if forward.traced:
        count = forward.tokens if forward.regular else None
        steps = forward.shared.steps
        if layer.number not in steps:
            steps[layer.number] = Step(forward, layer)
        step = steps[layer.number]
    else:  # layers with our own window may keep only the last tokens
        kept = layer.window is not None
        offset = max(0, forward.room - key.shape[2]) if kept else layer_call.mask.offset
        count = forward.room - offset
        mask: BatchMask = layer_call.mask
        key_of_step = StepKey(
            layout=layer.number, offset=offset, device=forward.device, whole=whole
        )
        if key_of_step not in mask.steps:
            mask.steps[key_of_step] = Step(
                forward=forward, layer=layer, offset=offset, mask=mask, whole=whole
            )
        step = mask.steps[key_of_step]
    if count is not None and count != key.shape[2]:  # a static cache has empty slots after these
        key = key[:, :, :count]
        value = value[:, :, :count]
    temperature = layer.map.learned_temperature
    if temperature is not None and layer.window is None:
        dtype = wide(query)
        growths = forward.shared.growths
        if dtype not in growths:
            t = forward.tempered.double().clamp(min=0)
            growths[dtype] = temperature.growth(t)
        growth = growths[dtype][:, None, :, None].to(dtype)
        query = getattr(layer_call.module, learned.TEMPERATURE)(query, growth)
    call = layer.adding(layer_call, forward)
    return _Prepared(step=step, query=query, key=key, value=value, call=call)


def _natively(layer_call: LayerCall, forward: Any) -> Tensor:
    """Compute attention like transformers; ``forward`` is the layer's, if known."""
    mask = layer_call.mask
    if isinstance(mask, BatchMask):
        if forward is None or not forward.traced:
            mask = mask.dense_on(layer_call.query.device)
        elif mask.ready is not None:
            mask = mask.ready
        else:
            arguments = {**(mask.arguments or {}), "q_offset": forward.filled}
            mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**arguments)
    if layer_call.call.softcap is None and layer_call.call.sinks is None:
        given = {"dropout": layer_call.dropout, "scaling": layer_call.call.scale, **layer_call.more}
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(
            layer_call.module, layer_call.query, layer_call.key, layer_call.value, mask, **given
        )[0]
    dense = _native_dense(layer_call, mask)  # sdpa has no soft cap and no sinks
    out = plain.attend(
        dense.query, dense.key, layer_call.value, call=dense.call, places=dense.places
    )
    return out.transpose(1, 2).contiguous()


def _native_dense(layer_call: LayerCall, mask: Tensor | None) -> Dense:
    """Return the call of a layer that the map does not change.

    Without a mask, a single query sees every key, and several causal queries are the first keys, as
    in transformers, where a static cache has empty slots after them.
    """
    count = layer_call.query.shape[2]
    keys = torch.arange(layer_call.key.shape[2], device=layer_call.key.device)
    causal = mask is None and count > 1 and not _sees_all(layer_call)
    queries = keys[:count] if causal else keys[-1:].expand(count)
    places = Places(queries, keys, None if mask is None else shown(mask))
    bands = [RotatedBand(Distance(0, None), None, None)]
    call = replace(layer_call.call, bands=bands)
    return Dense(query=layer_call.query, key=layer_call.key, call=call, places=places)


def _dense(layer_call: LayerCall, forward: PositionForward | None) -> Dense:
    layer = layer_call.layer
    mask = layer_call.mask
    if layer is None or layer.layout is None or forward is None:
        mask = mask.dense_on(layer_call.query.device) if isinstance(mask, BatchMask) else mask
        return _native_dense(layer_call, mask)
    found = _prepared(layer_call, layer, forward, whole=True)
    return found.step.dense(found.query, found.key, found.call)


def _batch_mask(position_map: PositionMap, module: nn.Module, mask: Any) -> BatchMask:
    """Return a mask with its forward, even if generate created it before the forward."""
    if isinstance(mask, BatchMask) and mask.owner is not None and mask.owner.located:
        return mask
    forward = inputs.forward_of(position_map, module, args=(mask,), kwargs={})
    if isinstance(mask, BatchMask):
        if mask.owner is None:
            mask.belong_to(forward)
        return mask
    if mask is not None and mask.ndim == 4:
        return forward.shared.given_masks.setdefault(id(mask), BatchMask(forward, given=mask))
    return BatchMask(forward)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)
