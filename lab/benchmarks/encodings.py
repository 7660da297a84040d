"""Measures the time of encodings, relative to torch's causal attention.

    python -m lab.benchmarks.encodings --lengths 2048,4096,8192,16384

``matrix`` is the usual way to add a bias: a ``[1, heads, tokens, tokens]`` tensor as the mask of
torch's attention (about 8 GiB at 16384 tokens). Variants alternate, as in
:mod:`benchmarks.attention`; peak memory is measured in a fresh process for each variant and length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console

from lab.benchmarks import measuring
from lab.benchmarks.measuring import NATIVE, Attend, prefill, show
from rope_ext.attention import dispatch as attention
from rope_ext.attention.call import Call, Pairs, RotatedBand
from rope_ext.encodings import Encoding, Heads, NoPE
from rope_ext.methods import all_encodings, build_method
from rope_ext.methods.geometry import Distance
from rope_ext.position.learned import DistanceBias

MATRIX = "matrix (alibi)"
BLOCKS = ("dape", "cope")
"""Encodings with logits computed in blocks, which takes several times as long."""
BLOCKS_MOST = 8192
"""Longest text for which they are measured, tokens."""
_NO_PAIRS = Pairs(slice(0, 0), slice(0, 0))


def bias_of(name: str, heads: int) -> DistanceBias:
    torch.manual_seed(0)
    return DistanceBias(build_method(name), Heads(heads, 64, 64), torch.nn.Module())


def attend(
    variant: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Return a function that runs the variant once, including its bias."""
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
            matrix = make()["bias"][:, apart.clamp(min=0)].masked_fill_(apart < 0, -torch.inf)
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


def main() -> None:
    given = measuring.parser(
        __doc__.splitlines()[0], "2048,4096,8192,16384", "forward,backward,memory", rounds=5
    )
    given.add_argument("--heads", type=int, default=4)
    args = given.parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]
    if args.peak:
        print(measuring.peak(functools.partial(attend, args.peak), args.heads, lengths[0]))
        return
    console, parts = Console(), args.parts.split(",")
    where = f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    for part in ("forward", "backward"):
        if part in parts:
            title = part if part == "forward" else "forward and backward"
            columns = {
                f"{length} tokens": prefill(
                    variants(length),
                    args.heads,
                    length,
                    torch.float32,
                    part == "backward",
                    args.rounds,
                )
                for length in lengths
            }
            show(console, f"{title}, float32, {args.heads} heads of 64; {where}", columns)
    if "memory" in parts:
        heads = ("--heads", str(args.heads))
        peaks = {
            variant: [
                measuring.peak_of_fresh_process("lab.benchmarks.encodings", variant, length, *heads)
                for length in lengths
            ]
            for variant in variants(0)
        }
        title = f"peak MiB of a training step, float32; {where}"
        measuring.show_peaks(console, title, lengths, peaks)


if __name__ == "__main__":
    main()
