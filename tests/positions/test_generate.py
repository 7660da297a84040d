"""Every way to generate writes what it writes without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import rope_ext
from tests.helpers.models import tiny_llama
from tests.helpers.positions import FAMILIES, KINDS, METHODS, NEW, padded, patch

HOW: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "several sequences": {"num_beams": 2, "num_return_sequences": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "chunked prefill": {"prefill_chunk_size": 13},
    "static cache": {"cache_implementation": "static"},
    "assistant": {},
    "patched assistant": {},
    "early exit": {"assistant_early_exit": 1},
}
EVERY = list(HOW)
FEW = ["beams", "static cache", "patched assistant"]


@pytest.fixture(scope="module")
def without_cache() -> dict[tuple, torch.Tensor]:
    """What was written without a cache: the same for every way with as many beams."""
    return {}


@pytest.mark.parametrize(
    ("kind", "name", "how"),
    [
        *(("llama", "self_extend", how) for how in HOW),
        *(("llama", name, FEW[i % 3]) for i, name in enumerate(METHODS) if name != "self_extend"),
        *(
            pytest.param(kind, "self_extend", how, marks=pytest.mark.slow)
            for number, kind in enumerate(KINDS[1:])
            for how in EVERY[number % 2 : 8 : 2]
        ),
    ],
)
def test_generate_writes_what_it_writes_without_a_cache(
    kind: str, name: str, how: str, ids, without_cache
) -> None:
    family = FAMILIES[kind]
    model = patch(family.model(), name, **family.options)
    prompt, settings = ids[:1, :60], {**NEW, **HOW[how]}
    beams = {key: value for key, value in settings.items() if key.startswith("num_")}
    key = kind, name, *beams.items()
    if key not in without_cache:
        without_cache[key] = model.generate(prompt, use_cache=False, **NEW, **beams)
    if "assistant" in how:
        settings["assistant_model"] = assistant = tiny_llama(num_hidden_layers=1)
        if how == "patched assistant":
            patch(assistant, "rerope")
    assert torch.equal(model.generate(prompt, **settings), without_cache[key])


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *(("llama", how) for how in ({}, {"num_beams": 3}, {"cache_implementation": "static"})),
        *((kind, {}) for kind in KINDS[1::2]),
        *((kind, {"num_beams": 3, "cache_implementation": "static"}) for kind in KINDS[2::2]),
    ],
)
def test_generate_serves_rows_of_different_lengths_as_if_alone(kind: str, how, ids) -> None:
    family = FAMILIES[kind]
    model = patch(family.model(), **family.options)
    rows = [ids[0, :70], ids[1, :20]]
    batch, mask, _ = padded(rows, "left")
    together = model.generate(batch, attention_mask=mask, **NEW, **how)[:, 70:]
    for row, prompt in enumerate(rows):
        alone = model.generate(prompt[None], **NEW, **how)[0, len(prompt) :]
        assert torch.equal(together[row], alone)


def test_generate_under_patched_and_after_it(ids) -> None:
    model = tiny_llama()
    plain = model.generate(ids[:1, :60], **NEW)
    with rope_ext.patched(model, "rerope", factor=4, window=5):
        long = model.generate(ids[:1, :60], **NEW)
    assert long.shape == plain.shape
    assert not torch.equal(long, plain)
    assert torch.equal(model.generate(ids[:1, :60], **NEW), plain)


def test_a_chat_goes_on_with_its_cache(ids) -> None:
    model = patch(tiny_llama())
    cache = DynamicCache(config=model.config)
    said = model.generate(ids[:1, :40], past_key_values=cache, **NEW)
    longer = torch.cat((said, ids[1:, :20]), 1)
    cached = model.generate(longer, past_key_values=cache, **NEW)
    assert torch.equal(cached, model.generate(longer, use_cache=False, **NEW))
