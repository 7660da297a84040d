"""Small models and patches shared by the tests of all engines."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.helpers.models import LENGTH, tiny_llama

VOCABULARY = 128
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.15,
    "pad_token_id": 0,
}
BUILD = {
    "llama": tiny_llama,
    "mistral": lambda: MistralForCausalLM(
        MistralConfig(**SIZES, head_dim=16, sliding_window=None, tie_word_embeddings=True)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
}
SERVED = [
    ("llama", "rerope"),
    ("llama", "leaky_rerope"),
    ("mistral", "dual_chunk"),
    ("qwen2", "self_extend"),
    ("qwen3", "jet_long"),
    ("llama", "string"),
]
"""Every method of the plugins for vLLM and SGLang, on one of their families, and each of these."""
TABLE = [1.0 + 0.5 * i for i in range(8)]
FLAGS: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": ("yarn", {}),
    "yarn of factor 7": ("yarn", {"factor": 7}),
    "yarn hotter": ("yarn", {"attention_factor": 1.3, "beta_fast": 2.0, "beta_slow": 0.25}),
    "pi": ("pi", {}),
    "pi of factor 7": ("pi", {"factor": 7}),
    "ntk": ("ntk", {}),
    "abf": ("abf", {"base": 5e5}),
    "dynamic_ntk": ("dynamic_ntk", {"length": 200}),
}
TABLES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama3", {}),
    "mrrope": ("mrrope", {}),
    "ntk_by_parts": ("ntk_by_parts", {}),
    "resonance": ("resonance", {}),
    "p_rope": ("p_rope", {"p": 0.5}),
    "longrope2": ("longrope2", {}),
    "clipped": ("clipped", {}),
    "base_truncation": ("base_truncation", {}),
    "longrope": ("longrope", {"long_factor": TABLE}),
    "dynamic_yarn": ("dynamic_yarn", {"length": 200}),
    "yarn smooth": ("yarn", {"truncate": False}),
    "yarn paper": ("yarn", {"ramp": "rotations"}),
}
TOLERANCE = 2e-3  # float32 on both sides; 4e-6 was seen
ids = torch.randint(4, VOCABULARY, (7 * LENGTH,), generator=torch.Generator().manual_seed(1))


def built(family: str) -> Any:
    torch.manual_seed(0)
    model = BUILD[family]().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # initialized to zero, which would hide loading errors
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def prompts(length: int) -> list[list[int]]:
    """Return prompts within and beyond the trained length, up to one token below the limit."""
    return [ids[:n].tolist() for n in (50, 3 * LENGTH, length - 1)]


@torch.no_grad()
def expected(model: Any, length: int) -> torch.Tensor:
    rows = [model(torch.tensor([p])).logits[0, -1].log_softmax(-1) for p in prompts(length)]
    return torch.stack(rows)
