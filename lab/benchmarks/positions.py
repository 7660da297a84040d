"""Compares schemes of positions for training on short rows, with equal numbers of tokens.

    python -m lab.benchmarks.positions --output runs/positions

Every scheme of recipes/positions.py fine-tunes both bundled checkpoints from 512 to 4096 tokens
with their recipe, on text alone, with the same steps and tokens. The learning rate of each scheme
is doubled and halved while that lowers the loss at the target length, after one training, on text
that is not used for measurement. Before and after training, unseen text and passkeys are scored
within the trained length and at the target length. ``mixed_windows`` trains Dynamic YaRN on rows of
4096 tokens, ``pose_dynamic`` Dynamic YaRN with PoSE, and all others YaRN, on rows of 1024. Two more
train YaRN in two halves of the steps, the second one on the merged model of the first: ``long`` on
rows of 4096 tokens in both, ``short_first``, a curriculum, on rows of 1024 and then of 4096.

Every cell is a file in the output; interrupted cells resume.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_ext
from lab.benchmarks.calibration import BOX, CHECKPOINTS, SEED, Measured, Unseen, run, texts_of
from lab.surgery import recipe_of
from recipes import finetune
from recipes.checks import at_least, out_of_range
from rope_eval.reports.calibration import mean
from rope_eval.reports.intervals import mean_interval
from rope_eval.reports.summary import estimate_perplexity, interval
from rope_eval.tune.fitness import losses_at_end, losses_of_answers, prompts_of, windows_of
from rope_ext.command.arguments import split
from rope_ext.errors import Mistakes, OptionError
from rope_ext.methods import build_method

TRAINED = 512  # tokens of a row
FACTOR = 8
TOKENS = 8192  # of a step
RATE = 1e-3  # the first learning rate that is tried
LEAST = 1e-3 / 16  # the lowest learning rate that is tried
BASELINE = "pose"


@dataclass(frozen=True)
class Scheme:
    """A way to train: the method, and positions and length of rows in each stage.

    Its steps are divided equally among the stages; it is compared with the scheme ``base``.
    """

    method: str
    stages: tuple[tuple[str, int], ...]
    base: str = BASELINE


SCHEMES = {
    **{
        name: Scheme("yarn", ((name, 2 * TRAINED),))
        for name in ("pose", "pose_released", "random", "random_floats", "cream")
    },
    "pose_dynamic": Scheme("dynamic_yarn", (("pose", 2 * TRAINED),)),
    "mixed_windows": Scheme("dynamic_yarn", (("mixed_windows", FACTOR * TRAINED),)),
    # Two stages in both, since a second one begins with a new optimizer.
    "long": Scheme("yarn", (("consecutive", FACTOR * TRAINED),) * 2),
    "short_first": Scheme(
        "yarn", (("consecutive", 2 * TRAINED), ("consecutive", FACTOR * TRAINED)), base="long"
    ),
}


def words_of(
    checkpoint: str, name: str, stage: int, seed: int, steps: int, rate: float, folder: Path
) -> list[str]:
    """The command line of recipes/finetune.py for one stage; ``steps`` are those of all stages."""
    scheme = SCHEMES[name]
    positions, length = scheme.stages[stage]
    steps //= len(scheme.stages)
    words = ["--config", recipe_of(checkpoint), "--method", scheme.method, "--factor", str(FACTOR)]
    words += ["--positions", positions, "--pose_chunks", "0", "--length", str(length)]
    words += ["--per_device_train_batch_size", str(TOKENS // length), "--retrieval_share", "0"]
    words += ["--max_steps", str(steps), "--learning_rate", str(rate), "--seed", str(seed)]
    words += ["--output_dir", str(folder)]
    resumed = any(folder.glob("checkpoint-*"))
    return [*words, "--resume_from_checkpoint", "true"] if resumed else words


def model_of(checkpoint: str, adapter: Path | None) -> Any:
    """The checkpoint without a patch, merged with the adapters of all stages up to ``adapter``."""
    if adapter is None:
        model: Any = AutoModelForCausalLM.from_pretrained(BOX / checkpoint, dtype=torch.float32)
    else:
        base = merged_of(adapter)
        place = base if base.exists() else BOX / checkpoint
        model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return model.eval()


def merged_of(folder: Path) -> Path:
    """The directory of the model that a later stage in ``folder`` trains."""
    return folder.with_name(f"{folder.name}-base")


def train(checkpoint: str, name: str, seed: int, steps: int, rate: float, folder: Path) -> None:
    """Train all stages of a scheme, the last one in ``folder``; what is there is not repeated."""
    if (folder / "rope_ext.json").exists():
        return
    before: Path | None = None
    last = len(SCHEMES[name].stages) - 1
    for stage in range(last + 1):
        place = folder if stage == last else folder.with_name(f"{folder.name}-stage-{stage}")
        words = words_of(checkpoint, name, stage, seed=seed, steps=steps, rate=rate, folder=place)
        if before is not None:
            base = merged_of(place)
            model_of(checkpoint, before).save_pretrained(base)
            AutoTokenizer.from_pretrained(BOX / checkpoint).save_pretrained(base)
            words += ["--model", str(base)]
        if not (place / "rope_ext.json").exists():
            finetune.main(words)
        before = place


@cache
def rows_to_choose_by(checkpoint: str, windows: int) -> tuple[tuple[int, ...], ...]:
    """Windows of the target length, from text that is not used for measurement."""
    tokenizer = AutoTokenizer.from_pretrained(BOX / checkpoint)
    texts = texts_of(checkpoint)[0]
    length = FACTOR * TRAINED
    cure = "--windows asks for more"
    return windows_of(tokenizer, texts, length, count=windows, seed=SEED, cure=cure).windows


def loss_to_choose_by(checkpoint: str, method: str, adapter: Path, windows: int) -> float:
    """Loss at the target length on :func:`rows_to_choose_by`, nats per token."""
    model = model_of(checkpoint, adapter)
    rows = rows_to_choose_by(checkpoint, windows)
    with rope_ext.patched(model, method, factor=FACTOR), torch.no_grad():
        return mean(
            losses_at_end(
                model, windows=rows, scored=FACTOR * TRAINED // 4, advance=lambda rows: None
            )
        )


@cache
def measured(
    checkpoint: str, method: str, adapter: Path | None, windows: int, prompts: int
) -> Measured:
    """Loss of every document, and passkeys found, at the trained and the target length."""
    tokenizer = AutoTokenizer.from_pretrained(BOX / checkpoint)
    texts = texts_of(checkpoint)[1]
    model = model_of(checkpoint, adapter)
    unseen = Unseen(
        model=model,
        tokenizer=tokenizer,
        texts=texts,
        length=FACTOR * TRAINED,
        windows=windows,
        prompts=prompts,
    )
    asked = prompts_of(
        tokenizer, lengths=[TRAINED], count=prompts, texts=unseen.rows.windows, seed=SEED
    )
    under = build_method(method, factor=FACTOR)
    with rope_ext.patched(model, under), torch.no_grad():
        answers = losses_of_answers(model, asked, lambda rows: None)
    return {**unseen.under(under), "found_inside": [hit for _, hit in answers]}


def lowest(loss: Callable[[float], float], rate: float) -> float:
    """Find the rate with the lowest loss by doubling and halving.

    Stops at ``LEAST``: if any training is worse than none, no rate is low enough.
    """
    for factor in (2.0, 0.5):
        while rate * factor >= LEAST and loss(rate * factor) < loss(rate):
            rate *= factor
    return rate


def cell_of(checkpoint: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Choose a rate with the first seed, train with every seed, measure before and after."""
    method = SCHEMES[name].method
    began = time.monotonic()

    def trained(rate: float, seed: int) -> Path:
        folder = args.output / f"{checkpoint}-{name}-{args.steps}-{rate}-{seed}"
        train(checkpoint, name, seed=seed, steps=args.steps, rate=rate, folder=folder)
        return folder

    @cache
    def loss(rate: float) -> float:
        return loss_to_choose_by(checkpoint, method, adapter=trained(rate, 0), windows=args.windows)

    def under(adapter: Path | None) -> Measured:
        return measured(checkpoint, method, adapter, windows=args.windows, prompts=args.prompts)

    rate = lowest(loss, RATE)
    after = [under(trained(rate, seed)) for seed in range(args.seeds)]
    minutes = (time.monotonic() - began) / 60
    return {"before": under(None), "after": after, "rate": rate, "minutes": minutes}


