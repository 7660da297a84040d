"""Evaluates held-out rows and passkeys during training, and plots both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from recipes.contents import digest_of
from recipes.data import Pack, Tokenize
from recipes.stream import DataError
from rope_eval.data.prompts import Frame
from rope_eval.forward import score
from rope_eval.plots.style import bare, figure_of, style_of
from rope_eval.tasks.passkey import PasskeyPrompts
from rope_ext.errors import OptionError

NAME = "evaluation"  # name of the plot and of the file with its numbers
_SEED = 0
_PANELS = {"eval_loss": "cross entropy, nats per token", "eval_passkey": "share found"}
_READ = 4  # documents tokenized at once


@dataclass(frozen=True)
class HeldOut:
    """What a run is evaluated on.

    Args:
        rows: evaluation rows.
        texts: the documents that they are made of.
        tokens: tokens of these documents.
    """

    rows: list[dict[str, np.ndarray]]
    texts: list[str]
    tokens: int

    def __str__(self) -> str:
        used = sum(len(row["input_ids"]) for row in self.rows)
        return (
            f"documents held out for evaluation: {len(self.texts):,}, with {self.tokens:,} tokens, "
            f"of which it uses {used:,}"
        )


def held_out(documents: Any, tokenizer: Any, *, length: int, rows: int, minimum: int) -> HeldOut:
    """Make evaluation rows from the first documents, and return both.

    Args:
        documents: documents in the column ``text``.
        tokenizer: tokenizer of the model.
        length: length of a row in tokens.
        rows: number of rows.
        minimum: minimum length of a document in tokens; shorter ones are skipped.

    Raises:
        DataError: there are not enough documents.
    """
    tokenize = Tokenize(tokenizer)
    kept = []
    texts = []
    size = 0
    for batch in documents.iter(_READ):
        tokens = tokenize({"text": batch["text"]})["input_ids"]
        for text, ids in zip(batch["text"], tokens, strict=True):
            if len(ids) < max(minimum, 1):
                continue
            kept.append(ids)
            texts.append(text)
            size += len(ids)
            if size >= rows * length:
                packed = Pack(length)({"input_ids": kept})["input_ids"][:rows]
                return HeldOut([{"input_ids": row} for row in packed], texts, size)
    raise DataError(
        f"the data has {size} tokens, not enough for --eval_rows {rows} of "
        f"{length} tokens; lower --eval_rows or --eval_length, or give another --eval_dataset"
    )


def without(documents: Any, texts: Sequence[str]) -> Any:
    """Return the documents other than these texts, in the same order.

    Raises:
        DataError: the others have less text, all together.
    """
    # Not ``skip``, after which a stream cannot shuffle the order of its files.
    others = documents.filter(_Others({digest_of(text) for text in texts}), input_columns="text")
    taken = sum(map(len, texts))
    left = 0
    for row in others:
        left += len(row["text"] or "")
        if left >= taken:
            return others
    raise DataError(
        f"evaluation takes whole documents, here {len(texts):,} with {taken / (taken + left):.0%} "
        f"of the text; give --eval_dataset or fewer --eval_rows"
    )


@dataclass(frozen=True)
class _Others:
    """Whether a text is none of those with these digests."""

    digests: set[int]

    def __call__(self, text: str | None) -> bool:
        return digest_of(text or "") not in self.digests


def passkeys(tokenizer: Any, length: int, number: int) -> list[Any]:
    """Passkey prompts of ``length`` tokens at evenly spread depths.

    Raises:
        OptionError: a prompt does not fit into ``length`` tokens.
    """
    prompts = PasskeyPrompts(tokenizer, Frame.from_tokenizer(tokenizer, "no"))
    if number and length < prompts.minimum_length():
        raise OptionError(
            f"a passkey prompt needs {prompts.minimum_length()} tokens, and evaluation rows have "
            f"{length}; give a larger --eval_length, or --eval_passkeys 0"
        )
    return [prompts.forward_case(length, (i + 0.5) / number, _SEED + i) for i in range(number)]


def found(model: nn.Module, cases: Sequence[Any]) -> float:
    """Share of the passkeys that greedy decoding writes after the lead-in, by one forward each."""
    hits = [bool(score(model, [case.ids], case.count)[1].all()) for case in cases]
    return sum(hits) / len(hits)


def report(
    history: Sequence[dict[str, Any]],
    *,
    title: str,
    training: str,
    length: int,
    passkeys: int,
    folder: Path,
) -> None:
    """Write ``evaluation.json`` and ``evaluation.png`` from Trainer's log.

    Args:
        history: log history of Trainer's state; for repeated steps, the last entry counts.
        title: title of the plot: the model and its method.
        training: label of the training loss.
        length: evaluated length in tokens.
        passkeys: number of passkeys in each evaluation.
        folder: output directory.
    """
    labels = {
        "eval_loss": f"held-out rows of {length} tokens",
        "eval_passkey": f"{passkeys} passkeys in {length} tokens",
    }
    curve = _curve(history)
    losses = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    shown = [name for name in _PANELS if any(name in entry for entry in curve)]
    figure = figure_of(7.5, 1.0 + 2.7 * len(shown))
    panels = np.atleast_1d(figure.subplots(len(shown), sharex=True))
    for number, (axes, name) in enumerate(zip(panels, shown, strict=True)):
        if name == "eval_loss" and losses:
            axes.plot(*zip(*losses, strict=True), color="#999999", linewidth=1, label=training)
        points = [(entry["step"], entry[name]) for entry in curve]
        axes.plot(*zip(*points, strict=True), linewidth=1.7, markersize=5, label=labels[name],
                  **style_of(number))  # fmt: skip
        axes.set_ylabel(_PANELS[name])
        axes.legend(frameon=False)
        bare(axes)
    panels[0].set_title(title)
    if "eval_passkey" in shown:
        panels[-1].set_ylim(-0.04, 1.04)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(folder / f"{NAME}.png", dpi=110)
    text = json.dumps({"length": length, "curve": curve}, indent=1) + "\n"
    (folder / f"{NAME}.json").write_text(text, encoding="utf-8")


def _curve(history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The evaluations by step, each with its numbers."""
    # A resumed run evaluates some steps again: the later entry is of the weights that it keeps.
    steps = {entry["step"]: entry for entry in history if "eval_loss" in entry}
    return [
        {"step": step, **{name: entry[name] for name in _PANELS if name in entry}}
        for step, entry in sorted(steps.items())
    ]


def preserve_rng_state() -> Any:
    """A context manager that restores the state of the random generators."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    return torch.random.fork_rng(devices)
