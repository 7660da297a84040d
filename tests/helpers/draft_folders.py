"""Folders of drafts for speculative decoding, with the fields of published ``config.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "vocab_size": 200,
}
EAGLE3: dict[str, Any] = {
    **SIZES,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 50,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "use_aux_hidden_state": True,
    },
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_hidden_layers": 1,
    "rope_scaling": None,
    "rope_theta": 500000,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.53.0",
}
DFLASH: dict[str, Any] = {
    **SIZES,
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "dflash_config": {"mask_token_id": 199, "target_layer_ids": [1, 2]},
    "dtype": "bfloat16",
    "head_dim": 16,
    "layer_types": ["full_attention"] * 2,
    "max_position_embeddings": 2048,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_target_layers": 4,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "transformers_version": "4.57.1",
    "use_sliding_window": False,
}
LAYER = {name: EAGLE3[name] for name in (*SIZES, "head_dim", "num_hidden_layers", "model_type")}
LAYER |= {"max_position_embeddings": 2048, "rope_scaling": None, "rope_theta": 500000}
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "auto_map": {"": "core.Eagle3SpeculatorConfig"},
    "draft_vocab_size": 50,
    "norm_before_residual": True,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "target"},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0",
    "transformer_layer_config": LAYER,
}
EAGLE: dict[str, Any] = {
    "architectures": ["EagleLlamaForCausalLM"],
    "model": {**LAYER, "architectures": ["LlamaForCausalLM"]},
    "model_type": "eagle",
}
FOLDERS: dict[str, dict[str, Any]] = {
    "eagle3": EAGLE3,
    "dflash": DFLASH,
    "speculators": SPECULATORS,
    "eagle": EAGLE,
}
"""By format: all as their trainers and vLLM's configuration classes write them."""
WITHIN = {"speculators": "transformer_layer_config", "eagle": "model"}
"""Where a format has the model of the draft, if it is not the whole file."""
METHODS = {"eagle3": "eagle3", "dflash": "dflash", "speculators": "eagle3", "eagle": "eagle"}
"""Values of ``method`` in vLLM's ``--speculative-config``."""


def write_draft(folder: Path, kind: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(FOLDERS[kind]), encoding="utf-8")
    return folder


def model_part(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """The entries of ``config.json`` that describe the model of a draft."""
    return config[WITHIN[kind]] if kind in WITHIN else config
