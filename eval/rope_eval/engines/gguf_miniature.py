"""Writes small models as GGUF files for llama.cpp, with the keys of its converter.

Names of configuration fields and tensors are in ``gguf.json``; details of each family follow
llama.cpp's ``conversion/*.py`` at commit 0c1e57098.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rope_ext.engines.base import ENGINES, Family
from rope_ext.engines.llama_cpp import gguf_library, write_out
from rope_ext.errors import ExportError
from rope_ext.rotary.sites import text_config, unwrap

_TABLES = json.loads(Path(__file__).with_name("gguf.json").read_text(encoding="utf-8"))
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def write_model(model: nn.Module, path: str | Path) -> None:
    """Write a small model as a GGUF file in float32, with the keys of llama.cpp's converter.

    Tables of frequencies are left out.
    The vocabulary is synthetic (``t3``, ``t4``, ...); prompts are lists of token IDs.
    """
    gguf = gguf_library()
    model = unwrap(model)
    config = text_config(model)
    family = ENGINES["llama.cpp"][config.model_type]
    writer = gguf.GGUFWriter(path, family.name)
    _write_values(writer, config)
    for key, value in family.keys.items():
        value = getattr(config, value) if isinstance(value, str) else value
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"{family.name}.{key}", value)
    kinds = gguf.TokenType
    size = config.vocab_size
    special = {"<unk>": kinds.UNKNOWN, "<s>": kinds.CONTROL, "</s>": kinds.CONTROL}
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*special, "<0x0A>", *(f"t{i}" for i in range(4, size))])
    writer.add_token_types([*special.values(), kinds.BYTE] + [kinds.NORMAL] * (size - 4))
    writer.add_token_scores([0.0] * size)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    # The engine has to read the same tokens as transformers.
    writer.add_add_bos_token(False)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == family.name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        for part, piece in _parts(
            name, values=tensor.detach().float().cpu(), config=config, family=family
        ):
            # llama.cpp then reads the embedding instead.
            if part == "lm_head.weight" and config.tie_word_embeddings:
                continue
            written = names.get_name(part, (".weight", ".bias"))
            if written is None:
                raise ExportError(f"the gguf library has no name for {part} of {family.name}")
            writer.add_tensor(written, piece.contiguous().numpy())
    write_out(writer)


def _write_values(writer: Any, config: Any) -> None:
    """Write the keys of sizes and RoPE that llama.cpp reads, as its converter does."""
    for name, method in _TABLES["values"].items():
        if getattr(config, name, None) is not None:
            getattr(writer, method)(getattr(config, name))
    _write_feed_forward(writer, config)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters = config.rope_parameters
    kinds = getattr(config, "layer_types", None) or ()
    rotary = int(dim * parameters.get("partial_rotary_factor", 1.0))
    if "linear_attention" in kinds:
        linear = [kind == "linear_attention" for kind in kinds]
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", linear)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
        # Sections of the three position axes; text has the same position on each.
        axes = [(rotary // 2 + more) // 3 for more in (2, 1, 0)]
        writer.add_rope_dimension_sections([*parameters.get("mrope_section", axes), 0])
    if "llama_4_scaling_beta" in parameters:
        writer.add_attn_temperature_scale(parameters["llama_4_scaling_beta"])
    _write_heads(writer, config, kinds, dim=dim)
    writer.add_rope_dimension_count(rotary)
    writer.add_rope_freq_base(parameters["rope_theta"])
    _write_scaling(writer, parameters, mla=ENGINES["llama.cpp"][config.model_type].mla)


def _write_feed_forward(writer: Any, config: Any) -> None:
    width = getattr(config, "intermediate_size", 0)
    writer.add_feed_forward_length(width)
    experts = [count for name in _EXPERTS if (count := getattr(config, name, None))]
    if experts:
        writer.add_expert_count(experts[0])
        if getattr(config, "moe_intermediate_size", None) is None:
            writer.add_expert_feed_forward_length(width)
    kinds = getattr(config, "mlp_layer_types", None)
    if kinds and getattr(config, "first_k_dense_replace", None) is None:  # it became this list
        writer.add_leading_dense_block_count(kinds.index("sparse"))


def _write_heads(writer: Any, config: Any, kinds: Sequence[str], dim: int) -> None:
    """Write numbers and sizes of heads; ``dim`` is the size of those that rotate."""
    key_heads = config.num_key_value_heads
    keys = dim
    values = dim
    if getattr(config, "kv_lora_rank", None):  # all heads share one cached key
        keys = config.kv_lora_rank + dim
        values = config.kv_lora_rank
        key_heads = 1
    if "conv" in kinds:  # then llama.cpp reads a number for each layer
        key_heads = [0 if kind == "conv" else key_heads for kind in kinds]
    writer.add_head_count_kv(key_heads)
    writer.add_key_length(keys)
    writer.add_value_length(values)


def _write_scaling(writer: Any, parameters: Mapping[str, Any], mla: bool) -> None:
    """Write the scaling keys that the converter writes for ``rope_parameters``."""
    kind = parameters.get("rope_type")
    if kind not in ("linear", "yarn"):
        return
    writer.add_rope_scaling_type(gguf_library().RopeScalingType(kind))
    writer.add_rope_scaling_factor(parameters["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(parameters["original_max_position_embeddings"])
    if parameters.get("mscale_all_dim"):
        unit = 0.1 if mla else 1.0
        writer.add_rope_scaling_yarn_log_mul(unit * parameters["mscale_all_dim"])


def _parts(
    name: str, values: torch.Tensor, config: Any, family: Family
) -> Iterator[tuple[str, torch.Tensor]]:
    """Convert a transformers tensor to GGUF tensors, with names that the gguf library knows."""
    for part, known in _TABLES["names"].items():
        name = name.replace(part, known)
    if config.model_type == "gpt_oss" and ".experts." in name:
        values = values.transpose(-1, -2) if values.ndim == 3 else values
        if ".gate_up_proj" in name:  # gate and up are interleaved
            values = torch.cat((values[:, ::2], values[:, 1::2]), 1)
    if ".experts." in name and not name.endswith(".bias"):
        name += ".weight"
    if ".experts.gate_up_proj" in name:
        gate, up = values.chunk(2, 1)
        yield name.replace("gate_up_proj", "gate_proj"), gate
        yield name.replace("gate_up_proj", "up_proj"), up
    elif "kv_b_proj" in name:
        yield from _latent_parts(name, values, config)
    elif "in_proj_qkvz" in name:
        yield from _linear_parts(name, values, config)
    # As the converter writes them: decay itself, convolutions of two dimensions, scales of norms
    # with the 1 that transformers adds.
    elif name.endswith(".A_log"):
        yield name, -values.exp()
    elif ".conv" in name and values.ndim == 3:
        yield name, values.squeeze(1)
    elif family.centered and name.endswith("norm.weight") and "linear_attn" not in name:
        yield name, values + 1
    elif family.interleaved:
        yield name, _interleaved(name, values, config)
    else:
        yield name, values


def _latent_parts(
    name: str, values: torch.Tensor, config: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Split the projection of latent attention into that of keys and that of values."""
    heads = values.unflatten(0, (config.num_attention_heads, -1))
    nope, value = heads.split((config.qk_nope_head_dim, config.v_head_dim), 1)
    yield name.replace("kv_b_proj", "k_b_proj"), nope.transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), value


def _linear_parts(
    name: str, values: torch.Tensor, config: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Split the projection of linear attention into that of q, k, v and that of the gate."""
    heads = values.unflatten(0, (config.linear_num_key_heads, -1))
    key = config.linear_key_head_dim
    value = (heads.shape[1] - 2 * key) // 2  # a gate has the size of a value
    *qkv, gate = heads.split((key, key, value, value), 1)
    yield name.replace("qkvz", "qkv"), torch.cat([part.flatten(0, 1) for part in qkv])
    yield name.replace("qkvz", "z"), gate.flatten(0, 1)


def _interleaved(name: str, values: torch.Tensor, config: Any) -> torch.Tensor:
    """Put the two columns of each rotary pair side by side, in projections of q and k."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if f".{part}." in name and count:
            return values.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
    return values
