"""``compose="raise"``: the checkpoint's own RoPE scaling with a larger factor."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import rope_ext
from tests.families.checks import changed, snapshot
from tests.families.zoo import tiny_model
from tests.helpers.models import tiny_llama
from tests.helpers.positions import logits

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 2.0,
    "original_max_position_embeddings": 32,
}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
SHIPPED = {
    "yarn": ("llama", YARN, "yarn"),
    "own betas and temperature": (
        "llama",
        {**YARN, "beta_fast": 8.0, "beta_slow": 0.5, "attention_factor": 1.3, "mscale": 0.7},
        "yarn",
    ),
    "llama3": ("llama", LLAMA3, "llama3"),
    "linear": ("llama", LINEAR, "pi"),
    "gpt_oss": ("gpt_oss", {**YARN, "truncate": False, "beta_fast": 32.0}, "yarn"),
    "deepseek_v3": ("deepseek_v3", {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}, "yarn"),
}


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 128, (1, 150), generator=torch.Generator().manual_seed(0))


def shipped(family: str, parameters: dict) -> torch.nn.Module:
    parameters = copy.deepcopy(parameters)
    if family == "llama":
        return tiny_llama(rope_parameters=parameters)
    return tiny_model(family, rope_parameters=parameters)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_raised_factor_is_the_one_that_transformers_computes(tmp_path, ids, name: str) -> None:
    family, parameters, method = SHIPPED[name]
    model = shipped(family, parameters)
    model.save_pretrained(tmp_path)  # which notes the dtype in the configuration
    before = snapshot(model)
    rope_ext.patch(model, method, factor=8, compose="raise")

    config = copy.deepcopy(model.config)
    config.rope_parameters = {**parameters, "factor": 8.0}
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    assert torch.equal(model.model.rotary_emb.inv_freq, inv_freq)
    assert model.model.rotary_emb.attention_scaling == pytest.approx(scaling, rel=1e-12)

    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["rope_parameters"] | parameters | {"factor": 8.0} == saved["rope_parameters"]
    assert saved["max_position_embeddings"] == 256  # 32 times 8
    assert "rope_ext" not in saved
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again, ids), logits(model, ids))
    assert not changed(before, snapshot(rope_ext.unpatch(model)))


def test_a_raised_dynamic_checkpoint_computes_as_transformers_and_reloads(tmp_path, ids) -> None:
    model = shipped("llama", {**LINEAR, "rope_type": "dynamic"})
    other = shipped("llama", {**LINEAR, "rope_type": "dynamic", "factor": 4.0})
    model.save_pretrained(tmp_path)
    before = snapshot(model)
    rope_ext.patch(model, "dynamic_ntk", factor=4, compose="raise")
    patched = logits(model, ids)
    # Angles of the one are products of a row, of the other a matrix product.
    torch.testing.assert_close(patched, logits(other, ids), rtol=0, atol=1e-4)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(rope_ext.from_pretrained(tmp_path).eval(), ids), patched)
    assert not changed(before, snapshot(rope_ext.unpatch(model)))


@pytest.mark.parametrize("factor", [1.5, 2])
def test_a_factor_that_raises_nothing_is_refused(ids, factor: float) -> None:
    model = shipped("llama", YARN)
    before = snapshot(model)
    with pytest.raises(rope_ext.OptionError, match=f"factor={factor} does not raise .*2.0"):
        rope_ext.patch(model, "yarn", factor=factor, compose="raise")
    assert not changed(before, snapshot(model))
