"""Published shapes of models, so that planning a run needs no download and no license."""

from __future__ import annotations

from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from rope_ext.saving.checkpoints import load_config

SHAPES: dict[str, PreTrainedConfig] = {
    "meta-llama/Llama-2-7b-hf": LlamaConfig(max_position_embeddings=4096),
    "meta-llama/Meta-Llama-3-8B": LlamaConfig(
        vocab_size=128256,
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    ),
    "Qwen/Qwen2.5-7B": Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "Qwen/Qwen3-8B-Base": Qwen3Config(
        vocab_size=151936,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "mistralai/Mistral-7B-v0.3": MistralConfig(
        vocab_size=32768,
        max_position_embeddings=32768,
        sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
}
SHAPES["meta-llama/Meta-Llama-3-8B-Instruct"] = SHAPES["meta-llama/Meta-Llama-3-8B"]


def config_of(model: str) -> PreTrainedConfig:
    """Configuration from the published shape of a model, or from the model itself."""
    return SHAPES[model] if model in SHAPES else load_config(model)
