"""Measures the cache memory and time that a window in most layers saves, at 16 times the length.

    python -m lab.benchmarks.windows

Uses the model of :mod:`benchmarks.decoding`, in float32 with random weights; compares ``swan`` with
the unpatched model and with ``nope`` in the same layers, without windows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import Cache, DynamicCache

import rope_ext
from lab.benchmarks import decoding
from lab.benchmarks.measuring import NATIVE, machine, of_same_weights, ratios

FACTOR = 16
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "swan": {"method": "swan"},
    "nope, every 4th layer": {"method": "nope", "layers": "every 4th"},
}


def cached(cache: Cache) -> int:
    """Bytes of keys and values in a growing cache, counting the whole storage of views."""
    kept = [x for layer in cache.layers for x in (layer.keys, layer.values) if x is not None]
    return sum(x.untyped_storage().nbytes() for x in kept)


@torch.inference_mode()
def prefill(model: nn.Module, ids: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, logits_to_keep=1)
    return cache


@torch.inference_mode()
def step(model: nn.Module, token: torch.Tensor, cache: Cache) -> None:
    for _ in range(decoding.STEPS):
        model(token, past_key_values=cache, logits_to_keep=1)


def measure(of: decoding.Size, length: int, rounds: int) -> Table:
    """Measure every variant.

    Args:
        of: size of the model; its ``prompt`` is not used.
        length: tokens in the cache.
        rounds: runs of each variant.
    """
    ids = torch.randint(3, 1000, (1, length), generator=torch.Generator().manual_seed(0))
    models = {NATIVE: of.build(decoding.HEADS, torch.float32)}
    for name, given in VARIANTS.items():
        models[name] = rope_ext.patch(of_same_weights(models[NATIVE]), factor=FACTOR, **given)
    reading = {name: partial(prefill, model, ids) for name, model in models.items()}
    found = ratios(reading, max(1, rounds // 5))
    caches = {name: read() for name, read in reading.items()}
    steps: dict[str, Callable[[], None]] = {
        name: partial(step, model, ids[:, :1].clone(), caches[name])
        for name, model in models.items()
    }
    decoded = ratios(steps, rounds)
    table = Table(title=f"{of.layers} layers, {length} tokens, {FACTOR} times the trained length")
    for column in ("", "cache, MiB", "decoding, tokens/s", "ratio", "prefill, s", "ratio"):
        table.add_column(column)
    for name in models:
        one, whole = decoded[name], found[name]
        table.add_row(
            name,
            f"{cached(caches[name]) / 2**20:.1f}",
            f"{decoding.STEPS / one.seconds:.1f}",
            str(one),
            f"{whole.seconds:.2f}",
            str(whole),
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="rounds; a fifth for prefill")
    parser.add_argument("--small", action="store_true", help="few tokens, to test the command")
    args = parser.parse_args(arguments)
    of = decoding.Size(5, 32) if args.small else decoding.size(False)
    console = Console(width=140)
    console.print(machine())
    console.print(measure(of, FACTOR * of.trained, args.rounds))


if __name__ == "__main__":
    main()
