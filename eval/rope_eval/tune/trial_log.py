"""A log of trials and their results, from which a search or calibration resumes.

The header has the kind of run and its settings. A run is a function of its seed and of the logged
results: a resumed run is replayed, and known results are not computed again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from rope_eval.folder import writing
from rope_eval.log import Log, read_lines, to_line
from rope_ext.errors import MeasureError

ROOM = "make room and give the same again to go on"
L = TypeVar("L", bound="TrialLog")


class TrialLog:
    """Results by trial: in memory, and in a log if there is one.

    Args:
        log: an open log; None saves nothing.
        field: the key of the result in a line.
        found: the results so far, by trial.
    """

    def __init__(self, log: Log | None, field: str, found: dict[str, Any]) -> None:
        self.log, self.field, self.found = log, field, found

    @classmethod
    def open(cls: type[L], path: Path, kind: str, field: str, settings: Mapping[str, Any]) -> L:
        """The log at ``path``: a new one, or one with the same settings.

        Raises:
            MeasureError: its settings differ, or it cannot be read or written.
        """
        log, found = Log(path, to_line({kind: settings}), ROOM), {}
        with writing(path, "give another output"):
            if path.exists():
                given, found = read_log(path, kind, field)
                _require_same(path, kind, given, json.loads(json.dumps(settings)))
        log.open()
        return cls(log, field, found)

    def get(self, trial: Mapping[str, Any]) -> Any:
        """The result of a trial, or None."""
        return self.found.get(json.dumps(trial))

    def add(self, trial: Mapping[str, Any], result: Any) -> None:
        """Save the result of a trial."""
        self.found[json.dumps(trial)] = result
        if self.log is not None:
            self.log.add(to_line({**trial, self.field: result}))


def read_log(path: Path, kind: str, field: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings and results of a log.

    Raises:
        MeasureError: it is not a log of this kind.
    """
    lines = list(read_lines(path))
    settings = lines[0].get(kind) if lines else None
    if not isinstance(settings, dict):
        raise MeasureError(f"{path} is not the log of a {kind}; delete it, or give another output")
    trials = [(line, line.pop(field)) for line in lines[1:] if field in line]
    return settings, {json.dumps(trial): result for trial, result in trials}


def _require_same(path: Path, kind: str, given: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    changed = [
        f"another {name}" if name in ("model", "text") else f"{name} was {given.get(name)!r}"
        for name, value in now.items()
        if given.get(name) != value
    ]
    if changed:
        raise MeasureError(
            f"{path} is of another {kind} ({', '.join(changed)}); give the same again to go on "
            f"with it, or another output"
        )
