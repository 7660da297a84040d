"""Every way to generate writes what it writes without a cache."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import rope_ext
from rope_ext.rotary.context import cache_among
from tests.families.zoo import tiny_model
from tests.helpers.models import tiny_llama
from tests.helpers.positions import FAMILIES, NEW, padded, patch

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


@pytest.fixture(scope="module")
def without_cache() -> dict[tuple, torch.Tensor]:
    """What was written without a cache: the same for every way with as many beams."""
    return {}


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *(("llama", how) for how in HOW),
        pytest.param("gemma2 scaled", "prompt lookup", marks=pytest.mark.slow),
        pytest.param("smollm3", "several sequences", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "chunked prefill", marks=pytest.mark.slow),
        pytest.param("mistral windowed", "patched assistant", marks=pytest.mark.slow),
    ],
)
def test_generate_writes_what_it_writes_without_a_cache(
    kind: str, how: str, ids, without_cache
) -> None:
    family = FAMILIES[kind]
    model = patch(family.model(), **family.options)
    prompt, settings = ids[:1, :60], {**NEW, **HOW[how]}
    beams = {key: value for key, value in settings.items() if key.startswith("num_")}
    key = kind, *beams.items()
    if key not in without_cache:
        without_cache[key] = model.generate(prompt, use_cache=False, **NEW, **beams)
    if "assistant" in how:
        settings["assistant_model"] = assistant = tiny_llama(num_hidden_layers=1)
        if how == "patched assistant":
            patch(assistant, "rerope")
    assert torch.equal(model.generate(prompt, **settings), without_cache[key])


def test_a_row_that_grows_beyond_the_window_is_written_as_alone(ids) -> None:
    """Of five tokens. At one step, it has no far keys yet, and the longer row has some."""
    model = patch(tiny_llama(), "rerope")
    batch, mask, _ = padded([ids[0, :40], ids[1, :3]], "left")
    together = model.generate(batch, attention_mask=mask, **NEW)
    assert torch.equal(together[1, 40:], model.generate(ids[1:, :3], **NEW)[0, 3:])


def test_a_chat_goes_on_with_its_cache(ids) -> None:
    model = patch(tiny_llama())
    cache = DynamicCache(config=model.config)
    said = model.generate(ids[:1, :40], past_key_values=cache, **NEW)
    longer = torch.cat((said, ids[1:, :20]), 1)
    cached = model.generate(longer, past_key_values=cache, **NEW)
    assert torch.equal(cached, model.generate(longer, use_cache=False, **NEW))


@pytest.mark.parametrize("name", ["rerope", "dynamic_yarn"])
def test_an_interrupted_call_frees_its_cache(name: str, ids) -> None:
    model, caches = rope_ext.patch(tiny_llama(), name, factor=4), []

    def interrupt(_: Any, args: Any, kwargs: Any) -> None:
        caches.append(weakref.ref(cache_among(kwargs)))
        raise KeyboardInterrupt

    with model.model.layers[1].register_forward_pre_hook(interrupt, with_kwargs=True):
        for run in (lambda: model.generate(ids, **NEW), lambda: model(ids)):
            with contextlib.suppress(KeyboardInterrupt):
                run()
    model(ids)
    gc.collect()
    assert [cache() for cache in caches] == [None, None]


HYBRIDS = ["qwen3_next", "qwen3_5_text", "olmo_hybrid"]
"""Families with layers of attention and of states, whose masks differ."""


def writes_padded_rows_as_alone(model_type: str, name: str, ids: torch.Tensor, order: Any) -> None:
    """Into a static cache; ``order`` sorts the names of transformers' dict of masks."""
    model = rope_ext.patch(tiny_model(model_type), name, factor=4)
    decoder = model.model

    def sort(module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        masks = kwargs.get("attention_mask")
        if isinstance(masks, dict):
            kwargs["attention_mask"] = {key: masks[key] for key in order(masks)}
        return args, kwargs

    handle = decoder.register_forward_pre_hook(sort, prepend=True, with_kwargs=True)
    ids, padding = ids[:, :60], torch.ones_like(ids[:, :60])
    padding[1, :25] = 0
    settings = {**NEW, "cache_implementation": "static"}
    written = model.generate(ids, attention_mask=padding, **settings)
    handle.remove()
    alone = model.generate(ids[1:, 25:], use_cache=False, **NEW)
    assert torch.equal(written[1, 60:], alone[0, 35:])


@pytest.mark.parametrize("name", ["rerope", "dynamic_ntk"])
@pytest.mark.parametrize("model_type", HYBRIDS)
def test_the_order_of_a_dict_of_masks_does_not_matter(model_type: str, name: str, ids) -> None:
    for order in (sorted, lambda masks: sorted(masks, reverse=True)):
        writes_padded_rows_as_alone(model_type, name, ids, order)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_padded_rows_of_a_hybrid_under_any_hash_seed(seed: int) -> None:
    """The dict is made from a set of strings, whose order depends on the seed."""
    code = (
        "import torch\n"
        "from tests.positions.test_generate import HYBRIDS, writes_padded_rows_as_alone\n"
        "ids = torch.randint(3, 100, (2, 90), generator=torch.Generator().manual_seed(0))\n"
        "for model_type in HYBRIDS:\n"
        "    writes_padded_rows_as_alone(model_type, 'rerope', ids, list)\n"
    )
    environment = os.environ | {
        "PYTHONHASHSEED": str(seed),
        "PYTHONPATH": os.pathsep.join([".", *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
