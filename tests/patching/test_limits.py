"""What does not fit an extension is named: long texts, short drafts, adapters of other patches."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model

import rope_ext
from tests.helpers.models import tiny_llama  # which was trained on 64 tokens

SHORT, LONG = torch.arange(200)[None] % 60, torch.arange(600)[None] % 60


@pytest.mark.parametrize("name", ["yarn", "ntk", "self_extend", "dual_chunk", "lampe"])
def test_more_tokens_than_the_patch_reaches_are_named_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = rope_ext.patch(tiny_llama(), name, factor=4)
    caplog.clear()
    model(SHORT)
    packed = torch.arange(200).repeat(3)[None]
    model(LONG, position_ids=packed) if name in ("yarn", "ntk") else None
    assert not caplog.records
    for _ in range(2):
        model(LONG)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "600 tokens, more than the 256" in record.getMessage()
    assert "factor=9.38" in record.getMessage()
    caplog.clear()
    rope_ext.patch(model, name, factor=9.38, replace=True)(LONG)
    assert not any("more than" in r.getMessage() for r in caplog.records)


def test_a_cache_counts(caplog: pytest.LogCaptureFixture) -> None:
    model = rope_ext.patch(tiny_llama(), "yarn", factor=4)
    given = {"attention_mask": torch.ones_like(SHORT), "do_sample": False}
    model.generate(SHORT, max_new_tokens=56, min_new_tokens=56, **given)
    assert not caplog.records
    model.generate(SHORT, max_new_tokens=60, min_new_tokens=60, **given)
    assert [record.name for record in caplog.records].count("rope_ext") == 1


def test_methods_that_follow_the_sequence_have_no_limit(caplog: pytest.LogCaptureFixture) -> None:
    rope_ext.patch(tiny_llama(), "dynamic_ntk", factor=4)(LONG)
    assert not caplog.records


def test_a_draft_that_reaches_less_far_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model, draft = rope_ext.patch(tiny_llama(), "yarn", factor=4), tiny_llama()
    given = {"max_new_tokens": 2, "assistant_model": draft}
    for _ in range(2):
        model.generate(SHORT[:, :20], **given)
    [message] = [r.getMessage() for r in caplog.records if r.name == "rope_ext"]
    assert "assistant_model reaches 64 tokens and this model 256" in message
    assert "factor=4" in message
    caplog.clear()
    rope_ext.patch(draft, "yarn", factor=4)
    rope_ext.patch(model, "yarn", factor=4, replace=True).generate(SHORT[:, :20], **given)
    assert not [r for r in caplog.records if r.name == "rope_ext"]
    assert "generate" not in rope_ext.unpatch(model).__dict__


@pytest.mark.parametrize("factor", [4, 8])
def test_an_adapter_of_another_patch_is_named(tmp_path, caplog, factor: int) -> None:
    trained = rope_ext.patch(tiny_llama(), "yarn", factor=4)
    adapted = get_peft_model(trained, LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path)
    rope_ext.save_sidecar(adapted, tmp_path)
    model = rope_ext.patch(tiny_llama(), "yarn", factor=factor)
    model.load_adapter(str(tmp_path))
    told = [r.getMessage() for r in caplog.records if r.name == "rope_ext"]
    assert len(told) == (factor == 8) and all("'yarn', factor=4)" in one for one in told)
    assert "load_adapter" not in rope_ext.unpatch(model).__dict__


def test_an_adapter_whose_record_was_edited_is_named(tmp_path, caplog) -> None:
    trained = rope_ext.patch(tiny_llama(), "yarn", factor=4)
    adapted = get_peft_model(trained, LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path)
    file = rope_ext.save_sidecar(adapted, tmp_path)
    record = json.loads(file.read_text())
    record["method"]["factor"] = 8.0
    file.write_text(json.dumps(record))
    rope_ext.patch(tiny_llama(), "yarn", factor=4).load_adapter(str(tmp_path))
    [told] = [r.getMessage() for r in caplog.records if r.name == "rope_ext"]
    assert str(file) in told and "factor=8" in told
