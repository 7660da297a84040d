"""Writes small models as GGUF files, to run them in llama.cpp.

Details of each family follow llama.cpp's ``conversion/*.py`` and ``src/models/*.cpp``.
"""

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
    **dict.fromkeys(("rms_norm_eps", "norm_eps"), "add_layer_norm_rms_eps"),
    **dict.fromkeys(("layer_norm_eps", "norm_epsilon"), "add_layer_norm_eps"),
    "hidden_size": "add_embedding_length",
    "num_hidden_layers": "add_block_count",
    "num_attention_heads": "add_head_count",
    "max_position_embeddings": "add_context_length",
    "vocab_size": "add_vocab_size",
    "num_experts_per_tok": "add_expert_used_count",
    "moe_intermediate_size": "add_expert_feed_forward_length",
    "shared_expert_intermediate_size": "add_expert_shared_feed_forward_length",
    "n_shared_experts": "add_expert_shared_count",
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), "add_leading_dense_block_count"),
    "norm_topk_prob": "add_expert_weights_norm",
    "routed_scaling_factor": "add_expert_weights_scale",
    "residual_multiplier": "add_residual_scale",
    "embedding_multiplier": "add_embedding_scale",
    "attention_multiplier": "add_attention_scale",
    "logits_scaling": "add_logit_scale",
    "logit_scale": "add_logit_scale",
    "attn_logit_softcapping": "add_attn_logit_softcapping",
    "final_logit_softcapping": "add_final_logit_softcapping",
    "q_lora_rank": "add_q_lora_rank",
    "kv_lora_rank": "add_kv_lora_rank",
    "qk_head_dim": "add_key_length_mla",
    "v_head_dim": "add_value_length_mla",
    "conv_L_cache": "add_shortconv_l_cache",
    "linear_conv_kernel_dim": "add_ssm_conv_kernel",
    "linear_key_head_dim": "add_ssm_state_size",
    "linear_num_key_heads": "add_ssm_group_count",
    "linear_num_value_heads": "add_ssm_time_step_rank",
}
"""Configuration fields, and ``gguf.GGUFWriter`` methods that write them."""
_RENAMED = {
    "e_score_correction_bias": "e_score_correction.bias",
    "block_sparse_moe.router.": "mlp.gate.",
    "block_sparse_moe": "mlp",
    "feed_forward.experts.": "mlp.experts.",
    ".expert_bias": ".expert_bias.bias",
    ".sinks": ".sinks.weight",
    ".dt_bias": ".dt_proj.bias",
    "_proj_bias": "_proj.bias",
}
"""Parts of transformers' tensor names, and their names in the gguf library."""


def require_gguf() -> Any:
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
        model: a model whose family in ``LLAMA_CPP`` has an architecture.
        path: the output file.
    """
    gguf, model = require_gguf(), unwrap(model)
    config = text_config(model)
    family = LLAMA_CPP[config.model_type]
    writer = gguf.GGUFWriter(path, family.name)
    _write_values(writer, config)
    for key, value in family.keys.items():
        value = getattr(config, value) if isinstance(value, str) else value
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
    write_out(writer)


def write_out(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_values(writer: Any, config: Any) -> None:
    for name, method in _VALUES.items():
        if getattr(config, name, None) is not None:
            getattr(writer, method)(getattr(config, name))
    width = getattr(config, "intermediate_size", 0)
    writer.add_feed_forward_length(width)
    experts = next((getattr(config, n) for n in _EXPERTS if getattr(config, n, None)), None)
    if experts is not None:
        writer.add_expert_count(experts)
        if getattr(config, "moe_intermediate_size", None) is None:
            writer.add_expert_feed_forward_length(width)
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    parameters, kinds = config.rope_parameters, getattr(config, "layer_types", None) or ()
    rotary = int(dim * parameters.get("partial_rotary_factor", 1.0))
    keys, values = dim, dim
    if getattr(config, "kv_lora_rank", None):  # all heads share one cached key
        keys, values, shared = config.kv_lora_rank + dim, config.kv_lora_rank, 1
    if "conv" in kinds:
        shared = [0 if kind == "conv" else shared for kind in kinds]
    if "linear_attention" in kinds:
        linear = [kind == "linear_attention" for kind in kinds]
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", linear)
        width = config.linear_num_value_heads * config.linear_value_head_dim
        writer.add_ssm_inner_size(width)
        # Sections of the three position axes; text has the same position on each.
        axes = [(rotary // 2 + more) // 3 for more in (2, 1, 0)]
        writer.add_rope_dimension_sections([*parameters.get("mrope_section", axes), 0])
    if "llama_4_scaling_beta" in parameters:
        writer.add_attn_temperature_scale(parameters["llama_4_scaling_beta"])
    writer.add_head_count_kv(shared)
    writer.add_key_length(keys)
    writer.add_value_length(values)
    writer.add_rope_dimension_count(rotary)
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
    """Convert a transformers tensor to GGUF tensors, with names that the gguf library knows."""
    for part, known in _RENAMED.items():
        name = name.replace(part, known)
    if config.model_type == "gpt_oss" and ".experts." in name:  # split interleaved gates
        values = values.transpose(-1, -2) if values.ndim == 3 else values
        if ".gate_up_proj" in name:
            values = torch.cat((values[:, ::2], values[:, 1::2]), 1)
    if ".experts." in name and not name.endswith(".bias"):
        name += ".weight"
    if ".experts.gate_up_proj" in name:
        gate, up = values.chunk(2, 1)
        yield name.replace("gate_up_proj", "gate_proj"), gate
        yield name.replace("gate_up_proj", "up_proj"), up
    elif "kv_b_proj" in name:
        heads = values.unflatten(0, (config.num_attention_heads, -1))
        nope, value = heads.split((config.qk_nope_head_dim, config.v_head_dim), 1)
        yield name.replace("kv_b_proj", "k_b_proj"), nope.transpose(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), value
    elif "in_proj_qkvz" in name:
        heads = values.unflatten(0, (config.linear_num_key_heads, -1))
        key = config.linear_key_head_dim
        *rest, gate = heads.split((key, key, *[(heads.shape[1] - 2 * key) // 2] * 2), 1)
        yield name.replace("qkvz", "qkv"), torch.cat([part.flatten(0, 1) for part in rest])
        yield name.replace("qkvz", "z"), gate.flatten(0, 1)
    elif name.endswith(".A_log"):
        yield name, -values.exp()
    elif ".conv" in name and values.ndim == 3:
        yield name, values.squeeze(1)
    elif family.centered and name.endswith("norm.weight") and "linear_attn" not in name:
        yield name, values + 1
    else:
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        rows = next((n for part, n in heads.items() if f".{part}." in name), None)
        if family.interleaved and rows:
            values = values.unflatten(0, (rows, 2, -1)).transpose(1, 2).flatten(0, 2)
        yield name, values
