"""Prints the lowest version of each runtime dependency and of each of the eval extra.

    python .ci/floors.py [--check] [package ...]

as pip takes them, from pyproject.toml; given packages are left out. With --check, nothing is
printed, and it fails unless these versions are installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version


def floors(project: dict[str, Any], without: Iterable[str] = ()) -> list[str]:
    """Return ``name==version`` for each dependency in the table ``project``.

    Raises ValueError for one without a lowest version.
    """
    left_out = {canonicalize_name(name) for name in without}
    found = []
    for text in (*project["dependencies"], *project["optional-dependencies"]["eval"]):
        requirement = Requirement(text)
        if canonicalize_name(requirement.name) in left_out:
            continue
        lowest = [part.version for part in requirement.specifier if part.operator == ">="]
        if len(lowest) != 1:
            raise ValueError(
                f"{text!r} in pyproject.toml has no lowest version; write name>=version"
            )
        found.append(f"{requirement.name}=={lowest[0]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the lowest versions of the dependencies.")
    parser.add_argument("--check", action="store_true", help="fail unless they are installed")
    parser.add_argument("without", nargs="*", help="packages to leave out")
    given = parser.parse_args()
    file = Path(__file__).parents[1] / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    lowest = floors(project, given.without)
    if not given.check:
        print(*lowest)
        return
    for name, wanted in (word.split("==") for word in lowest):
        if Version(version(name)) != Version(wanted):
            raise SystemExit(f"{name} {version(name)} is installed, not {wanted}")


if __name__ == "__main__":
    main()
