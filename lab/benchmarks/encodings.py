"""Measures the time of encodings, relative to torch's causal attention.

    python -m lab.benchmarks.encodings --lengths 2048,4096,8192,16384

``matrix`` is the usual way to add a bias: a ``[1, heads, tokens, tokens]`` tensor as the mask of
torch's attention (about 8 GiB at 16384 tokens). Variants alternate, as in
:mod:`benchmarks.speed`; peak memory is measured in a fresh process for each variant and length.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from lab.benchmarks import measuring
from lab.benchmarks.measuring import NATIVE, Attend, prefill
from rope_ext.attention import dispatch as attention
from rope_ext.attention.call import Call, Pairs, RotatedBand
from rope_ext.command.arguments import parse_lengths
from rope_ext.encodings import Encoding, Heads, NoPE
from rope_ext.methods import all_encodings, build_method
from rope_ext.methods.geometry import Distance
from rope_ext.position.learned import DistanceBias

HEADS = 4
TITLES = {
    "forward": "Forward: time relative to torch's attention (lower to upper quartile)",
    "backward": "Forward and backward, likewise",
    "memory": "Peak MiB of a training step",
}
MATRIX = "matrix (alibi)"
BLOCKS = ("dape", "cope")
"""Encodings with logits computed in blocks, which takes several times as long."""
BLOCKS_MOST = 8192
"""Longest text for which they are measured, tokens."""
_NO_PAIRS = Pairs(slice(0, 0), slice(0, 0))


def attend(
    variant: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Return a function that runs the variant once, including its bias."""
    scale = query.shape[-1] ** -0.5
    heads, tokens = query.shape[1:3]
    plain = functools.partial(F.scaled_dot_product_attention, query, key, value, scale=scale)
    if variant == NATIVE:
        return functools.partial(plain, is_causal=True)
    torch.manual_seed(0)
    encoding = build_method("alibi" if variant == MATRIX else variant)
    bias = DistanceBias(encoding, Heads(heads, 64, 64), torch.nn.Module())
    make = functools.partial(bias, tokens, query.device, torch.float32)
    if variant == MATRIX:

        def whole() -> torch.Tensor:
            at = torch.arange(tokens)
            distance = at[:, None] - at
            matrix = make()["bias"][:, distance.clamp(min=0)].masked_fill_(distance < 0, -torch.inf)
            return plain(attn_mask=matrix[None])

        return whole
    band = [RotatedBand(Distance(0, None), None, None)]

    def run() -> torch.Tensor:
        call = Call(band, _NO_PAIRS, scale, **make())
        return attention.attend(query, key, value, call)

    return run


def variants(length: int) -> dict[str, Attend]:
    adding = (
        cls.name
        for cls in all_encodings()
        if cls.bias is not Encoding.bias or cls.scored()
        if cls.name not in BLOCKS or length <= BLOCKS_MOST
    )
    names = [NATIVE, NoPE.name, *adding, MATRIX]
    return {name: functools.partial(attend, name) for name in names}


def measured(part: str, length: int, rounds: int) -> Mapping[str, Any]:
    """A column of a table, by variant."""
    if part != "memory":
        return prefill(
            variants(length),
            heads=HEADS,
            length=length,
            dtype=torch.float32,
            backward=part == "backward",
            rounds=rounds,
        )
    command = [sys.executable, "-m", "lab.benchmarks.encodings", "--lengths", str(length), "--peak"]
    root = Path(__file__).parents[2]  # where Python finds lab
    return {
        name: float(subprocess.check_output([*command, name], cwd=root))
        for name in variants(length)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--lengths", default="2048,4096,8192,16384", help="comma-separated lengths in tokens")
    add("--parts", nargs="+", choices=TITLES, default=list(TITLES))
    add("--rounds", type=int, default=5)
    add("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    lengths = parse_lengths(args.lengths)
    if args.peak:
        print(measuring.peak(functools.partial(attend, args.peak), HEADS, lengths[0]))
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {HEADS} heads, float32")
    for part in args.parts:
        columns = {f"{n} tokens": measured(part, n, args.rounds) for n in lengths}
        text = "{:.0f}".format if part == "memory" else str
        print(f"\n{TITLES[part]}\n\n{measuring.markdown(columns, text)}")


if __name__ == "__main__":
    main()
