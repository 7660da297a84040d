"""docs/hidden-state.md has every piece of hidden state, and nothing keeps any elsewhere."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from rope_ext.position import install  # noqa: F401 - it registers all
from tests.helpers.sources import PACKAGES, nodes

ROOT = Path(__file__).parents[1]
ENTRIES = [
    re.findall(r"`([^`]+)`", line.split("|")[1])
    for line in (ROOT / "docs/hidden-state.md").read_text().splitlines()
    if line.startswith("|") and "`" in line
]
LISTED = {name for entry in ENTRIES for name in entry}


def test_the_entries_are_few() -> None:
    assert len(ENTRIES) <= 6


@functools.cache
def parsed() -> list[tuple[str, ast.AST]]:
    """Every node of every file of both packages."""
    return [
        (str(path.relative_to(package)), node)
        for package in PACKAGES
        for path in package.rglob("*.py")
        for node in nodes(path)
    ]


def test_every_name_put_on_the_objects_of_others_is_listed() -> None:
    names = {
        name
        for _, node in parsed()
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for name in re.findall(r"^_rope_ext\w*$", node.value)
    }
    assert names == {name for name in LISTED if name.startswith("_rope_ext")}


def test_every_name_in_the_registries_of_others_is_listed() -> None:
    names = {*AttentionInterface().valid_keys(), *AttentionMaskInterface().valid_keys()}
    ours = {name for name in names if name.startswith("rope_ext")}
    schemas = torch._C._jit_get_all_schemas()
    ours |= {schema.name for schema in schemas if schema.name.startswith("rope_ext::")}
    assert ours == {name for name in LISTED if name.startswith("rope_ext")}
