"""The package is read from the bottom up: no file needs one that needs it."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import rope_ext

PACKAGE = Path(rope_ext.__file__).parent


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of the package that a file names in its imports.

    Those within functions too, and those for type checkers only.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & set(known) or {node.module}
    return found & set(known) - {"rope_ext"}  # loaded before any of its files, by Python itself


def test_no_import_goes_round_in_a_circle_nor_behind_type_checking() -> None:
    known = modules()
    assert len(known) > 60
    graph = {name: imported(path, known) for name, path in known.items()}
    assert "rope_ext.position.map" in graph["rope_ext.position.tokens"]
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_relative_imports_are_not_in_use_which_the_walk_would_not_see() -> None:
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.ImportFrom) or node.level == 0
