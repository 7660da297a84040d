"""Options that change the formula of an encoding: exact, trained, decoded, saved and reloaded."""

from __future__ import annotations

import pytest
import torch

import rope_ext
from rope_ext.encodings.alibi import slopes
from tests.helpers.biases import parameters
from tests.helpers.models import tiny_llama
from tests.helpers.positions import EXACT, logits
from tests.helpers.promises import decodes_as_it_reads
from tests.helpers.relative import dense, randomized
from tests.helpers.variants import VARIANTS

TOKENS = 40


def patched(key: str) -> torch.nn.Module:
    name, options, _ = VARIANTS[key]
    model = randomized(rope_ext.patch(tiny_llama(), name, **options))
    for path, value in parameters(model).items():
        if path.endswith("fire_multiplier"):
            value.data.fill_(0.03)  # denominators change after 15 tokens
    return model


@pytest.mark.parametrize("key", VARIANTS)
def test_logits_and_gradients_are_those_of_the_formula(key: str, ids) -> None:
    ids, model, plain = ids[:, :TOKENS], patched(key), tiny_llama()
    learned = parameters(model)
    with dense(plain, VARIANTS[key][2], torch.arange(TOKENS)[None], learned):
        right = plain(ids).logits
    found = model(ids).logits
    torch.testing.assert_close(found, right, **EXACT)
    for one, other in zip(*(_gradients(x, learned) for x in (found, right)), strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=1e-3)  # sums over 3,200 pairs


def _gradients(found: torch.Tensor, learned: dict) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(found.sin().sum(), list(learned.values())) if learned else ()


@pytest.mark.parametrize("key", VARIANTS)
def test_decoded_from_a_cache_and_reloaded_to_the_bit(key: str, ids, tmp_path) -> None:
    ids, model = ids[:, :TOKENS], patched(key)
    decodes_as_it_reads(model, "dynamic", ids, (25, 1, 1, 13))
    model.save_pretrained(tmp_path)
    again = rope_ext.from_pretrained(tmp_path)
    assert torch.equal(logits(again, ids), logits(model, ids))


def test_learned_slopes_start_from_the_fixed_ones(ids) -> None:
    model, fixed = tiny_llama(), rope_ext.patch(tiny_llama(), "alibi")
    rope_ext.patch(model, "alibi", learned=True)
    layers = parameters(model).values()
    assert len(layers) == 2 and all(torch.equal(x, slopes(4).float()) for x in layers)
    torch.testing.assert_close(logits(model, ids), logits(fixed, ids), **EXACT)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("alibi", {"learned": 2}, "learned=2 is not valid; it must be True or False"),
        ("t5", {"buckets": "all"}, "buckets='all' is not valid; it must be 'logarithmic' or 'off"),
        ("shaw", {"table": "fixed"}, "table='fixed' is not valid; it must be 'learned' or 'sinu"),
        ("shaw", {"p_min": 64}, "p_min=64 is not valid; it must be less than clip=64"),
        ("shaw", {"values": None}, "values=None is not valid; it must be True or False"),
    ],
)
def test_bad_options_are_refused(name: str, options: dict, said: str) -> None:
    with pytest.raises(rope_ext.OptionError, match=said):
        rope_ext.patch(tiny_llama(), name, **options)
