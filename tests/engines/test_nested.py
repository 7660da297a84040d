"""Exported overrides reach the text model of a configuration that nests it.

vLLM and SGLang read the folder's configuration and update it. Both updates are written down here
from vLLM 0.33.0 (``ModelConfig._apply_dict_overrides``) and SGLang 0.5.23 (``get_config`` of
``srt/utils/hf_transformers/config.py``).
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, Qwen3_5Config

import rope_ext
from rope_ext.methods.temperature import yarn_factor
from rope_ext.patching import current_patch
from rope_ext.saving.folder import built_on_meta, patch_without_weights
from tests.families.zoo import LENGTH, image_text_types, tiny_config, tiny_model

SETTINGS = {"vllm": "hf_overrides", "sglang": "json_model_override_args"}
RUN = ("qwen3_5+images", "qwen3_5_moe+images", "qwen3_vl", "qwen2_5_vl", "mistral3", "llava")
"""Families that both engines run, so that nothing is left out without notice."""
YARN = rope_ext.YaRN(factor=4)


def merged(target: Any, updates: dict[str, Any]) -> None:
    for name, value in updates.items():
        there = target.get(name) if isinstance(target, dict) else getattr(target, name, None)
        if isinstance(value, dict) and (isinstance(there, dict) or hasattr(there, "__dict__")):
            merged(there, value)
        elif isinstance(target, dict):
            target[name] = value
        else:
            setattr(target, name, value)


def by_vllm(config: Any, overrides: dict[str, Any]) -> None:
    for name, value in overrides.items():
        if isinstance(getattr(config, name, None), PreTrainedConfig):
            merged(getattr(config, name), value)
        else:
            setattr(config, name, value)


def by_sglang(config: Any, overrides: dict[str, Any]) -> None:
    for name, value in overrides.items():
        there = getattr(config, name, None)
        if isinstance(value, dict) and isinstance(there, PreTrainedConfig):
            there.update(value)
        elif name == "rope_parameters" and isinstance(there, dict):
            setattr(config, name, {**there, **value})
        else:
            setattr(config, name, value)


UPDATE = {"vllm": by_vllm, "sglang": by_sglang}


@functools.cache
def nested() -> tuple[str, ...]:
    """Families whose text model is a part of a larger configuration, and rotates."""
    found = []
    for name in image_text_types():
        try:
            config = tiny_config(name)
        except Exception:
            continue
        text = config.get_text_config(decoder=True)
        if text is not config and getattr(text, "rope_parameters", None):
            found.append(name)
    return tuple(found)


def check(folder: Path, engine: str, model: Any) -> None:
    made = rope_ext.export(model, engine)
    config = AutoConfig.from_pretrained(folder)
    UPDATE[engine](config, json.loads(json.dumps(made.settings[SETTINGS[engine]])))
    text, state = config.get_text_config(decoder=True), current_patch(model)
    ours = dict(state.decoder.config.get_text_config(decoder=True).rope_parameters)
    if state.decoder.config.model_type in ("qwen2_vl_text", "qwen2_5_vl_text") and engine == "vllm":
        ours |= {name: 4 * ours[name] for name in ("beta_fast", "beta_slow")}  # as it computes them
    assert text.rope_parameters == ours
    assert text.max_position_embeddings == state.target_length == 4 * LENGTH
    assert f" {folder} " in made.command


@pytest.mark.parametrize("engine", SETTINGS)
def test_every_nested_family_receives_its_overrides(tmp_path: Path, engine: str) -> None:
    run = []
    for name in nested():
        folder = tmp_path / name
        tiny_config(name).save_pretrained(folder)
        config = AutoConfig.from_pretrained(folder)
        try:
            model = patch_without_weights(built_on_meta(config), YARN, {"sliding_layers": "scale"})
            rope_ext.export(model, engine)
        except rope_ext.RopeExtError:
            continue
        check(folder, engine, model)
        run.append(name)
    assert set(RUN) <= set(run)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "llama4"])
def test_a_text_model_loaded_from_a_larger_folder_is_served_as_that(tmp_path, name: str) -> None:
    tiny_model(f"{name}+images").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.model_type == f"{name}_text"
    rope_ext.patch(model, "yarn", factor=4, sliding_layers="scale")
    check(tmp_path, "vllm", model)
    model.save_pretrained(tmp_path / "flat")
    made = rope_ext.export(tmp_path / "flat", "vllm")
    assert made.settings == {"max_model_len": 4 * LENGTH} or not made.settings


def test_a_configuration_without_a_folder_is_nested_as_well() -> None:
    config = tiny_config("qwen3_5")
    assert isinstance(config, Qwen3_5Config)
    model = patch_without_weights(built_on_meta(config), YARN)
    assert list(rope_ext.export(model, "vllm").settings["hf_overrides"]) == ["text_config"]


def test_a_raised_factor_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    """VLLM merges what is nested, so that a number that is left out stays as it was."""
    config = tiny_config("qwen3_vl")
    text = config.text_config
    length = {"original_max_position_embeddings": LENGTH, "attention_factor": yarn_factor(2.0)}
    text.rope_parameters |= {"rope_type": "yarn", "factor": 2.0, **length}
    text.max_position_embeddings = 2 * LENGTH
    config.save_pretrained(tmp_path)
    model = built_on_meta(AutoConfig.from_pretrained(tmp_path))
    rope_ext.patch(model, "yarn", factor=4, compose="raise")
    served = AutoConfig.from_pretrained(tmp_path)
    by_vllm(served, rope_ext.export(model, "vllm").settings["hf_overrides"])
    found = served.text_config.rope_parameters
    assert (found["factor"], found["attention_factor"]) == (4.0, yarn_factor(4.0))
