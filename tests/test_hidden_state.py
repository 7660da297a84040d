"""docs/hidden-state.md has every piece of hidden state, and nothing keeps any elsewhere."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from rope_ext.position import install  # noqa: F401 - it registers all
from tests.helpers.sources import OURS, PACKAGES, nodes, parse

ROOT = Path(__file__).parents[1]
ENTRIES = [
    re.findall(r"`([^`]+)`", line.split("|")[1])
    for line in (ROOT / "docs/hidden-state.md").read_text().splitlines()
    if line.startswith("|") and "`" in line
]
LISTED = {name for entry in ENTRIES for name in entry}


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


PROCESS_WIDE = {
    name
    for line in (ROOT / "docs/hidden-state.md")
    .read_text()
    .split("## For the whole process")[1]
    .splitlines()
    if line.startswith("| ")
    for name in re.findall(r"`([^`]+)`", line.split("|")[1])
}
CACHES = ("cache", "lru_cache")
MUTATORS = ("append", "add", "update", "setdefault", "pop", "clear", "extend", "remove", "discard")
SETTERS = ("register", "register_backend", "setLevel", "addFilter", "disable_progress_bar")
KEPT = ("threading.Lock", "threading.RLock", "WeakKeyDictionary", "WeakValueDictionary")


def test_everything_that_a_process_keeps_is_listed() -> None:
    """Caches, changed module variables, locks, thread-locals, and what others' code is given."""
    found = {name for package in PACKAGES for path in package.rglob("*.py") for name in kept(path)}
    assert found <= LISTED
    assert found >= PROCESS_WIDE


def kept(path: Path) -> Iterator[str]:
    """Return the names of what one file keeps for its process, outside of any object of ours."""
    tree = parse(path)
    own = set(assigned(tree.body))
    others = set(of_others(path))
    at_import = {node for statement in tree.body if runs(statement) for node in ast.walk(statement)}
    for node in nodes(path):
        match node:
            case ast.FunctionDef() if any(bare(each) in CACHES for each in node.decorator_list):
                yield node.name
            case ast.ClassDef() if "threading.local" in map(ast.unparse, node.bases):
                yield from (
                    x for x, value in assigned(tree.body).items() if bare(value) == node.name
                )
            case ast.Assign(targets=[ast.Name(name)]) if node in tree.body:
                called = ast.unparse(node.value).partition("(")[0]
                if called in KEPT:
                    yield name
            case ast.Global():
                yield from node.names
            case ast.Attribute(attr=attr, value=ast.expr()) if attr in SETTERS:
                if root(node) in others:
                    yield ast.unparse(node.value).replace("'", '"')
            case ast.Call(func=ast.Name(name)) if name in SETTERS and name in others:
                yield name
        for place in changed(node):
            name = root(place)
            if name in others and not isinstance(place, ast.Name):
                yield ast.unparse(place).replace("'", '"')
            elif name in own and node not in at_import:
                yield name


def changed(node: ast.AST) -> Iterator[ast.expr]:
    """Return what a node changes: the dict of an item, an attribute, an object by its method."""
    if isinstance(node, (ast.Assign, ast.Delete)):
        for target in node.targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, (ast.Attribute, ast.Subscript)):
                    yield each
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name() as name, attr=attr)) if attr in MUTATORS:
            yield name
        case (
            ast.Call(args=[*_, ast.Name() as holder, ast.Constant(value=str(name))])
            | ast.Call(args=[ast.Name() as holder, ast.Constant(value=str(name)), _])
        ) if "setattr" in ast.unparse(node):
            yield ast.Attribute(value=holder, attr=name)


def assigned(body: list[ast.stmt]) -> dict[str, ast.expr]:
    """Return the variables of a module and their first values."""
    found: dict[str, ast.expr] = {}
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(value, ast.expr):
            found |= {each.id: value for each in targets if isinstance(each, ast.Name)}
    return found


def of_others(path: Path) -> Iterator[str]:
    """Return the names that a file imports from other packages."""
    for node in nodes(path):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                module = (getattr(node, "module", None) or alias.name).partition(".")[0]
                if module not in OURS:
                    yield (alias.asname or alias.name).partition(".")[0]


def root(node: ast.AST) -> str:
    """Return the name that a chain of attributes, items and calls begins with."""
    while not isinstance(node, ast.Name):
        node = getattr(node, "func", None) or getattr(node, "value", None) or ast.Name("")
    return node.id


def runs(statement: ast.stmt) -> bool:
    """Whether a statement of a module is over once the module is imported."""
    return not isinstance(statement, (ast.FunctionDef, ast.ClassDef))


def bare(node: ast.AST) -> str:
    """Return the last name of a decorator or call: ``lru_cache`` for ``functools.lru_cache(4)``."""
    return ast.unparse(node).partition("(")[0].rpartition(".")[2]
