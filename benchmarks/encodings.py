"""What encodings beside the rotation cost: ratios to torch's own causal attention.

    python -m benchmarks.encodings --lengths 2048,4096,8192,16384

``matrix`` is how such a bias is usually added: a tensor of ``[1, heads, tokens, tokens]`` as the
mask of torch's attention. Variants take turns, as in :mod:`benchmarks.attention`; the peak of
memory is that of a process of its own for each variant and length.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from benchmarks.attention import NATIVE, ratios, resident, show, tensors, trained
from rope_ext import attention
from rope_ext.attention import Call, Pairs, TurnedBand
from rope_ext.encodings import Heads
from rope_ext.methods import Rope, all_encodings, build_method
from rope_ext.methods.geometry import Distance
from rope_ext.position.bias import DistanceBias

MATRIX = "matrix (alibi)"
MATRIX_MOST = 8192
"""Tokens up to which the matrix fits into memory beside its gradient."""
_NO_PAIRS = Pairs(slice(0, 0), slice(0, 0))
_ROPE = Rope.geometric(1e4, 64, 512)


def bias_of(name: str, heads: int) -> DistanceBias:
    torch.manual_seed(0)
    return DistanceBias(build_method(name), Heads(heads, 64, 64), _ROPE, torch.empty(0))


def attend(
    variant: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """A call of the variant, its bias made anew in each."""
    scale, (heads, tokens) = query.shape[-1] ** -0.5, query.shape[1:3]
    plain = functools.partial(F.scaled_dot_product_attention, query, key, value, scale=scale)
    if variant == NATIVE:
        return functools.partial(plain, is_causal=True)
    name = "alibi" if variant == MATRIX else variant
    bias = bias_of(name, heads)
    make = functools.partial(bias, tokens, query.device, torch.float32)
    if variant == MATRIX:

        def whole() -> torch.Tensor:
            at = torch.arange(tokens)
            apart = at[:, None] - at
            matrix = make().bias[:, apart.clamp(min=0)].masked_fill_(apart < 0, -torch.inf)
            return plain(attn_mask=matrix[None])

        return whole
    band = [TurnedBand(Distance(0, None), None, None)]

    def run() -> torch.Tensor:
        call = Call(band, _NO_PAIRS, scale, **make()._asdict())
        return attention.attend(query, key, value, call)

    return run


def variants(length: int) -> list[str]:
    names = [NATIVE, *(cls.name for cls in all_encodings())]
    return [*names, MATRIX] if length <= MATRIX_MOST else names


def measured(length: int, heads: int, backward: bool, rounds: int) -> dict:
    inputs = [
        x.requires_grad_(backward) for x in tensors(heads, heads, length, length, torch.float32)
    ]
    runs = {variant: attend(variant, *inputs) for variant in variants(length)}
    if backward:
        runs = {name: functools.partial(trained, run, inputs) for name, run in runs.items()}
    return ratios(runs, rounds)


def peak(variant: str, length: int, heads: int) -> float:
    """MiB that a training step adds to the process, which must be a fresh one."""
    inputs = [x.requires_grad_() for x in tensors(heads, heads, length, length, torch.float32)]
    small = [x.requires_grad_() for x in tensors(heads, heads, 64, 64, torch.float32)]
    trained(attend(variant, *small), small)
    before = resident("VmRSS")
    trained(attend(variant, *inputs), inputs)
    return resident("VmHWM") - before


def peak_of_fresh_process(variant: str, length: int, heads: int) -> float:
    command = [sys.executable, "-m", "benchmarks.encodings", "--heads", str(heads)]
    command += ["--peak", variant, "--lengths", str(length)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="2048,4096,8192,16384", help="tokens, by commas")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", default="forward,backward,memory")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]
    if args.peak:
        print(peak(args.peak, lengths[0], args.heads))
        return
    console, parts = Console(), args.parts.split(",")
    where = f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    for part in ("forward", "backward"):
        if part in parts:
            title = part if part == "forward" else "forward and backward"
            columns = {
                f"{length} tokens": measured(length, args.heads, part == "backward", args.rounds)
                for length in lengths
            }
            show(console, f"{title}, float32, {args.heads} heads of 64; {where}", columns)
    if "memory" in parts:
        table = Table(title=f"peak MiB of a training step, float32; {where}")
        for column in ("", *(f"{length} tokens" for length in lengths)):
            table.add_column(column)
        for variant in variants(0):
            peaks = (
                f"{peak_of_fresh_process(variant, length, args.heads):.0f}"
                if variant in variants(length)
                else ""
                for length in lengths
            )
            table.add_row(variant, *peaks)
        console.print(table)


if __name__ == "__main__":
    main()
