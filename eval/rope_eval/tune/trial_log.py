"""The log of what was tried and what came of it, from which a run that was killed goes on.

Its first line names the kind of run and its settings; every other line is one trial. A run is a
function of its seed and of these numbers: it is replayed, and what is known is not computed again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rope_eval.cases import repair
from rope_eval.folder import replace_file, writing
from rope_ext.errors import MeasureError

ROOM = "make room and give the same again to go on"


class TrialLog:
    """What was tried: in memory, and in a file that is only ever added to.

    Args:
        path: of the file; None keeps nothing.
        field: what a line calls that which came of it.
        found: what came of it, by what was tried.
    """

    def __init__(self, path: Path | None, field: str, found: dict[str, Any]) -> None:
        self.path, self.field, self.found = path, field, found

    @classmethod
    def open(cls, path: Path, kind: str, field: str, settings: Mapping[str, Any]) -> TrialLog:
        """The log at ``path``: a new one, or one of the same settings.

        Raises:
            MeasureError: it is of other settings, or cannot be read or written.
        """
        with writing(path, "give another output"):
            if not path.exists():
                replace_file(path, (json.dumps({kind: settings}) + "\n").encode())
                return cls(path, field, {})
            given, found = read_log(path, kind, field)
            _require_same(path, kind, given, json.loads(json.dumps(settings)))
            repair(path)
        return cls(path, field, found)

    def get(self, what: Mapping[str, Any]) -> Any:
        """What came of it, if it was tried."""
        return self.found.get(json.dumps(what))

    def add(self, what: Mapping[str, Any], came: Any) -> None:
        """Write down what came of it."""
        self.found[json.dumps(what)] = came
        if self.path is not None:
            text = json.dumps({**what, self.field: came}) + "\n"
            with writing(self.path, ROOM), self.path.open("a", encoding="utf-8") as file:
                file.write(text)


def read_log(path: Path, kind: str, field: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings and trials of a log, without the line that a killed run left unfinished.

    Raises:
        MeasureError: it is none.
    """
    try:
        text, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
        head, *lines = map(json.loads, text.split("\n"))
        trials = [(line, line.pop(field)) for line in lines]
        return dict(head[kind]), {json.dumps(what): came for what, came in trials}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise MeasureError(
            f"{path} is not the log of a {kind}; delete it, or give another output"
        ) from None


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
