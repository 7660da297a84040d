"""What a patch costs in time: ratios to the unpatched model, in one interleaved run.

    python -m eval.speed --model checkpoints/tiny-512 --length 2048

Unpatched and patched runs take turns, so that whatever else the machine does hits both; the
median of each is compared. A ratio of 1.00 means that patching is free.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

import rope_ext

VARIANTS = {
    "unpatched": {},
    "yarn": {"method": "yarn"},
    "yarn, float64 angles": {"method": "yarn", "precise": True},
    "dynamic_ntk": {"method": "dynamic_ntk"},
    "rerope": {"method": "rerope"},
    "self_extend": {"method": "self_extend"},
    "dual_chunk": {"method": "dual_chunk"},
    "string": {"method": "string", "factor": 1.0},
}


@torch.inference_mode()
def prefill(model: nn.Module, ids: torch.Tensor) -> None:
    model(ids, use_cache=False, logits_to_keep=1)


@torch.inference_mode()
def decode(model: nn.Module, ids: torch.Tensor, cache: DynamicCache) -> None:
    start = cache.get_seq_length()
    for _ in range(8):
        model(ids[:, -1:], past_key_values=cache, logits_to_keep=1)
    cache.crop(start - cache.get_seq_length())


def train(model: nn.Module, ids: torch.Tensor) -> None:
    model(ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad()


def timed(run: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def measure(model: nn.Module, ids: torch.Tensor, factor: float, rounds: int) -> dict:
    """Median seconds, ``{task: {variant: seconds}}``."""
    models, runs = {}, {}
    for variant, options in VARIANTS.items():
        models[variant] = copy.deepcopy(model)
        if options:
            rope_ext.patch(models[variant], **{"factor": factor, **options})
    for variant, patched in models.items():
        cache = DynamicCache(config=patched.config)
        with torch.inference_mode():
            patched(ids, past_key_values=cache, logits_to_keep=1)
        runs["prefill", variant] = partial(prefill, patched, ids)
        runs["decode", variant] = partial(decode, patched, ids, cache)
        runs["training step", variant] = partial(train, patched, ids)
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for run in runs.values():  # warm up
        timed(run, ids.device)
    for _ in track(range(rounds), "measuring", console=Console(stderr=True)):
        for key, run in runs.items():
            seconds[key].append(timed(run, ids.device))
    result: dict[str, dict[str, float]] = {}
    for (task, variant), values in seconds.items():
        result.setdefault(task, {})[variant] = statistics.median(values)
    return result


def patch_seconds(model: nn.Module, factor: float, rounds: int) -> float:
    """Median seconds of one call of ``rope_ext.patch``."""
    values = []
    for _ in range(rounds):
        start = time.perf_counter()
        rope_ext.patch(model, "yarn", factor=factor)
        values.append(time.perf_counter() - start)
        rope_ext.unpatch(model)
    return statistics.median(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="checkpoints/tiny-512")
    parser.add_argument("--length", type=int, default=2048, help="tokens")
    parser.add_argument("--factor", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    model = model.to(args.device).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (1, args.length), generator=generator)
    seconds = measure(model, ids.to(args.device), args.factor, args.rounds)
    table = Table(
        title=f"{args.model}, {args.length} tokens, {args.dtype} on {args.device}, median of "
        f"{args.rounds}; torch {torch.__version__}, transformers {transformers.__version__}"
    )
    for column in ("", *(task for task in seconds)):
        table.add_column(column)
    for variant in VARIANTS:
        cells = (
            f"{task[variant] * 1e3:.1f} ms, {task[variant] / task['unpatched']:.3f}x"
            for task in seconds.values()
        )
        table.add_row(variant, *cells)
    console = Console()
    console.print(table)
    console.print(f"rope_ext.patch itself: {patch_seconds(model, args.factor, 20) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
