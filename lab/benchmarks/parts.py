"""Where the time of attention in bands goes: rotating, near keys, far keys, merging.

    python -m lab.benchmarks.parts --lengths 8192,16384 --window 1024

Seconds of each part of a forward pass, by the seconds of rotary embedding and torch's own causal
attention in the same round; a number is the median over the rounds. What is no call of the kernel
and rotates nothing is reported as merging.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from lab.benchmarks import attention, measuring
from lab.benchmarks.measuring import NATIVE
from rope_ext.attention import flash

PARTS = ("rotating", "near", "far", "merging")


class Clock:
    """Seconds of the parts of what runs while it is entered."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.band = "near"

    def timed(self, run: Callable[..., Any], part: str | None = None) -> Callable[..., Any]:
        """``run``, whose seconds are those of ``part``; None: of the band that is computed."""

        def timed(*given: Any, **options: Any) -> Any:
            start = time.perf_counter()
            found = run(*given, **options)
            self.seconds[part or self.band] += time.perf_counter() - start
            return found

        return timed

    def bands(self, regions: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """``regions``, with what is in turn told: what has no last distance is far."""

        def told(*given: Any, **options: Any) -> Iterator[Any]:
            for region in regions(*given, **options):
                self.band = "far" if region.band.geometry.last is None else "near"
                yield region

        return told

    def measure(self, run: Callable[[], Any], native: bool) -> dict[str, float]:
        """Seconds of every part of one call."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        changed = [(flash, "kernel", None), (flash, "rotate_part", "rotating")]
        if native:
            changed = [(attention.F, "scaled_dot_product_attention", "near")]
            changed += [(attention, "rotary", "rotating")]
        with ExitStack() as stack:
            for place, name, part in changed:
                new = self.timed(getattr(place, name), part)
                stack.enter_context(patch.object(place, name, new))
            stack.enter_context(patch.object(flash, "regions", self.bands(flash.regions)))
            start = time.perf_counter()
            with torch.inference_mode():
                run()
            whole = time.perf_counter() - start
        return self.seconds | {"merging": whole - sum(self.seconds.values())}


def shares(
    length: int, window: int, rounds: int, dtype: torch.dtype = torch.float32
) -> dict[str, dict[str, float]]:
    """``{variant: {part: by the seconds of the native}}`` at ``length`` tokens; all take turns."""
    clock = Clock()
    inputs = measuring.tensors(attention.HEADS, attention.HEADS, length, length, dtype)
    names = (NATIVE, *attention.VARIANTS)
    runs = {name: attention.attend(name, *inputs, window) for name in names}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for measured in range(rounds + 1):
        whole = None
        for name, run in runs.items():
            parts = clock.measure(run, name == NATIVE)
            whole = whole or sum(parts.values())
            if measured:  # the first one warms up
                found[name].append({part: value / whole for part, value in parts.items()})
    return {
        name: {part: statistics.median(r[part] for r in each) for part in PARTS}
        for name, each in found.items()
    }


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given.add_argument("--lengths", default="8192,16384", help="tokens, by commas")
    given.add_argument("--rounds", type=int, default=5)
    given.add_argument("--window", type=int, default=1024, help="tokens")
    given.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    args = given.parse_args()
    for length in map(int, args.lengths.split(",")):
        shape = f"{length} tokens, {attention.HEADS} heads of 64, window {args.window}"
        where = f"{args.dtype}, torch {torch.__version__}, {torch.get_num_threads()} threads"
        table = Table(title=f"{shape}, {where}")
        for column in ("", *PARTS, "total"):
            table.add_column(column)
        found = shares(length, args.window, args.rounds, getattr(torch, args.dtype))
        for name, parts in found.items():
            cells = [*parts.values(), sum(parts.values())]
            table.add_row(name, *(f"{value:.3f}" for value in cells))
        Console().print(table)


if __name__ == "__main__":
    main()
