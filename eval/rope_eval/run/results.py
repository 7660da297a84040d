"""Scores cases from losses or text, computed here or on a server."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rope_eval.cases import Case


@dataclass(frozen=True)
class Result:
    """The outcome of a case without its key; see ``Outcome``."""

    value: float
    tokens: int
    written: str | None = None


def tail(case: Case) -> int:
    return len(case.ids) - min(case.only) if case.only else case.count


def loss(case: Case, losses: torch.Tensor) -> Result:
    """Return the mean loss of the scored tokens; NaN counts as infinite."""
    losses = losses.nan_to_num(nan=math.inf, posinf=math.inf)
    scored = losses[-case.count :]
    if case.only:
        first = len(case.ids) - len(losses)
        scored = losses[torch.tensor(case.only, device="cpu") - first]
    tokens = len(scored) if case.weight is None else case.weight
    return Result(float(scored.mean()), tokens)


def share_found(case: Case, written: str) -> float:
    """Score text with the judge, or by the share of answers in it, ignoring case, as RULER."""
    if case.judge is not None:
        return float(case.judge(written))
    text = written.lower()
    return sum(answer.lower() in text for answer in case.answers) / len(case.answers)
