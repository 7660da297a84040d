"""Tests as a reader finds them: what several files share lies where nothing is tested."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def imported_tests(source: str) -> list[str]:
    """What ``source`` imports from files of tests or fixtures, at its top or within a function."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module or ''}.{alias.name}" for alias in node.names]
    tests = {path.stem for path in TESTS.rglob("test_*.py")} | {"conftest"}
    return [name for name in names if tests & set(name.split("."))]


@pytest.mark.parametrize(
    "line",
    [
        "from conftest import ids",
        "import tests.test_cli",
        "from tests.positions import test_caches",
        "from tests.positions.test_caches import steps",
        "def f():\n    from .test_cli import call",
        "from . import conftest",
    ],
)
def test_imports_of_tests_are_found(line: str) -> None:
    assert imported_tests(line)


def test_no_file_imports_a_file_of_tests_or_fixtures() -> None:
    files = sorted(TESTS.rglob("*.py"))
    found = {
        str(path.relative_to(TESTS)): imported_tests(path.read_text("utf-8")) for path in files
    }
    assert {name: modules for name, modules in found.items() if modules} == {}


def test_every_folder_is_a_package() -> None:
    """So two files may have the same name, and ``tests.helpers`` is found from everywhere."""
    folders = {path.parent for path in TESTS.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []
