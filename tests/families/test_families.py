"""Every causal-LM and image-text family: what patch promises holds, or patch refuses.

docs/FAMILIES.md is the list of exceptions: a family cannot turn from supported to refused, or lose
position methods, without a test that fails under its name.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import rope_ext
from tests.families import coverage
from tests.families.checks import changed, snapshot
from tests.families.zoo import image_text_types, model_types, tiny_model

PAGE = (Path(__file__).parents[2] / "docs/FAMILIES.md").read_text("utf-8")
USED = {  # by the most people, or one of each kind of rotation, layers and verdict
    *("cohere_compass_text", "deepseek_v3", "gemma3_text", "gptj", "llama", "mistral3", "qwen3"),
    "qwen3_vl",
}
MADE = {"repeatable", "changes", "unpatch yarn", "unpatch dynamic_ntk"}
"""Checks that no family may lose."""
REFUSED = {
    "bart": rope_ext.NoRopeError,
    "codegen": rope_ext.NoRopeError,  # a fixed table of sines
    "evolla": rope_ext.UnsupportedModelError,  # its encoder of proteins rotates within its decoder
    "jamba": rope_ext.NoRopeError,
    "mistral": rope_ext.UnsupportedModelError,  # every layer has a window
    "phimoe": rope_ext.UnsupportedModelError,  # frequencies from the configuration, every forward
    "recurrent_gemma": rope_ext.UnsupportedModelError,
}


def by_use() -> list[object]:
    """All families; those that fewer people use are for the slow tests."""
    every = [*model_types(), *image_text_types()]
    assert set(every) >= USED
    return [pytest.param(n, marks=[] if n in USED else [pytest.mark.slow]) for n in every]


@pytest.mark.parametrize("model_type", by_use())
def test_family(model_type: str) -> None:
    result = coverage.check_family(model_type)
    different = coverage.outdated(PAGE, [result])
    assert not [line for line in different if line.startswith(f"{model_type}: ")]
    assert [check for check in result.checks if check.passed is False] == []
    if result.verdict in (coverage.SUPPORTED, coverage.WINDOW_ONLY):
        assert {check.name for check in result.checks if check.passed} >= MADE


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused_by_default_and_left_alone(model_type: str) -> None:
    model = tiny_model(model_type)
    before = snapshot(model)
    with pytest.raises(REFUSED[model_type]):
        rope_ext.patch(model, "yarn", factor=4)
    assert changed(before, snapshot(model)) == set()
