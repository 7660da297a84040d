"""What was trained under an encoding is kept when the model is patched with other options."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import nn

import rope_ext
from rope_ext.position.bias import learned
from tests.helpers.models import LENGTH, tiny_llama
from tests.helpers.positions import logits

GROWING = {  # a table that grows, and whether its last row stood for all beyond
    "learned": ({"length": LENGTH}, {"length": 100}, "table", 0, False),
    "learned by factor": ({}, {"factor": 2}, "table", 0, False),
    "multiplicative": ({}, {"length": 100}, "table", 0, False),
    "shaw": ({"clip": 8}, {"clip": 20}, "value", 0, True),
    "deberta": ({"clip": 8}, {"clip": 20}, "query", 1, True),
    "cope": ({"positions": 8}, {"positions": 20}, "table", 0, True),
    "t5 by offset": (
        {"buckets": "offsets", "max_distance": 8},
        {"buckets": "offsets", "max_distance": 20},
        "beta",
        1,
        True,
    ),
}
READ_OTHERWISE = {  # options that change how the same numbers are read
    "t5": {"max_distance": 256},
    "fire": {"threshold": 100.0},
    "floater": {"step": 0.2, "into": "first"},
    "transformer_xl": {"base": 500.0},
    "kerple_log": {"temperature": 1.5},
}


def trained(key: str, options: dict, **more: object) -> nn.Module:
    model = rope_ext.patch(tiny_llama(), key.split()[0], **options, **more)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for value in learned(model).values():
            value.copy_(0.02 + 0.03 * torch.rand(value.shape, generator=generator))
    return model


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in learned(model).items()}


@pytest.mark.parametrize("reloaded", [False, True])
@pytest.mark.parametrize("key", GROWING)
def test_a_table_that_grows_keeps_what_was_trained(key: str, reloaded: bool, ids, tmp_path) -> None:
    options, other, table, dim, repeats = GROWING[key]
    model = trained(key, options)
    before, right = values(model), logits(model, ids[:, :LENGTH])
    if reloaded:
        model.save_pretrained(tmp_path)
        model = rope_ext.from_pretrained(tmp_path)
    rope_ext.patch(model, key.split()[0], **other, replace=True)
    after = values(model)
    assert after.keys() == before.keys()
    for name, value in before.items():
        rows = value.shape[dim]
        assert after[name].shape[dim] > rows or name.rpartition(".")[2] != table
        assert torch.equal(after[name].narrow(dim, 0, rows), value)
    torch.testing.assert_close(logits(model, ids[:, :LENGTH]), right, atol=2e-5, rtol=1e-5)
    if repeats:  # the very same function, at any distance
        whole = trained(key, options)
        torch.testing.assert_close(logits(model, ids), logits(whole, ids), atol=2e-5, rtol=1e-5)
    else:
        assert all(value[LENGTH:].std() > 0 for value in after.values()) or "multi" in key


@pytest.mark.parametrize("name", READ_OTHERWISE)
def test_options_that_leave_the_shapes_alone_keep_the_parameters(name: str) -> None:
    model = trained(name, {})
    before = learned(model)
    rope_ext.patch(model, name, **READ_OTHERWISE[name], replace=True)
    after = learned(model)
    assert [*after] == [*before]
    assert all(after[key] is value for key, value in before.items() if "scale" not in key)


def test_what_peft_trains_grows_along(ids) -> None:
    model = rope_ext.patch(tiny_llama(), "learned")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["rope_ext_input"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(model, config)
    (table,) = (p for n, p in model.named_parameters() if p.requires_grad and "rope_ext" in n)
    with torch.no_grad():
        table.add_(0.3)
    right = logits(model, ids[:, :LENGTH])
    with rope_ext.patched(model, "learned", length=100, replace=True):
        assert torch.equal(logits(model, ids[:, :LENGTH]), right)
        logits(model, ids)
    assert any(p is table for p in model.parameters())
    rope_ext.patch(model, "learned", length=100, replace=True)
    (grown,) = (p for n, p in model.named_parameters() if p.requires_grad and "rope_ext" in n)
    assert len(grown) == 100 and torch.equal(grown[:LENGTH], table)
    assert torch.equal(logits(model, ids[:, :LENGTH]), right)


def test_a_bias_over_the_rotation_continues_from_the_encoding() -> None:
    model = trained("t5", {})
    before = learned(model)
    rope_ext.patch(model, "yarn", factor=4, bias="t5", replace=True)
    assert all(value is before[name] for name, value in learned(model).items())
    with pytest.raises(rope_ext.OptionError, match="num_buckets=16 instead of 32"):
        rope_ext.patch(model, "rope", bias=rope_ext.T5(num_buckets=16), replace=True)
    assert all(value is before[name] for name, value in learned(model).items())


def test_layers_that_are_added_leave_the_others_trained() -> None:
    model = trained("kerple_log", {}, layers=[0])
    before = learned(model)
    rope_ext.patch(model, "kerple_log", replace=True)
    after = learned(model)
    assert len(after) == 2 * len(before)
    assert all(after[name] is value for name, value in before.items())
