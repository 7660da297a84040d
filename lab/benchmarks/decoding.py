"""Measures decoding in a model with many layers, where the cost of each layer adds up.

Eager with a growing cache, and fully compiled with a static one, for the position methods of
:mod:`benchmarks.speed`. Weights are random, which does not affect times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import rope_ext
from lab.benchmarks.measuring import NATIVE, Measured, of_same_weights, ratios
from rope_ext.command.terminal import tell

HEADS = 8
COLUMNS = 32
STEPS = 4


@dataclass(frozen=True)
class Size:
    """Size of the model; ``prompt``: tokens in the cache at the start."""

    layers: int = 16
    trained: int = 512
    prompt: int = 1024
    backend: str = "inductor"

    def __str__(self) -> str:
        width = HEADS * COLUMNS
        return f"{self.layers} layers of {width} columns, {self.prompt} tokens in the cache"

    def build(self, kv_heads: int, dtype: torch.dtype) -> LlamaForCausalLM:
        """A Llama of this size with random weights."""
        torch.manual_seed(0)
        width = HEADS * COLUMNS
        config = LlamaConfig(
            vocab_size=1024,
            hidden_size=width,
            num_hidden_layers=self.layers,
            num_attention_heads=HEADS,
            num_key_value_heads=kv_heads,
            intermediate_size=width * 11 // 4,
            max_position_embeddings=self.trained,
        )
        return LlamaForCausalLM(config).to(dtype).eval()


def size(small: bool) -> Size:
    return Size(layers=1, trained=32, prompt=64, backend="eager") if small else Size()


def measure(
    variants: Mapping[str, Mapping[str, Any]], of: Size, dtype: torch.dtype, rounds: int
) -> Iterator[dict[str, dict[str, Measured]]]:
    """``{column: {variant: measured}}``, eager and compiled, for two numbers of key heads.

    Args:
        variants: keyword arguments of ``rope_ext.patch``.
        of: size of the model.
        dtype: dtype of the weights.
        rounds: runs of each variant, of :data:`STEPS` tokens.
    """
    ids = torch.randint(3, 1000, (1, of.prompt), generator=torch.Generator().manual_seed(0))
    for kv_heads in (HEADS, HEADS // 4):
        models = {NATIVE: of.build(kv_heads, dtype)}
        for variant, given in variants.items():
            models[variant] = rope_ext.patch(of_same_weights(models[NATIVE]), **given)
        for how, backend in (("eager", ""), ("compiled", of.backend)):
            column = f"{how}, {kv_heads} key heads"
            tell(f"decoding: {column}, {rounds} rounds")
            # One graph for each model, all from the same code.
            with torch._dynamo.config.patch(recompile_limit=2 * len(models)):
                runs = {
                    name: _steps(one, ids=ids, rounds=rounds, backend=backend)
                    for name, one in models.items()
                }
                yield {column: ratios(runs, rounds)}
            # Graphs of this column would count towards the limit of the next one.
            torch._dynamo.reset()


@torch.inference_mode()
def _steps(model: nn.Module, ids: torch.Tensor, rounds: int, backend: str) -> Callable[[], None]:
    """A function that decodes :data:`STEPS` tokens after the prompt; compiled with a backend."""
    step = model
    cache = DynamicCache(config=model.config)
    if backend:
        step = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
        # One more round, the warm-up of ``ratios``.
        room = ids.shape[1] + STEPS * (rounds + 1)
        cache = StaticCache(config=model.config, max_cache_len=room)
    model(ids, past_key_values=cache, logits_to_keep=1)
    return partial(_run, step, ids[:, :1].clone(), cache)


@torch.inference_mode()
def _run(step: Callable[..., Any], token: torch.Tensor, cache: Cache) -> None:
    for _ in range(STEPS):
        step(token, past_key_values=cache, logits_to_keep=1)
