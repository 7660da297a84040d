"""Writes what embedders found as tables in the docs, and as data for ``recommend``.

Intervals are 95 %: exact binomial ones, and paired ones of differences on the same questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.evidence.retrieval import CUT, DOCUMENTS, FACTORS, TASK, found_in
from rope_eval.folder import read_lines
from rope_eval.reports.summary import (
    bold_if_clear,
    estimate_rate,
    is_clear,
    percent,
    rate_difference,
)

TRAINED = {"embeddinggemma-300m": 2048}
SHAPES = {
    "embeddinggemma-300m": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 24,
        "hidden_size": 768,
        "num_attention_heads": 3,
    }
}
"""What the configurations of these models say, by which ``recommend`` knows them."""


def is_retrieval(path: Path) -> bool:
    """Whether a file has the cells of an embedder."""
    return any(line.get("task") == TASK for line in read_lines(path))


@dataclass(frozen=True)
class Retrieved:
    """The measured cells of one embedder; a method counts where every document was measured."""

    model: str
    lines: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Retrieved:
        lines = [line for line in read_lines(path) if line.get("task") == TASK]
        return cls(lines[0]["model"], lines)

    @property
    def trained(self) -> int:
        return TRAINED[self.model]

    def found(self, method: str, length: int, factor: float) -> list[int]:
        """Return for each question whether its document was found; empty if not measured."""
        factor = 1 if method in (CUT, "unpatched") else factor
        documents = {
            line["document"]: line
            for line in self.lines
            if (line["method"], line["length"], line["factor"]) == (method, length, factor)
            and "refused" not in line
        }
        return found_in([*documents.values()]) if len(documents) == DOCUMENTS else []

    def refused(self) -> dict[str, str]:
        """Return the reasons of the methods that the model does not take."""
        return {line["method"]: line["refused"] for line in self.lines if "refused" in line}

    def rows(self, length: int, factor: float) -> dict[str, list[int]]:
        """Return what was found by method: the baselines, then methods, the best first."""
        names = dict.fromkeys([CUT, "unpatched", *(str(line["method"]) for line in self.lines)])
        every = {name: self.found(name, length, factor) for name in names}
        every = {name: found for name, found in every.items() if found}
        first = [name for name in (CUT, "unpatched") if name in every]
        rest = sorted((n for n in every if n not in first), key=lambda n: -sum(every[n]))
        return {name: every[name] for name in (*first, *rest)}


def conditions(evidence: Retrieved) -> str:
    line = evidence.lines[0]
    return (
        f"{evidence.model}, trained on {evidence.trained:,} tokens, in {line['dtype']} on "
        f"{line['device']}: {DOCUMENTS} documents, {len(line['alike'])} questions, torch "
        f"{line['torch']}, transformers {line['transformers']}, seed {line['seed']}.\n"
    )


def table(evidence: Retrieved, factor: int) -> str:
    """Return the table of one length; empty if nothing was measured there."""
    rows = evidence.rows(factor * evidence.trained, factor)
    if not {CUT, "unpatched"} <= rows.keys():
        return ""
    lines = ["| method | questions found | less unpatched, points | less cut, points |\n"]
    lines.append("| --- | --- | --- | --- |\n")
    names = {CUT: f"unpatched, cut at {evidence.trained:,} tokens", "unpatched": "unpatched"}
    for name, found in rows.items():
        gaps = [_gap(found, rows[other]) if other != name else "" for other in ("unpatched", CUT)]
        if name == CUT:
            gaps[0] = ""  # the same as the other one
        of = f"{sum(found)} of {len(found)}, {percent(estimate_rate(found))}"
        lines.append(f"| {names.get(name, f'`{name}`')} | {of} | {' | '.join(gaps)} |\n")
    return "".join(lines)


def _gap(one: Sequence[int], other: Sequence[int]) -> str:
    return bold_if_clear(rate_difference(one, other))


def summary(evidence: Retrieved) -> dict[str, Any]:
    """Return data for ``recommend``, as that of language models."""
    methods: dict[str, dict[str, Any]] = {}
    for factor in FACTORS:
        rows = evidence.rows(factor * evidence.trained, factor)
        if len(rows) < 3:  # there is nothing to rank
            continue
        for name, found in rows.items():
            if name == CUT:
                continue
            numbers: dict[str, Any] = {"found": sum(found), "of": len(found)}
            if name == "unpatched":
                numbers["cut"] = sum(rows[CUT])
            else:
                numbers["clear"] = is_clear(rate_difference(found, rows["unpatched"]))
            at = methods.setdefault(name, {"at": {}})["at"]
            at[str(factor)] = {"retrieval": numbers}
    return {
        "model": evidence.model,
        "embeds": True,
        "shape": SHAPES[evidence.model],
        "trained": evidence.trained,
        "documents": DOCUMENTS,
        "methods": methods,
    }
