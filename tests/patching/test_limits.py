"""Texts that are longer than an extension are named once."""

from __future__ import annotations

import logging

import pytest
import torch

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
