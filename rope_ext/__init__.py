"""Extend the context of RoPE models in Hugging Face transformers with one line.

Public names are imported on first use (PEP 562), so that the command line can show its help
without importing torch.
"""

# First: from here on, a command imports nothing from the current folder.
import rope_ext.import_path

# isort: split
import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import rope_ext.requirements  # noqa: F401 - checks versions before others fail
from rope_ext.version import __version__ as __version__

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_HOMES = {
    alias.name: node.module or ""
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
    if not alias.name.startswith("_")
}
"""Maps each public name to the module that defines it."""
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name, f"rope_ext.{name}")
    if home == "rope_ext.patching":  # lower than saving, which it therefore cannot import
        importlib.import_module("rope_ext.saving.trainers")
    if name in _HOMES:
        value = getattr(importlib.import_module(home), name)
    elif not name.startswith("_") and importlib.util.find_spec(home) is not None:
        value = importlib.import_module(home)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # later lookups skip this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps ``rope_ext.methods`` a function when the subpackage of that name is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "methods" or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
