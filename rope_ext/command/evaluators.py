"""The way to ``rope_eval``, which depends on this package and is found when it is asked for."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from rope_ext.errors import MeasureError

PACKAGE = "rope_eval"


def find(module: str) -> ModuleType | None:
    """A module of ``rope_eval``, or None if that package is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        return None
    return importlib.import_module(f"{PACKAGE}.{module}")


def require(module: str) -> ModuleType:
    """A module of ``rope_eval``; raises MeasureError if that package is not installed."""
    found = find(module)
    if found is None:
        raise MeasureError(
            f"{PACKAGE}, which holds the evaluators, is not installed; it comes with rope-ext: "
            f'pip install "rope-ext[eval]"'
        )
    return found
