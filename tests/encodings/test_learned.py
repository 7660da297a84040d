"""What an encoding learns is part of the model: kept, extended, saved, and trained by adapters."""

from __future__ import annotations

import logging

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import rope_ext
from rope_ext.position.learned import learned
from tests.helpers.encodings import ALL, parameters
from tests.helpers.models import LENGTH, tiny_llama
from tests.helpers.positions import EXACT, logits


def trained(name: str, **options: object) -> nn.Module:
    model = rope_ext.patch(tiny_llama(), name, **options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for value in learned(model).values():
            value.copy_(0.02 + 0.03 * torch.rand(value.shape, generator=generator))
    return model


@pytest.mark.parametrize(
    ("name", "lacks"), [("t5", r"rope_ext_bias\.beta"), ("sinusoidal", r"rope_ext_input\.scale")]
)
def test_weights_that_lack_it_are_refused(name: str, lacks: str, tmp_path) -> None:
    trained(name).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    kept = {key: value for key, value in load_file(file).items() if "rope_ext" not in key}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(rope_ext.LoadError, match=lacks):
        rope_ext.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "options"), [("t5", {}), ("rope", {"bias": "t5"}), ("learned", {"factor": 2})]
)
def test_a_patch_that_comes_back_has_what_it_had_learned(name: str, options: dict, ids) -> None:
    """After another was refused in its place, and after one for the length of a block."""
    model = trained(name, **options)
    want, before = logits(model, ids), learned(model)
    with pytest.raises(rope_ext.OptionError):
        rope_ext.patch(model, "multiplicative", length=2, replace=True)
    with rope_ext.patched(model, "nope", replace=True):
        assert not torch.equal(logits(model, ids), want)
    after = learned(model)
    assert list(after) == list(before)
    assert all(after[key] is before[key] for key in before)  # which optimizers hold
    assert torch.equal(logits(model, ids), want)


GROWING = {  # a table that grows, and whether its last row stood for all beyond
    "learned": ({"length": LENGTH}, {"length": 100}, "table", 0, False),
    "learned by factor": ({}, {"factor": 2}, "table", 0, False),
    "multiplicative": ({}, {"length": 100}, "table", 0, False),
    "shaw": ({"clip": 8}, {"clip": 20}, "value", 0, True),
    "deberta": ({"clip": 8}, {"clip": 20}, "query", 1, True),
    "deberta, absolute": (
        *({"clip": 8, "absolute_layers": 2}, {"clip": 8, "absolute_layers": 2, "length": 100}),
        *("table", 0, False),
    ),
    "cope": ({"positions": 8}, {"positions": 20}, "table", 0, True),
    "t5 by offset": (
        {"buckets": "offsets", "max_distance": 8},
        {"buckets": "offsets", "max_distance": 20},
        *("beta", 1, True),
    ),
}


@pytest.mark.every
@pytest.mark.parametrize("key", GROWING)
def test_a_table_that_grows_keeps_what_was_trained(key: str, ids, tmp_path) -> None:
    options, other, table, dim, repeats = GROWING[key]
    name = key.split()[0].strip(",")
    model = trained(name, **options)
    right = logits(model, ids[:, :LENGTH])
    before = {key: value.detach().clone() for key, value in learned(model).items()}
    model.save_pretrained(tmp_path)
    for again in (model, rope_ext.from_pretrained(tmp_path)):
        rope_ext.patch(again, name, **other, replace=True)
        after = learned(again)
        assert after.keys() == before.keys()
        for path, value in before.items():
            rows = value.shape[dim]
            if path.rpartition(".")[2] == table:
                assert after[path].shape[dim] > rows
            assert torch.equal(after[path].narrow(dim, 0, rows), value)
            if path.endswith(".table") and not repeats and "multi" not in key:
                assert after[path][LENGTH:].std() > 0
        torch.testing.assert_close(logits(again, ids[:, :LENGTH]), right, atol=2e-5, rtol=1e-5)
        if repeats:  # the very same function, at any distance
            whole = trained(name, **options)
            torch.testing.assert_close(logits(again, ids), logits(whole, ids), atol=2e-5, rtol=1e-5)


