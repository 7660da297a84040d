"""The house as its plan says: no import runs in a circle, and none leads to a higher room."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "rope_ext"

ROOMS = (
    "errors swapping under_way version",
    "requirements",
    "methods",
    "encodings",
    "options",
    "record",
    "swapping",
    "under_way",
    "caches",
    "rotary",
    "stale",
    "saving",
    "attention",
    "position",
    "apply",
    "patching",
    "loading",
    "plots.style",
    "measure plots.results plots.calibration",
    "advice",
    "engines",
    "plots",
    "rope_ext",
    "cli lm_eval",
)
"""From the lowest up: packages and modules, those of one line side by side.

A part of a package that is named by itself has its own place; ``rope_ext`` is the public face.
"""

Imports = dict[str, set[str]]


def imported(source: str, modules: set[str]) -> set[str]:
    """Those of ``modules`` that ``source`` imports, also for annotations and within functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else str(node.module) for name in names}
    return found & modules


def imports_of_the_package() -> Imports:
    sources = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        sources[".".join(parts).removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return {name: imported(source, set(sources)) - {name} for name, source in sources.items()}


def circles(imports: Imports) -> list[set[str]]:
    """The largest sets of modules each of which leads to every other one."""
    reached = {name: set(direct) for name, direct in imports.items()}
    for middle in imports:
        for far in reached.values():
            if middle in far:
                far |= reached[middle]
    found = []
    for name, far in reached.items():
        circle = {other for other in far if name in reached[other]}
        if circle and circle not in found:
            found.append(circle)
    return found


def room(module: str) -> int:
    """The place of a module in ``ROOMS``."""
    inner = module.removeprefix("rope_ext.")
    places = {name: place for place, names in enumerate(ROOMS) for name in names.split()}
    fitting = [name for name in places if inner == name or inner.startswith(f"{name}.")]
    assert fitting, f"{module} is in no room: say where it belongs"
    return places[max(fitting, key=len)]


@pytest.mark.parametrize(
    "source",
    [
        "import rope_ext.a",
        "from rope_ext import a",
        "from rope_ext.a import b",
        "def f():\n    from rope_ext.a import b",
        "if TYPE_CHECKING:\n    from rope_ext.a import b",
    ],
)
def test_every_way_to_import_is_seen(source: str) -> None:
    assert imported(source, {"rope_ext", "rope_ext.a"}) == {"rope_ext.a"}


def test_circles_are_found_whatever_their_length() -> None:
    imports = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert circles(imports) == [{"a", "b", "c"}, {"d", "e"}]


def test_no_import_runs_in_a_circle() -> None:
    assert circles(imports_of_the_package()) == []


def test_no_room_imports_a_higher_one() -> None:
    upward = {
        (name, other)
        for name, others in imports_of_the_package().items()
        for other in others
        if room(other) > room(name)
    }
    assert upward == set()
