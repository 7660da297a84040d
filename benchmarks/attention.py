"""What attention in several bands costs: ratios to rotary and torch's own causal attention.

    python -m benchmarks.attention --lengths 4096,8192,16384 --window 1024

All variants of a length take turns, so that whatever else the machine does hits each of them; a
ratio is the median over the rounds of variant / native within one round. "dense" is what the
published code of ReRoPE does: both logit matrices, then a choice. The peak of memory is that of a
process of its own for each variant and length.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from rope_ext import attention
from rope_ext.attention import Call, Pairs, Turn, TurnedBand, reference
from rope_ext.methods.geometry import ChunkGap, Distance

COLUMNS = 64
HALVES = Pairs(slice(0, COLUMNS // 2), slice(COLUMNS // 2, COLUMNS))
SCALE = COLUMNS**-0.5
DENSE_MOST = 4096
"""Tokens up to which the dense form fits into memory."""
NATIVE = "native"


def turn(positions: torch.Tensor) -> Turn:
    inv_freq = 10000.0 ** -(torch.arange(0, COLUMNS, 2) / COLUMNS)
    angles = positions[:, None] * inv_freq
    return angles.cos(), angles.sin()


def bands(variant: str, queries: int, keys: int, window: int) -> list[TurnedBand]:
    """What a method asks of the kernel; in decoding the keys are cached as far as can be."""
    at = torch.arange(keys, dtype=torch.float32)
    own, key = turn(at[-queries:]), turn(at)
    far = turn(torch.tensor([float(window)]))
    if variant == "rerope":
        return [
            TurnedBand(Distance(0, window), own, key),
            TurnedBand(Distance(window, None), far, None),
        ]
    if variant == "self_extend":
        grouped = turn((at[-queries:] / 8).floor() + window - window // 8)
        return [
            TurnedBand(Distance(0, window), own, key),
            TurnedBand(
                Distance(window, None), grouped, turn((at / 8).floor()) if queries > 1 else None
            ),
        ]
    if variant == "string":
        shifted = turn(at[-queries:] - window + 128)
        return [
            TurnedBand(Distance(0, window), own, None),
            TurnedBand(Distance(window, None), shifted, None),
        ]
    if variant == "dual_chunk":
        return [
            TurnedBand(ChunkGap(window, 0, 0), own, None),
            TurnedBand(ChunkGap(window, 1, 1), own, None),
            TurnedBand(ChunkGap(window, 2, None), far, None),
        ]
    raise ValueError(variant)


VARIANTS = ("rerope", "self_extend", "string", "dual_chunk")


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As transformers rotates."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def native(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, own: Turn, cached: Turn
) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        rotary(query, *own),
        key if cached is None else rotary(key, *cached),
        value,
        is_causal=query.shape[2] == key.shape[2],
        scale=SCALE,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def attend(
    variant: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int
) -> Callable[[], torch.Tensor]:
    """A call of the variant."""
    queries, keys = query.shape[2], key.shape[2]
    if variant == NATIVE:
        tables = [torch.cat((t, t), dim=-1).to(query.dtype) for t in turn(torch.arange(keys))]
        own = [table[-queries:] for table in tables]
        cached = tables if queries > 1 else None  # a cache holds rotated keys
        return functools.partial(native, query, key, value, own, cached)
    asked = bands("rerope" if variant == "dense" else variant, queries, keys, window)
    run = reference.attend if variant == "dense" else attention.attend
    return functools.partial(run, query, key, value, Call(asked, HALVES, SCALE))


def tensors(
    heads: int, kv_heads: int, queries: int, keys: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Query, key and value as a projection leaves them, tokens before heads in memory.

    A single query finds them as a cache does, heads before tokens.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    made = [
        torch.randn(1, *shape, COLUMNS, generator=generator).to(dtype).transpose(1, 2)
        for shape in shapes
    ]
    return made if queries > 1 else [x.contiguous() for x in made]


def trained(run: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> None:
    torch.autograd.grad(run().sum(), inputs)


def ratios(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, tuple[float, float]]:
    """Median seconds, and the median ratio to native of the same round."""
    seconds: dict[str, list[float]] = {variant: [] for variant in runs}
    for run in runs.values():  # warm up
        run()
    for _ in range(rounds):
        for variant, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[variant].append(time.perf_counter() - start)
    return {
        variant: (
            statistics.median(values),
            statistics.median(v / n for v, n in zip(values, seconds[NATIVE], strict=True)),
        )
        for variant, values in seconds.items()
    }


def prefill(
    length: int, window: int, dtype: torch.dtype, backward: bool, rounds: int
) -> dict[str, tuple[float, float]]:
    inputs = [x.requires_grad_(backward) for x in tensors(8, 8, length, length, dtype)]
    dense = ("dense",) if length <= DENSE_MOST and dtype == torch.float32 else ()
    runs = {variant: attend(variant, *inputs, window) for variant in (NATIVE, *VARIANTS, *dense)}
    if backward:
        runs = {name: functools.partial(trained, run, inputs) for name, run in runs.items()}
    return ratios(runs, rounds)


def decode(
    keys: int, kv_heads: int, window: int, dtype: torch.dtype, rounds: int
) -> dict[str, tuple[float, float]]:
    inputs = tensors(8, kv_heads, 1, keys, dtype)
    return ratios({v: attend(v, *inputs, window) for v in (NATIVE, *VARIANTS)}, rounds)


def resident(field: str) -> float:
    """MiB of this process, from Linux; ``ru_maxrss`` would be inherited from the parent."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise OSError(f"no {field} in /proc/self/status; measure memory on Linux")


