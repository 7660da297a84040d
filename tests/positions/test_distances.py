"""Whole models of every kind give the logits of the papers' distances."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.positions import (
    EXACT,
    FAMILIES,
    GEOMETRIES,
    KINDS,
    METHODS,
    TOLD,
    WIDE,
    by_formula,
    grid,
    logits,
    patch,
)

NEAR = [("llama", name) for name in METHODS]  # elsewhere every kind with one of each geometry
NEAR += [(kind, name) for kind in KINDS[1:] for name in GEOMETRIES]
NEAR += [
    (kind, GEOMETRIES[number % 4]) for number, kind in enumerate(FAMILIES) if kind not in KINDS
]


@pytest.mark.parametrize(("kind", "name"), grid(FAMILIES, METHODS))
def test_logits_are_those_of_the_papers_distances(kind: str, name: str, ids) -> None:
    family = FAMILIES[kind]
    model = family.model()
    with by_formula(model, family, name, torch.arange(90)[None], **METHODS[name]):
        right = logits(model, ids)
    plain = logits(model, ids)
    patch(model, name, **family.options)
    assert (right - plain).abs().max() > 0.03  # cohere's logits are of size 0.3
    torch.testing.assert_close(logits(model, ids), right, **EXACT)


@pytest.mark.parametrize(("kind", "name"), NEAR)
def test_nothing_changes_where_nothing_is_far(kind: str, name: str, ids) -> None:
    family = FAMILIES[kind]
    model = family.model()
    if kind.startswith("gemma2"):  # sdpa of older transformers forgets to cap the logits
        model.set_attn_implementation("eager")
    plain = logits(model, ids)
    patch(model, name, **{**WIDE[name], **TOLD, **family.options})
    # Self-Extend and some others keep keys under another angle and turn them back, in float32;
    # granite, whose attention is scaled by 1 and not by 1/4, then loses one more digit.
    turned_back = name in ("self_extend", "leaky_rerope", "dpe", "lampe")
    tolerance = 1e-4 if turned_back and kind == "granite" else 3e-5 if turned_back else 1e-5
    torch.testing.assert_close(logits(model, ids), plain, atol=tolerance, rtol=0)
