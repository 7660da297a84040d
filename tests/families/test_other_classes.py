"""Every other class of transformers that rotates: no raw error, and no attention made causal.

Those outside of the causal and image-text mappings: encoders, embedders, heads, audio, series.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import rope_ext
from rope_ext.config.writing import UNPATCHED
from rope_ext.patching import current_patch
from rope_ext.rotary.sites import find_sites, text_decoder, vocabulary_of
from rope_ext.saving.load import same, saved_frequencies
from tests.families import coverage
from tests.families.zoo import LENGTH, NotBuildable, other_classes, rotating_modules, tiny_of

OPTIONS: dict[str, Any] = {"factor": 4, "original_max_position_embeddings": LENGTH}
METHODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("yarn", {}),
    ("dynamic_ntk", {}),
    ("rerope", {"window": LENGTH, "log_n": False}),
    ("alibi", {"factor": None}),
    ("yarn", {"bias": "alibi"}),
    ("yarn", {"temperature": "log_n"}),
)
WITHIN = 40
"""Tokens of a text, fewer than the window, so that ``rerope`` may change nothing."""


def built(module: str) -> list[PreTrainedModel]:
    models = []
    for cls in other_classes(module):
        try:
            models.append(tiny_of(cls))
        except NotBuildable:  # it needs more than a small configuration
            continue
    return models


@torch.no_grad()
def output(model: PreTrainedModel) -> torch.Tensor | None:
    """What the decoder makes of one text; None if token ids are not enough for it."""
    decoder: Any = text_decoder(model)
    try:
        # Without special tokens: what a padding token gives is not defined.
        ids = 3 + torch.arange(WITHIN)[None] * 37 % (vocabulary_of(decoder).num_embeddings - 3)
        return decoder(input_ids=ids)[0]
    except Exception:  # whatever a model raises that needs other inputs
        return None


@pytest.mark.slow
@pytest.mark.parametrize("module", rotating_modules())
def test_patch_accepts_or_refuses_in_words_and_changes_no_direction(module: str) -> None:
    for model in built(module):
        before = output(model)
        for method, options in METHODS:
            given = {name: x for name, x in {**OPTIONS, **options}.items() if x is not None}
            try:
                with rope_ext.patched(model, method, **given):
                    after = output(model)
            except rope_ext.RopeExtError as error:
                assert "\n" not in str(error) and str(error)
                continue
            assert (before is None) == (after is None), (type(model), method)
            if before is not None and after is not None and method == "rerope":
                torch.testing.assert_close(
                    after, before, rtol=1e-4, atol=1e-4, msg=str(type(model))
                )


def reloads_as_described(model: PreTrainedModel, folder: Path) -> bool:
    """Save a patched model; plain transformers builds its frequencies where ``describe`` says so.

    Elsewhere it must not load it, unless ``describe`` says that it loads it unpatched.
    """
    said = str(rope_ext.describe(model))
    state = current_patch(model)
    assert state is not None
    promised = saved_frequencies(state.sites, state, start=True)
    model.save_pretrained(folder)
    try:
        again = type(model).from_pretrained(folder)
    except Exception as error:  # the refusal reads as the family raises it
        return "reloads it" not in said and "rope_ext" in str(error)
    length = OPTIONS["original_max_position_embeddings"]  # some configurations count no tokens
    equal = same(saved_frequencies(find_sites(text_decoder(again), length)), promised)
    return equal if "reloads it" in said else UNPATCHED in said


@pytest.mark.slow
@pytest.mark.parametrize("module", rotating_modules())
def test_plain_transformers_reloads_what_describe_says(module: str, tmp_path: Path) -> None:
    for number, model in enumerate(built(module)):
        for method in ("yarn", "dynamic_ntk"):
            try:
                rope_ext.patch(model, method, **OPTIONS)
            except rope_ext.RopeExtError:
                continue
            assert reloads_as_described(model, tmp_path / f"{number}-{method}"), type(model)
            rope_ext.unpatch(model)


@pytest.mark.slow
@pytest.mark.parametrize("module", rotating_modules())
def test_every_class_is_on_the_page_as_it_is_found(module: str) -> None:
    """An accepted class passes every check, and the page says what was found."""
    page = (Path(__file__).parents[2] / "docs/FAMILIES.md").read_text("utf-8")
    for cls in other_classes(module):
        result = coverage.check_class(cls)
        assert [check for check in result.checks if check.passed is False] == [], cls
        different = coverage.outdated(page, [result])
        assert not [line for line in different if line.startswith(f"{cls.__name__}: ")]


def test_a_table_of_learned_positions_beside_the_rotation_is_refused() -> None:
    model = tiny_of(transformers.MoonshineStreamingModel)
    with pytest.raises(rope_ext.UnsupportedModelError, match="pos_emb"):
        rope_ext.patch(model, "yarn", factor=4)
    assert not rope_ext.describe(model).method


EXAMINED = ("EuroBertForMaskedLM", "LasrForCTC", "NeoMMEModel", "T5GemmaEncoderModel")


@pytest.mark.every
@pytest.mark.parametrize("name", EXAMINED)
def test_a_class_of_each_kind_passes_every_check(name: str) -> None:
    result = coverage.check(name)
    assert result.verdict == coverage.SUPPORTED, result.reason


@pytest.mark.parametrize("name", ["DiaModel", "T5GemmaModel"])
def test_decoders_with_a_configuration_of_their_own_are_saved(name: str, tmp_path: Path) -> None:
    model = tiny_of(getattr(transformers, name))
    rope_ext.patch(model, "yarn", **OPTIONS)
    assert "reloads it" in str(rope_ext.describe(model))
    assert reloads_as_described(model, tmp_path)
