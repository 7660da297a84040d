"""Rows of a batch give what they give alone, on whichever side they are padded."""

from __future__ import annotations

import pytest
import torch

import rope_ext
from tests.helpers.models import tiny_llama
from tests.helpers.positions import (
    CACHES,
    EXACT,
    FAMILIES,
    KINDS,
    TOLD,
    WIDE,
    logits,
    padded,
    patch,
)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    ("kind", "side"),
    # A sliding window counts the padding on the right as tokens, unpatched too.
    [*((kind, "left") for kind in KINDS), ("llama", "right"), ("smollm3", "right")],
)
def test_padded_rows_decode_as_if_alone(kind: str, side: str, cache: str, ids) -> None:
    """Prefilled in chunks, the first of which holds nothing but padding for one of the rows."""
    family = FAMILIES[kind]
    model = patch(family.model(), **family.options)
    rows = [ids[0, :80], ids[1, :41]]
    batch, mask, positions = padded(rows, side)
    store, begin, said = CACHES[cache](model.config), 0, []
    for chunk in batch.split([30, 30, 20], 1):
        end = begin + chunk.shape[1]
        given = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
        said.append(logits(model, chunk, past_key_values=store, **given))
        begin = end
    for step in range(5):
        mask = torch.cat((mask, torch.ones(2, 1, dtype=torch.long)), 1)
        given = {"attention_mask": mask, "position_ids": torch.tensor([[80 + step], [41 + step]])}
        new = ids[:, 80 + step : 81 + step]
        said.append(logits(model, new, past_key_values=store, **given))
    for row, real in enumerate(rows):
        alone = logits(model, torch.cat((real, ids[row, 80:85]))[None])[0]
        torch.testing.assert_close(torch.cat(said, 1)[row][mask[row].bool()], alone, **EXACT)


def test_padding_in_the_middle_counts_as_distance_unless_positions_say_otherwise(ids) -> None:
    model = tiny_llama()
    mask = torch.ones_like(ids)
    mask[1, 20:30] = 0
    real = mask.bool()
    plain = logits(model, ids, attention_mask=mask)[real]
    with rope_ext.patched(model, "rerope", factor=4, **WIDE["rerope"], **TOLD):
        torch.testing.assert_close(logits(model, ids, attention_mask=mask)[real], plain, **EXACT)
    patch(model)
    closed = logits(model, ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1))
    torch.testing.assert_close(closed[1][real[1]], logits(model, ids[1][real[1]][None])[0], **EXACT)
