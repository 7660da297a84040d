"""A tiny random model of every class in transformers' causal-LM and image-text mappings.

One generic recipe shrinks any config: every field that a family really has is set to the small
value of `_SMALL`, and one layer of each kind the family mixes is kept. `_OVERRIDES` holds what
that recipe cannot know.
"""

from __future__ import annotations

import copy
import importlib
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

LENGTH = 64
"""Trained context of every tiny model, in tokens."""

VOCAB = 128
TEXT_VOCAB = VOCAB - 8
"""Tokens below are text; above are those of images, of videos and of what encloses them."""

IMAGES = "+images"
"""Ends the name of a class with images whose model type has one for text, too."""

_MAX_LAYERS = 4


class NotBuildable(RuntimeError):
    """The family cannot be built tiny and random here; the message says why."""


def _table(*groups: tuple[int | float, str]) -> dict[str, int | float]:
    return {name: value for value, names in groups for name in names.split()}


_SMALL = _table(
    (VOCAB, "vocab_size vocab_size_per_layer_input pronunciation_vocab_size shape_vocab_size"),
    (VOCAB, "encoder_hash_byte_group_vocab"),
    (LENGTH, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions"),
    (LENGTH, "max_source_positions context_length rel_extent original_max_position_embeddings"),
    (64, "hidden_size d_model n_embd emb_dim embedding_size embedding_dim backbone_hidden_size"),
    (64, "lru_width d_inner adapter_in_dim adapter_input_size adapter_out_dim"),
    (64, "out_hidden_size hidden_size_global nemo_conv_channels projection_dim"),
    (64, "projection_hidden_size projector_hidden_size"),
    (64, "pronunciation_embed_dim shape_embed_dim ext_pw_out_channel"),
    (96, "intermediate_size dense_intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim"),
    (96, "ffn_hidden_size n_inner dff dim_ff intermediate_size_mlp mlp_dim"),
    (32, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size"),
    (32, "shared_experts_intermediate_size expert_ffn_hidden_size prefix_dense_intermediate_size"),
    (32, "moe_shared_expert_intermediate_size router_hidden_size q_lora_rank kv_lora_rank"),
    (2, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers depth"),
    (2, "num_decoder_layers num_encoder_layers num_blocks"),
    (4, "num_attention_heads n_head n_heads num_heads decoder_attention_heads attention_heads"),
    (4, "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads"),
    (2, "num_key_value_heads num_kv_heads swa_num_key_value_heads"),
    (4, "swa_num_attention_heads"),
    (16, "head_dim dim_head d_head kv_channels swa_head_dim attention_head_size rotary_dim"),
    (16, "sliding_window sliding_window_size window_size local_attention attention_chunk_size"),
    (16, "index_head_dim query_pre_attn_scalar attention_window_size o_lora_rank"),
    (16, "local_attention_window_len"),
    (8, "qk_rope_head_dim qk_nope_head_dim v_head_dim gated_norm_rank d_rel laurel_rank"),
    (8, "adapter_rank hidden_size_per_layer_input mamba_chunk_size block_size"),
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    # With few indexer heads all scores of a token are often negative, rectified to ties at zero,
    # and which of them are chosen then depends on the shapes.
    (32, "index_n_heads"),
    (2, "num_experts_per_tok moe_k moe_topk top_k_experts"),
    (1, "n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts"),
    (1, "first_k_dense_replace num_dense_layers n_groups mamba_n_groups mamba_ngroups"),
    (8, "index_topk"),
    (8, "mamba_d_state state_size ssm_state_size"),
    (4, "mamba_n_heads mamba_num_heads n_mamba_heads"),
    (2, "linear_num_key_heads o_groups zero_expert_num"),
    (4, "linear_num_value_heads linear_num_heads"),
    (16, "linear_key_head_dim linear_value_head_dim linear_head_dim mamba_head_dim"),
    (32, "image_size"),
    (8, "patch_size"),
    (4, "mm_tokens_per_image"),
    (TEXT_VOCAB, "image_token_id image_token_index media_placeholder_token_id"),
    (0.15, "initializer_range init_std initializer_factor"),
    (0, "bos_token_id pad_token_id num_mtp_layers num_nextn_predict_layers"),
    (1, "eos_token_id decoder_start_token_id forced_eos_token_id sep_token_id cls_token_id"),
)

# Fields with one value a layer; together they say which kinds of layers a family mixes.
_PER_LAYER = (
    "activation_sparsity_pattern",
    "indexer_types",
    "layer_rope_theta",
    "layer_types",
    "layers_block_type",
    "mlp_layer_types",
    "no_rope_layers",
)

# What stays of the rope parameters of a family whose default config is scaled already.
_UNSCALED = ("llama_4_scaling_beta", "mrope_section", "partial_rotary_factor", "rope_theta")

# Decoders whose positions have three axes although their default rope parameters do not say so.
_THREE_AXES = (
    *("glm4v_text", "glm4v_moe_text", "glm_ocr_text", "hunyuan_vl_text"),
    *("paddleocr_vl_text", "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text"),
)

# Fields to set although the family's default leaves them out: its code needs them.
_REQUIRED = ("head_dim", "num_experts_per_tok", "num_key_value_heads")

_NOT_BUILDABLE = {
    "gemma4_assistant": "draft model: needs `shared_kv_states` of a target model",
    "gemma4_unified_assistant": "draft model: needs `shared_kv_states` of a target model",
    "idefics": "needs an image",
    "mistral4": "transformers supports only its own yarn: `default` rotates whole heads",
    "pi0": "needs the state of a robot",
    "shieldgemma2": "a classifier that transformers cannot reload",
    "t5gemma2": "an encoder-decoder that needs input ids for both",
}

_TILES = [[32, 32], [32, 64]]

_OVERRIDES: dict[str, dict[str, Any]] = {
    # Tokens of images and of sounds follow those of text, each as many as their codebook has.
    "apertus1p5": {"audio_token_offset": TEXT_VOCAB + 4, "image_token_offset": TEXT_VOCAB},
    "apertus1p5_vision_tokenizer": {"codebook_size": 4},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": None,
        },
    },
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "blt": {"use_cache": False},  # its default forward asks the config for `num_hidden_layers`
    "dbrx": {"attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0}},
    "chameleon": {"vocabulary_map": {"<image>": TEXT_VOCAB}},
    "cosmos3_edge_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 2, 2],
        }
    },
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "layer_types": [
            "sliding_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "partial_rotary_factor": 0.5,
    },
    "dia": {"delay_pattern": [0, 1, 2]},
    "dia_decoder": {"cross_head_dim": 16, "cross_hidden_size": 64, "num_channels": 3},
    "dory": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "n_input_layers": 1,
        "n_output_layers": 1,
        "n_recurrent_layers": 2,
        "num_hidden_layers": 4,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {
        "swa_head_dim": 16,
        "swa_kv_lora_rank": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 32,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "esm": {"position_embedding_type": "rotary", "vocab_size": VOCAB, "pad_token_id": 0},
    "esmc": {"num_key_value_heads": 4},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [32, 32],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [3, 3, 2],
        },
    },
    # PaliGemma's switches this on; text without token types is then read causally by eager
    # attention alone.
    "gemma": {"use_bidirectional_attention": False},
    "gemma3n_text": {
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gemma4_text": {"global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "glm5_next_text": {"index_kpool": 4},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "image_grid_pinpoints": _TILES},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "position_embedding_type": "rope",
    },
    "hy_v4_vl_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 1, 1],
        }
    },
    "inkling2_vision": {"text_hidden_size": 64},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "laguna": {
        "layer_types": ["full_attention", "sliding_attention"],
        "num_attention_heads_per_layer": [4, 4],
        "sliding_window": 16,
    },
    "lfm2": {"full_attn_idxs": None, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_vision_model": {
        "intermediate_size": 256,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
        "vision_output_dim": 64,
    },
    "llava_next": {"image_grid_pinpoints": _TILES},
    "llava_next_video": {"image_grid_pinpoints": _TILES},
    "llava_onevision": {"image_grid_pinpoints": _TILES},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8},
    "mellum": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16},
    "minimax_m3_vl_text": {
        "index_n_heads": 4,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
    },
    "ministral3": {
        "rope_parameters": {
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": LENGTH,
            "rope_theta": 1000000.0,
            "rope_type": "default",
        }
    },
    "molmo2_adapter": {"vision_feature_layer": [-1, -2]},
    "moonshine_streaming": {"num_key_value_heads": 4},
    # Its cache keeps to the window and its attention does not: a wide one makes both agree.
    "moshi": {"sliding_window": 16 * LENGTH},
    "qwen4_exp_text": {
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "indexer_head_dim": 16,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds_dim": (32, 32),
        "axial_pos_shape": (8, 8),
        "hash_seed": 0,
        "is_decoder": True,
    },
    "step3p5": {"sliding_window": 16},
    "vibevoice_acoustic_tokenizer": {"num_filters": 2},
    "vibevoice_acoustic_tokenizer_decoder": {"num_filters": 2},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "wavtokenizer_encoder": {"codebook_dim": 64, "codebook_size": 4},
    "xlstm": {"hidden_size": 128},  # its query and key widths are rounded up to 64
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
    },
    # Its prefill keeps time steps above the minimum and its decoding does not: a minimum that
    # never binds makes both agree.
    "zamba2": {"time_step_min": 1e-8, "use_mem_rope": True},
    "zaya": {
        "layer_types": ["hybrid_sliding", "hybrid"],
        "num_experts_per_tok": 1,
        "sliding_window": 16,
    },
}


