"""A step of decoding: what all layers share is decided once."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from rope_ext.attention import flash
from tests.helpers.models import tiny_llama
from tests.helpers.positions import EXACT, decoded, patch


@pytest.mark.parametrize("name", ["rerope", "lm_infinite"])
def test_a_further_layer_costs_few_calls_of_python(name: str, ids) -> None:
    def calls(layers: int) -> int:
        model = patch(tiny_llama(num_hidden_layers=layers), name)
        cache, count = DynamicCache(config=model.config), 0

        def seen(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event == "call" and frame.f_globals["__name__"].startswith("rope_ext.")

        decoded(model, ids[:, :40], [38, 1, 1], cache)
        with torch.no_grad():
            sys.setprofile(seen)
            try:
                model(ids[:, 40:41], past_key_values=cache)
            finally:
                sys.setprofile(None)
        return count

    # The guard of the cache, what skips the rotation, the attention function, the step, what stays
    # rotated of a layer and of a band, and whether the keys are as they were.
    assert (calls(4) - calls(2)) / 2 <= 7


def test_a_step_with_a_sink_and_more_keys_than_are_turned_at_a_time(
    monkeypatch: pytest.MonkeyPatch, ids
) -> None:
    """As the general path, which every layer takes while gradients are wanted."""
    monkeypatch.setattr(flash, "_BLOCK", 4)
    model = patch(tiny_llama(), "self_extend")
    right = decoded(model, ids, [40, *[1] * 50])
    cache = DynamicCache(config=model.config)
    said = [model(part, past_key_values=cache).logits for part in ids.split([40, *[1] * 50], 1)]
    torch.testing.assert_close(torch.cat(said, 1), right, **EXACT)
