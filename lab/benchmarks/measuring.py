"""Helpers for benchmarks: alternating timings, peak memory, a description of the machine."""

from __future__ import annotations

import copy
import functools
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

COLUMNS = 64
"""Columns of every head."""
NATIVE = "native"

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Callable[[], torch.Tensor]]
"""Turns query, key and value into a call to measure."""


def tensors(
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    dtype: torch.dtype,
    columns: int = COLUMNS,
    device: str = "cpu",
) -> list[torch.Tensor]:
    """Query, key and value in the memory layout of a projection, tokens before heads.

    For a single query, keys and values have the layout of a cache, heads before tokens.
    """
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    drawn = [
        torch.randn(1, *shape, columns, generator=generator, device=device)
        .to(dtype)
        .transpose(1, 2)
        for shape in shapes
    ]
    return drawn if queries > 1 else [x.contiguous() for x in drawn]


def trained(run: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> None:
    torch.autograd.grad(run().sum(), inputs)


def of_same_weights(model: nn.Module) -> nn.Module:
    """Copy a model for patching, with its own modules and buffers but shared parameters."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def seconds_of(run: Callable[[], object], device: str = "cpu") -> float:
    """Seconds of one call; on a GPU, time on its stream, without launch overhead if it is short."""
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


class Measured(NamedTuple):
    """Result of one variant.

    Args:
        seconds: median.
        ratio: median of the ratios to native in the same round.
        low: lower quartile of these ratios.
        high: upper quartile.
    """

    seconds: float
    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ({self.low:.3f} to {self.high:.3f})"


def compared(seconds: Mapping[str, Sequence[float]]) -> dict[str, Measured]:
    """Compare every variant with the native one, round by round."""
    found = {}
    for variant, values in seconds.items():
        of_round = [v / n for v, n in zip(values, seconds[NATIVE], strict=True)]
        quarters = statistics.quantiles(of_round, n=4, method="inclusive") if of_round[1:] else []
        low, ratio, high = quarters or of_round * 3
        found[variant] = Measured(
            seconds=statistics.median(values), ratio=ratio, low=low, high=high
        )
    return found


def ratios(
    runs: Mapping[str, Callable[[], object]], rounds: int, device: str = "cpu"
) -> dict[str, Measured]:
    """Time every run in every round, after a warm-up, and compare with the native one.

    Runs alternate, so that other load on the machine affects all of them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    # Compiles kernels and fills the allocator.
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(seconds_of(run, device))
    return compared(seconds)


def machine() -> dict[str, Any]:
    """Describe the machine; ``bfloat16``: whether the processor has units for it."""
    known = torch.cpu.get_capabilities()
    return {
        "processor": str(known.get("cpu_name") or platform.processor() or platform.machine()),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "bfloat16": any(name.endswith("bf16") and has for name, has in known.items()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def prefill(
    attends: dict[str, Attend],
    heads: int,
    length: int,
    dtype: torch.dtype,
    backward: bool,
    rounds: int,
) -> dict[str, Measured]:
    """:func:`ratios` of forwards, or of training steps."""
    inputs = [
        x.requires_grad_(backward)
        for x in tensors(heads, kv_heads=heads, queries=length, keys=length, dtype=dtype)
    ]
    runs = {name: attend(*inputs) for name, attend in attends.items()}
    if backward:
        runs = {name: functools.partial(trained, run, inputs) for name, run in runs.items()}
    return ratios(runs, rounds)


def resident(field: str) -> float:
    """A memory field of this process in MiB, from Linux (``ru_maxrss`` would be inherited)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise OSError(f"no {field} in /proc/self/status; measure memory on Linux")


def peak(attend: Attend, heads: int, length: int) -> float:
    """MiB that a training step adds to this process, which must be fresh."""
    inputs, small = (
        [
            x.requires_grad_()
            for x in tensors(
                heads, kv_heads=heads, queries=tokens, keys=tokens, dtype=torch.float32
            )
        ]
        for tokens in (length, 64)
    )
    # What is loaded once, such as the libraries of kernels, is not of this length.
    trained(attend(*small), small)
    before = resident("VmRSS")
    trained(attend(*inputs), inputs)
    return resident("VmHWM") - before


def markdown(columns: Mapping[str, Mapping[str, Any]], text: Callable[[Any], str] = str) -> str:
    """A table in Markdown, with a row for each variant in any of the columns."""
    lines = [("", *columns), ("---",) * (1 + len(columns))]
    for name in dict.fromkeys(name for cells in columns.values() for name in cells):
        found = (cells.get(name) for cells in columns.values())
        lines.append((f"`{name}`", *("" if cell is None else text(cell) for cell in found)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