# What the configuration of a class needs beside that of its family.
_OF_CLASS: dict[str, dict[str, Any]] = {"T5GemmaEncoderModel": {"is_encoder_decoder": False}}


def model_types() -> list[str]:
    """Every model type of the mapping, less those sharing both config and modeling class."""
    seen: set[tuple[type, str]] = set()
    kept = []
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        key = (CONFIG_MAPPING[model_type], MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
        if key not in seen:
            seen.add(key)
            kept.append(model_type)
    return kept


def image_text_types() -> list[str]:
    """Model types of the image-text mapping, less the classes that `model_types` has.

    Where both mappings have the type, with different classes, its name here ends in `IMAGES`.
    """
    kept: dict[tuple[type, str], str] = {}
    for model_type, class_name in sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()):
        causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
        if causal != class_name:
            name = model_type if causal is None else model_type + IMAGES
            kept.setdefault((CONFIG_MAPPING[model_type], class_name), name)
    return list(kept.values())


def class_name(model_type: str) -> str:
    """The modeling class of a name of `model_types` or `image_text_types`."""
    plain = model_type.removesuffix(IMAGES)
    if plain == model_type and model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[plain]


def tiny_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """The family's config, shrunk; `overrides` are set on top (its text part if it has one)."""
    return _tiny(CONFIG_MAPPING[model_type.removesuffix(IMAGES)], overrides)


