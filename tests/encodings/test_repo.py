"""Positions that layers compute from hidden states, beside what the matrix says of them."""

from __future__ import annotations

import torch

import rope_ext
from tests.helpers.encodings import ALL, dense, parameters
from tests.helpers.models import tiny_llama
from tests.helpers.positions import EXACT, FAMILIES, logits

patch = ALL["repo"].patch


def test_the_first_layers_keep_their_rotation(ids) -> None:
    """The first 5 of 16, rounded down, unless ``layers`` chooses others."""
    ids = ids[:, :12]
    repo = rope_ext.RePo()
    assert [repo.default_layers(n)[0] for n in (1, 3, 4, 16, 32)] == [0, 0, 1, 5, 10]
    model, plain = patch(tiny_llama(num_hidden_layers=4)), tiny_llama(num_hidden_layers=4)
    assert {int(name.split(".")[2]) for name in parameters(model)} == {1, 2, 3}
    assert "layers: 1, 2, 3; the others keep the rotation" in str(rope_ext.describe(model))
    with dense(plain, FAMILIES["llama"], ALL["repo"], torch.arange(12)[None], model):
        right = logits(plain, ids)
    torch.testing.assert_close(logits(model, ids), right, **EXACT)
    chosen = rope_ext.patch(tiny_llama(num_hidden_layers=4), "repo", layers=[0, 3])
    assert {int(name.split(".")[2]) for name in parameters(chosen)} == {0, 3}


def test_what_is_added_to_large_positions_keeps_its_fractions(ids) -> None:
    """In float32, positions of a million have steps of 1/16."""
    model = rope_ext.patch(tiny_llama(num_hidden_layers=1), "repo", positions="shifted")
    for weight in model.model.layers[0].self_attn.rope_ext_positions.parameters():
        torch.nn.init.normal_(weight)
    near = logits(model, ids[:, :40])
    rope_ext.patch(model, "repo", positions="shifted", precise=True, replace=True)
    far = torch.arange(1_000_000, 1_000_040)[None]
    torch.testing.assert_close(logits(model, ids[:, :40], position_ids=far), near, **EXACT)


def test_positions_are_not_rounded_in_half_precision(ids) -> None:
    """Numbers of bfloat16 are whole beyond 256."""
    model, t = patch(tiny_llama()), torch.arange(4)[None]
    module = model.model.layers[0].self_attn.rope_ext_positions
    x = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    want = module(x.float(), t)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x, t), want)
        found = model(ids).logits
    right = logits(model, ids)
    assert (found - right).abs().max() < 0.1 * right.abs().max()
    model.to(torch.bfloat16)
    assert module(x, t).dtype == torch.float32
    assert (logits(model, ids) - right).abs().mean() < 0.1 * right.abs().max()