def peak(variant: str, length: int, window: int) -> float:
    """MiB that a training step adds to the process, which must be a fresh one."""
    inputs = [x.requires_grad_() for x in tensors(8, 8, length, length, torch.float32)]
    small = [x.requires_grad_() for x in tensors(8, 8, 64, 64, torch.float32)]
    trained(attend(variant, *small, 16), small)
    before = resident("VmRSS")
    trained(attend(variant, *inputs, window), inputs)
    return resident("VmHWM") - before


def peak_of_fresh_process(variant: str, length: int, window: int) -> float:
    command = [sys.executable, "-m", "benchmarks.attention", "--window", str(window)]
    command += ["--peak", variant, "--lengths", str(length)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def show(console: Console, title: str, columns: dict[str, dict[str, tuple[float, float]]]) -> None:
    table = Table(title=title)
    table.add_column("")
    for column in columns:
        table.add_column(column)
    for variant in dict.fromkeys(name for cells in columns.values() for name in cells):
        cells = (cells.get(variant) for cells in columns.values())
        table.add_row(
            variant, *("" if c is None else f"{c[0] * 1e3:.1f} ms, {c[1]:.2f}x" for c in cells)
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="4096,8192,16384", help="tokens, by commas")
    parser.add_argument("--window", type=int, default=1024, help="tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--parts", default="forward,backward,decode,memory")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]
    if args.peak:
        print(peak(args.peak, lengths[0], args.window))
        return
    parts = args.parts.split(",")
    console = Console()
    where = f"torch {torch.__version__}, {torch.get_num_threads()} threads, window {args.window}"
    for name in args.dtypes.split(","):
        dtype = getattr(torch, name)
        for part in ("forward", "backward"):
            if part in parts:
                title = part if part == "forward" else "forward and backward"
                columns = {
                    f"{length} tokens": prefill(
                        length, args.window, dtype, part == "backward", args.rounds
                    )
                    for length in lengths
                }
                show(console, f"{title}, {name}, 8 heads of 64; {where}", columns)
        if "decode" in parts:
            columns = {
                f"{keys} keys, 8:{kv} heads": decode(keys, kv, args.window, dtype, 50)
                for keys in lengths
                for kv in (8, 2)
            }
            show(console, f"one decoding step, {name}; {where}", columns)
    if "memory" in parts:
        table = Table(title=f"peak MiB of a training step, float32; {where}")
        for column in ("", *(f"{length} tokens" for length in lengths)):
            table.add_column(column)
        for variant in (NATIVE, *VARIANTS):
            peaks = (peak_of_fresh_process(variant, length, args.window) for length in lengths)
            table.add_row(variant, *(f"{mib:.0f}" for mib in peaks))
        console.print(table)


if __name__ == "__main__":
    main()
