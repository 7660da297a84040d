"""Writes small models as GGUF files, to run them in llama.cpp.

What each family needs comes from llama.cpp's ``conversion/*.py`` and ``src/models/*.cpp``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rope_ext.engines.families import LLAMA_CPP, Family
from rope_ext.errors import ExportError
from rope_ext.rotary.sites import text_config, unwrap

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_VALUES = {
    "rms_norm_eps": "add_layer_norm_rms_eps",
    **dict.fromkeys(("layer_norm_eps", "norm_epsilon", "norm_eps"), "add_layer_norm_eps"),
    "hidden_size": "add_embedding_length",
    "num_hidden_layers": "add_block_count",
    "num_attention_heads": "add_head_count",
    "num_key_value_heads": "add_head_count_kv",
    "max_position_embeddings": "add_context_length",
    "vocab_size": "add_vocab_size",
    "num_experts_per_tok": "add_expert_used_count",
    "moe_intermediate_size": "add_expert_feed_forward_length",
    "shared_expert_intermediate_size": "add_expert_shared_feed_forward_length",
    "n_shared_experts": "add_expert_shared_count",
    "first_k_dense_replace": "add_leading_dense_block_count",
    "routed_scaling_factor": "add_expert_weights_scale",
    "residual_multiplier": "add_residual_scale",
    "embedding_multiplier": "add_embedding_scale",
    "attention_multiplier": "add_attention_scale",
    "logits_scaling": "add_logit_scale",
    "logit_scale": "add_logit_scale",
    "attn_logit_softcapping": "add_attn_logit_softcapping",
    "final_logit_softcapping": "add_final_logit_softcapping",
}
"""Configuration fields, and the methods of ``gguf.GGUFWriter`` that write them."""


def require_gguf() -> Any:
    """Import the ``gguf`` library."""
    try:
        import gguf
    except ImportError:
        raise ExportError(
            "GGUF files need the gguf library, which is not installed; install it with: "
            'pip install "rope-ext[engines]"'
        ) from None
    return gguf


def write_model(model: nn.Module, path: str | Path) -> None:
    """Write a small model as a GGUF file in float32, with an unscaled rotary embedding.

    The vocabulary is synthetic (``t3``, ``t4``, ...); prompts are lists of token IDs.

    Args:
        model: a model of a family in ``LLAMA_CPP`` that has an architecture.
        path: the output file.
    """
    gguf, model = require_gguf(), unwrap(model)
    config = text_config(model)
    family = LLAMA_CPP[config.model_type]
    writer = gguf.GGUFWriter(path, family.name)
    _write_values(writer, config)
    for key, value in family.keys.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"{family.name}.{key}", value)
    _write_vocabulary(gguf, writer, config.vocab_size)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == family.name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        values = tensor.detach().float().cpu()
        for part, piece in _parts(name, values, config, family):
            if part == "lm_head.weight" and config.tie_word_embeddings:
                continue
            written = names.get_name(part, (".weight", ".bias"))
            if written is None:
                raise ExportError(f"the gguf library has no name for {part} of {family.name}")
            writer.add_tensor(written, piece.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_values(writer: Any, config: Any) -> None:
    for name, method in _VALUES.items():
        if getattr(config, name, None) is not None:
            getattr(writer, method)(getattr(config, name))
    width = config.intermediate_size
    writer.add_feed_forward_length(width)
    experts = next((getattr(config, n) for n in _EXPERTS if getattr(config, n, None)), None)
    if experts is not None:
        writer.add_expert_count(experts)
        if getattr(config, "moe_intermediate_size", None) is None:
            writer.add_expert_feed_forward_length(width)
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    parameters = config.rope_parameters
    writer.add_rope_dimension_count(int(dim * parameters.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(parameters["rope_theta"])


def _write_vocabulary(gguf: Any, writer: Any, size: int) -> None:
    kinds = gguf.TokenType
    special = {"<unk>": kinds.UNKNOWN, "<s>": kinds.CONTROL, "</s>": kinds.CONTROL}
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*special, "<0x0A>", *(f"t{i}" for i in range(4, size))])
    writer.add_token_types([*special.values(), kinds.BYTE] + [kinds.NORMAL] * (size - 4))
    writer.add_token_scores([0.0] * size)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _parts(
    name: str, values: torch.Tensor, config: Any, family: Family
) -> Iterator[tuple[str, torch.Tensor]]:
    """GGUF tensors for one tensor of transformers, under names that the library knows."""
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    name = name.replace("block_sparse_moe.router.", "mlp.gate.").replace("block_sparse_moe", "mlp")
    if name.endswith("mlp.experts.gate_up_proj"):
        stem = name.removesuffix(".gate_up_proj")
        gate, up = values.chunk(2, 1)
        yield f"{stem}.gate_proj.weight", gate
        yield f"{stem}.up_proj.weight", up
        return
    if name.endswith("mlp.experts.down_proj"):
        name += ".weight"
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    rows = next((n for part, n in heads.items() if f".{part}." in name), None)
    if family.interleaved and rows:
        values = values.unflatten(0, (rows, 2, -1)).transpose(1, 2).flatten(0, 2)
    yield name, values
