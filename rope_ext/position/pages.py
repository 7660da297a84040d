"""Continuous batching on GPUs: the paged kernel reads keys where transformers has cached them.

It computes all requests of a row at once. What it does not support is computed request by request.
"""

from typing import Any

import torch
from torch import Tensor

from rope_ext.attention import paged
from rope_ext.attention.call import Pairs
from rope_ext.attention.decode import runs_on
from rope_ext.position.masks import BatchMask
from rope_ext.position.paged import PagedForward
from rope_ext.position.steps import LayerCall


def supported(layer_call: LayerCall, allocator: Any) -> bool:
    """Whether the paged kernel computes a layer; ``allocator``: that of its pages."""
    layer = layer_call.layer
    query = layer_call.query
    mask = layer_call.mask
    if layer is None or layer.layout is None or not runs_on(query.device):
        return False
    if layer.map.kernel == "reference" or layer_call.dropout or torch.is_grad_enabled():
        return False
    # Learned parts, logits of an encoding's own, and decays are no rotations by position.
    encoding = layer.map.encoding
    if layer.biased is not None or encoding.computes_positions() or layer.map.query_span:
        return False
    if layer.map.learned_temperature is not None or layer.map.method.by_pair:
        return False
    if layer.window is not None or allocator.layer_type != "full_attention":
        return False
    if not isinstance(mask, BatchMask) or not mask.causal or mask.window is not None:
        return False
    columns = query.shape[-1]
    if not _halves(layer.layout.pairs, columns):
        return False
    if max(columns, layer_call.value.shape[-1]) > paged.MOST_COLUMNS:
        return False
    dtypes = {x.dtype for x in (query, layer_call.key, layer_call.value)}  # autocast mixes them
    return dtypes == {allocator.cache_dtype} and query.dtype != torch.float64


def _halves(pairs: Pairs, columns: int) -> bool:
    """Whether the halves of a head rotate together, as the kernel assumes."""
    if not (isinstance(pairs.first, slice) and isinstance(pairs.second, slice)):
        return False
    first = range(columns)[pairs.first]
    second = range(columns)[pairs.second]
    return first == range(columns // 2) and second == range(columns // 2, columns)


def attend(layer_call: LayerCall, row: PagedForward) -> Tensor:
    """Cache the keys of a row of requests, and compute the attention of all of them.

    Returns ``[1, tokens, heads, columns of value]``.
    """
    layer = layer_call.layer
    assert layer is not None and layer.layout is not None, "callers ask supported() first"
    number = layer_call.module.layer_idx
    allocator = row.pages.layer_to_allocator[number]
    kind = allocator.layer_type
    given = layer_call.more  # what transformers gives to attention functions of a row
    query = layer_call.query[0].transpose(0, 1)
    # A token is a page here, since transformers gives the indices of tokens.
    keys, values = (x.flatten(0, 1) for x in allocator.get_cache_for_block_table(number))
    written = given["write_index"][allocator.index]
    keys.index_copy_(0, written, layer_call.key[0].transpose(0, 1))
    values.index_copy_(0, written, layer_call.value[0].transpose(0, 1))
    if kind not in row.batches:
        first = given["cu_seq_lens_k"][kind]
        read = given["read_index"][allocator.index]
        row.batches[kind] = paged.Batch(
            pages=(read if len(read) else written)[:, None],  # empty if all requests are new
            lengths=first.diff(),
            starts=row.ends,
            max_queries=given["max_length_q"],
            pages_of=first[:-1],
        )
    call = layer_call.call
    out = query.new_empty(*query.shape[:2], values.shape[-1])
    paged.attend(
        query=query,
        key_cache=keys[:, :, None],
        value_cache=values[:, :, None],
        out=out,
        batch=row.batches[kind],
        tables=layer.map.paged_tables(layer.layout, given["max_length_k"][kind], query.device),
        logits=paged.Logits(scale=call.scale, softcap=call.softcap or 0.0, sinks=call.sinks),
    )
    return out[None]
