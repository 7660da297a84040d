"""Attention weights that a patched model returns are those of the papers' distances."""

from __future__ import annotations

import pytest
import torch

import rope_ext
from tests.families.checks import changed, snapshot
from tests.helpers.models import tiny_llama
from tests.helpers.positions import (
    CACHES,
    EXACT,
    FAMILIES,
    GEOMETRIES,
    KINDS,
    METHODS,
    by_formula,
    logits,
    padded,
    patch,
)

WITH = [*(("llama", n) for n in METHODS), *zip(KINDS[1:], GEOMETRIES, strict=True)]


@pytest.mark.parametrize(("kind", "name"), WITH)
def test_attention_weights_are_those_of_the_papers_distances(kind: str, name: str, ids) -> None:
    family = FAMILIES[kind]
    model = family.model()
    with by_formula(model, family, name, torch.arange(90)[None], **METHODS[name]):
        right = model(ids, output_attentions=True).attentions
    patch(model, name, **family.options)
    plain = logits(model, ids)
    with torch.no_grad():
        output = model(ids, output_attentions=True)
    assert torch.equal(output.logits, plain)
    assert len(output.attentions) == len(right) == len(model.model.layers)
    for weights, expected in zip(output.attentions, right, strict=True):
        torch.testing.assert_close(weights.double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "implementation"),
    [("llama", "sdpa"), ("llama", "eager"), ("smollm3", "sdpa"), ("gemma2", "eager")],
)
def test_attention_weights_of_padded_rows_and_of_caches(kind, implementation, ids) -> None:
    family = FAMILIES[kind]
    model = family.model()
    model.set_attn_implementation(implementation)
    patch(model, **family.options)
    batch, mask, positions = padded([ids[0], ids[1, :61]], "left")
    given = {"attention_mask": mask, "position_ids": positions}
    with torch.no_grad():
        alone = model(ids[1:, :61], output_attentions=True).attentions
        together = model(batch, **given, output_attentions=True).attentions
        assert len(alone) == len(model.model.layers)
        for make in CACHES.values():
            cache = make(model.config)
            model(ids[1:, :60], past_key_values=cache)
            last = model(ids[1:, 60:61], past_key_values=cache, output_attentions=True).attentions
            for one, other, right in zip(together, last, alone, strict=True):
                torch.testing.assert_close(one[1, :, 29:, 29:], right[0], **EXACT)
                keys = min(other.shape[-1], 61)  # a cache may hold the window only, or empty slots
                begin = 61 - keys if other.shape[-1] < 61 else 0
                torch.testing.assert_close(other[0, :, 0, :keys], right[0, :, 60, begin:], **EXACT)


def test_attention_weights_of_packed_documents(ids) -> None:
    model, positions = patch(tiny_llama()), torch.cat((torch.arange(30), torch.arange(60)))[None]
    with torch.no_grad():
        given = {"position_ids": positions, "use_cache": False, "output_attentions": True}
        together = model(ids[:1], **given).attentions
        alone = model(ids[:1, 30:], output_attentions=True).attentions
    for one, right in zip(together, alone, strict=True):
        torch.testing.assert_close(one[:, :, 30:, 30:], right, **EXACT)
        assert not one[:, :, 30:, :30].any()


def test_a_configuration_that_could_not_be_saved_is_refused_before_the_work(ids, tmp_path) -> None:
    model = tiny_llama()
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    before = snapshot(model)
    with pytest.raises(rope_ext.OptionError, match=r"set it to False and pass output_attentions"):
        patch(model)
    assert changed(before, snapshot(model)) == set()
    model.config.output_attentions = False
    patch(model)
    assert len(model(ids, output_attentions=True).attentions) == 2
    model.save_pretrained(tmp_path)
