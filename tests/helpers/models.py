"""Tiny random models with a nominal trained length of 64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedConfig,
    Qwen2VLTextConfig,
    Qwen2VLTextModel,
)
from transformers.masking_utils import sdpa_mask

LENGTH = 64
# Models as built, and the random state after building them: copying takes half of
# the time.
_BUILT: dict[str, tuple[LlamaForCausalLM, torch.Tensor]] = {}


def tiny_llama(**overrides: object) -> LlamaForCausalLM:
    """Random weights, large enough for every rotary pair to matter."""
    values: dict = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": LENGTH,
        "initializer_range": 0.15,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    key = f"{overrides} on {torch.get_default_device()}"
    if key not in _BUILT:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**(values | overrides))).eval()
        _BUILT[key] = model, torch.get_rng_state()
    model, random = _BUILT[key]
    torch.set_rng_state(random)
    return copy.deepcopy(model)


def tiny_llava(text: PreTrainedConfig) -> LlavaForConditionalGeneration:
    """A model that sees, around a language model with this configuration."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    vision = CLIPVisionConfig(image_size=28, patch_size=14, num_attention_heads=2, **sizes)
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=127)
    return LlavaForConditionalGeneration(config).eval()


def several_axes() -> Qwen2VLTextModel:
    """Return a decoder with three position axes."""
    torch.manual_seed(0)
    config = Qwen2VLTextConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        pad_token_id=0,
    )
    return Qwen2VLTextModel(config).eval()


@contextmanager
def attending(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """``model`` with the attention function registered under ``name``."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield model
    finally:
        model.set_attn_implementation(before)


_functions: list[Callable] = []
AttentionInterface.register("given", lambda *args, **kwargs: _functions[-1](*args, **kwargs))
AttentionMaskInterface.register(
    "given", lambda **arguments: sdpa_mask(**{**arguments, "allow_is_causal_skip": False})
)


@contextmanager
def attending_by(model: nn.Module, function: Callable) -> Iterator[nn.Module]:
    """Run ``model`` with this attention function, which gets a mask of visible keys."""
    _functions.append(function)
    try:
        with attending(model, "given"):
            yield model
    finally:
        _functions.pop()
