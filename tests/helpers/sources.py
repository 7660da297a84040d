"""Source files of this repository, each parsed once for all tests that read them."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = ("rope_ext", "rope_eval", "recipes", "lab", "tests")
PACKAGES = (ROOT / "rope_ext", ROOT / "eval" / "rope_eval")


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file, in the order of ``ast.walk``."""
    return tuple(ast.walk(parse(path)))
