"""Shared by all tests: a tiny random Llama, trained (so to say) on 64 tokens."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM

# Else a name that is no folder is asked for five times, 23 s. huggingface_hub reads it when it is
# imported, which conftest.py of a subfolder may do before pytest_configure is called.
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_configure() -> None:
    gc.disable()  # until all tests are collected: what is imported stays, and walking it takes long


MANY = 6
VERY_MANY = 24


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Of tests with many cases a third or a fifth is fast; the rest is slow."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.get_closest_marker("slow") and not item.get_closest_marker("every"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        if len(cases) > MANY:
            share = 5 if len(cases) > VERY_MANY else 3
            fast = chosen([values(case) for case in cases], math.ceil(len(cases) / share))
            for index in set(range(len(cases))) - fast:
                cases[index].add_marker("slow")
                cases[index].add_marker("sweep")


def values(case: pytest.Item) -> set[tuple[str, str]]:
    """Return a case's parameters and their values, as text."""
    callspec = getattr(case, "callspec", None)  # none: cases of parameterized, which are methods
    return {(name, repr(value)) for name, value in callspec.params.items()} if callspec else set()


def chosen(cases: Sequence[set[tuple[str, str]]], count: int) -> set[int]:
    """Return the indices of ``count`` cases: as many values as possible, far apart in the list.

    It goes by values and order alone, so that another name of a test or case changes nothing.
    """
    golden = (math.sqrt(5) - 1) / 2  # multiples of it, modulo 1, lie far apart
    order = sorted(range(len(cases)), key=lambda index: index * golden % 1)
    found: list[int] = []
    seen: set[tuple[str, str]] = set()
    while len(found) < count:
        left = [index for index in order if index not in found]
        best = max(left, key=lambda index: len(cases[index] - seen))  # of equals, the first
        found.append(best)
        seen |= cases[best]
    return set(found)


def pytest_collection_finish() -> None:
    """In the processes that run tests: the one that hands them out needs no transformers."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    gc.freeze()  # modules and tests stay to the end, and need not be looked through again
    # A tiny model is thousands of objects: Python's default of 700 walks them while it is built.
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.fixture
def model() -> LlamaForCausalLM:
    from tests.helpers.models import tiny_llama

    return tiny_llama()


SHORT = ("encodings", "methods", "positions")
"""Folders whose tests compute every pair of tokens by a formula."""


@pytest.fixture
def ids(request: pytest.FixtureRequest) -> torch.Tensor:
    """Two rows of 160 tokens, of 90 in some folders, ids 3 and up."""
    import torch

    tokens = 90 if request.path.parent.name in SHORT else 160
    return torch.randint(3, 128, (2, tokens), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods that the test registers are unknown after it."""
    from rope_ext.methods import kinds

    monkeypatch.setattr(kinds, "REGISTRY", {**kinds.REGISTRY})


@pytest.fixture
def in_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph would hold, run as it is: the same operations, without waiting for dynamo."""
    from rope_ext.position.install import Installed

    monkeypatch.setattr(Installed, "traceable", lambda self: True)


@pytest.fixture
def no_graphs() -> None:
    """What dynamo has compiled and counted is forgotten, and no cache of another test lives on."""
    import torch
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    gc.collect()  # a patch marks every cache, with a hook that leaves, and recompiles, as they go
