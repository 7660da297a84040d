"""How many kernels a compiled decoding step launches in each layer on a GPU; none is needed.

    python -m lab.benchmarks.launches --methods rerope,self_extend

Needs the package ``triton`` and a C++ compiler. Models of two and of three layers have a filled
static cache; inductor generates the code of their next step for a mocked GPU, and the difference
is what a layer launches. Attention of the unpatched model is not lowered as on a real GPU, so it
has no row.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import rope_ext
from lab.benchmarks.kernels import CARDS
from lab.benchmarks.mocked_gpu import code_of, mocked, to_mocked
from rope_ext.command.arguments import split

TRAINED, ROOM = 1024, 1920  # tokens; `string` reaches no further
METHODS = "rerope,leaky_rerope,self_extend,string,dual_chunk,lm_infinite,alibi,t5"
OPTIONS = {"alibi": {}, "t5": {}}
LAYERS = (2, 3)


def patched(method: str, layers: int, dtype: torch.dtype) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=128,
        max_position_embeddings=TRAINED,
    )
    model = LlamaForCausalLM(config).eval().to(dtype)
    return rope_ext.patch(model, method, **OPTIONS.get(method, {"factor": ROOM / TRAINED}))


def filled(model: LlamaForCausalLM) -> StaticCache:
    """A static cache with ``TRAINED`` tokens, and room for more."""
    cache = StaticCache(model.config, max_cache_len=ROOM)
    with torch.no_grad():
        model(torch.zeros(1, TRAINED, dtype=torch.long), past_key_values=cache)
    return cache


def launches(methods: Sequence[str], card: str, dtype: torch.dtype) -> dict[str, tuple[int, int]]:
    """Triton's kernels and other calls of a layer, by method; for a process of its own."""
    models = [patched(name, layers, dtype) for name in methods for layers in LAYERS]
    caches = [filled(model) for model in models]
    counts = []
    with mocked(CARDS[card]):
        for model, cache in zip(models, caches, strict=True):
            to_mocked(model, cache)
            token = torch.zeros(1, 1, dtype=torch.long, device="cuda")
            step = code_of(model, token, past_key_values=cache).split("def call(")[-1]
            others = step.count("extern_kernels.") + step.count("torch.ops.aten.")
            counts.append((step.count(".run("), others))
    found = {}
    for name, (own, other), (more, others) in zip(methods, counts[::2], counts[1::2], strict=True):
        found[name] = more - own, others - other
    return found


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default=METHODS, help="by commas")
    parser.add_argument("--card", default="9.0", choices=list(CARDS), help="capability")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16", "float32"])
    args = parser.parse_args(given)
    if importlib.util.find_spec("triton") is None:
        parser.error("this needs the package triton")
    found = launches(split(args.methods), args.card, getattr(torch, args.dtype))
    print("| Method | Kernels of Triton | Products |\n|---|---|---|")
    for name, (own, other) in found.items():
        print(f"| `{name}` | {own} | {other} |")


if __name__ == "__main__":
    main()
