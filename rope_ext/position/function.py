"""The attention function and the mask function of models under a position map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

from rope_ext import attention
from rope_ext.attention import reference
from rope_ext.attention.bands import Band, Pairs
from rope_ext.errors import OptionError, UnsupportedModelError
from rope_ext.heads import Head
from rope_ext.methods.geometry import Distance
from rope_ext.position.forward import under_way
from rope_ext.position.plan import Plan, Stretch, documents_of

if TYPE_CHECKING:
    from rope_ext.position.mapping import Mapping

NAME = "rope_ext"  # names with sdpa, flash, flex_attention or a slash take special paths
LAYER = "_rope_ext_layer"  # on an attention module: its Layer


@dataclass(frozen=True, eq=False)
class Layer:
    """What an attention module is to the map; ``head`` is None where it stays as it was."""

    mapping: Mapping
    head: Head | None


@torch.compiler.disable
def _mask(**arguments: Any) -> Any:
    """Mask function under :data:`NAME`."""
    for name in ("q_offset", "kv_offset"):  # a static cache's own counters, which move on
        arguments[name] = int(arguments.get(name, 0))
    if isinstance(arguments.get("attention_mask"), Plan):
        arguments["attention_mask"] = arguments["attention_mask"].padding
    stack = under_way()
    documents = documents_of(arguments["mask_function"])
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
    layer = module.__dict__.get(LAYER)
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
            mask = mask if mask.dtype == torch.bool else _visible(mask)
        turned = [
            Band(geometry, at_query.at(of_query, dtype), at_key.at(t, dtype))
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
        [Band(Distance(0, None), None, None)],
        Pairs(slice(0, 0), slice(0, 0)),
        query_positions=queries,
        key_positions=keys,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        sinks=s_aux,
        mask=mask,
    )
    return out.transpose(1, 2).contiguous(), None
