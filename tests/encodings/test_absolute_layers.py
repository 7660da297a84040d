"""Absolute positions before DeBERTa's last layers: exact, cached, padded, trained and saved."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import rope_ext
from rope_ext.position.bias import learned
from tests.helpers.biases import parameters
from tests.helpers.models import LENGTH, tiny_llama
from tests.helpers.positions import CACHES, EXACT, logits
from tests.helpers.promises import (
    decodes_as_it_reads,
    documents_are_apart,
    generates_as_it_recomputes,
    learns,
    rows_are_as_alone,
)
from tests.helpers.relative import dense

TABLE = "model.rope_ext_input.table"


def three_layers() -> nn.Module:
    return tiny_llama(num_hidden_layers=3)


def patched(absolute_layers: int = 2, length: int = 100, **options: object) -> nn.Module:
    """Every parameter is different, and large enough to matter."""
    given = {"clip": 7, "absolute_layers": absolute_layers, "length": length, **options}
    model = rope_ext.patch(three_layers(), "deberta", **given)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for value in learned(model).values():
            value.copy_(0.5 * torch.randn(value.shape, generator=generator))
    return model


@pytest.mark.parametrize("count", [1, 2, 3])
def test_logits_and_gradients_are_those_of_the_formula(count: int, ids) -> None:
    """The vector of each position is added once, to what enters the first of the last layers."""
    model, plain = patched(count), three_layers()
    table = learned(model)[TABLE]

    def add(layer: nn.Module, args: tuple) -> tuple:
        x = args[0].double() + table.double()[: args[0].shape[1]]
        return (x.to(args[0].dtype), *args[1:])

    handle = plain.model.layers[3 - count].register_forward_pre_hook(add)
    with dense(plain, "deberta", torch.arange(90)[None], parameters(model)):
        right = plain(ids).logits
    handle.remove()
    found = model(ids).logits
    torch.testing.assert_close(found, right, **EXACT)
    values = list(learned(model).values())
    of_both = [torch.autograd.grad(x.sin().sum(), values) for x in (found, right)]
    for one, other in zip(*of_both, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3)
    assert of_both[0][list(learned(model)).index(TABLE)][:90].abs().min() > 0
    assert (found - logits(patched(3 if count < 3 else 1), ids)).abs().max() > 0.01


@pytest.mark.parametrize("cache", CACHES)
def test_cached_decoding_equals_recomputation(cache: str, ids) -> None:
    decodes_as_it_reads(patched(), cache, ids, (40, 1, 1, 30, 1, 1, 1, 15))


def test_positions_count_from_the_first_token_of_a_row_and_of_a_document(ids) -> None:
    model = patched()
    for side in ("left", "right"):
        rows_are_as_alone(model, side, ids)
    documents_are_apart(model, ids[:1], (15, 75))
    generates_as_it_recomputes(model, ids[:, :60], num_beams=2)


def test_it_is_trained_saved_reloaded_and_taken_out(ids, tmp_path) -> None:
    plain = three_layers()
    model = patched(length=None, factor=2)
    assert learned(model)[TABLE].shape == (2 * LENGTH, 64)
    learns(model, {TABLE: learned(model)[TABLE]}, ids, tokens=60, lr=0.1)
    want = logits(model, ids)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(rope_ext.from_pretrained(tmp_path), ids), want)
    assert "the first of the last 2 layers gets" in str(rope_ext.describe(model))
    names = set(model.state_dict())
    rope_ext.unpatch(model)
    assert names - set(model.state_dict()) == {
        TABLE,
        *(
            f"model.layers.{i}.self_attn.rope_ext_bias.{x}"
            for i in range(3)
            for x in ("key", "query")
        ),
    }
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)
    assert list(model.state_dict()) == list(plain.state_dict())


def test_a_trained_model_is_patched_again(ids, caplog) -> None:
    """With a longer table, with more of the layers, and with none of them."""
    model = patched()
    before, right = learned(model)[TABLE].detach().clone(), logits(model, ids)
    rope_ext.patch(model, "deberta", clip=20, absolute_layers=2, length=120, replace=True)
    assert torch.equal(learned(model)[TABLE][:100], before)
    torch.testing.assert_close(logits(model, ids), right, atol=2e-5, rtol=1e-5)
    rope_ext.patch(model, "deberta", clip=20, absolute_layers=1, length=120, replace=True)
    assert torch.equal(learned(model)[TABLE][:100], before)
    assert not torch.equal(logits(model, ids), right)
    with pytest.raises(rope_ext.OptionError, match=r"length=110 instead of 120"):
        rope_ext.patch(model, "deberta", clip=20, absolute_layers=1, length=110, replace=True)
    with caplog.at_level(logging.WARNING, logger="rope_ext"):
        rope_ext.patch(model, "deberta", clip=20, replace=True)
    assert TABLE.removeprefix("model.") in caplog.text and TABLE not in model.state_dict()
    rope_ext.patch(model, "deberta", clip=20, absolute_layers=1, replace=True)
    assert len(learned(model)[TABLE]) == LENGTH
