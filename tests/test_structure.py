"""The house as its plan says: no import runs in a circle, and none leads to a higher room."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Sequence

from tests.helpers.sources import OURS, PACKAGES, ROOT, nodes

ROOMS = {
    "rope_ext": (
        "errors import_path quoting version",
        "requirements engine_names methods",
        "encodings",
        "options",
        "config attention",
        "rotary",
        "position",
        "config.writing",
        "apply",
        "saving.gguf_header",
        "saving.gguf_source",
        "advice.recommendation",
        "patching",
        "saving",
        "engines command",
        "advice",
        "rope_ext",
        "cli",
        "__main__",
    ),
    "rope_eval": (
        "rope_eval",
        "embedder folder forward options plots.style progress server sliding data",
        "cases settings",
        "systems versions",
        "tasks",
        "run",
        "reports plots.results",
        "engines evaluate tune",
        "command lm_eval plots",
        "cli",
    ),
}
"""Of both packages from the lowest up: folders and single files, those of one line side by side.

A part of a folder that is named by itself has its own place; ``rope_ext`` is the public face. All
of ``rope_eval`` is above all of ``rope_ext``.
"""

FOLDERS = (*PACKAGES, *(ROOT / name for name in ("recipes", "lab", "tests")))

Imports = dict[str, set[str]]


def imported(nodes: Iterable[ast.AST], modules: set[str]) -> set[str]:
    """Those of ``modules`` that a file imports, also for annotations and within functions."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else str(node.module) for name in names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found |= {str(name.value) for name in node.args[:1] if isinstance(name, ast.Constant)}
    return found & modules


@functools.cache
def imports_of_the_packages() -> Imports:
    files = {}
    for package in PACKAGES:
        for path in package.rglob("*.py"):
            parts = path.relative_to(package.parent).with_suffix("").parts
            files[".".join(parts).removesuffix(".__init__")] = path
    return {name: imported(nodes(path), set(files)) - {name} for name, path in files.items()}


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


def room(module: str) -> tuple[int, int]:
    """The package of a module, and its place in ``ROOMS``."""
    package, _, inner = module.partition(".")
    rooms = ROOMS[package]
    places = {name: place for place, names in enumerate(rooms) for name in names.split()}
    fitting = [n for n in places if (inner or package) == n or inner.startswith(f"{n}.")]
    assert fitting, f"{module} is in no room: say where it belongs"
    return list(ROOMS).index(package), places[max(fitting, key=len)]


def test_no_import_runs_in_a_circle() -> None:
    assert circles(imports_of_the_packages()) == []


def test_no_room_imports_a_higher_one() -> None:
    upward = {
        (name, other)
        for name, others in imports_of_the_packages().items()
        for other in others
        if room(other) > room(name)
    }
    assert not upward


def test_every_module_has_a_room_and_every_room_is_there() -> None:
    modules = set(imports_of_the_packages())
    for module in modules:
        room(module)
    for package, rooms in ROOMS.items():
        names = {f"{package}.{name}" for line in rooms for name in line.split() if name != package}
        assert names <= modules


def test_no_file_uses_what_is_private_to_another() -> None:
    """Names that begin with an underscore are used in the file that defines them alone."""
    files = [path for folder in FOLDERS for path in folder.rglob("*.py")]
    assert [f"{path.name}: {name}" for path in files for name in borrowed(nodes(path))] == []


def borrowed(tree: Sequence[ast.AST]) -> Iterator[str]:
    """Private names of other modules of ours, imported or read as attributes of a module."""
    modules = set()
    for node in tree:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            modules |= {alias.asname or alias.name for alias in node.names}
            yield from filter(private, (alias.name for alias in node.names))
    for node in tree:
        if isinstance(node, ast.Attribute) and private(node.attr):
            value = ast.unparse(node.value)
            yield from [f"{value}.{node.attr}"] if value in modules else []


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
