"""Rows that are padded differently decode in one call, and read from the device few times."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import rope_ext
from tests.helpers.models import tiny_llama

LENGTH = 90


def batch(rows: int, padded: bool = True) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 128, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row in range(rows if padded else 0):
        mask[row, : 5 * row] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def begun(model, given: dict[str, torch.Tensor]) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(**given, past_key_values=cache)
    return cache


def step(model, given: dict[str, torch.Tensor], cache: DynamicCache, tokens: int = 1):
    mask = torch.nn.functional.pad(given["attention_mask"], (0, tokens), value=1)
    ids = torch.arange(7, 7 + tokens).expand(len(mask), -1)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, past_key_values=cache).logits


@pytest.mark.parametrize("method", ["rerope", "self_extend", "dual_chunk", "lm_infinite", "string"])
def test_rows_together_are_rows_alone(method) -> None:
    options = {"factor": 1.9} if method == "string" else {"factor": 2}
    model = rope_ext.patch(tiny_llama(), method, **options)
    for tokens in (1, 3):
        given = batch(3)
        out = step(model, given, begun(model, given), tokens)
        for row in range(3):
            alone = {name: x[row : row + 1, 5 * row :] for name, x in given.items()}
            expected = step(model, alone, begun(model, alone), tokens)
            torch.testing.assert_close(out[row : row + 1], expected, rtol=2e-4, atol=2e-4)
