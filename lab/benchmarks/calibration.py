"""Measures ``calibrate`` and ``search`` on unseen text.

    python -m lab.benchmarks.calibration --output runs/calibration

Calibrates methods on both bundled checkpoints, and compares each with its published default on
other documents: perplexity within the trained length and at the target length, and passkeys with
other keys. The cell ``search`` searches a LongRoPE table that has to beat the calibrated ``yarn``,
and compares the two. ``tiny-512`` is calibrated on the training part of Python's library and
measured on the held-out part; ``tiny-bytes-512`` on every second held-out document, and measured on
the others.

Every cell is a file in the output; interrupted cells resume.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_ext
from rope_eval.data.prompts import beginning
from rope_eval.data.text import python_library, read_texts
from rope_eval.reports.calibration import Change, mean
from rope_eval.reports.intervals import mean_interval, paired_rates
from rope_eval.tune.calibrate import cut
from rope_eval.tune.fitness import losses_at_end, losses_of_answers, prompts_of, windows_of
from rope_ext.command.arguments import parse_length, split
from rope_ext.config.record import method_from_json, method_to_json, option_texts
from rope_ext.methods import Method

BOX = Path(__file__).parents[2] / "checkpoints"
CHECKPOINTS = ("tiny-512", "tiny-bytes-512")
METHODS = ("yarn", "llama3", "ntk", "self_extend", "rerope")
SEARCH = "search"
COST = 0.02
SEED = 1  # calibrations and searches use 0

Measured = dict[str, list[Any]]


def texts_of(checkpoint: str) -> tuple[list[str], list[str]]:
    """Documents to calibrate on, and others to measure on."""
    if checkpoint == "tiny-512":
        return python_library("train"), python_library("held_out")
    documents = read_texts([BOX / checkpoint / "held_out.jsonl"])
    return documents[::2], documents[1::2]


class Unseen:
    """Text and prompts to measure methods on.

    Args:
        model: unpatched model.
        tokenizer: its tokenizer.
        texts: documents that were not used for calibration.
        length: length of the windows and prompts, tokens; a quarter of it is scored.
        windows: number of windows.
        prompts: number of prompts.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        texts: list[str],
        length: int,
        windows: int,
        prompts: int,
    ) -> None:
        self.model = model
        self.length = length
        rows = windows_of(
            tokenizer, texts, length, count=windows, seed=SEED, cure="--windows asks for more"
        )
        trained = model.config.max_position_embeddings
        first = beginning(tokenizer)
        self.rows = rows
        self.inside = [tuple(cut(window, trained, first)) for window in rows.windows]
        self.prompts = prompts_of(
            tokenizer, lengths=[length], count=prompts, texts=rows.windows, seed=SEED
        )

    def under(self, method: Method) -> Measured:
        """Loss of every document, and whether each prompt is found."""
        with rope_ext.patched(self.model, method), torch.no_grad():
            far = losses_at_end(
                self.model, self.rows.windows, scored=self.length // 4, advance=lambda rows: None
            )
            inside = []
            for pieces in self.inside:
                losses = losses_at_end(
                    self.model, windows=pieces, scored=len(pieces[0]) - 1, advance=lambda rows: None
                )
                inside.append(mean(losses))
            answers = losses_of_answers(self.model, self.prompts, lambda rows: None)
        found = [hit for _, hit in answers]
        return {"inside": self._means(inside), "far": self._means(far), "found": found}

    def _means(self, losses: list[float]) -> list[float]:
        return [mean(group) for group in self.rows.by_document(losses)]


def measured(unseen: Unseen, before: Method, after: Method) -> dict[str, Any]:
    """Compare two methods on the same rows: paired 95 % intervals, in nats and in shares found."""
    one = unseen.under(before)
    other = one if after == before else unseen.under(after)
    cell: dict[str, Any] = {"before": method_to_json(before), "after": method_to_json(after)}
    for name in ("inside", "far"):
        change = [b - a for a, b in zip(one[name], other[name], strict=True)]
        cell[name] = [
            mean(one[name]),
            mean(other[name]),
            *(mean_interval(change) or (-math.inf, math.inf)),
        ]
    cell["documents"] = len(one["far"])
    counts = [sum(one["found"]), sum(other["found"]), len(one["found"])]
    cell["found"] = [*counts, *(paired_rates(other["found"], one["found"]) or (-1, 1))]
    return cell


