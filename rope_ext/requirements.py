"""Raises at ``import rope_ext`` where torch or transformers is missing or too old."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from pathlib import Path

from rope_ext.version import __version__

MINIMUM = {"torch": "2.11", "transformers": "5.17"}
"""As in pyproject.toml."""


def _release(version: str) -> tuple[int, ...]:
    """Major and minor number; a development version counts as its release."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _installed(name: str) -> str | None:
    """The version of a package, from the metadata beside it, or else by importing it.

    Importing torch takes seconds, and `rope-ext --help` does not need it.
    """
    spec = importlib.util.find_spec(name)
    for folder in spec.submodule_search_locations or () if spec else ():
        beside = [str(Path(folder).parent)]
        for distribution in importlib.metadata.distributions(name=name, path=beside):
            return distribution.version
    try:
        return str(importlib.import_module(name).__version__)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None


def check() -> None:
    """Raise ImportError unless the packages are there, in the versions that are needed."""
    found = {name: _installed(name) for name in MINIMUM}
    faults = [
        f"{name} {MINIMUM[name]} or later, but "
        f"{'it is not installed' if version is None else f'{version} is installed'}"
        for name, version in found.items()
        if version is None or _release(version) < _release(MINIMUM[name])
    ]
    if not faults:
        return
    packages = " ".join(f"'{name}>={version}'" for name, version in MINIMUM.items())
    raise ImportError(
        f"rope_ext {__version__} needs {' and '.join(faults)}. Install with: pip install -U "
        f"{packages}. If another package requires an older version (optimum installs an older "
        f"transformers), use rope_ext in an environment without that package"
    )


check()
