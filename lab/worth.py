r"""Measure what fine-tuning a pretrained checkpoint for a longer context is worth.

    python -m lab.worth --minutes 60
    python -m lab.worth --factors 4 --seeds 42 --arms pose

For every factor, arm and seed, recipes/finetune.py trains SmolLM2 (8192 tokens) with YaRN and LoRA,
on text of Python's standard library: ``pose`` on rows of 2048 tokens with PoSE, ``full`` on rows as
long as the target, with as many tokens. Then ``rope-ext eval`` measures perplexity on held-out
text: 8 documents within the trained length, 4 at two and four times that length; and 20 decoded
passkeys at twice the trained length; beside the unpatched model and untrained YaRN. What is quick
comes first for all of them. Each report has intervals over documents or prompts;
``lab.worth_table`` compares the seeds in one table.

Each command resumes where it stopped, and ``--minutes`` begins none after that time, so that the
same line continues on another day. Several processes with one ``--output`` share the work, one
command at a time each; one ends when all that is left waits for others. ``--dry-run`` prints the
commands.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from checkpoints.pretrained import smollm2
from rope_eval.folder import log_name

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "own_model_yarn_lora.yaml"
ARMS = ("pose", "full")
_WHOLE = ("--protocol", "start")
"""Every token counts, not only the last ones: of few documents, intervals are narrower."""
LOG = log_name(0)
_ADAPTER = "rope_ext.json"
"""The last file that a training writes."""


@dataclass(frozen=True)
class Command:
    """A command, the file that marks it as done, and the files without which it cannot run.

    ``report`` is the folder that it resumes, and ``before`` one with outcomes that it shares.
    """

    done: Path
    words: list[str]
    needs: tuple[Path, ...] = ()
    report: Path | None = None
    before: Path | None = None

    def run(self) -> None:
        """Run the command; what it shares with the report ``before`` is not measured again."""
        if self.report is not None and self.before is not None:
            log, known = self.report / LOG, self.before / LOG
            if known.exists() and not log.exists():
                self.report.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(known, log)
        subprocess.run(self.words, cwd=ROOT, check=True)


@dataclass(frozen=True)
class Study:
    """What is trained and measured; lengths in tokens.

    Args:
        model: model directory or GGUF file.
        output: directory of all runs and reports.
        trained: trained length.
        row: length of a row with PoSE.
        tokens: tokens of a training run.
        step_tokens: tokens of a step; at least one row.
        documents: text segments within the trained length, and beyond.
        passkeys: passkey prompts at each of five depths.
        more: more settings of recipes/finetune.py.
    """

    model: str
    output: Path
    trained: int = 8192
    row: int = 2048
    tokens: int = 45 * 4096
    step_tokens: int = 4096
    documents: tuple[int, int] = (8, 4)
    passkeys: int = 4
    more: tuple[str, ...] = ()

    def training(self, factor: int, arm: str, seed: int) -> list[str]:
        """The command that trains one adapter."""
        folder = self.adapter(factor, arm, seed)
        target = self.trained * factor
        row = self.row if arm == "pose" else target
        # Tokens of a run and of a step are equal in both arms; only rows differ.
        rows = max(1, self.step_tokens // row)
        steps = max(1, self.tokens // (rows * row))
        words = ["--config", str(RECIPE), "--model", self.model, "--dataset", "python-library"]
        words += ["--original_max_position_embeddings", str(self.trained)]
        words += ["--target_length", str(target), "--length", str(row)]
        words += ["--rows_per_step", str(rows), "--max_steps", str(steps), "--save_steps", "5"]
        # minimum_document: --target_length would set half a row, and the two arms would read
        # different documents.
        words += ["--pose_chunks", "2" if arm == "pose" else "0", "--minimum_document", "0"]
        words += ["--use_cpu", "true", "--quantize", "false", "--optim", "adamw_torch"]
        words += ["--gradient_checkpointing", "true" if arm == "full" else "false"]
        words += ["--seed", str(seed), "--output_dir", str(folder), "--report_to", "none"]
        resume = ["--resume_from_checkpoint", "true"] if any(folder.glob("checkpoint-*")) else []
        return [sys.executable, "recipes/finetune.py", *words, *self.more, *resume]

    def adapter(self, factor: int, arm: str, seed: int) -> Path:
        """The directory of a training."""
        return self.output / f"{arm}-{factor}x-{seed}"

    def measurements(self, factor: int, adapter: Path | None) -> Iterator[Command]:
        """The commands that measure one adapter; None: the model without and with YaRN."""
        twice, target = 2 * self.trained, min(4, factor) * self.trained
        untrained = self.output / f"untrained-{factor}x"
        folder = untrained if adapter is None else adapter
        inside, beyond = self.documents
        keys = ["--trials", str(self.passkeys), "--digits", "3"]
        parts = [
            ("inside", "perplexity", self.trained, [*_WHOLE, "--windows", str(inside)]),
            ("twice", "perplexity", twice, [*_WHOLE, "--windows", str(beyond)]),
        ]
        if target > twice:
            parts.append(("target", "perplexity", target, [*_WHOLE, "--windows", str(beyond)]))
        parts.append(("passkeys", "passkey", twice, keys))
        for name, task, length, options in parts:
            words = ["--model", self.model, "--factor", str(factor), "--dtype", "bfloat16"]
            words += ["--method", "none,yarn" if adapter is None else "adapter"]
            words += [] if adapter is None else ["--adapter", str(adapter)]
            words += ["--trained-length", str(self.trained), "--lengths", str(length), "--force"]
            report = folder / f"report-{name}"
            words += [*options, "--output", str(report), "--resume"]
            yield Command(
                folder / f"done-{name}",
                words=[sys.executable, "-m", "rope_ext", "eval", task, *words],
                # The unpatched model is measured once, before the adapters.
                needs=() if adapter is None else (adapter / _ADAPTER, untrained / f"done-{name}"),
                report=report,
                before=None if adapter is None else untrained / report.name,
            )


def commands(
    study: Study, factors: Sequence[int], arms: Sequence[str], seeds: Sequence[int]
) -> Iterator[Command]:
    """All commands, the first of them first: trainings, then the same measurement of all."""
    for factor in factors:
        adapters: list[Path | None] = [None]
        for seed in seeds:
            for arm in arms:
                folder = study.adapter(factor, arm, seed)
                yield Command(folder / _ADAPTER, words=study.training(factor, arm, seed))
                adapters.append(folder)
        every = [study.measurements(factor, adapter) for adapter in adapters]
        for same in zip(*every, strict=True):
            yield from same


def take(waiting: Sequence[Command]) -> tuple[Command, FileLock] | None:
    """Choose and lock the first command that can run now; None: there is none."""
    for command in waiting:
        if command.done.exists() or not all(path.exists() for path in command.needs):
            continue
        command.done.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(command.done.with_suffix(".lock"))
        with suppress(Timeout):
            lock.acquire(blocking=False)
            if not command.done.exists():
                return command, lock
            lock.release()
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="model directory or GGUF file; default: SmolLM2")
    parser.add_argument("--output", type=Path, default=Path("runs/worth"))
    parser.add_argument("--factors", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["pose"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--trained", type=int, default=Study.trained, help="trained length, tokens")
    parser.add_argument("--row", type=int, default=Study.row, help="row of PoSE, tokens")
    parser.add_argument("--tokens", type=int, default=Study.tokens, help="of each training run")
    parser.add_argument(
        "--documents", type=int, nargs=2, default=Study.documents, metavar=("IN", "BEYOND")
    )
    parser.add_argument(
        "--passkeys", type=int, default=Study.passkeys, help="prompts at each of five depths"
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no command after that")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    args = parser.parse_args(arguments)
    begun = time.monotonic()
    study = Study(
        model=args.model or str(smollm2()),
        output=args.output,
        trained=args.trained,
        row=args.row,
        tokens=args.tokens,
        step_tokens=2 * args.row,
        documents=tuple(args.documents),
        passkeys=args.passkeys,
    )
    every = [*commands(study, args.factors, args.arms, seeds=args.seeds)]
    if args.dry_run:
        for command in every:
            print(shlex.join(command.words))
        return
    while (taken := take(every)) is not None:
        command, lock = taken
        try:
            if time.monotonic() - begun > 60 * args.minutes:
                print(f"{command.done.parent}: not measured yet; run the same command again")
                return
            print(shlex.join(command.words), flush=True)
            command.run()
            # After the command has ended well, so that a killed one is run again.
            command.done.touch(exist_ok=True)
        finally:
            lock.release()


if __name__ == "__main__":
    main()
