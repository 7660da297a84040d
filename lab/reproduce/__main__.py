"""Measure a published table and compare with its numbers.

    python -m lab.reproduce --list
    python -m lab.reproduce yarn-llama2               # needs the weights, the data and a GPU
    python -m lab.reproduce yarn-llama2 --dry-run     # the same steps on checkpoints/tiny-512

Each file in lab/reproduce/tables contains the model, the data, every published number with its
source, and the tolerance for a measured number. None has been measured yet, for lack of a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rope_ext.cli import app
from rope_ext.command.terminal import clean_errors
from rope_ext.errors import OptionError, nearest
from rope_ext.quoting import shell_join

TABLES = Path(__file__).parent / "tables"
STAND_IN = "checkpoints/tiny-512"
STAND_IN_LENGTH = 512
STAND_IN_TEXT = "checkpoints/tiny-bytes-512/held_out.jsonl"
_FLOPS = 2e14  # rule of thumb for a GPU with 400 to 1000 TFLOP/s in bfloat16


@dataclass(frozen=True)
class Cell:
    """One published number.

    Args:
        length: context in tokens.
        published: the number, in the unit of the table.
        method, factor, options: as for ``rope-ext eval``; ``unpatched`` is the model alone.
        model, text: replace those of the table.
    """

    length: int
    published: float
    method: str = "unpatched"
    factor: float = 1.0
    options: tuple[str, ...] = ()
    model: str = ""
    text: str = ""


@dataclass(frozen=True)
class Table:
    """A published table, or the part that can be measured with ``rope-ext eval``.

    Args:
        title: description of the measurement.
        source: paper and table.
        model: Hub ID.
        trained: trained length, tokens.
        parameters: parameters of the model, to estimate GPU hours.
        task: task of ``rope-ext eval``: perplexity, passkey or ruler.
        metric: unit of the numbers: perplexity, loss (nats per token) or rate (per cent).
        tolerance: largest difference, relative for perplexity and loss, in points for a rate.
        cells: the numbers.
        arguments: further options of the task.
        samples: prompts or text segments per length, to estimate GPU hours.
        stride: stride of a sliding window in tokens; 0: no sliding window.
        text: evaluation text.
        prepare: a command that the user has to run first, such as a search.
        note: differences from the published protocol, or disputed points.
    """

    title: str
    source: str
    model: str
    trained: int
    parameters: float
    task: str
    metric: str
    tolerance: float
    cells: tuple[Cell, ...]
    arguments: tuple[str, ...] = ()
    samples: int = 10
    stride: int = 0
    text: str = ""
    prepare: str = ""
    note: str = ""
    name: str = field(default="", compare=False)

    @property
    def gpu_hours(self) -> float:
        """Estimate from 2 operations per parameter and token, without attention.

        A sliding window moves over segments with the longest length of its command.
        """
        tokens = 0
        for run in runs(self, Path(), dry=False):
            longest = max(run.cells)
            for length in run.cells:
                windows = 1 + (longest - length) // self.stride if self.stride else 1
                tokens += windows * length * self.samples
        return 2 * self.parameters * tokens / _FLOPS / 3600


def read(name: str) -> Table:
    """Read the table with that name.

    Raises:
        OptionError: there is no such table.
    """
    path = TABLES / f"{name}.yaml"
    if not path.exists():
        near = nearest(name, names())
        raise OptionError(f"there is no table {name!r}{near or ';'} tables: {', '.join(names())}")
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    cells = [cell | {"options": tuple(cell.get("options", ()))} for cell in data.pop("cells")]
    data["arguments"] = tuple(map(str, data.get("arguments", ())))
    return Table(**data, cells=tuple(Cell(**cell) for cell in cells), name=name)


def names() -> list[str]:
    """Names of all tables."""
    return sorted(path.stem for path in TABLES.glob("*.yaml"))


@dataclass(frozen=True)
class Run:
    """One command and the numbers that it measures."""

    words: tuple[str, ...]
    output: Path
    cells: Mapping[int, Cell]
    """Cells by measured length, in tokens."""


def runs(table: Table, output: Path, dry: bool) -> Iterator[Run]:
    """A command for each model, text and method of a table.

    Args:
        table: what to measure.
        output: folder for the results.
        dry: use the stand-in, with lengths in proportion to its trained length and few cases.
    """
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in table.cells:
        key = (cell.model or table.model, cell.text or table.text, cell.method, cell.factor)
        groups.setdefault((*key, cell.options), []).append(cell)
    for number, ((model, text, method, factor, options), cells) in enumerate(groups.items()):
        folder = output / f"{number}-{method}"
        measured = {_length(table, cell, dry): cell for cell in cells}
        words = ["--tasks", table.task, "--model", STAND_IN if dry else model, "--method", method]
        # Published tables have lengths beyond a method's target.
        words += ["--lengths", ",".join(map(str, measured)), "--force", "--resume"]
        words += ["--factor", f"{factor:g}"] if method != "unpatched" else []
        for option in _DRY_OPTIONS.get(method, ()) if dry else options:
            words += ["--option", option]
        if text:
            words += ["--text", STAND_IN_TEXT if dry else text]
        stride = min(table.stride, min(measured) // 2) if dry else table.stride
        words += ["--stride", str(stride)] if stride else []
        words += [*table.arguments, *(_FEW[table.task] if dry else ())]
        yield Run((*words, "--output", str(folder)), folder, measured)


_DRY_OPTIONS = {"longrope": ("longrope=checkpoints/tiny-512/longrope_2048.json",)}
_FEW = {
    "perplexity": ("--windows", "2"),
    "passkey": ("--trials", "1", "--depths", "1"),
    "ruler": ("--trials", "1", "--ruler-tasks", "niah_single_1"),
}
"""Options that override the others in a dry run."""


def _length(table: Table, cell: Cell, dry: bool) -> int:
    """The length to measure; in a dry run, at least long enough for a prompt."""
    shortest = min(table.trained, *(one.length for one in table.cells))
    return cell.length * STAND_IN_LENGTH // shortest if dry else cell.length


def measured(run: Run, metric: str) -> dict[int, float]:
    """Measured numbers of a run by length, in the unit of the table."""
    data = json.loads((run.output / "results.json").read_text(encoding="utf-8"))
    system = data["systems"][-1]["name"]  # the first one is the unpatched model
    if data["suites"]:  # the average of the tasks
        (suite,) = data["suites"].values()
        values = {int(n): found["value"] for n, found in suite[system]["average"].items()}
    else:
        rows = [row for row in data["summary"] if row["system"] == system]
        values = {row["length"]: row["value"] for row in rows}
    in_unit = {"loss": math.log, "rate": lambda share: 100 * share}.get(metric, float)
    return {length: in_unit(value) for length, value in values.items()}


def agrees(table: Table, cell: Cell, value: float) -> bool:
    """Whether a measured number is within the tolerance of the published one."""
    allowed = table.tolerance * (1 if table.metric == "rate" else cell.published)
    return abs(value - cell.published) <= allowed


def reproduce(table: Table, output: Path, dry: bool) -> bool:
    """Measure, print the results next to the published numbers, return whether all agree."""
    print(f"{table.title} ({table.source}), in {table.metric}")
    if table.prepare:
        print(f"before: {table.prepare}")
    print("estimate: " + _hours(table))
    lines = []
    agreed = True
    for run in runs(table, output, dry):
        print(f"$ {shell_join(['rope-ext', 'eval', *run.words])}", flush=True)
        app(["eval", *run.words], standalone_mode=False)
        found = measured(run, table.metric)
        for length, cell in run.cells.items():
            value = found.get(length, math.nan)
            good = agrees(table, cell, value)
            agreed &= good
            verdict = "agrees" if good else "DIFFERS"
            if dry:
                verdict = "stand-in"
            method = (
                f"{cell.method} x{cell.factor:g}" if cell.method != "unpatched" else cell.method
            )
            numbers = f"{cell.published:>10g} {value:>10.4g}  {verdict}"
            lines.append(f"{method:<28} {cell.length:>8} {numbers}")
    print(f"{'method':<28} {'tokens':>8} {'published':>10} {'measured':>10}")
    print("\n".join(lines))
    if table.note:
        print(f"note: {table.note}")
    return agreed or dry


def _hours(table: Table) -> str:
    return f"{table.gpu_hours:.2g} GPU hours at {_FLOPS / 1e12:g} TFLOP/s, without attention"


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.reproduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("table", nargs="?", help="see --list")
    parser.add_argument("--list", action="store_true", help="list the tables and exit")
    parser.add_argument("--dry-run", action="store_true", help=f"use {STAND_IN} instead")
    parser.add_argument("--output", type=Path, default=Path("runs/reproduce"))
    args = parser.parse_args(argv)
    if args.list or args.table is None:
        for name in names():
            table = read(name)
            print(f"{name:<24} {table.title} ({table.source}); {_hours(table)}")
        return
    with clean_errors():
        table = read(args.table)
        folder = args.output / (f"{table.name}-dry" if args.dry_run else table.name)
        if not reproduce(table, folder, args.dry_run):
            sys.exit(1)


if __name__ == "__main__":
    main()
