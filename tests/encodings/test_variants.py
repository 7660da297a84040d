"""Options that change the formula of an encoding: exact, trained, decoded, saved and reloaded."""

from __future__ import annotations

import torch

import rope_ext
from rope_ext.encodings.alibi import slopes
from tests.helpers.biases import parameters
from tests.helpers.models import tiny_llama
from tests.helpers.positions import EXACT, logits


def test_learned_slopes_start_from_the_fixed_ones(ids) -> None:
    model, fixed = tiny_llama(), rope_ext.patch(tiny_llama(), "alibi")
    rope_ext.patch(model, "alibi", learned=True)
    layers = parameters(model).values()
    assert len(layers) == 2 and all(torch.equal(x, slopes(4).float()) for x in layers)
    torch.testing.assert_close(logits(model, ids), logits(fixed, ids), **EXACT)
