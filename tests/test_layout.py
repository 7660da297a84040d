"""Tests as a reader finds them: what several files share lies where nothing is tested."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from tests.helpers.sources import nodes

TESTS = Path(__file__).parent
NAMES = {path.stem for path in TESTS.rglob("test_*.py")} | {"conftest"}


def imported_tests(nodes: Iterable[ast.AST]) -> list[str]:
    """What a file imports from files of tests or fixtures, at its top or within a function."""
    names = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module or ''}.{alias.name}" for alias in node.names]
    return [name for name in names if NAMES & set(name.split("."))]


def test_no_file_imports_a_file_of_tests_or_fixtures() -> None:
    files = sorted(TESTS.rglob("*.py"))
    found = {str(path.relative_to(TESTS)): imported_tests(nodes(path)) for path in files}
    assert {name: modules for name, modules in found.items() if modules} == {}


def test_every_folder_is_a_package() -> None:
    """So two files may have the same name, and ``tests.helpers`` is found from everywhere."""
    folders = {path.parent for path in TESTS.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []
