"""Remove RoPE from a pretrained model, train it briefly, and evaluate it at 1 to 8 times.

    python -m lab.surgery tiny-512

Each operation is a run of recipes/finetune.py with the same number of steps and tokens, evaluated
before and after training with rope_eval. Finished steps are skipped.

* yarn: extend RoPE with PoSE, as in the checkpoint's recipe.
* drope (arXiv 2512.12167): drop RoPE, train at the trained length, and use the temperature of
  ``drope`` beyond it, with ``c`` chosen on training text.
* alibi: replace RoPE by ALiBi.
* every_4th: drop RoPE from every fourth layer.

Further operations for ``--only``: swan (arXiv 2504.08719) drops RoPE from the first of every four
layers and gives the others a window; swan_last drops it from the last of four; t5, kerple_log and
every other encoding that rope_ext.fit supports replace RoPE; t5_fitted and so on are fitted to RoPE
first; repo computes positions from hidden states; repo_shifted starts from the model's own.
``--steps 0`` evaluates without training.
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
from rope_eval.reports.summary import difference, shown, signed
from rope_eval.settings import Settings
from rope_eval.tasks.passkey import Passkey
from rope_eval.tasks.perplexity import Perplexity
from rope_eval.tune.fitting import supported
from rope_ext.command.arguments import parse_lengths
from rope_ext.command.method_options import ADAPTER
from rope_ext.command.terminal import stoppable
from rope_ext.errors import Mistakes, OptionError, RopeExtError

LENGTH = 512  # trained length of both checkpoints
_RANK = "64"  # rank of LoRA on all linear layers: a new encoding needs more than an extension
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_CONSECUTIVE = ("--pose_chunks", "0", "--positions", "consecutive")


HELD_OUT: dict[str, tuple[str, ...]] = {
    "tiny-512": (),
    "tiny-bytes-512": ("checkpoints/tiny-bytes-512/held_out.jsonl",),
}
"""Evaluation text of each checkpoint; default: the Python standard library."""


def recipe_of(checkpoint: str) -> str:
    """The recipe with the data and the optimizer of a checkpoint."""
    return f"recipes/{checkpoint.replace('-', '_')}_yarn_pose.yaml"


@dataclass(frozen=True)
class Operation:
    """An operation, as settings of recipes/finetune.py.

    Args:
        method: method in the sidecar of the adapter.
        words: further command-line arguments.
        trained_rows: train on rows of the trained length; otherwise with PoSE on half as many,
            twice as long.
        temperatures: values of ``c`` to choose from for DroPE.
    """

    method: str
    words: tuple[str, ...] = ()
    trained_rows: bool = True
    temperatures: tuple[float, ...] = ()


DEFAULT = ("yarn", "drope", "alibi", "every_4th")
OPERATIONS = {
    "yarn": Operation("yarn", trained_rows=False),
    "drope": Operation("nope", temperatures=(0.1, 0.2, 0.4)),
    "alibi": Operation("alibi"),
    "every_4th": Operation("nope", ("--layers", "every 4th")),
    "swan": Operation("swan"),
    "swan_last": Operation("swan", ("--method_options", '{"start": 3}')),
    **{name: Operation(name) for name in supported()},
    **{f"{name}_fitted": Operation(name, ("--init", "model")) for name in supported()},
    "repo": Operation("repo"),
    "repo_shifted": Operation("repo", ("--method_options", '{"positions": "shifted"}')),
}
BASELINE = "yarn"


@dataclass(frozen=True)
class Reading:
    """One row of the table: the evaluation of an operation after some steps."""

    name: str
    report: Report
    system: str
    note: str = ""


@dataclass(frozen=True)
class Bench:
    """Settings shared by all operations.

    Args:
        name: name of the checkpoint.
        model: directory of the checkpoint.
        config: recipe with the data and the optimizer.
        output: directory for adapters, reports and the table.
        steps: number of training steps.
        factor: extension factor of every method.
        lengths: lengths to evaluate, tokens.
        windows: number of text windows.
        trials: number of passkeys at each of five depths.
        length: trained length, tokens.
        batch: rows of the trained length per step.
        text: evaluation text; default: the Python standard library.
        more: further settings for recipes/finetune.py.
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
        """Train an adapter for ``steps``; 0 makes one step with a learning rate of 0."""
        run = self.output / f"{name}-{steps}"
        operation = OPERATIONS[name]
        # The last file that a training writes.
        if (run / "rope_ext.json").exists():
            return run
        length = self.length if operation.trained_rows else 2 * self.length
        words = ["--config", self.config, "--model", self.model, "--factor", f"{self.factor:g}"]
        words += ["--length", str(length), "--max_steps", str(max(1, steps))]
        # As many tokens a step, whatever the length of a row.
        words += ["--per_device_train_batch_size", str(self.batch * self.length // length)]
        words += ["--lora_r", _RANK, "--lora_alpha", _RANK, "--lora_target", *_LINEAR]
        words += ["--retrieval_share", "0"]  # text only, the same for all operations
        words += ["--output_dir", str(run), "--method", operation.method, *operation.words]
        words += [*(_CONSECUTIVE if operation.trained_rows else ()), *self.more]
        words += [] if steps else ["--learning_rate", "0"]
        if any(run.glob("checkpoint-*")):
            words += ["--resume_from_checkpoint", "true"]
        finetune.main(words)
        return run

    def read(self, name: str, steps: int, c: float = 0.0, tune: bool = False) -> Reading:
        """Evaluate an adapter, with its own patch or with DroPE's temperature.

        Args:
            name: name of the operation.
            steps: number of training steps.
            c: ``c`` of DroPE; 0 for no temperature.
            tune: evaluate training text, at the longest length only.
        """
        run = self.output / f"{name}-{steps}"
        method = OPERATIONS[name].method
        options: dict[str, dict[str, Any]] = {}
        if c:  # the adapter was trained without RoPE, and DroPE has none either
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
            raise OptionError("surgery runs in one process; start it without a launcher")
        system = next(s.name for s in report.plan.systems if s.method == method)
        return Reading(f"{name}, {steps} steps", report, system)

    def _tuning_text(self) -> Path:
        """A file with some training text, for choosing the temperature."""
        path = self.output / "tune.jsonl"
        if not path.exists():
            texts = (
                read_texts(["runs/django/train.jsonl"]) if self.text else python_library("train")
            )
            # Surely enough tokens for a whole window, without tokenizing all texts.
            long = [text for text in texts if len(text) > 8 * self.lengths[-1]][: self.windows]
            lines = "".join(json.dumps({"text": text}) + "\n" for text in long)
            replace_file(path, lines.encode())
        return path

    def chosen(self, name: str, steps: int) -> Reading:
        """Evaluate after training, with the temperature of lowest loss on training text."""
        temperatures = OPERATIONS[name].temperatures
        if not temperatures:
            return self.read(name, steps)
        loss = {}
        # 0 as well: a temperature has to lower the loss to be chosen.
        for c in (0.0, *temperatures):
            tuned = self.read(name, steps, c, tune=True)
            place = ("perplexity", tuned.system, self.lengths[-1])
            loss[c] = tuned.report.estimates[place].value
        best = min(loss, key=loss.__getitem__)
        found = self.read(name, steps, best)
        note = f"{name}: c {best:g} of {', '.join(f'{c:g}' for c in loss)}, chosen on other text"
        return Reading(name=found.name, report=found.report, system=found.system, note=note)


def table(readings: Sequence[Reading], bench: Bench) -> str:
    """Perplexity and passkeys by length with 95 % intervals, and differences to YaRN.

    Differences are paired, beyond the trained length: relative for perplexity, in points for
    passkeys, both in per cent.
    """
    base = next(r for r in readings if r.name == f"{BASELINE}, {bench.steps} steps")
    lines = [f"# {bench.name}: RoPE removed, {bench.steps} steps", ""]
    for task, kind in (("perplexity", "loss"), ("passkey", "rate")):
        header = [task, *map(str, bench.lengths), f"beyond {bench.length}, relative to {base.name}"]
        lines += [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
        unpatched = Reading("unpatched", base.report, base.report.plan.systems[0].name)
        for reading in (unpatched, *readings):
            found = (reading.report.estimates[task, reading.system, n] for n in bench.lengths)
            cells = [reading.name, *(shown(one, kind) for one in found)]
            cells.append(
                "" if reading is base else _against(reading, base, bench, task=task, kind=kind)
            )
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    lines += [reading.note for reading in readings if reading.note]
    return "\n".join(lines) + "\n"


def _against(reading: Reading, base: Reading, bench: Bench, task: str, kind: str) -> str:
    beyond = [n for n in bench.lengths if n > bench.length]
    pair = [
        [o for n in beyond for o in each.report.places[task, each.system, n]]
        for each in (reading, base)
    ]
    found = difference(*pair, kind)
    return "" if found is None else signed(found)


def operate(bench: Bench, names: Sequence[str]) -> str:
    """Train and evaluate the operations; write the table and return it.

    Raises:
        RopeExtError: see recipes/finetune.py and ``rope-ext eval``.
    """
    bench.output.mkdir(parents=True, exist_ok=True)
    readings = []
    with lock(bench.output):
        for name in dict.fromkeys((BASELINE, *names)):
            bench.train(name, 0)
            readings.append(bench.read(name, 0))
            if bench.steps:
                bench.train(name, bench.steps)
                readings.append(bench.chosen(name, bench.steps))
        text = table(readings, bench)
        replace_file(bench.output / "surgery.md", text.encode())
    return text


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lab.surgery",
        description=__doc__.splitlines()[0],
        epilog="Other settings, such as --learning_rate 1e-3, go to recipes/finetune.py.",
    )
    add = parser.add_argument
    add("name", choices=HELD_OUT)
    add("--only", default=",".join(DEFAULT), help="comma-separated operations; yarn always runs")
    add("--steps", type=int, default=120)
    add("--lengths", default="512,1k,2k,4k")
    add("--windows", type=int, default=12, help="number of text windows")
    add("--trials", type=int, default=4, help="number of passkeys at each of five depths")
    add("--output", type=Path, help="default: runs/surgery/NAME")
    args, more = parser.parse_known_args(given)
    names = args.only.split(",")
    mistakes = Mistakes()
    for name in names:
        if name not in OPERATIONS:
            known = ", ".join(OPERATIONS)
            mistakes.add(f"--only {name!r} is unknown. Operations: {known}")
    rules = {"steps": at_least(0), "windows": at_least(1), "trials": at_least(1)}
    mistakes.add_all(out_of_range(vars(args), rules).values())
    with mistakes.collected():
        parse_lengths(args.lengths)
    mistakes.report()
    lengths = parse_lengths(args.lengths)
    bench = Bench(
        name=args.name,
        model=f"checkpoints/{args.name}",
        config=recipe_of(args.name),
        output=args.output or Path("runs/surgery") / args.name,
        steps=args.steps,
        # YaRN trains on rows of twice the trained length.
        factor=float(max(4, math.ceil(max(lengths) / LENGTH))),
        lengths=lengths,
        windows=args.windows,
        trials=args.trials,
        length=LENGTH,
        batch=8,
        text=HELD_OUT[args.name],
        more=tuple(more),
    )
    print(operate(bench, names))


if __name__ == "__main__":
    try:
        with stoppable("run the same command to continue"):
            main()
    except RopeExtError as error:
        sys.exit(f"error: {error}")
