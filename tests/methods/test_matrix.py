"""Every method and encoding: its formula, decoding, padding, documents, saving, compiling.

A tiny model of transformers that is not patched attends by the formula, dense and in float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from rope_ext.attention import bands
from rope_ext.methods import all_encodings, all_methods
from tests.helpers.encodings import parameters
from tests.helpers.graphs import graphs, whole
from tests.helpers.positions import CACHES, EXACT, FAMILIES, NEW, Family, logits, padded
from tests.helpers.promises import (
    an_adapter_trains_it_along,
    checkpointing_changes_nothing,
    decodes_as_it_reads,
    documents_are_apart,
    generates_as_it_recomputes,
    is_saved_and_taken_out,
    learns,
    pieces_of_rows_are_as_alone,
    rows_are_as_alone,
    sees_nothing_later,
)
from tests.methods.cases import CASES, DISTINCT, LEARNING, ONE_OF_EACH, PAIRS, Case

STEPS = (40, 1, 1, 30, 1, 1, 1, 15)
NAMED = {CASES[key].name: key for key in reversed(DISTINCT)}.values()
"""The first case of every name."""
PROJECTIONS = ("proj", "query_key_value", "qkv")
DECODED = [
    *("rerope", "alibi", "xpos", "3d_rpe", "cope", "swan", "t5 over rerope", "rerope in one layer"),
    "yarn and ssmax",
]
"""Those that change what enters the layers, or compute positions from it, break the graph."""


def test_every_method_and_encoding_is_here() -> None:
    registered = {cls.name for cls in (*all_methods(), *all_encodings())}
    assert registered <= {case.name for case in CASES.values()}


def is_the_formula(case: Case, family: Family, plain: nn.Module, model: nn.Module, ids) -> None:
    """Logits, and gradients of what is learned and of every projection, in blocks of queries."""
    untouched = logits(plain, ids)
    names = [n for n, _ in plain.named_parameters() if n.endswith("weight")]
    names = [n for n in names if any(part in n for part in PROJECTIONS)]
    learned = list(parameters(model).values())
    weights = [[*learned, *map(one.get_parameter, names)] for one in (model, plain)]
    with case.formula(plain, family, model, torch.arange(ids.shape[1])):
        right = plain(ids).logits
        expected = torch.autograd.grad(right.sin().sum(), weights[1], retain_graph=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bands, "ROWS", 32)
        found = model(ids).logits
        gradients = torch.autograd.grad(found.sin().sum(), weights[0])
    torch.testing.assert_close(found, right, **EXACT)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-2, rtol=2e-3)  # sums over 16,000 pairs
    assert (found - untouched).abs().max() > 0.01


@pytest.mark.every
@pytest.mark.parametrize("key", CASES)
def test_logits_and_gradients_are_those_of_the_formula(key: str, ids) -> None:
    case = CASES[key]
    is_the_formula(case, case.family, case.plain(), case.patched(), ids)


def pieces_are_as_alone(model: nn.Module, cache: str, ids) -> None:
    """The first piece of the last row is padding."""
    rows = [ids[0, :75], ids[1, :64], ids[1, 3:33]]
    made = CACHES[cache](model.config)
    pieces_of_rows_are_as_alone(model, rows, "left", (40, 25, 5, *[1] * 5), made)


@pytest.mark.parametrize(
    ("kind", "key", "cache"), [(*pair, list(CACHES)[n % 4]) for n, pair in enumerate(PAIRS)]
)
def test_all_of_it_holds_in_other_families(kind: str, key: str, cache: str, ids) -> None:
    family = FAMILIES[kind]
    model = CASES[key].patch(family.model(), **family.options)
    is_the_formula(CASES[key], family, family.model(), model, ids)
    decodes_as_it_reads(model, cache, ids, STEPS)
    pieces_are_as_alone(model, cache, ids)
    if "gpt_oss" not in kind:  # does not separate documents
        documents_are_apart(model, ids[:1, :70], (30, 40))


def in_turn(options: Iterable[str]) -> list[tuple[str, str]]:
    """Every case with one of the options, those of every kind with all of them."""
    every = list(options)
    return [
        (key, option)
        for n, key in enumerate(DISTINCT)
        for option in (every if key in ONE_OF_EACH else [every[n % len(every)]])
    ]


@pytest.mark.parametrize(("key", "cache"), in_turn(CACHES))
def test_cached_decoding_equals_recomputation(key: str, cache: str, ids) -> None:
    decodes_as_it_reads(CASES[key].patched(), cache, ids, STEPS)


@pytest.mark.parametrize(("key", "side"), in_turn(["left", "right"]))
def test_a_row_of_a_batch_gives_what_it_gives_alone(key: str, side: str, ids) -> None:
    rows_are_as_alone(CASES[key].patched(), side, ids)


@pytest.mark.parametrize(("key", "cache"), zip(DISTINCT, itertools.cycle(CACHES), strict=False))
def test_padded_rows_in_pieces_give_what_they_give_alone(key: str, cache: str, ids) -> None:
    pieces_are_as_alone(CASES[key].patched(), cache, ids)


@pytest.mark.parametrize("key", DISTINCT)
def test_documents_are_apart_and_later_tokens_unseen(key: str, ids) -> None:
    model = CASES[key].patched()
    documents_are_apart(model, ids[:1, :70], (30, 40))
    sees_nothing_later(model, ids)


@pytest.mark.parametrize("more", [{}, {"num_beams": 2}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("key", ONE_OF_EACH)
def test_generation_is_that_of_recomputation(key: str, more: dict[str, Any], ids) -> None:
    generates_as_it_recomputes(CASES[key].patched(), ids[:, :66], **more)


@pytest.mark.parametrize("key", CASES)
def test_saved_reloaded_and_taken_out(key: str, ids, tmp_path: Path) -> None:
    is_saved_and_taken_out(CASES[key].plain(), CASES[key].patch, ids, tmp_path)


@pytest.mark.parametrize("key", LEARNING)
def test_it_is_trained(key: str, ids, tmp_path: Path) -> None:
    """By an optimizer, and along with an adapter."""
    model = CASES[key].patched()
    learns(model, parameters(model), ids)
    modules = {part for name in parameters(model) for part in name.split(".") if "rope_ext" in part}
    an_adapter_trains_it_along(CASES[key].plain(), CASES[key].patch, sorted(modules), ids, tmp_path)


@pytest.mark.parametrize("key", LEARNING)
def test_gradients_with_checkpointing(key: str, ids) -> None:
    checkpointing_changes_nothing(CASES[key].patched, ids)


@pytest.mark.parametrize("key", ONE_OF_EACH)
def test_half_precision_and_autocast_are_close(key: str, ids) -> None:
    """A bfloat16 number has two or three digits."""
    model = CASES[key].patched()
    right = logits(model, ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = model(ids, labels=ids)
    cast.loss.backward()
    assert all(p.grad.isfinite().all() for p in parameters(model).values())
    for found in (cast.logits, logits(model.to(torch.bfloat16), ids)):
        assert (found.float() - right).abs().mean() < 0.08 * right.abs().mean()


@pytest.mark.slow
@pytest.mark.parametrize("key", NAMED)
def test_compiled_it_gives_the_same(key: str, ids, no_graphs) -> None:
    model = CASES[key].patched()
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(logits(compiled, ids), logits(model, ids), **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("key", DECODED)
def test_decoding_in_a_static_cache_is_one_graph(key: str, ids, no_graphs) -> None:
    model = CASES[key].patched()
    tokens, mask, _ = padded([ids[0, :60], ids[1, :49]], "left")
    given = {"attention_mask": mask, "pad_token_id": 0, **NEW}
    right = model.generate(tokens, **given)
    said = model.generate(tokens, cache_implementation="static", compile_config=whole(), **given)
    assert torch.equal(said, right)
    assert graphs() == 1 and not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "key", ["alibi", "swan", "t5 over rerope", "alibi in one layer", "rerope in one layer", "yarn"]
)
def test_prompts_and_gradients_are_one_graph(key: str, ids, no_graphs) -> None:
    model = CASES[key].patched()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = []
    for one in (model, compiled):
        model.zero_grad()
        one(ids, labels=ids, use_cache=False).loss.backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*found, **EXACT)
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "key"), [("gemma2", "rerope"), ("gpt_oss", "alibi")])
def test_layers_with_a_window_are_in_the_graph_as_they_were(kind, key, ids, no_graphs) -> None:
    """They share a rotary module with those that are patched."""
    model = CASES[key].patch(FAMILIES[kind].model())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled, ids), logits(model, ids), **EXACT)
    right = model.generate(ids, **NEW)
    said = model.generate(ids, cache_implementation="static", compile_config=whole(), **NEW)
    assert torch.equal(said, right) and not counters["graph_break"]
