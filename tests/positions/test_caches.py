"""Caches that are continued often, or read by layers that stay; test_matrix.py has the others."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from tests.families.zoo import tiny_model
from tests.helpers.positions import (
    CACHES,
    EXACT,
    FAMILIES,
    KINDS,
    TOLD,
    WIDE,
    decoded,
    logits,
    patch,
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_is_prefilled_once_and_continued_often(kind: str, ids) -> None:
    family = FAMILIES[kind]
    model = patch(family.model(), **family.options)
    prefix = DynamicCache(config=model.config)
    logits(model, ids[:1, :50], past_key_values=prefix)
    for row in (0, 1):
        rest = ids[row : row + 1, 50:]
        cached = logits(model, rest, past_key_values=copy.deepcopy(prefix))
        right = logits(model, torch.cat((ids[:1, :50], rest), 1))[:, 50:]
        torch.testing.assert_close(cached, right, **EXACT)
    prefix.batch_repeat_interleave(2)
    cached = logits(model, ids[:, 50:], past_key_values=prefix)
    right = logits(model, torch.cat((ids[:1, :50].expand(2, -1), ids[:, 50:]), 1))[:, 50:]
    torch.testing.assert_close(cached, right, **EXACT)


@pytest.mark.parametrize("window", [39, 40, 41, 300])  # of a prompt of 40 tokens in 100 slots
@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_layers_that_stay_read_a_static_cache_from_its_beginning(kind: str, window, ids) -> None:
    """Capped or with sinks, they attend in our code, where others do in torch's."""
    model = tiny_model(FAMILIES[kind].model_type, sliding_window=window)
    model.set_attn_implementation("eager")
    plain = logits(model, ids[:, :48], use_cache=False)
    patch(model, "rerope", **WIDE["rerope"], **TOLD)
    for steps in ([40, *[1] * 8], [40, 3, 5]):
        cached = decoded(model, ids[:, :48], steps, CACHES["static"](model.config))
        torch.testing.assert_close(cached, plain, **EXACT)
