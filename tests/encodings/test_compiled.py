"""Encodings in forwards that torch.compile traces: whole, and what the eager path computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import rope_ext
from tests.helpers import biases, inputs, relative, scored
from tests.helpers.graphs import graphs, whole
from tests.helpers.models import tiny_llama
from tests.helpers.positions import EXACT, FAMILIES, NEW, logits, padded

pytestmark = pytest.mark.usefixtures("no_graphs")
MADE: dict[str, Callable[[nn.Module, str], nn.Module]] = {
    **dict.fromkeys(biases.FORMULAS, biases.patch),
    **dict.fromkeys(("xpos", "3d_rpe", "drope"), inputs.patch),
    **dict.fromkeys(relative.RELATIVE, relative.patch),
    **dict.fromkeys(scored.SIZES, scored.patch),
    "rerope and t5": lambda model, _: relative.randomized(
        rope_ext.patch(model, "rerope", factor=4, bias=rope_ext.T5(num_buckets=8, max_distance=20))
    ),
    "yarn and alibi": lambda model, _: rope_ext.patch(model, "yarn", factor=4, bias="alibi"),
    "every 2nd": lambda model, _: rope_ext.patch(model, "alibi", layers=[1]),
    "rerope in one": lambda model, _: rope_ext.patch(model, "rerope", factor=4, layers=[1]),
    "swan": lambda model, _: rope_ext.patch(model, "swan", every=2, window=7, factor=4),
    "yarn in one": lambda model, _: rope_ext.patch(model, "yarn", factor=4, layers=[1]),
}

FAST = ("alibi", "xpos", "shaw", "rerope and t5", "every 2nd", "swan")
ALL = [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in MADE]
GRAPHS = (*FAST, "fire", "cope", "rerope in one")  # one of each kind; the formulas are in ALL
BY_ROWS = {"xpos", *relative.RELATIVE, *scored.SIZES}  # what a graph has for few queries alone


def made(name: str) -> nn.Module:
    return MADE[name](tiny_llama(), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_decoding_in_a_static_cache_is_one_graph(name: str, ids) -> None:
    model = made(name)
    tokens, mask, _ = padded([ids[0, :60], ids[1, :49]], "left")
    given = {"attention_mask": mask, "pad_token_id": 0, **NEW}
    right = model.generate(tokens, **given)
    said = model.generate(tokens, cache_implementation="static", compile_config=whole(), **given)
    assert torch.equal(said, right)
    assert graphs() == 1
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in GRAPHS if name not in BY_ROWS])
def test_prompts_and_gradients_are_one_graph(name: str, ids) -> None:
    model = made(name)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled, ids), logits(model, ids), **EXACT)
    found = []
    for one in (model, compiled):
        model.zero_grad()
        one(ids, labels=ids, use_cache=False).loss.backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*found, **EXACT)
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("gemma2", "rerope"), ("gpt_oss", "alibi")])
def test_layers_with_a_window_are_in_the_graph_as_they_were(kind: str, name: str, ids) -> None:
    """They share a rotary module with those that are patched."""
    model = rope_ext.patch(FAMILIES[kind].model(), name, factor=4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled, ids), logits(model, ids), **EXACT)
    right = model.generate(ids, **NEW)
    said = model.generate(ids, cache_implementation="static", compile_config=whole(), **NEW)
    assert torch.equal(said, right)
    assert not counters["graph_break"]
