"""Configurations in the wild: transformers' reading counts, and everybody says the same."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
)

import rope_ext
from rope_ext.config.settings import ORIGINAL
from rope_ext.rotary.sites import find_sites, text_decoder
from rope_ext.saving.checkpoints import load_model
from tests.families.zoo import tiny_config, tiny_model
from tests.helpers.models import LENGTH, tiny_llama
from tests.helpers.saved_patches import edited

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


def folder(path: Path, fields: dict[str, Any]) -> Path:
    """A folder as found in the wild: these fields in place of those of rope_parameters."""
    tiny_llama().save_pretrained(path)
    with edited(path) as saved:
        del saved["rope_parameters"]
        saved |= fields
    return path


CASES: dict[str, tuple[dict[str, Any], tuple[int, int], str]] = {
    "both styles": (
        {"rope_parameters": PLAIN, "rope_scaling": YARN, "max_position_embeddings": 4 * LENGTH},
        (LENGTH, 4 * LENGTH),
        "rope_type is given as 'default' (rope_parameters), but transformers uses 'yarn'",
    ),
    "two names of the type": (
        {"rope_parameters": {**YARN, "type": "linear"}, "max_position_embeddings": 4 * LENGTH},
        (LENGTH, 4 * LENGTH),
        "rope_type is given as 'linear' (type of rope_parameters), but transformers uses 'yarn'",
    ),
    "two bases": (
        {"rope_parameters": {**PLAIN, "rope_theta": 5e5}, "rope_theta": 1e4},
        (LENGTH, LENGTH),
        "rope_theta is given as 10000.0 (the top level), but transformers uses 500000.0",
    ),
    "a length that does not fit the factor": (
        {"rope_scaling": YARN, "max_position_embeddings": LENGTH},
        (LENGTH, 4 * LENGTH),
        f"max_position_embeddings={LENGTH} does not fit factor=4",
    ),
    "no original length": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 4 * LENGTH},
        (4 * LENGTH, 16 * LENGTH),
        "max_position_embeddings for the missing original_max_position_embeddings",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_everything_gives_the_numbers_of_transformers_and_says_why(tmp_path, caplog, case) -> None:
    fields, (trained, target), told = CASES[case]
    place = folder(tmp_path / case.replace(" ", "-"), fields)
    with caplog.at_level(logging.WARNING, "rope_ext"):
        described = rope_ext.describe(place)
    warnings = [record.getMessage() for record in caplog.records if record.name == "rope_ext"]
    assert len(warnings) == 1 and told in warnings[0] and str(place) in warnings[0]
    assert "\n" not in warnings[0]
    assert (described.length, described.target_length) == (trained, target)
    assert rope_ext.diagnose(place, 8 * LENGTH).trained_length == trained
    model = AutoModelForCausalLM.from_pretrained(place)
    (site,) = find_sites(text_decoder(model))
    (same,) = described.sites
    assert site.rope.length == target
    after = torch.tensor(same.inv_freq_after)
    torch.testing.assert_close(after, site.loaded, rtol=1e-5, atol=0, check_dtype=False)
    if target > trained:
        made = rope_ext.export(place, "vllm")
        assert f"--max-model-len {target}" in made.command or "--max-model-len" not in made.command
        with pytest.raises(rope_ext.OptionError, match=f"within the {target} tokens"):
            rope_ext.recommend(place, target)
    found = rope_ext.recommend(place, 4 * target)
    assert found.trained_length == target
    assert rope_ext.describe(rope_ext.patch(model, found)).target_length == 4 * target


@pytest.mark.parametrize(
    "method", ["yarn", "pi", "ntk", "llama3", "resonance", "rerope", "dynamic_ntk"]
)
def test_what_a_patch_saves_does_not_contradict_itself(tmp_path, caplog, method: str) -> None:
    rope_ext.patch(tiny_llama(), method, factor=4).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "rope_ext"):
        rope_ext.describe(tmp_path)
    assert [record for record in caplog.records if record.name == "rope_ext"] == []


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_is_no_contradiction(tmp_path, caplog, factor: float) -> None:
    """Llama 3.1 and 3.2 have one length and the factors 8 and 32."""
    rope = {"rope_type": "llama3", "factor": factor, "rope_theta": 5e5}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: LENGTH}
    place = folder(tmp_path, {"rope_scaling": rope, "max_position_embeddings": 16 * LENGTH})
    with caplog.at_level(logging.WARNING, "rope_ext"):
        assert rope_ext.describe(place).target_length == 16 * LENGTH
    assert [record for record in caplog.records if record.name == "rope_ext"] == []
    assert AutoConfig.from_pretrained(place).max_position_embeddings == 16 * LENGTH


def phi(path: Path, **more: Any) -> Path:
    """A folder like those of Phi-3 and Phi-4-mini, whose window is longer than their context."""
    tables = {"short_factor": [1.0 + 0.1 * i for i in range(8)]}
    tables["long_factor"] = [1.0 + 2.0 * i for i in range(8)]
    config = tiny_config("phi3", original_max_position_embeddings=LENGTH)
    config.save_pretrained(path)
    with edited(path) as saved:
        del saved["rope_parameters"]
        saved["rope_scaling"] = {"type": "longrope", **tables, **more}
        saved |= {"max_position_embeddings": 32 * LENGTH, "sliding_window": 64 * LENGTH}
    return path


def test_a_folder_with_tables_of_its_own_is_extended_already(tmp_path: Path) -> None:
    place = phi(tmp_path)
    found = rope_ext.describe(place)
    assert (found.method, found.length, found.target_length) == ("longrope", LENGTH, 32 * LENGTH)
    assert found.serve == (f"vllm serve {place} --max-model-len {32 * LENGTH}",)
    made = rope_ext.export(place, "vllm")
    assert made.command == found.serve[0] and made.settings == {"max_model_len": 32 * LENGTH}
    assert "hf upload" in rope_ext.export(place, "transformers").command
    with pytest.raises(rope_ext.ExportError, match="'vllm' and 'transformers' can run this patch"):
        rope_ext.export(place, "mlx")
    with pytest.raises(rope_ext.OptionError, match=f"{32 * LENGTH} tokens that .* vllm serve"):
        rope_ext.recommend(place, 16 * LENGTH)
    with pytest.raises(rope_ext.AlreadyScaledError, match=r"its own two tables.*vllm serve"):
        rope_ext.recommend(place, 64 * LENGTH)
    assert rope_ext.diagnose(place, 16 * LENGTH).trained_length == LENGTH
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place))
    described = rope_ext.describe(model)
    assert (described.length, described.target_length) == (LENGTH, 32 * LENGTH)
    assert rope_ext.export(model, "vllm").settings == made.settings


def test_a_temperature_of_its_own_is_not_left_to_the_engine(tmp_path: Path) -> None:
    place = phi(tmp_path, attention_factor=1.5)
    with pytest.raises(rope_ext.ExportError, match=r"vllm cannot run longrope: .*temperature"):
        rope_ext.export(place, "vllm")


def test_a_temperature_in_the_softmax_scale_is_served_as_it_is(tmp_path: Path) -> None:
    """As that of DeepSeek V3 and Kimi K2."""
    config = tiny_config("deepseek_v3")
    config.rope_parameters |= {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
    config.max_position_embeddings = 4 * LENGTH
    config.save_pretrained(tmp_path)
    described = rope_ext.describe(tmp_path)
    assert (described.length, described.target_length) == (LENGTH, 4 * LENGTH)
    assert rope_ext.export(tmp_path, "vllm").command == f"vllm serve {tmp_path}"


EDITS: dict[str, tuple[str, Any, tuple[str, str]]] = {
    "a factor of yarn": ("yarn", ["rope_parameters", "factor", 8.0], ("8.0", "4.0")),
    "a field too many": ("yarn", ["rope_parameters", "truncate", False], ("False", "None")),
    "the older factor": ("yarn", ["rope_scaling", "factor", 8.0], ("8.0", "4.0")),
    "the base of yarn": ("yarn", ["rope_theta", 5e5], ("500000.0", "10000.0")),
    "the base of ntk": ("ntk", ["rope_parameters", "rope_theta", 5e5], ("500000.0", "48760")),
    "the base of rerope": (
        "rerope",
        ["rope_parameters", "rope_theta", 5e5],
        ("500000.0", "10000.0"),
    ),
    "the base that the patch of rerope found": (
        "rerope",
        ["rope_ext", "config", "rope_parameters", "rope_theta", 5e5],
        ("500000.0", "10000.0"),
    ),
    "the older base of rerope": ("rerope", ["rope_theta", 5e5], ("500000.0", "10000.0")),
    "a dynamic method": (
        "dynamic_yarn",
        ["rope_parameters", "rope_theta", 5e5],
        ("500000.0", "1000"),
    ),
}


def changed_by_hand(place: Path, method: str, *change: Any, family: str = "llama") -> Path:
    """A folder saved under a patch, whose ``config.json`` was then edited."""
    rope_ext.patch(tiny_model(family), method, factor=4).save_pretrained(place)
    *path, name, value = change
    with edited(place) as saved:
        for part in path:
            saved = saved[part]
        saved[name] = value
    return place


@pytest.mark.parametrize("case", EDITS)
def test_a_configuration_changed_by_hand_is_refused(tmp_path: Path, case: str) -> None:
    """One of the two places of each value is read, so the change would have no effect."""
    method, change, values = EDITS[case]
    place = changed_by_hand(tmp_path, method, *change)
    for read in (rope_ext.from_pretrained, rope_ext.describe, load_model):
        with pytest.raises(rope_ext.RecordError, match="changed after a patch") as raised:
            read(str(place))
        assert all(value in str(raised.value) for value in values)


def test_a_base_that_a_recorded_patch_replaces_is_not_changed(tmp_path: Path) -> None:
    """With several types of layers, the older fields do not repeat it."""
    change = ["rope_parameters", "full_attention", "rope_theta", 5e5]
    place = changed_by_hand(tmp_path, "rerope", *change, family="gemma3_text")
    with pytest.raises(rope_ext.RecordError, match="rope_parameters"):
        rope_ext.from_pretrained(place)


def test_a_change_in_both_places_is_read(tmp_path: Path) -> None:
    place = changed_by_hand(tmp_path, "yarn", "rope_parameters", "beta_fast", 16.0)
    with edited(place) as saved:
        saved["rope_scaling"]["beta_fast"] = 16.0
    assert rope_ext.describe(place).options["beta_fast"] == 16


def test_the_old_name_of_a_type_is_mentioned() -> None:
    """Only ``rope_type`` is read, for each type of layers."""
    config = tiny_config("gemma3_text")
    for part in config.rope_parameters.values():
        part |= {"type": "yarn"}
    described = str(rope_ext.describe(config))
    assert "trained for" in described and "'yarn' as type" in described


@pytest.mark.parametrize("family", ["gemma3_text", "llama"])
def test_scaling_of_all_layers_is_described_whatever_their_bases(family: str, tmp_path) -> None:
    config = tiny_config(family)
    parameters = config.rope_parameters
    for part in parameters.values() if family == "gemma3_text" else [parameters]:
        part |= YARN
    config.max_position_embeddings = 4 * LENGTH
    model = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    for given in (model, tmp_path):
        described = rope_ext.describe(given)
        assert (described.length, described.target_length) == (LENGTH, 4 * LENGTH)


def test_a_trained_length_beside_the_context_length_counts(tmp_path: Path) -> None:
    model = tiny_llama(max_trained_positions=LENGTH // 2)
    described = rope_ext.describe(model)
    assert described.length == LENGTH // 2 and "max_trained_positions" in str(described)
    for method in ("yarn", "ntk", "pi"):
        rope_ext.patch(model, method, factor=4).save_pretrained(tmp_path / method)
        described = rope_ext.describe(tmp_path / method)
        assert (described.length, described.target_length) == (LENGTH // 2, 2 * LENGTH)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / method)
        assert rope_ext.describe(plain).target_length == 2 * LENGTH
        assert rope_ext.describe(rope_ext.unpatch(model)).length == LENGTH // 2


@pytest.mark.parametrize("listed", [[0, 1], [0]])
def test_layers_without_the_scaling_of_a_configuration(tmp_path, listed: list[int]) -> None:
    """Molmo2 lists the layers that it scales: others rotate by a module of their own."""
    model = tiny_model("molmo2")
    text = model.config.text_config
    text.rope_scaling_layers = listed
    torch.manual_seed(0)
    model = type(model)(model.config).eval()
    rope_ext.patch(model, "yarn", factor=4)
    ids = torch.arange(3, 103)[None]
    model.save_pretrained(tmp_path)
    if len(listed) == 2:
        again = type(model).from_pretrained(tmp_path).eval()
    else:
        with pytest.raises(Exception, match="rope_ext"):
            type(model).from_pretrained(tmp_path)
        again = rope_ext.from_pretrained(tmp_path).eval()
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert len(rope_ext.describe(tmp_path).sites) == 3 - len(listed)


def test_a_scaling_of_some_layers_is_raised_in_these(tmp_path: Path) -> None:
    config = tiny_config("molmo2")
    config.text_config.rope_scaling_layers = [0]
    config.text_config.rope_parameters = {**config.text_config.rope_parameters, **YARN}
    config.text_config.max_position_embeddings = 4 * LENGTH
    model = AutoModelForImageTextToText.from_config(config).eval()
    rope_ext.patch(model, "yarn", factor=8, compose="raise").save_pretrained(tmp_path)
    ids = torch.arange(3, 103)[None]
    again = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_the_language_model_of_a_model_of_several_is_named() -> None:
    """Nothing can be patched in the whole."""
    with torch.device("meta"):
        config = Qwen2_5OmniConfig()
        config.thinker_config.text_config.num_hidden_layers = 1
        config.talker_config.num_hidden_layers = 1
        config.thinker_config.vision_config.depth = 1
        config.thinker_config.audio_config.encoder_layers = 1
        model = Qwen2_5OmniForConditionalGeneration(config)
    with pytest.raises(rope_ext.UnsupportedModelError, match=r"model\.thinker"):
        rope_ext.describe(model)
    with pytest.raises(rope_ext.UnsupportedModelError, match=r"model\.thinker"):
        rope_ext.patch(model, "yarn", factor=4)
