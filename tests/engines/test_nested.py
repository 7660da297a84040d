"""Exported overrides reach the text model of a configuration that nests it.

vLLM and SGLang read the folder's configuration and update it. Both updates are written down here
from vLLM 0.33.0 (``ModelConfig._apply_dict_overrides``) and SGLang 0.5.23 (``get_config`` of
``srt/utils/hf_transformers/config.py``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

import rope_ext
from rope_eval.engines import verifying
from rope_ext.methods.temperature import yarn_factor
from rope_ext.patching import current_patch
from rope_ext.rotary.sites import find_sites, text_config, text_decoder
from rope_ext.saving.folder import built_on_meta, patch_without_weights
from tests.engines.record import ran
from tests.families.zoo import LENGTH, tiny_config, tiny_model

SETTINGS = {"vllm": "hf_overrides", "sglang": "json_model_override_args"}
NESTED = ("qwen3_5+images", "qwen3_5_moe+images", "qwen3_vl", "qwen2_5_vl", "mistral3", "llava")
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


def update(engine: str, config: Any, overrides: dict[str, Any]) -> None:
    for name, value in overrides.items():
        there = getattr(config, name, None)
        if not isinstance(there, PreTrainedConfig):
            setattr(config, name, value)
        elif engine == "vllm":
            merged(there, value)
        else:
            there.update(value)


def check(folder: Path, engine: str, model: Any) -> None:
    made = rope_ext.export(model, engine)
    config = AutoConfig.from_pretrained(folder)
    update(engine, config, made.settings[SETTINGS[engine]])
    text, state = config.get_text_config(decoder=True), current_patch(model)
    ours = dict(state.decoder.config.get_text_config(decoder=True).rope_parameters)
    if state.decoder.config.model_type == "qwen2_5_vl_text" and engine == "vllm":
        ours |= {name: 4 * ours[name] for name in ("beta_fast", "beta_slow")}  # as it computes them
    assert text.rope_parameters == ours
    assert text.max_position_embeddings == state.target_length == 4 * LENGTH
    assert f" {folder} " in made.command


@pytest.mark.parametrize("engine", SETTINGS)
@pytest.mark.parametrize("name", NESTED)
def test_nested_families_receive_their_overrides(tmp_path: Path, engine: str, name: str) -> None:
    tiny_config(name).save_pretrained(tmp_path)
    model = built_on_meta(AutoConfig.from_pretrained(tmp_path))
    check(tmp_path, engine, patch_without_weights(model, YARN, {"sliding_layers": "scale"}))


@pytest.mark.parametrize("name", ["qwen3_5", "llama4"])
def test_a_text_model_loaded_from_a_larger_folder_is_served_as_that(tmp_path, name: str) -> None:
    tiny_model(f"{name}+images").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.model_type == f"{name}_text"
    rope_ext.patch(model, "yarn", factor=4, sliding_layers="scale")
    check(tmp_path, "vllm", model)
    model.save_pretrained(tmp_path / "flat")
    made = rope_ext.export(tmp_path / "flat", "vllm")
    assert made.settings == {"max_model_len": 4 * LENGTH} or not made.settings


def test_a_raised_factor_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    """What is nested is merged, so that a number that is left out stays as it was."""
    config = tiny_config("qwen3_vl")
    text = config.text_config
    length = {"original_max_position_embeddings": LENGTH, "attention_factor": yarn_factor(2.0)}
    text.rope_parameters |= {"rope_type": "yarn", "factor": 2.0, **length}
    text.max_position_embeddings = 2 * LENGTH
    config.save_pretrained(tmp_path)
    model = built_on_meta(AutoConfig.from_pretrained(tmp_path))
    rope_ext.patch(model, "yarn", factor=4, compose="raise")
    served = AutoConfig.from_pretrained(tmp_path)
    update("vllm", served, rope_ext.export(model, "vllm").settings["hf_overrides"])
    found = served.text_config.rope_parameters
    assert (found["factor"], found["attention_factor"]) == (4.0, yarn_factor(4.0))


WHOLE = ("qwen3_5+images", "gemma3+images")
"""Models with images whose text model mlx-lm runs inside the whole."""


def whole_for_mlx(name: str, method: str, **options: Any) -> Any:
    model = tiny_model(name)
    model.config.vocab_size = model.config.text_config.vocab_size  # mlx-lm reads it for Gemma
    interval = {"qwen3_5+images": "full_attention_interval"}.get(name, "sliding_window_pattern")
    setattr(model.config.text_config, interval, 2)  # as the tiny model alternates its layers
    return rope_ext.patch(model, method, factor=4, **options)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("method", ["yarn", "resonance"])
def test_transformers_reads_what_mlx_is_given_for_a_whole_model(tmp_path, name, method) -> None:
    model = whole_for_mlx(name, method)
    model.save_pretrained(tmp_path)
    rope_ext.export(tmp_path, "mlx").write(tmp_path)
    built = text_decoder(built_on_meta(AutoConfig.from_pretrained(tmp_path)))
    for site, own in zip(find_sites(built), find_sites(text_decoder(model)), strict=True):
        torch.testing.assert_close(site.loaded, own.loaded, rtol=1e-5, atol=0)
        assert site.scaling == pytest.approx(own.scaling)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(
    ("method", "options"),
    [("yarn", {}), ("yarn", {"attention_factor": 1.3}), ("ntk", {}), ("resonance", {})],
)
def test_mlx_runs_the_text_model_of_a_whole_model(
    tmp_path: Path, name: str, method: str, options: dict[str, Any]
) -> None:
    pytest.importorskip("mlx_lm")
    model = whole_for_mlx(name, method, **options)
    model.save_pretrained(tmp_path)
    rope_ext.export(model, "mlx").write(tmp_path)
    prompts = [[token % 100 + 4 for token in range(n)] for n in (50, 3 * LENGTH, 4 * LENGTH - 1)]
    with torch.no_grad():
        rows = [model(torch.tensor([ids])).logits[0, -1].log_softmax(-1) for ids in prompts]
    torch.testing.assert_close(
        verifying.mlx(tmp_path, prompts), torch.stack(rows), rtol=0, atol=1e-4
    )
    kind = {"ntk": "default", "resonance": "longrope"}.get(method, method)
    ran("mlx", text_config(model).model_type, kind)


def test_mlx_is_given_no_model_that_it_does_not_load() -> None:
    for name, reason in {
        "qwen3_5_text": "the whole 'qwen3_5'",
        "qwen3_5_moe+images": "experts",
        "llava": "'llava'",
    }.items():
        model = rope_ext.patch(tiny_model(name), "yarn", factor=4)
        with pytest.raises(rope_ext.ExportError, match=reason):
            rope_ext.export(model, "mlx")
