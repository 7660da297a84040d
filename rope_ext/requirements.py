"""Makes ``import rope_ext`` raise if torch or transformers is missing or too old."""

import importlib.metadata
import re

from rope_ext.version import __version__

MINIMUM = {"torch": "2.11", "transformers": "5.17"}
"""Keep in sync with pyproject.toml."""


def _release(version: str) -> tuple[int, ...]:
    """Return the major and minor version; a development version counts as its release."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


_faults = []
for _name, _least in MINIMUM.items():
    try:  # importing torch takes seconds, and `rope-ext --help` does not need it
        _found = importlib.metadata.version(_name)
    except importlib.metadata.PackageNotFoundError:
        _found = "no version"
    if _release(_found) < _release(_least):
        _faults.append(f"{_name} {_least} or later, but {_found} is installed")
if _faults:
    _packages = " ".join(f"'{name}>={version}'" for name, version in MINIMUM.items())
    raise ImportError(
        f"rope_ext {__version__} needs {' and '.join(_faults)}. Install with: pip install -U "
        f"{_packages}, without packages that require older ones, such as optimum"
    )