def tiny_model(model_type: str, **overrides: Any) -> PreTrainedModel:
    """The family's causal LM with random weights, float32, in eval mode."""
    if model_type in _NOT_BUILDABLE:
        raise NotBuildable(f"{model_type}: {_NOT_BUILDABLE[model_type]}")
    try:
        config = tiny_config(model_type, **overrides)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = _opened(_from_config(model_type, config))
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise NotBuildable(f"{model_type}: {reason}") from error
    return model.float().eval()


def _opened(model: PreTrainedModel) -> PreTrainedModel:
    """Open gates and scales that start closed, which hide what is behind them."""
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=_SMALL["initializer_range"])
    return model


def tiny_of(cls: type[PreTrainedModel], **overrides: Any) -> PreTrainedModel:
    """A class outside of both mappings with random weights, float32, in eval mode."""
    if cls.config_class.model_type == "mistral4":
        raise NotBuildable(f"{cls.__name__}: {_NOT_BUILDABLE['mistral4']}")
    try:
        config = _tiny(cls.config_class, {**_OF_CLASS.get(cls.__name__, {}), **overrides})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = _opened(cls._from_config(config))
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise NotBuildable(f"{cls.__name__}: {reason}") from error
    return model.float().eval()


def other_classes(module: str) -> list[type[PreTrainedModel]]:
    """The public model classes of a module of `rotating_modules`, less those of both mappings."""
    mapped = {class_name(name) for name in (*model_types(), *image_text_types())}
    try:
        found = importlib.import_module(f"transformers.models.{module}")
    except ModuleNotFoundError:  # see not_importable
        return []
    made = (getattr(found, name) for name in found.__all__ if name not in mapped)
    models = [one for one in made if isinstance(one, type) and issubclass(one, PreTrainedModel)]
    return [one for one in models if not one.__name__.endswith("PreTrainedModel")]


