"""docs/hidden-state.md has every piece of hidden state, and nothing keeps any elsewhere."""

from __future__ import annotations

import ast
import copy
import functools
import re
import threading
from pathlib import Path

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from rope_ext.position import install  # noqa: F401 - it registers all
from rope_ext.position.learned import NAMES
from rope_ext.rotary.context import forward_context
from rope_ext.rotary.swapping import mark_hooked, undo
from tests.helpers.sources import PACKAGES, nodes

ROOT = Path(__file__).parents[1]
LISTED = set(re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/hidden-state.md").read_text(), re.M))


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


def test_all_that_a_thread_is_in_the_middle_of_is_in_one_place_and_listed() -> None:
    users = {
        file
        for file, node in parsed()
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "threading.local"
    }
    assert users == {"rotary/context.py"}
    assert {*vars(forward_context)} <= LISTED


def test_another_thread_is_in_the_middle_of_something_else() -> None:
    seen = []
    forward_context.stack.append("mine")
    try:
        thread = threading.Thread(target=lambda: seen.append(list(forward_context.stack)))
        thread.start()
        thread.join()
    finally:
        forward_context.stack.clear()
    assert seen == [[]]


def test_classes_are_swapped_in_one_place() -> None:
    def assigns_class(node: ast.AST) -> bool:
        targets = node.targets if isinstance(node, ast.Assign) else []
        return any(isinstance(t, ast.Attribute) and t.attr == "__class__" for t in targets)

    assert {file for file, node in parsed() if assigns_class(node)} == {
        "rotary/swapping.py",
        "__init__.py",  # of the package itself
        "position/forward.py",  # a layer of a cache that is emptied
    }
    assert {name for name in LISTED if re.fullmatch(r"[A-Z][a-z]\w*", name)} == {"Hooked"}


def test_every_lock_is_listed() -> None:
    made = {
        target.id
        for _, node in parsed()
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if re.search(r"Lock\b", ast.unparse(node.value.func)) and isinstance(target, ast.Name)
    }
    assert made and made <= LISTED


def test_every_name_in_the_registries_of_others_is_listed() -> None:
    names = {*AttentionInterface().valid_keys(), *AttentionMaskInterface().valid_keys()}
    ours = {name for name in names if name.startswith("rope_ext")}
    schemas = torch._C._jit_get_all_schemas()
    ours |= {schema.name for schema in schemas if schema.name.startswith("rope_ext::")}
    assert ours == {name for name in LISTED if name.startswith("rope_ext")} - {*NAMES}


class Said:
    """Some class of others."""


def test_a_marked_class_is_that_of_its_object_alone_and_is_taken_back() -> None:
    one, other, changes = Said(), Said(), []
    mark_hooked(one, changes)
    mark_hooked(one, changes)  # not on top of itself
    assert isinstance(one, Said) and type(one).__name__ == "Said" and type(one) is not Said
    assert type(copy.deepcopy(one)) is type(one) and type(other) is Said
    undo(changes)
    assert type(one) is Said
