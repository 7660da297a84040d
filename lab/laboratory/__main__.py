"""Train a small decoder from scratch for each position encoding and seed, and compare them.

    python -m lab.laboratory --resume
    accelerate launch --num_processes 8 -m lab.laboratory --resume

Everything else is equal: initial weights where shapes match, rows and their order, steps, and the
search for learning rates. Results are appended as they arrive; --resume continues an interrupted
run.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lab.laboratory import page
from lab.laboratory.log import Cell, Log
from lab.laboratory.model import ASKED, Size, chosen
from lab.laboratory.rates import Rates
from lab.laboratory.tasks import TASKS, Tasks
from lab.laboratory.text import Text
from lab.laboratory.training import Subject, Training
from recipes.checks import POSITIVE, at_least, out_of_range
from rope_eval.folder import Folder
from rope_eval.run.runner import Ranks
from rope_ext.command.arguments import split
from rope_ext.command.terminal import stoppable
from rope_ext.errors import MeasureError, Mistakes, RopeExtError, first_line, nearest

# The two subjects.
TEXT = "text"
LENGTHS = "tasks"
Tell = Callable[[str], None]
"""Prints progress."""
_SIZES = (
    *("steps", "problem_steps", "length", "width", "layers", "heads"),
    *("batch", "problems", "rows"),
)

_RULES = {
    **dict.fromkeys(("seeds", *_SIZES), at_least(1)),
    "length": at_least(64),
    "choosing_share": (lambda share: 0 < share <= 1, "above 0 and at most 1"),
    "learning_rate": POSITIVE,
}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lab.laboratory", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add(
        "--encodings",
        type=split,
        help="comma-separated; default: all in `rope-ext methods`; others, with linear attention "
        "or from scratch only: " + ", ".join(ASKED),
    )
    add("--seeds", type=int, default=3, help="number of seeds; intervals need three")
    add("--tasks", type=split, default=[TEXT, *TASKS], help="comma-separated; default: %(default)s")
    add("--steps", type=int, default=Text.steps, help="training steps on text")
    add("--problem-steps", type=int, default=Tasks.steps, help="training steps on problems")
    add(
        "--choosing-share",
        type=float,
        default=0.25,
        help="share of the training steps to choose learning rates with",
    )
    add("--length", type=int, default=128, help="tokens per row; evaluated at up to 16 times")
    add("--width", type=int, default=128, help="hidden size")
    add("--layers", type=int, default=2)
    add("--heads", type=int, default=4)
    add("--batch", type=int, default=Text.batch, help="rows of text per step")
    add("--problems", type=int, default=Tasks.batch, help="problems per step")
    add("--rows", type=int, default=32, help="evaluation rows at each length")
    add("--learning-rate", type=float, default=0.01)
    add("--output", type=Path, default=Path("runs/laboratory"))
    add("--device", default="auto")
    add("--resume", action="store_true", help="continue the run in --output, if there is one")
    add("--report", action="store_true", help="only write the report of finished cells")
    args = parser.parse_args(given)
    mistakes = Mistakes()
    mistakes.add_all(out_of_range(vars(args), _RULES, separator="-").values())
    mistakes.add_all(_unsuitable(args))
    with mistakes.collected():
        chosen(args.encodings)
    mistakes.report()
    return args


def _unsuitable(args: argparse.Namespace) -> Iterator[str]:
    """Errors for a width that heads do not divide, and for unknown tasks."""
    if args.heads >= 1 and args.width % (8 * args.heads):
        yield (
            f"--width {args.width} must be a multiple of 8 x --heads {args.heads}, so that a "
            f"quarter of each head is an even number of columns"
        )
    for name in args.tasks:
        if name not in (TEXT, *TASKS):
            yield (
                f"--tasks {name!r} is unknown{nearest(name, [TEXT, *TASKS]) or '.'} "
                f"Tasks: {', '.join([TEXT, *TASKS])}"
            )


def subjects_of(args: argparse.Namespace) -> dict[str, Subject]:
    found: dict[str, Subject] = {}
    if TEXT in args.tasks:
        found[TEXT] = Text(args.length, args.batch, args.rows, steps=args.steps)
    if names := tuple(name for name in TASKS if name in args.tasks):
        found[LENGTHS] = Tasks(
            names=names, batch=args.problems, rows=args.rows, steps=args.problem_steps
        )
    return found


def settings_of(args: argparse.Namespace, subjects: dict[str, Subject]) -> dict[str, Any]:
    """Settings that cells must share to be comparable."""
    settings = {name: getattr(args, name) for name in (*_SIZES, "choosing_share", "learning_rate")}
    # Also for a subject that is left out, so that a later run can add it.
    settings["tasks"] = list(subjects[LENGTHS].names if LENGTHS in subjects else TASKS)
    text = subjects.get(TEXT) or Text(args.length)
    seen = hashlib.sha256(text.stream.tobytes() + text.held_out.tobytes())
    settings["text"] = seen.hexdigest()[:16]
    return settings


def main(given: list[str] | None = None) -> int:
    args = arguments(given)
    names = chosen(args.encodings)
    subjects = subjects_of(args)
    ranks = Ranks.join(args.device)
    log = Log(args.output, settings_of(args, subjects))
    if args.report:
        return write_page(log)
    folder = Folder(args.output)
    with folder.lock():
        done = log.read()
        if done and not args.resume:
            raise MeasureError(
                f"{args.output} holds {len(done)} finished cells; give --resume to go on, or "
                f"another --output"
            )
        size = Size(args.width, args.layers, args.heads)
        shorter = {
            name: replace(subject, steps=math.ceil(args.choosing_share * subject.steps))
            for name, subject in subjects.items()
        }
        found = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(found if ranks.device == "auto" else ranks.device)
        training = Training(size, args.learning_rate, device)

        def choose(cell: Cell, tell: Tell) -> dict[str, Any]:
            return training.choose_rates(shorter[cell.chooses_for], cell.name, tell)

        def train(cell: Cell, tell: Tell) -> dict[str, Any]:
            record = done[Cell.rates(cell.subject, cell.name)]
            if "chosen" not in record:  # refused, with the reason
                return record
            found = Rates(**record["chosen"])
            return training.run(subjects[cell.subject], cell.name, cell.seed, found, tell)

        ranks.wait()  # all processes divide the same rest
        failed = work(
            ranks,
            log,
            cells=[Cell.rates(s, name) for s in subjects for name in names],
            function=choose,
        )
        ranks.wait()
        done = log.read()
        cells = [
            Cell(subject, name, seed)
            for subject in subjects
            # Seed by seed: a run that is stopped has compared all encodings with some seeds.
            for seed in range(args.seeds)
            for name in names
            if Cell.rates(subject, name) in done
        ]
        failed += work(ranks, log, cells, function=train)
        ranks.wait()
        if ranks.rank == 0:
            write_page(log)
    return 1 if failed else 0


def work(
    ranks: Ranks, log: Log, cells: list[Cell], function: Callable[[Cell, Tell], dict[str, Any]]
) -> int:
    """Run the unfinished cells of this process; returns the number of failed ones."""
    done = log.read()
    ranks.wait()  # all have read the same log
    mine = ranks.share([cell for cell in cells if cell not in done])
    began = time.monotonic()
    failed = 0
    for number, cell in enumerate(mine):
        minutes = (time.monotonic() - began) / 60
        left = f", {minutes / number * (len(mine) - number):.0f} minutes left" if number else ""
        start = f"[{number + 1}/{len(mine)}{left}] {cell}"

        def tell(text: str, start: str = start) -> None:
            print(f"{start}: {text}", file=sys.stderr, flush=True)

        try:
            record = function(cell, tell)
        except RopeExtError as error:
            record = {"refused": first_line(error)}
            tell(f"refused: {record['refused']}")
        except Exception as error:  # one failing encoding must not end the run
            traceback.print_exc()
            tell(f"broke ({type(error).__name__}); --resume tries it again")
            failed += 1
            continue
        log.append(ranks.rank, cell, record)
    return failed


def write_page(log: Log) -> int:
    """Write the page and its numbers for all finished cells."""
    paths = Folder(log.folder).write(page.contents(log.settings, log.read()))
    print(f"wrote {', '.join(map(str, paths))}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    try:
        with stoppable():
            sys.exit(main())
    except RopeExtError as error:
        sys.exit(f"error: {error}")
