"""Write what ``lab.worth`` has measured as a table.

    python -m lab.worth_table runs/worth --factor 4

A row for the unpatched model, for untrained YaRN, for every trained seed, and for the mean of the
seeds: what is averaged is the loss of each document, or the answer to each prompt. Changes are
paired on the same documents or prompts, with 95 % intervals over those; how far the seeds are apart
shows in their rows. A part that some seed lacks is written without the mean.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from lab.worth import Study
from rope_eval.cases import Outcome, read_outcomes
from rope_eval.reports.summary import bold_if_clear, difference, estimate, shown

MEAN = "trained, mean of the seeds"
BASES = ("unpatched", "yarn, untrained")
KINDS = {"perplexity": "loss", "passkey": "rate"}


def read(output: Path, factor: int, arm: str) -> dict[tuple[str, int], dict[str, list[Outcome]]]:
    """Read all outcomes: by task and length, then by row, each in the order of its prompts."""
    # By prompt, too: a resumed log may have an outcome twice.
    found: dict[tuple[str, int], dict[str, dict[str, Outcome]]] = {}
    folders = [output / f"untrained-{factor}x", *sorted(output.glob(f"{arm}-{factor}x-*"))]
    for folder in folders:
        trained = folder is not folders[0]
        for log in sorted(folder.glob("report-*/cases.jsonl")):
            for one in read_outcomes([log]).values():
                base = "unpatched" if one.system == "unpatched" else f"{one.system}, untrained"
                if trained and base in BASES:  # the report of an adapter begins with these
                    continue
                row = f"trained, seed {folder.name.rpartition('-')[2]}" if trained else base
                if one.task != "perplexity" or _asked(log.parent.name, one.length):
                    rows = found.setdefault((one.task, one.length), {})
                    rows.setdefault(row, {})[one.prompt] = one
    return {
        place: {row: [own[prompt] for prompt in sorted(own)] for row, own in rows.items()}
        for place, rows in found.items()
    }


def _asked(report: str, length: int) -> bool:
    """Whether a length is what a report is of, not one that ``eval`` measures beside it."""
    return (report == "report-inside") == (length == Study.trained)


def with_mean(rows: dict[str, list[Outcome]]) -> dict[str, list[Outcome]]:
    """Add the row of the mean of the seeds, if every seed has the same prompts."""
    seeds = [outcomes for name, outcomes in rows.items() if name.startswith("trained, seed")]
    prompts = {tuple(one.prompt for one in outcomes) for outcomes in seeds}
    if len(seeds) < 2 or len(prompts) > 1:
        return rows
    every = zip(*seeds, strict=True)
    return {**rows, MEAN: [replace(same[0], value=fmean(o.value for o in same)) for same in every]}


def table(output: Path, factor: int, arm: str) -> Iterator[str]:
    """Yield the lines of a table for each task and length."""
    for (task, length), rows in sorted(read(output, factor, arm).items()):
        kind = KINDS[task]
        count = max(map(len, rows.values()))
        things = "documents" if kind == "loss" else "prompts"
        yield f"\n{task.capitalize()} at {length:,} tokens, {count} {things}:\n"
        unit = "%" if kind == "loss" else "points"
        yield f"| factor {factor} | {task} | less unpatched, {unit} | less untrained, {unit} |"
        yield "| --- | --- | --- | --- |"
        complete = {name: own for name, own in with_mean(rows).items() if len(own) == count}
        for name, own in complete.items():
            others = BASES[: BASES.index(name)] if name in BASES else BASES
            found = (difference(own, complete.get(other, []), kind) for other in others)
            gaps = [bold_if_clear(gap) for gap in found]
            gaps += [""] * (len(BASES) - len(gaps))
            yield f"| {name} | {shown(estimate(own, kind), kind)} | {' | '.join(gaps)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, nargs="?", default=Path("runs/worth"))
    parser.add_argument("--factor", type=int, default=4)
    parser.add_argument("--arm", default="pose", help="pose or full")
    args = parser.parse_args()
    for line in table(args.output, args.factor, args.arm):
        print(line)


if __name__ == "__main__":
    main()
