"""What a patch costs in time: ratios to the unpatched model, in one interleaved run.

    python -m benchmarks.speed --model checkpoints/tiny-512 --lengths 2k

Unpatched and patched runs take turns, so that whatever else the machine does hits both; the
median of each is compared. A ratio of 1.00 means that patching is free. Without ``--method``, one
method of each kind is measured. Every method gets a copy of the model.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from transformers import DynamicCache

import rope_ext
from rope_ext.measure import command, models
from rope_ext.measure.arguments import parse_lengths, parse_options, split
from rope_ext.measure.cases import require_positive
from rope_ext.measure.systems import checked_methods
from rope_ext.measure.versions import versions

EACH_KIND = {
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


def measure(models: Mapping[str, nn.Module], ids: torch.Tensor, rounds: int) -> dict:
    """Median seconds, ``{task: {variant: seconds}}``, on ids ``[rows, tokens]``."""
    runs = {}
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


def patch_seconds(model: nn.Module, rounds: int, given: Mapping[str, Any]) -> float:
    """Median seconds of one call of ``rope_ext.patch``, for YaRN."""
    values = []
    for _ in range(rounds):
        start = time.perf_counter()
        rope_ext.patch(model, "yarn", **given)
        values.append(time.perf_counter() - start)
        rope_ext.unpatch(model)
    return statistics.median(values)


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Median seconds by length, task and variant.

    Raises:
        RopeExtError: something is unknown or cannot be loaded.
    """
    name, names = command.only_model(args), split(args.method or ())
    variants = {variant: {"factor": args.factor, **more} for variant, more in EACH_KIND.items()}
    if names or args.option:
        own = parse_options(args.option, names)
        methods = checked_methods(names, args.factor, own, args.adapter, force=True)
        variants = {method: {"method": method, **more} for method, more in methods.items()}
    rows, lengths = command.batch_size(args.batch_size) or 1, parse_lengths(args.lengths)
    require_positive(batch_size=rows, rounds=args.rounds, length=min(lengths))
    model = models.load_model(name, args.dtype, args.device, args.attn, args.adapter)
    given = {
        "compose": args.compose,
        "original_max_position_embeddings": args.trained_length,
    }
    patched = {"unpatched": model}
    for variant, more in variants.items():
        patched[variant] = rope_ext.patch(copy.deepcopy(model), **{**given, **more})
    generator = torch.Generator().manual_seed(args.seed)
    seconds = {}
    for length in lengths:
        ids = torch.randint(3, model.config.vocab_size, (rows, length), generator=generator)
        seconds[length] = measure(patched, ids.to(model.device), args.rounds)
    return {
        "model": name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "batch_size": rows,
        "rounds": args.rounds,
        "seed": args.seed,
        "variants": variants,
        "seconds": seconds,
        "patch_seconds": patch_seconds(model, 20, {"factor": args.factor, **given}),
        "versions": versions(),
    }


def show(data: dict[str, Any]) -> None:
    """Print one table per length."""
    console, known = Console(), data["versions"]
    for length, tasks in data["seconds"].items():
        table = Table(
            title=f"{data['model']}, {data['batch_size']} x {length} tokens, {data['dtype']} on "
            f"{data['device']}, median of {data['rounds']}; torch {known['torch']}, transformers "
            f"{known['transformers']}"
        )
        for column in ("", *tasks):
            table.add_column(column)
        for variant in ("unpatched", *data["variants"]):
            cells = (
                f"{task[variant] * 1e3:.1f} ms, {task[variant] / task['unpatched']:.3f}x"
                for task in tasks.values()
            )
            table.add_row(variant, *cells)
        console.print(table)
    console.print(f"rope_ext.patch itself: {data['patch_seconds'] * 1e3:.1f} ms")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = command.bare(__doc__, "runs/speed")
    parser.add_argument("--lengths", action="append", required=True, help="tokens, such as 2k,8k")
    parser.add_argument("--rounds", type=int, default=15, help="runs of each")
    command.run(parser.parse_args(arguments), evaluate, show, "speed.json")


if __name__ == "__main__":
    main()
