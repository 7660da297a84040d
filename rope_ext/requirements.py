"""Makes ``import rope_ext`` raise if torch or transformers is missing or too old."""

from __future__ import annotations

import importlib.metadata
import re

from rope_ext.version import __version__

MINIMUM = {"torch": "2.11", "transformers": "5.17"}
"""Keep in sync with pyproject.toml."""


def _release(version: str) -> tuple[int, ...]:
    """Return the major and minor version; a development version counts as its release."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def check() -> None:
    """Raise ImportError unless the required versions of the packages are installed."""
    faults = []
    for name, least in MINIMUM.items():
        try:  # importing torch takes seconds, and `rope-ext --help` does not need it
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "no version"
        if _release(found) < _release(least):
            faults.append(f"{name} {least} or later, but {found} is installed")
    if not faults:
        return
    packages = " ".join(f"'{name}>={version}'" for name, version in MINIMUM.items())
    raise ImportError(
        f"rope_ext {__version__} needs {' and '.join(faults)}. Install with: pip install -U "
        f"{packages}. If another package requires an older version (optimum installs an older "
        f"transformers), use rope_ext in an environment without that package"
    )


check()
