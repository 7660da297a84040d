"""Lists the shared memory of every Triton kernel of rope_ext for several GPUs, without a GPU.

    python -m lab.benchmarks.kernels --output kernels.jsonl

Needs the package ``triton`` and a C++ compiler. Attention runs on fake tensors of a mocked GPU, so
graphs, options and sizes are those of a real one. Inductor lowers them, and Triton compiles each
kernel for the capability until it has allocated shared memory (with ``--whole`` to machine code,
which takes several times as long); nothing is launched. Prints a line of JSON for each case, then a
Markdown table. The same ``--output`` continues an interrupted run. The exit status is 1 if a kernel
is not compiled or needs more than the GPU has.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lab.benchmarks.measuring import markdown
from lab.benchmarks.mocked_gpu import mocked
from rope_ext.attention import cards as estimates
from rope_ext.attention import flex
from rope_ext.attention.call import Call, Pairs, RotatedBand
from rope_ext.attention.cards import Card, Heads
from rope_ext.methods.geometry import ChunkGap, Distance, Sinks

KIB = 1024
CARDS = {
    card.version: card
    for card in (
        Card((7, 5), 64 * KIB, True),
        Card((8, 0), 163 * KIB, True),
        Card((8, 6), 99 * KIB, True),
        Card((8, 9), 99 * KIB, True),
        Card((9, 0), 227 * KIB, True),
    )
}
HEADS = {"64": (64, 64), "96": (96, 96), "128": (128, 128), "256": (256, 256), "MLA": (192, 128)}
"""Columns of queries and keys, and of values."""
PLAIN = "plain"
KINDS = ("bands", "chunks", "first tokens", "soft cap")
TRAIN = "prefill and backward"
PREFILL = "prefill"
KEYS = 1000
BAND = 256


@dataclass(frozen=True)
class Case:
    """A call of attention on a GPU.

    Args:
        card: capability of the GPU.
        kind: ``PLAIN``, ``"bias"`` or one of ``KINDS``.
        heads: a key of ``HEADS``.
        dtype: dtype of queries, keys and values.
        phase: ``TRAIN`` or ``PREFILL``.
    """

    card: str
    kind: str
    heads: str
    dtype: str
    phase: str


def cases(cards: Iterable[str], small: bool = False) -> list[Case]:
    """Plain and biased heads of all sizes for all GPUs, and the other kinds for some GPUs."""
    if small:
        of_each = [
            ("bands", "128", "float16", TRAIN),
            ("bias", "128", "float16", TRAIN),
            (PLAIN, "96", "float32", TRAIN),
        ]
        return [Case(card, *rest) for card in cards for rest in of_each]
    found = []
    for card in cards:
        for dtype in ("float16", "float32"):
            for heads in HEADS:
                found += [
                    Case(card=card, kind=kind, heads=heads, dtype=dtype, phase=TRAIN)
                    for kind in (PLAIN, "bias")
                ]
        if card == "8.6":
            found += [
                Case(card=card, kind=kind, heads="128", dtype="float16", phase=TRAIN)
                for kind in KINDS
            ]
        if card == "7.5":  # those that cannot be trained
            found += [
                Case(card=card, kind=kind, heads="256", dtype="float32", phase=PREFILL)
                for kind in (PLAIN, "bias")
            ]
        if CARDS[card].capability >= (8, 0):
            found += [
                Case(card=card, kind="bias", heads=x, dtype="bfloat16", phase=TRAIN)
                for x in ("128", "256")
            ]
    return found


def _call(kind: str, query: torch.Tensor, grads: bool) -> Call:
    heads, queries, columns = query.shape[1:]
    pairs = Pairs(slice(0, columns // 2), slice(columns // 2, columns))
    if kind == "bands":  # ReRoPE, Leaky ReRoPE, Self-Extend, STRING

        def rotation(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
            cos, sin = query.new_empty(2, tokens, columns // 2, dtype=torch.float32)
            return cos, sin

        near = RotatedBand(Distance(0, BAND), rotation(queries), rotation(KEYS))
        return Call([near, RotatedBand(Distance(BAND, None), rotation(1), None)], pairs, 0.1)
    geometry = {"chunks": ChunkGap(BAND, 0, 0), "first tokens": Sinks(4, BAND)}.get(kind)
    band = RotatedBand(geometry or Distance(0, None), None, None)
    softcap = 30.0 if kind == "soft cap" else None
    bias = None
    if kind == "bias":  # ALiBi, T5, KERPLE, Sandwich
        bias = query.new_empty(heads, KEYS, dtype=torch.float32).requires_grad_(grads)
    return Call([band], pairs, 0.1, softcap=softcap, bias=bias)


def run(case: Case, compiled: list[dict[str, Any]]) -> dict[str, Any]:
    """The kernels of a case."""
    columns, value_columns = HEADS[case.heads]
    train = case.phase == TRAIN
    dtype = getattr(torch, case.dtype)

    def empty(heads: int, columns: int) -> torch.Tensor:
        x = torch.empty(1, heads, KEYS, columns, dtype=dtype, device="cuda")
        return x.requires_grad_(train)

    query = empty(8, columns)
    key = empty(2, columns)
    value = empty(2, value_columns)
    card = CARDS[case.card]
    call = _call(case.kind, query, train)
    with torch.set_grad_enabled(train):
        refused = flex.refusal(query, value, call, card)
    if refused is not None:
        return {"refused": refused}
    compiled.clear()
    try:
        with torch.set_grad_enabled(train):
            flex.attend(query, key, value, call)
    except Exception as error:
        return {"ok": False, "error": f"{type(error).__name__}: {error}".split("\n")[0]}
    return {"ok": all(x["shared"] <= card.shared for x in compiled), "kernels": list(compiled)}


def table(lines: Iterable[dict[str, Any]]) -> str:
    """Largest number of bytes by kind, with the estimate for its tiles in brackets, in Markdown."""
    columns: dict[str, dict[str, tuple[int, int] | str]] = {}
    for line in lines:
        cells = columns.setdefault(line["card"], {})
        heads = f"{line['dtype']} {line['heads']}"
        if "kernels" not in line:
            phase = "backward" if line["phase"] == TRAIN else line["phase"]
            cells[f"{heads} {phase}"] = "refused" if "refused" in line else "failed"
            continue
        for kernel in filter(of_attention, line["kernels"]):
            name = f"{heads} {'backward' if 'BLOCK_N1' in kernel else PREFILL}"
            before = cells.get(name, (0, 0))
            if not isinstance(before, str):
                cells[name] = max(before, (kernel["shared"], estimate(line, kernel) or 0))

    def text(cell: tuple[int, int] | str) -> str:
        if isinstance(cell, str):
            return cell
        return f"{cell[0]:,}" + (f" ({cell[1]:,})" if cell[1] else "")

    return markdown(dict(sorted(columns.items())), text)


def of_attention(kernel: dict[str, Any]) -> bool:
    """Whether a kernel multiplies queries and keys; others need hardly any shared memory."""
    return "BLOCK_N" in kernel or "BLOCK_N1" in kernel


def estimate(line: dict[str, Any], kernel: dict[str, Any]) -> int | None:
    """Upper bound that rope_ext assumes for these tiles; None for tiles that it never uses."""
    size = getattr(torch, line["dtype"]).itemsize
    card = CARDS[line["card"]]
    heads = Heads(*HEADS[line["heads"]], size, line["kind"] == "bias")
    if "BLOCK_N" in kernel:
        tile = kernel["BLOCK_M"], kernel["BLOCK_N"], kernel["stages"]
        return estimates.forward_bytes(*tile, heads, card)
    one = kernel["stages"] == 1
    return estimates.backward_bytes(kernel["BLOCK_N1"], heads, card) if one else None


def measure(card: str, todo: list[Case], whole: bool, output: Path) -> None:
    """Append the lines of a GPU to a file, in a separate process."""
    compiled: list[dict[str, Any]] = []
    with mocked(CARDS[card], compiled, whole), output.open("a") as file:
        for case in todo:
            line = json.dumps({**asdict(case), **run(case, compiled)})
            print(line, flush=True)
            print(line, file=file, flush=True)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cards", default="7.5,8.0,8.6,8.9,9.0", help="GPU capabilities")
    parser.add_argument("--small", action="store_true", help="a few cases for each GPU")
    parser.add_argument("--whole", action="store_true", help="compile to machine code")
    parser.add_argument("--output", type=Path, help="JSON lines file")
    args = parser.parse_args(given)
    cards = args.cards.split(",")
    if unknown := set(cards) - {*CARDS}:
        parser.error(f"no card {', '.join(sorted(unknown))}; choose from {', '.join(CARDS)}")
    if importlib.util.find_spec("triton") is None:
        parser.error("this needs the package triton")
    with tempfile.TemporaryDirectory() as folder:
        # Empty caches, or a kernel of an earlier version would hide one that does not compile.
        os.environ |= {"TRITON_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder}
        output = args.output or Path(folder) / "lines"
        lines = read(output)
        for card in cards:
            known = [{name: line[name] for name in Case.__annotations__} for line in lines]
            todo = [x for x in cases([card], args.small) if asdict(x) not in known]
            # A process for each GPU, since the mocked one cannot be removed again.
            process = multiprocessing.get_context("spawn").Process(
                target=measure, args=(card, todo, args.whole, output)
            )
            process.start()
            process.join()
            if process.exitcode:
                return 1
        lines = read(output)
    print(table(lines))
    return int(not all(line.get("ok", "refused" in line) for line in lines))


def read(output: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in output.read_text().splitlines()] if output.exists() else []


if __name__ == "__main__":
    sys.exit(main())