def test_options_that_do_not_fit_are_refused_and_what_is_dropped_is_named(caplog) -> None:
    model = trained("t5")
    before = learned(model)
    rope_ext.patch(model, "yarn", factor=4, bias="t5", replace=True)
    assert all(value is before[name] for name, value in learned(model).items())
    with pytest.raises(rope_ext.OptionError, match="num_buckets=16 instead of 32"):
        rope_ext.patch(model, "rope", bias=rope_ext.T5(num_buckets=16), replace=True)
    assert all(value is before[name] for name, value in learned(model).items())
    model = trained("deberta", clip=20, absolute_layers=1, length=120)
    with pytest.raises(rope_ext.OptionError, match=r"length=110 instead of 120"):
        rope_ext.patch(model, "deberta", clip=20, absolute_layers=1, length=110, replace=True)
    with caplog.at_level(logging.WARNING, logger="rope_ext"):
        rope_ext.patch(model, "deberta", clip=20, replace=True)
    assert "rope_ext_input.table" in caplog.text and len(learned(model)) == 4


@pytest.mark.parametrize("name", ["kerple_log", "learned"])
def test_what_an_adapter_trained_outlives_another_patch(name: str, ids) -> None:
    options = {"length": 128} if name == "learned" else {}
    model = rope_ext.patch(tiny_llama(), name, **options)
    saved = ["rope_ext_bias", "rope_ext_input"]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=saved)
    adapted = peft.get_peft_model(model, config).eval()
    for path, value in adapted.named_parameters():
        if "rope_ext_" in path and value.requires_grad:
            value.data.add_(0.3)
    right, names = logits(adapted, ids), list(adapted.state_dict())
    with rope_ext.patched(adapted, "alibi", replace=True):
        assert not torch.equal(logits(adapted, ids), right)
    assert torch.equal(logits(adapted, ids), right)
    rope_ext.patch(adapted, name, **options, temperature=2.0, replace=True)
    rope_ext.patch(adapted, name, **options, replace=True)
    assert torch.equal(logits(adapted, ids), right)
    assert sorted(adapted.state_dict()) == sorted(names)
    if name == "learned":  # its table grows along
        with rope_ext.patched(adapted, name, length=140, replace=True):
            torch.testing.assert_close(logits(adapted, ids), right)
    rope_ext.unpatch(adapted)
    assert not any("rope_ext_" in path for path, _ in adapted.named_modules())


@pytest.mark.parametrize("first", ["patch", "adapter"])
def test_an_adapter_on_keys_changes_positions_that_go_through_keys(first: str, ids) -> None:
    """As the merged weights do, whether it was there before the patch or came after."""
    config = peft.LoraConfig(r=2, target_modules=["k_proj"], task_type="CAUSAL_LM")
    model, patch = tiny_llama(attention_bias=True), ALL["through keys"].patch
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.k_proj.bias)
    if first == "patch":
        model = peft.get_peft_model(patch(model), config)
    else:
        model = patch(peft.get_peft_model(model, config))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.normal_()
    found = logits(model.eval(), ids)
    model(ids, labels=ids).loss.backward()
    grads = [p.grad for n, p in model.named_parameters() if "lora_A" in n]
    assert all(g is not None and g.abs().sum() > 0 for g in grads)
    merged = model.merge_and_unload()
    assert type(merged.model.layers[0].self_attn.k_proj) is nn.Linear
    torch.testing.assert_close(logits(merged, ids), found, **EXACT)


def test_repo_begins_as_published_or_with_the_model_itself(ids) -> None:
    """Truncated normal numbers, which make no position at first; or the model's own positions."""
    torch.manual_seed(0)
    model = rope_ext.patch(tiny_llama(hidden_size=256), "repo")
    shapes = {name.split(".")[-1]: list(p.shape) for name, p in parameters(model).items()}
    assert shapes == {"gate": [32, 256], "content": [32, 256], "position": [2, 32]}
    drawn = next(iter(parameters(model).values()))
    assert drawn.abs().max() <= 0.06 and 0.019 < drawn.std() < 0.0205  # cut at three deviations
    nope = rope_ext.patch(tiny_llama(), "nope")
    model = rope_ext.patch(tiny_llama(), "repo")
    torch.testing.assert_close(logits(model, ids), logits(nope, ids), atol=0.05, rtol=0)
    model = rope_ext.patch(tiny_llama(), "repo", positions="shifted")
    torch.testing.assert_close(logits(model, ids), logits(tiny_llama(), ids), **EXACT)
