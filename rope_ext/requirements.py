"""Raises at ``import rope_ext`` where torch or transformers is missing or too old."""

from __future__ import annotations

import importlib
import re

from rope_ext.version import __version__

MINIMUM = {"torch": "2.11", "transformers": "5.17"}
"""As in pyproject.toml."""


def _release(version: str) -> tuple[int, ...]:
    """Major and minor number; a development version counts as its release."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _installed(name: str) -> str | None:
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
