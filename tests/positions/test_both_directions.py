"""Attention in both directions: encoders, and decoders read as encoders, against dense formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import rope_ext
from tests.families.zoo import tiny_of
from tests.helpers.both_directions import LOG_N, in_both_directions
from tests.helpers.models import LENGTH
from tests.helpers.positions import METHODS, TOLD, padded

BOTH = ["rerope", "leaky_rerope", "self_extend", "string", "dpe", "lm_infinite", "lampe"]
WIDE = {"window": 999, "log_n": False, **TOLD}  # changes no distance of these texts
CLOSE = {"atol": 1e-4, "rtol": 0}  # angles are float32; hidden states are of size 5


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 60, (count,), generator=generator)


def encoder(name: str = "EuroBertModel", **overrides: Any) -> nn.Module:
    return tiny_of(getattr(transformers, name), **overrides)


def states(model: nn.Module, ids: torch.Tensor, **given: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **given)[0]


def by_oracle(model: nn.Module, ids: torch.Tensor, name: str, **options: Any) -> torch.Tensor:
    places = torch.arange(ids.shape[1])[None]
    log_n = LENGTH if name in LOG_N else None
    with in_both_directions(model, name, places, 0 * places, log_n=log_n, **options):
        return states(model, ids)


def patched(model: nn.Module, name: str = "rerope", **options: Any) -> nn.Module:
    given = {"factor": 4, "attention_factor": 1, **(options or METHODS[name])}
    return rope_ext.patch(model, name, **given)


@pytest.mark.every
@pytest.mark.parametrize("name", BOTH)
def test_methods_equal_their_formula_with_negative_distances_ahead(name: str) -> None:
    model, ids = encoder().double(), tokens(90)[None]
    wanted = by_oracle(model, ids, name, **METHODS[name])
    torch.testing.assert_close(states(patched(model, name), ids), wanted, **CLOSE)


def test_a_window_as_long_as_the_text_changes_nothing() -> None:
    model, ids = encoder(), tokens(60)[None]
    wanted = states(model, ids)
    torch.testing.assert_close(states(patched(model, **WIDE), ids), wanted, **CLOSE)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_text_is_the_text_alone(side: str) -> None:
    model = patched(encoder(), "self_extend")
    texts = [tokens(90), tokens(47, 1)]
    ids, mask, _ = padded(texts, side)
    found = states(model, ids, attention_mask=mask)
    for row, text in enumerate(texts):
        alone = states(model, text[None])[0]
        torch.testing.assert_close(found[row][mask[row] == 1], alone, **CLOSE)