def cell_of(checkpoint: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Calibrate or search, and measure."""
    model = AutoModelForCausalLM.from_pretrained(BOX / checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(BOX / checkpoint)
    seen, other = texts_of(checkpoint)
    length = parse_length(args.length)
    began = time.monotonic()
    method = "yarn" if name == SEARCH else name
    found = rope_ext.calibrate(
        model,
        tokenizer,
        length,
        seen,
        methods=method,
        options=split(args.options) if args.options else None,
        output=args.output / f"{checkpoint}-{method}",
        resume=True,
    )
    if name == SEARCH:
        before: Method = found.method
        began = time.monotonic()
        after: Method = rope_ext.search(
            model,
            tokenizer,
            length,
            seen,
            output=args.output / f"{checkpoint}-{SEARCH}.found.json",
            start=before,
            population=args.tables // 2,
            iterations=1,
        )
    else:
        before = found.best.published
        after = found.method
    minutes = (time.monotonic() - began) / 60
    unseen = Unseen(
        model=model,
        tokenizer=tokenizer,
        texts=other,
        length=length,
        windows=args.windows,
        prompts=args.prompts,
    )
    cell = measured(unseen, before, after)
    told = {"sentence": found.sentence} if name != SEARCH else {}
    return {**cell, **told, "length": length, "minutes": minutes}


def kept(name: str, cell: Mapping[str, Any]) -> bool:
    """Whether a cell passes.

    A calibration passes if perplexity within the trained length rises by at most 2 % (upper end of
    the interval), and does not clearly rise at the target length. A search passes if neither loss
    at the target length nor answers are worse than those of the calibrated yarn.
    """
    if name == SEARCH:
        return cell["far"][1] <= cell["far"][0] and cell["found"][1] >= cell["found"][0]
    return cell["inside"][3] <= math.log1p(COST) and cell["far"][2] <= 0


def show(cells: Mapping[tuple[str, str], Mapping[str, Any]]) -> None:
    table = Table(title="change of perplexity on unseen text, with 95 % intervals")
    for column in ("checkpoint", "method", "found", "inside", "far", "passkeys", "kept", "min"):
        table.add_column(column)
    for (checkpoint, name), cell in cells.items():
        method = method_from_json(cell["after"])
        changed = cell["after"] != cell["before"]
        said = ", ".join(option_texts(method)) if changed else "published default"
        one, other, count = cell["found"][:3]
        table.add_row(
            checkpoint,
            name,
            "a table" if name == SEARCH else said,
            Change(*cell["inside"]).percent if changed else "0",
            Change(*cell["far"]).percent if changed else "0",
            f"{one} -> {other} of {count}",
            "yes" if kept(name, cell) else "NO",
            f"{cell['minutes']:.0f}",
        )
    Console(width=140).print(table)


def run(
    args: argparse.Namespace,
    cell_of: Callable[[str, str], Mapping[str, Any]],
    show: Callable[[Mapping[tuple[str, str], Mapping[str, Any]]], None],
    suffix: str = "",
) -> None:
    """Compute every cell without a file in the output, and print all cells after each."""
    args.output.mkdir(parents=True, exist_ok=True)
    cells = {}
    for checkpoint in split(args.checkpoints):
        for name in split(args.methods):
            path = args.output / f"{checkpoint}-{name}{suffix}.json"
            if not path.exists():
                path.write_text(json.dumps(cell_of(checkpoint, name), indent=1) + "\n")
            cells[checkpoint, name] = json.loads(path.read_text())
            show(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--checkpoints", default=",".join(CHECKPOINTS))
    parser.add_argument("--methods", default=",".join((*METHODS, SEARCH)))
    parser.add_argument("--length", default="2k")
    parser.add_argument("--options", default="", help="method options to tune; default: all")
    parser.add_argument("--windows", type=int, default=24, help="unseen text windows")
    parser.add_argument("--prompts", type=int, default=32, help="unseen prompts")
    parser.add_argument("--tables", type=int, default=48, help="tables per search")
    args = parser.parse_args()
    run(args, lambda checkpoint, name: cell_of(checkpoint, name, args), show)


if __name__ == "__main__":
    main()