def verdict(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> str:
    """The change of perplexity from ``other`` to ``one``, and whether it is clear.

    It is clear if two 95 % intervals exclude 0: over documents, of means over seeds, and over
    seeds, of means over documents. Intervals over seeds need at least four.

    Args:
        one: mean losses of documents, by seed; nats per token.
        other: the same for the other scheme.
    """
    gaps = torch.tensor(one, dtype=torch.float64) - torch.tensor(other, dtype=torch.float64)
    ends = [mean_interval(gaps.mean(dim).tolist()) for dim in (0, 1)]
    change = f"{100 * gaps.mean().expm1():+.1f} %"
    if ends[0] is not None:
        low, high = (100 * torch.tensor(ends[0]).expm1()).tolist()
        change += f" [{low:+.1f}, {high:+.1f}]"
    seeds = f"{len(gaps)} seed{'s' if len(gaps) > 1 else ''}"
    for sign, word in ((-1, "lower"), (1, "higher")):
        if all(end is not None and min(sign * end[0], sign * end[1]) > 0 for end in ends):
            return f"{change} {word}, {seeds}"
    return f"{change} cannot tell, {seeds}"


def show(cells: Mapping[tuple[str, str], Mapping[str, Any]]) -> None:
    table = Table(title="perplexity and passkeys on unseen text, before -> after")
    columns = ("checkpoint", "scheme", "rate", "512", "4096", "keys, 512", "keys, 4096")
    for column in (*columns, "512, to base", "4096, to base"):
        table.add_column(column)
    for (checkpoint, name), cell in cells.items():
        before = cell["before"]
        after = cell["after"]
        texts = [f"{cell['rate']:g}"]
        for key in ("inside", "far"):
            losses = [mean(values) for values in zip(*(m[key] for m in after), strict=True)]
            one, other = map(estimate_perplexity, (before[key], losses))
            texts.append(f"{interval(one)} -> {interval(other)}")
        for key in ("found_inside", "found"):
            share = mean([mean(m[key]) for m in after])
            texts.append(f"{mean(before[key]):.0%} -> {share:.0%} of {len(before[key])}")
        compared = SCHEMES[name].base
        base = cells.get((checkpoint, compared))
        shown = name if compared in (name, BASELINE) else f"{name}, to {compared}"
        if base is not None and name != compared:
            for key in ("inside", "far"):
                texts.append(verdict([m[key] for m in after], [m[key] for m in base["after"]]))
        table.add_row(checkpoint, shown, *texts)
    Console(width=200).print(table)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, required=True)
    add("--checkpoints", default=",".join(CHECKPOINTS))
    add("--schemes", default=",".join(SCHEMES), dest="methods", help="comma-separated")
    add("--steps", type=int, default=40, help="training steps of 8192 tokens")
    add("--seeds", type=int, default=4, help="number of trainings; intervals need 4")
    add("--windows", type=int, default=24, help="unseen text windows")
    add("--prompts", type=int, default=40, help="passkeys, half in filler and half in text")
    args = parser.parse_args(given)
    mistakes = Mistakes()
    names = ("steps", "seeds", "windows", "prompts")
    mistakes.add_all(out_of_range(vars(args), {name: at_least(1) for name in names}).values())
    for option, known in (("checkpoints", CHECKPOINTS), ("methods", tuple(SCHEMES))):
        for name in set(split(getattr(args, option))) - set(known):
            said = option.replace("methods", "schemes")
            mistakes.add(OptionError(f"--{said} {name!r} is unknown; give {', '.join(known)}"))
    mistakes.report()
    run(args, cell_of=partial(cell_of, args=args), show=show, suffix=f"-{args.steps}-{args.seeds}")


if __name__ == "__main__":
    main()