def not_importable() -> dict[str, str]:
    """By module of `rotating_modules`, the package that it imports and that is not installed.

    Transformers does not require it.
    """
    missing = {}
    for module in rotating_modules():
        try:
            importlib.import_module(f"transformers.models.{module}")
        except ModuleNotFoundError as error:
            missing[module] = str(error.name)
    return missing


def rotating_modules() -> list[str]:
    """Modules of transformers' models that may rotate, such as `llama.modeling_llama`.

    Either their own code rotates, or a model of any family is a part, as in `llava`.
    """
    root = Path(transformers.models.__path__[0])
    files = sorted(root.glob("*/modeling_*.py"))
    words = re.compile(r"inv_freq|rotary|AutoModel\.from_config")
    having = (path for path in files if words.search(path.read_text(encoding="utf-8")))
    return [f"{path.parent.name}.{path.stem}" for path in having]


def _from_config(model_type: str, config: PreTrainedConfig) -> PreTrainedModel:
    cls = getattr(transformers, class_name(model_type))
    decoder = getattr(config, "decoder", None)
    if isinstance(decoder, cls.config_class):  # listed under the whole model, built from a part
        return cls._from_config(decoder)
    if class_name(model_type) == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type):
        return AutoModelForCausalLM.from_config(config)
    return cls._from_config(config)


def _tiny(cls: type[PreTrainedConfig], overrides: dict[str, Any]) -> PreTrainedConfig:
    special = _OVERRIDES.get(cls.model_type, {})
    default = cls(**special.get("_default", {}))
    names = {field.name for field in fields(cls)}
    kwargs: dict[str, Any] = {}
    for name in sorted(names):
        value = vars(default).get(cls.attribute_map.get(name, name))
        if isinstance(value, PreTrainedConfig):
            kwargs[name] = _tiny(type(value), {})
        elif name in _SMALL and (value or name in _REQUIRED):
            kwargs[name] = _SMALL[name]
            if isinstance(value, (list, tuple)) and len(value) <= _MAX_LAYERS:  # by axis or stage
                kwargs[name] = type(value)([_SMALL[name]] * len(value))
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            kwargs[name] = min(value, VOCAB - 1)
    if "kv_lora_rank" in kwargs:  # latent attention has no grouped keys
        kwargs["num_key_value_heads"] = kwargs["num_attention_heads"]
    kwargs |= _layers(default, names)
    kwargs |= {name: copy.deepcopy(value) for name, value in special.items() if name != "_default"}
    text = next((kwargs[n] for n in ("text_config", "decoder") if n in kwargs), None)
    for name, value in overrides.items():
        if name not in names and text is not None:
            setattr(text, name, value)
        else:
            kwargs[name] = value
    config = cls(**kwargs)
    if "rope_parameters" not in overrides:
        _unscale(config)
    return config


def _layers(default: PreTrainedConfig, names: set[str]) -> dict[str, Any]:
    """One layer of each kind in the family's default stack."""
    count = getattr(default, "num_hidden_layers", None)
    columns = {}
    for name in _PER_LAYER:
        value = getattr(default, name, None)
        if name in names and isinstance(value, (list, tuple)) and len(value) == count:
            columns[name] = list(value)
    if not columns:
        return {}
    kinds = list(dict.fromkeys(zip(*columns.values(), strict=True)))[:_MAX_LAYERS]
    kinds += kinds[-1:] * (2 - len(kinds))
    rows = {name: [kind[i] for kind in kinds] for i, name in enumerate(columns)}
    return rows | {"num_hidden_layers": len(kinds)}


def _unscale(config: PreTrainedConfig) -> None:
    """Plain rope where the family's default is scaled; at least eight rotated dimensions."""
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return
    for part in [rope] if "rope_theta" in rope else [p for p in rope.values() if p]:
        if part.get("rope_type", "default") not in ("axial", "default", "proportional"):
            kept = {name: part[name] for name in _UNSCALED if name in part}
            part.clear()
            part.update(kept, rope_type="default")
        if part.get("partial_rotary_factor", 1.0) < 0.5:
            part["partial_rotary_factor"] = 0.5
        width = getattr(config, "qk_rope_head_dim", None) or _SMALL["head_dim"]
        pairs = int(width * part.get("partial_rotary_factor", 1.0)) // 2
        axes = part.get("mrope_section", () if config.model_type in _THREE_AXES else (pairs,))
        if sum(axes) != pairs:
            part["mrope_section"] = [pairs - 2 * (pairs // 4), pairs // 4, pairs // 4]
