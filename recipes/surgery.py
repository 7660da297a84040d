"""Remove RoPE from a pretrained model, train it briefly, and evaluate it at 1 to 8 times.

    python -m recipes.surgery tiny-512

Each operation is a run of recipes/finetune.py with the same number of steps and tokens, evaluated
before and after training by rope_eval. Finished steps are skipped.

* yarn: extend RoPE with PoSE, as in the checkpoint's recipe.
* drope (arXiv 2512.12167): drop RoPE, train at the trained length, and use the temperature of
  ``drope`` beyond it, with ``c`` chosen on training text.
* alibi: replace RoPE by ALiBi.
* every_4th: drop RoPE from every fourth layer.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes import finetune
from recipes.checks import at_least, out_of_range
from rope_eval.data.text import python_library, read_texts
from rope_eval.evaluate import evaluate
from rope_eval.folder import lock, replace_file
from rope_eval.reports.report import Report
from rope_eval.reports.summary import difference
from rope_eval.settings import Settings
from rope_eval.tasks.passkey import Passkey
from rope_eval.tasks.perplexity import Perplexity
from rope_ext.arguments import parse_lengths
from rope_ext.errors import Mistakes, OptionError, RopeExtError
from rope_ext.method_options import ADAPTER

LENGTH = 512  # that both checkpoints were trained on
TEMPERATURES = (0.1, 0.2, 0.4)  # c of DroPE
_RANK = "64"  # of LoRA on all linear layers: a swap has to change more than an extension
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_OWN = ("--pose_chunks", "0", "--positions", "consecutive")


@dataclass(frozen=True)
class Checkpoint:
    """What is operated on.

    Args:
        config: the recipe of its extension, whose data and optimizer all operations take.
        held_out: text to read, in place of Python's own library.
    """

    config: str
    held_out: tuple[str, ...] = ()


CHECKPOINTS = {
    "tiny-512": Checkpoint("recipes/tiny_512_yarn_pose.yaml"),
    "tiny-bytes-512": Checkpoint(
        "recipes/tiny_bytes_512_yarn_pose.yaml", ("checkpoints/tiny-bytes-512/held_out.jsonl",)
    ),
}


@dataclass(frozen=True)
class Operation:
    """A change of the model, as settings of recipes/finetune.py.

    Args:
        words: of the command line.
        method: that the sidecar of its adapter names.
        own_length: whether rows are as long as the model was trained; else twice that, half as
            many.
        temperatures: ``c`` of DroPE to choose from.
    """

    words: tuple[str, ...]
    method: str
    own_length: bool = True
    temperatures: tuple[float, ...] = ()


OPERATIONS = {
    "yarn": Operation(("--method", "yarn"), "yarn", own_length=False),
    "drope": Operation(("--method", "nope", *_OWN), "nope", temperatures=TEMPERATURES),
    "alibi": Operation(("--method", "alibi", *_OWN), "alibi"),
    "every_4th": Operation(("--method", "nope", "--layers", "every 4th", *_OWN), "nope"),
}
BASELINE = "yarn"


@dataclass(frozen=True)
class Reading:
    """One row of the table: an operation after some steps, with what was put on it then."""

    name: str
    report: Report
    system: str
    note: str = ""


@dataclass(frozen=True)
class Bench:
    """What every operation has in common.

    Args:
        name: of the checkpoint.
        model: its folder.
        config: the recipe of its extension.
        output: folder of adapters, reports and the table.
        steps: of training.
        factor: of every method.
        lengths: to read, tokens.
        windows: stretches of text that are read.
        trials: passkeys at each of five depths.
        length: that the model was trained on, tokens.
        batch: rows of that length in a step.
        text: to read, in place of Python's own library.
        more: settings of recipes/finetune.py.
    """

    name: str
    model: str
    config: str
    output: Path
    steps: int
    factor: float
    lengths: tuple[int, ...]
    windows: int
    trials: int
    length: int
    batch: int
    text: tuple[str, ...] = ()
    more: tuple[str, ...] = ()

    def train(self, name: str, steps: int) -> Path:
        """The adapter after ``steps``; 0: before any, which is one step of length zero."""
        run, made = self.output / f"{name}-{steps}", OPERATIONS[name]
        if (run / "rope_ext.json").exists():
            return run
        length = self.length if made.own_length else 2 * self.length
        words = ["--config", self.config, "--model", self.model, "--factor", f"{self.factor:g}"]
        words += ["--length", str(length), "--max_steps", str(max(1, steps))]
        words += ["--per_device_train_batch_size", str(self.batch * self.length // length)]
        words += ["--lora_r", _RANK, "--lora_alpha", _RANK, "--lora_target", *_LINEAR]
        words += ["--retrieval_share", "0"]  # text alone, so that operations differ in nothing else
        words += ["--output_dir", str(run), *made.words, *self.more]
        words += [] if steps else ["--learning_rate", "0"]
        if any(run.glob("checkpoint-*")):
            words += ["--resume_from_checkpoint", "true"]
        finetune.main(words)
        return run

    def read(self, name: str, steps: int, c: float = 0.0, tune: bool = False) -> Reading:
        """What an adapter does, under its own patch or with DroPE's temperature.

        Args:
            name: of the operation.
            steps: after which.
            c: of DroPE; 0: no temperature.
            tune: on text of the training, at the longest length alone.
        """
        run, method = self.output / f"{name}-{steps}", OPERATIONS[name].method
        options: dict[str, dict[str, Any]] = {}
        if c:  # trained without a rotation, which DroPE leaves out as well
            method = "drope"
            options = {method: {"c": c}}
        folder = f"{name}-{steps}" + (f"-c{c:g}" if c else "") + ("-tune" if tune else "")
        lengths = (self.lengths[-1],) if tune else self.lengths
        settings = Settings(
            models=(self.model,),
            methods=(method if c else ADAPTER,),
            lengths=lengths,
            factor=self.factor,
            options=options,
            adapter=str(run),
            force=bool(c),
            output=self.output / "reports" / folder,
            resume=True,
        )
        texts = (str(self._tuning_text()),) if tune else self.text
        tasks = [Perplexity(text=texts, windows=self.windows)]
        tasks += [] if tune else [Passkey(trials=self.trials)]
        report = evaluate(settings, tasks)
        if report is None:
            raise OptionError("surgery reads in one process; start it without a launcher")
        system = next(s.name for s in report.plan.systems if s.method == method)
        return Reading(f"{name}, {steps} steps", report, system)

    def _tuning_text(self) -> Path:
        """Some of what is trained on, in a file: not what is read in the end."""
        path = self.output / "tune.jsonl"
        if not path.exists():
            texts = (
                read_texts(["runs/django/train.jsonl"]) if self.text else python_library("train")
            )
            long = [text for text in texts if len(text) > 8 * self.lengths[-1]][: self.windows]
            lines = "".join(json.dumps({"text": text}) + "\n" for text in long)
            replace_file(path, lines.encode())
        return path

    def chosen(self, name: str, steps: int) -> Reading:
        """After training, with the temperature of the lowest loss on text of the training."""
        temperatures = OPERATIONS[name].temperatures
        if not temperatures:
            return self.read(name, steps)
        loss = {}
        for c in (0.0, *temperatures):
            tuned = self.read(name, steps, c, tune=True)
            place = ("perplexity", tuned.system, self.lengths[-1])
            loss[c] = tuned.report.estimates[place].value
        best = min(loss, key=loss.__getitem__)
        found = self.read(name, steps, best)
        note = f"{name}: c {best:g} of {', '.join(f'{c:g}' for c in loss)}, chosen on other text"
        return Reading(found.name, found.report, found.system, note)


def table(readings: Sequence[Reading], bench: Bench) -> str:
    """Perplexity and passkeys by length, with 95 % intervals, and how far each is from YaRN.

    Differences are on identical cases beyond the trained length: of perplexity by the share, of
    passkeys in points.
    """
    base = next(r for r in readings if r.name == f"{BASELINE}, {bench.steps} steps")
    lines = [f"# {bench.name}: the rotation taken out, {bench.steps} steps", ""]
    for task, form in (("perplexity", "{:.2f}"), ("passkey", "{:.0%}")):
        header = [task, *map(str, bench.lengths), f"beyond {bench.length}, less {base.name}"]
        lines += [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
        unpatched = Reading("unpatched", base.report, base.report.plan.systems[0].name)
        for reading in (unpatched, *readings):
            cells = [reading.name]
            for length in bench.lengths:
                found = reading.report.estimates[task, reading.system, length]
                cells.append(_estimate(found, form))
            cells.append("" if reading is base else _against(reading, base, bench, task))
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    lines += [reading.note for reading in readings if reading.note]
    return "\n".join(lines) + "\n"


def _against(reading: Reading, base: Reading, bench: Bench, task: str) -> str:
    beyond = [n for n in bench.lengths if n > bench.length]
    pair = [
        [o for n in beyond for o in each.report.places[task, each.system, n]]
        for each in (reading, base)
    ]
    kind = "rate" if task == "passkey" else "loss"
    found = difference(*pair, kind)
    return "" if found is None else _estimate(found, "{:+.0%}")


def _estimate(found: Any, form: str) -> str:
    if found.low is None:
        return f"{form.format(found.value)} ({found.note})"
    return f"{form.format(found.value)} ({form.format(found.low)} to {form.format(found.high)})"


def operate(bench: Bench, names: Sequence[str]) -> str:
    """Train, read, compare; returns the table, which it writes too.

    Raises:
        RopeExtError: as of recipes/finetune.py and ``rope-ext eval``.
    """
    bench.output.mkdir(parents=True, exist_ok=True)
    readings = []
    with lock(bench.output):
        for name in dict.fromkeys((BASELINE, *names)):
            bench.train(name, 0)
            readings.append(bench.read(name, 0))
            bench.train(name, bench.steps)
            readings.append(bench.chosen(name, bench.steps))
        text = table(readings, bench)
        replace_file(bench.output / "surgery.md", text.encode())
    return text


def bench_of(args: argparse.Namespace, made: Checkpoint, more: Sequence[str]) -> Bench:
    lengths = parse_lengths(args.lengths)
    return Bench(
        name=args.name,
        model=f"checkpoints/{args.name}",
        config=made.config,
        output=args.output or Path("runs/surgery") / args.name,
        steps=args.steps,
        factor=float(max(4, math.ceil(max(lengths) / LENGTH))),  # YaRN's rows are of two lengths
        lengths=lengths,
        windows=args.windows,
        trials=args.trials,
        length=LENGTH,
        batch=8,
        text=made.held_out,
        more=tuple(more),
    )


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.surgery",
        description=__doc__.splitlines()[0],
        epilog="Other settings, such as --learning_rate 1e-3, go to recipes/finetune.py.",
    )
    add = parser.add_argument
    add("name", choices=CHECKPOINTS)
    add("--only", default=",".join(OPERATIONS), help="comma-separated operations; yarn always runs")
    add("--steps", type=int, default=120)
    add("--lengths", default="512,1k,2k,4k")
    add("--windows", type=int, default=12, help="number of text windows")
    add("--trials", type=int, default=4, help="number of passkeys at each of five depths")
    add("--output", type=Path, help="default: runs/surgery/NAME")
    args, more = parser.parse_known_args(given)
    names, mistakes = args.only.split(","), Mistakes()
    for name in names:
        if name not in OPERATIONS:
            known = ", ".join(OPERATIONS)
            mistakes.add(f"--only {name!r} is unknown. Operations: {known}")
    rules = dict.fromkeys(("steps", "windows", "trials"), at_least(1))
    mistakes.add_all(out_of_range(vars(args), rules).values())
    with mistakes.collected():
        parse_lengths(args.lengths)
    mistakes.report()
    print(operate(bench_of(args, CHECKPOINTS[args.name], more), names))


if __name__ == "__main__":
    try:
        main()
    except RopeExtError as error:
        sys.exit(f"error: {error}")
