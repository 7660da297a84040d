"""Encodings in forwards that torch.compile traces: whole, and what the eager path computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import rope_ext
from tests.helpers import biases, inputs, relative, scored
from tests.helpers.graphs import graphs, static, whole
from tests.helpers.models import tiny_llama
from tests.helpers.positions import EXACT, FAMILIES, NEW, decoded, logits, padded
from tests.helpers.promises import pieces_of_rows_are_as_alone

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


@pytest.mark.parametrize("name", ALL)
def test_what_a_graph_holds_is_what_the_eager_path_computes(name: str, ids, in_tensors) -> None:
    """A prompt, a chunk, a few tokens and one at a time, in rows that are padded on the left."""
    model = made(name)
    rows = [ids[0, :75], ids[1, :64]]
    pieces_of_rows_are_as_alone(model, rows, "left", (40, 25, 5, *[1] * 5), static(model))
    right = logits(model, ids)
    torch.testing.assert_close(decoded(model, ids, [12, *[1] * 78], static(model)), right, **EXACT)


@pytest.mark.parametrize("tokens", [20, 5])
def test_positions_further_apart_than_there_are_slots(tokens: int, ids, in_tensors) -> None:
    """A bias that stays the same from some distance on is known there; others are refused."""
    positions = torch.cat((torch.arange(30), torch.arange(30) + 120))[None, : 30 + tokens]
    for name in ("rerope and t5", "alibi"):
        model = made(name)
        cache, given = static(model), {"position_ids": positions[:, :30]}
        logits(model, ids[:1, :30], past_key_values=cache, **given)
        rest = {"position_ids": positions[:, 30:], "past_key_values": cache}
        if name == "alibi":
            with pytest.raises((rope_ext.UnsupportedModelError, RuntimeError), match="apart by"):
                logits(model, ids[:1, 30 : 30 + tokens], **rest)
        else:
            alone = {"attention_mask": torch.ones_like(positions), "position_ids": positions}
            right = logits(model, ids[:1, : 30 + tokens], use_cache=False, **alone)
            said = logits(model, ids[:1, 30 : 30 + tokens], **rest)
            torch.testing.assert_close(said, right[:, 30:], **EXACT)


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
