"""What the benchmarks of attention measure: seconds in turns, and the peak of a fresh process."""

from __future__ import annotations

import argparse
import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

COLUMNS = 64
"""Of every head."""
NATIVE = "native"

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Callable[[], torch.Tensor]]
"""Query, key and value to a call of what is measured."""


def tensors(
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    dtype: torch.dtype,
    columns: int = COLUMNS,
    device: str = "cpu",
) -> list[torch.Tensor]:
    """Query, key and value as a projection leaves them, tokens before heads in memory.

    A single query finds them as a cache does, heads before tokens.
    """
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    made = [
        torch.randn(1, *shape, columns, generator=generator, device=device)
        .to(dtype)
        .transpose(1, 2)
        for shape in shapes
    ]
    return made if queries > 1 else [x.contiguous() for x in made]


def trained(run: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> None:
    torch.autograd.grad(run().sum(), inputs)


def seconds_of(run: Callable[[], object], device: str = "cpu") -> float:
    """Of one call; on a GPU those of its stream, without what starting it takes if it is short."""
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def ratios(
    runs: dict[str, Callable[[], object]], rounds: int, device: str = "cpu"
) -> dict[str, tuple[float, float]]:
    """Median seconds, and the median ratio to native of the same round."""
    seconds: dict[str, list[float]] = {variant: [] for variant in runs}
    for run in runs.values():  # warm up
        run()
    for _ in range(rounds):
        for variant, run in runs.items():
            seconds[variant].append(seconds_of(run, device))
    return {
        variant: (
            statistics.median(values),
            statistics.median(v / n for v, n in zip(values, seconds[NATIVE], strict=True)),
        )
        for variant, values in seconds.items()
    }


def prefill(
    attends: dict[str, Attend],
    heads: int,
    length: int,
    dtype: torch.dtype,
    backward: bool,
    rounds: int,
) -> dict[str, tuple[float, float]]:
    """:func:`ratios` of forwards, or of training steps."""
    inputs = [x.requires_grad_(backward) for x in tensors(heads, heads, length, length, dtype)]
    runs = {name: attend(*inputs) for name, attend in attends.items()}
    if backward:
        runs = {name: functools.partial(trained, run, inputs) for name, run in runs.items()}
    return ratios(runs, rounds)


def resident(field: str) -> float:
    """MiB of this process, from Linux; ``ru_maxrss`` would be inherited from the parent."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise OSError(f"no {field} in /proc/self/status; measure memory on Linux")


def peak(attend: Attend, heads: int, length: int) -> float:
    """MiB that a training step adds to the process, which must be a fresh one."""
    inputs, small = (
        [x.requires_grad_() for x in tensors(heads, heads, tokens, tokens, torch.float32)]
        for tokens in (length, 64)
    )
    trained(attend(*small), small)
    before = resident("VmRSS")
    trained(attend(*inputs), inputs)
    return resident("VmHWM") - before


def peak_of_fresh_process(module: str, variant: str, length: int, *options: str) -> float:
    command = [sys.executable, "-m", module, "--peak", variant, "--lengths", str(length), *options]
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


def show_peaks(
    console: Console, title: str, lengths: Sequence[int], peaks: dict[str, list[float | None]]
) -> None:
    """A row for each variant, MiB at each length; None where it is not measured."""
    table = Table(title=title)
    for column in ("", *(f"{length} tokens" for length in lengths)):
        table.add_column(column)
    for variant, found in peaks.items():
        table.add_row(variant, *("" if mib is None else f"{mib:.0f}" for mib in found))
    console.print(table)


def parser(description: str, lengths: str, parts: str, rounds: int) -> argparse.ArgumentParser:
    """The options that all have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--lengths", default=lengths, help="tokens, by commas")
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument("--parts", default=parts)
    made.add_argument("--peak", help=argparse.SUPPRESS)
    return made
