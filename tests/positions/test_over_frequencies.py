"""A position method over a frequency method."""

from __future__ import annotations

import pytest
import torch

import rope_ext
from tests.families.checks import changed, snapshot
from tests.helpers.models import LENGTH
from tests.helpers.positions import EXACT, FAMILIES, by_formula, decoded, logits


@pytest.mark.parametrize("under", [rope_ext.NTK(factor=2), rope_ext.YaRN(factor=2)], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_neox"])
def test_a_position_map_goes_over_a_frequency_map(under, kind: str, ids) -> None:
    family = FAMILIES[kind]
    model = family.model()
    with rope_ext.patched(model, under):
        plain = logits(model, ids)
        tokens = torch.arange(90)[None]
        with by_formula(model, family, "rerope", tokens, log_n=2 * LENGTH, window=5):
            right = logits(model, ids)
    before = snapshot(model)
    wide = rope_ext.ReRoPE(factor=2, window=100, log_n=False)
    with rope_ext.patched(model, wide, frequency=under):
        # The frequencies of a frequency method by itself are transformers' own, in float32.
        torch.testing.assert_close(logits(model, ids), plain, atol=5e-5, rtol=0)
    with rope_ext.patched(model, rope_ext.ReRoPE(factor=2, window=5), frequency=under):
        torch.testing.assert_close(logits(model, ids), right, **EXACT)
        cached = decoded(model, ids, [40, 45, *[1] * 5])
        torch.testing.assert_close(cached, right, **EXACT)
    assert changed(before, snapshot(model)) == set()
