"""What is saved under a patch comes back under it: models, adapters, and what is refused."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlavaForConditionalGeneration,
)

import rope_ext
from rope_ext.config.record import ARGUMENTS, OLDER, Record
from rope_ext.methods import build_method
from rope_ext.patching import current_patch
from tests.families.checks import changed, snapshot
from tests.families.zoo import tiny_config, tiny_model
from tests.helpers.models import LENGTH, tiny_llama, tiny_llava
from tests.helpers.positions import logits
from tests.helpers.saved_patches import PATCHES, edited, lora

CURE = r"load with rope_ext\.from_pretrained"


def patched(model: Any, case: str) -> Any:
    name, options = PATCHES[case]
    return rope_ext.patch(model, name, **{"factor": 4, **options})


def config_of(model: Any) -> dict[str, Any]:
    """Without what transformers drops when it reads it (``test_older_readers.py``)."""
    dropped = ("_name_or_path", *OLDER)
    return {k: v for k, v in model.config.to_dict().items() if k not in dropped}


def disarm(directory: Path, **of_record: Any) -> None:
    """Let plain transformers load what was saved under a patch that it cannot build."""
    with edited(directory) as config:
        config["rope_parameters"]["rope_type"] = "default"
        del config["rope_scaling"], config["rope_theta"]
        config["rope_ext"] |= of_record


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The unpatched model on disk."""
    tiny_llama().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("case", ["yarn", "dynamic_yarn", "dynamic_ntk growing", "rerope on ntk"])
def test_a_saved_model_comes_back_with_its_patch(tmp_path, ids, base: Path, case: str) -> None:
    model = patched(AutoModelForCausalLM.from_pretrained(base), case)
    model.save_pretrained(tmp_path / "saved")
    again = rope_ext.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(again, ids), logits(model, ids))
    assert config_of(again) == config_of(model)
    if current_patch(model).record.plain:
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert current_patch(again) is None and config_of(again) == config_of(plain)
        assert torch.equal(logits(plain, ids), logits(model, ids))
        return
    if not current_patch(model).saved.native:
        with pytest.raises(KeyError, match=CURE):
            AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert str(rope_ext.describe(again)) == str(rope_ext.describe(model))
    true = AutoModelForCausalLM.from_pretrained(base)
    rope_ext.unpatch(again)
    assert config_of(again) == config_of(true)
    assert torch.equal(logits(again, ids), logits(true, ids))


def test_angles_in_float64_come_back(tmp_path, ids) -> None:
    """Plain transformers loads the folder, too, but has angles in float32."""
    model = rope_ext.patch(tiny_llama(), "yarn", factor=4, precise=True)
    far = {"position_ids": 3_000_000 + torch.arange(ids.shape[1])[None]}
    model.save_pretrained(tmp_path)
    again = rope_ext.from_pretrained(tmp_path)
    assert torch.equal(logits(again, ids, **far), logits(model, ids, **far))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not torch.equal(logits(plain, ids, **far), logits(model, ids, **far))


def test_a_patch_on_a_scaled_checkpoint_comes_back(tmp_path, ids) -> None:
    rope_ext.patch(tiny_llama(), "llama3", factor=2).save_pretrained(tmp_path / "llama3")
    scaled = rope_ext.from_pretrained(tmp_path / "llama3")
    said, before = logits(scaled, ids), config_of(scaled)
    rope_ext.patch(scaled, "dual_chunk", factor=2, frequency=rope_ext.PI(factor=2), compose=True)
    scaled.save_pretrained(tmp_path / "both")
    again = rope_ext.from_pretrained(tmp_path / "both")
    assert torch.equal(logits(again, ids), logits(scaled, ids))
    assert not torch.equal(logits(again, ids), said)
    rope_ext.unpatch(again)
    assert torch.equal(logits(again, ids), said) and config_of(again) == before


def test_options_of_loading_reach_transformers(tmp_path) -> None:
    patched(tiny_llama(), "rerope").save_pretrained(tmp_path)
    again = rope_ext.from_pretrained(tmp_path, dtype=torch.float64, device_map="cpu")
    assert again.dtype == torch.float64 and current_patch(again).method.name == "rerope"
    config = AutoConfig.from_pretrained(tmp_path, attention_bias=True)
    again = rope_ext.from_pretrained(tmp_path, config=config)
    assert again.config.attention_bias and current_patch(again).method.name == "rerope"
    assert config.max_position_embeddings == 4 * LENGTH  # the one given is left alone
    again = rope_ext.from_pretrained(tmp_path, use_cache=False, config=str(tmp_path))
    assert again.config.use_cache is False and current_patch(again).method.name == "rerope"
    again, info = rope_ext.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and current_patch(again).method.name == "rerope"
    with pytest.raises(rope_ext.RecordError, match=r"64 -> 256 tokens.*gives.* 99 -> 396 tokens"):
        rope_ext.from_pretrained(tmp_path, max_position_embeddings=99)


def as_shards(model: Any, folder: Path) -> dict[str, Any]:
    model.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return {}


def as_subfolder(model: Any, folder: Path) -> dict[str, Any]:
    model.save_pretrained(folder / "step-3")
    return {"subfolder": "step-3"}


def as_variant(model: Any, folder: Path) -> dict[str, Any]:
    """In shards, which an index of that variant lists."""
    model.save_pretrained(folder, variant="fp16", max_shard_size="40KB")
    assert len(list(folder.glob("*.fp16-*.safetensors"))) > 2
    return {"variant": "fp16"}


LAYOUTS = [as_shards, as_subfolder, as_variant]


@pytest.mark.parametrize("save_as", LAYOUTS)
def test_learned_parameters_are_found_in_every_layout(tmp_path, ids, save_as) -> None:
    model = trained(rope_ext.patch(tiny_llama(tie_word_embeddings=True), "t5", factor=4))
    model.generation_config.max_new_tokens = 7
    again = rope_ext.from_pretrained(tmp_path, **save_as(model, tmp_path))
    assert torch.equal(logits(again, ids), logits(model, ids))
    assert again.generation_config.max_new_tokens == 7
    assert again.lm_head.weight is again.model.embed_tokens.weight


def trained(model: Any) -> Any:
    """With other values than a patch starts from."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "rope_ext" in name:
                value += torch.linspace(0, 1, value.numel()).view_as(value)
    return model


def spoiled(tensors: dict[str, torch.Tensor], key: str, how: str) -> None:
    if how == "NaN":
        tensors[key][0] = math.nan
    elif how == "int64":
        tensors[key] = tensors[key].long()
    elif how == "infinite":
        tensors[key] = torch.full_like(tensors[key], 1e300, dtype=torch.float64)
    else:
        tensors[f"other.{key}"] = tensors[key] + 1


@pytest.mark.parametrize("how", ["NaN", "int64", "both hold", "infinite"])
@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_learned_parameters_that_no_training_wrote_are_refused(
    tmp_path: Path, base: Path, kind: str, how: str
) -> None:
    """Not a number, whole numbers, two tensors for one, or beyond what its dtype holds."""
    model = rope_ext.patch(AutoModelForCausalLM.from_pretrained(base), "t5")
    if kind == "adapter":
        adapted = lora(model, modules_to_save=["rope_ext_bias"])
        save(adapted, tmp_path / "model")
        file = tmp_path / "model" / "adapter_model.safetensors"
    else:
        model.save_pretrained(tmp_path / "model")
        file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    spoiled(tensors, next(key for key in tensors if "rope_ext_bias" in key), how)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(rope_ext.RopeExtError, match=how):
        rope_ext.from_pretrained(tmp_path / "model")
    if kind == "adapter":
        patched_base = rope_ext.patch(AutoModelForCausalLM.from_pretrained(base), "t5")
        with pytest.raises(rope_ext.AdapterError, match=how):
            rope_ext.load_adapter(patched_base, tmp_path / "model")


@pytest.mark.parametrize("parts", [("method",), ("method", "resolved")])
def test_a_sidecar_with_another_factor_says_what_disagrees(tmp_path, base: Path, parts) -> None:
    model = rope_ext.patch(AutoModelForCausalLM.from_pretrained(base), "yarn", factor=4)
    save(lora(model), tmp_path)
    path = tmp_path / "rope_ext.json"
    sidecar = json.loads(path.read_text())
    for part in parts:
        sidecar[part]["factor"] = 8.0
    path.write_text(json.dumps(sidecar))
    with pytest.raises(rope_ext.RopeExtError) as raised:
        rope_ext.load_adapter(rope_ext.patch(tiny_llama(), "yarn", factor=8), tmp_path)
    assert ("256 tokens" if len(parts) > 1 else "factor=4") in str(raised.value)


def test_saving_and_reading_a_patch_prints_no_message_of_transformers(tmp_path, capfd) -> None:
    """About the type that a patch writes so that plain transformers refuses the folder."""
    logger = logging.getLogger("transformers")
    logger.setLevel(logging.WARNING)
    rope_ext.patch(tiny_llama(), "self_extend", factor=4).save_pretrained(tmp_path)
    rope_ext.describe(tmp_path)
    rope_ext.from_pretrained(tmp_path)
    assert "validation function" not in capfd.readouterr().err


def test_a_folder_named_like_a_file_is_a_folder(tmp_path: Path, ids) -> None:
    model = rope_ext.patch(tiny_llama(), "rerope", factor=4)
    model.save_pretrained(folder := tmp_path / "model.gguf")
    assert torch.equal(logits(rope_ext.from_pretrained(folder), ids), logits(model, ids))
    assert rope_ext.describe(folder).method == "rerope"
    model = rope_ext.patch(rope_ext.unpatch(rope_ext.from_pretrained(folder)), "pi", factor=4)
    assert "--model MODEL.gguf" in rope_ext.export(model, "llama.cpp").command


@pytest.mark.parametrize("case", PATCHES)
def test_a_record_gives_back_the_arguments_of_patch(case: str) -> None:
    name, options = PATCHES[case]
    record = current_patch(patched(tiny_llama(), case)).record
    again = Record.from_json(json.loads(json.dumps(record.to_json())), "here")
    assert again == record
    of_patch = {k: v for k, v in options.items() if k in ARGUMENTS}
    assert again.arguments == {**ARGUMENTS, **of_patch}
    of_method = {k: v for k, v in options.items() if k not in ARGUMENTS}
    assert again.method == build_method(name, **{"factor": 4, **of_method})
    assert again.target_length == rope_ext.describe(patched(tiny_llama(), case)).target_length


def test_the_arguments_of_a_record_are_those_of_patch() -> None:
    parameters = inspect.signature(rope_ext.patch).parameters
    left_out = {"model", "method", "replace", "tokenizer", "options"}
    assert {k: v.default for k, v in parameters.items() if k not in left_out} == dict(ARGUMENTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 4}, "install a newer rope_ext"),
        ({"method": {"name": "yarm", "factor": 4}}, "did you mean 'yarn'"),
        ({"method": {"factor": 4}}, "'name' is missing"),
        ({"arguments": {"kernel": "auto"}}, "its arguments are"),
        ({"trained_length": "64"}, "trained_length='64' is not a number of tokens"),
        ({"plain": None}, "plain=None .* is not True or False"),
    ],
)
def test_records_that_cannot_be_read_say_what_to_do(tmp_path, change, message) -> None:
    patched(tiny_llama(), "rerope").save_pretrained(tmp_path)
    disarm(tmp_path, **change)
    with pytest.raises(rope_ext.RecordError, match=message):
        rope_ext.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(rope_ext.RecordError, match=message):
        rope_ext.patch(model, "pi", factor=2)
    rope_ext.patch(model, "pi", factor=2, original_max_position_embeddings=LENGTH)
    assert model.config.max_position_embeddings == 2 * LENGTH
    assert not hasattr(model.config, "rope_ext")


@pytest.mark.parametrize("record", [None, {"config": {}}, {"plain": True}])
def test_a_record_that_leads_nowhere_is_told(tmp_path, record: dict[str, Any] | None) -> None:
    patched(tiny_llama(), "rerope").save_pretrained(tmp_path)
    with edited(tmp_path) as config:
        config["rope_ext"] = None if record is None else config["rope_ext"] | record
    with pytest.raises(rope_ext.RecordError, match="load the original model"):
        rope_ext.from_pretrained(tmp_path)


def test_a_default_that_changes_between_versions_is_noticed(tmp_path) -> None:
    patched(tiny_llama(), "leaky_rerope").save_pretrained(tmp_path)
    with edited(tmp_path) as config:
        config["rope_ext"]["resolved"]["window"] += 1
    with pytest.raises(rope_ext.RecordError, match="the same call now gives"):
        rope_ext.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["self_extend", "dpe", "rerope"])
def test_a_record_from_before_a_default_changed_reloads_as_it_was_saved(tmp_path, name) -> None:
    ids = torch.arange(3, 3 + 2 * LENGTH)[None] % 90  # beyond the trained length log_n is not 1
    before = rope_ext.patch(tiny_llama(), name, factor=4, published=True)
    before.save_pretrained(tmp_path)
    with edited(tmp_path) as config:
        for part in ("method", "resolved"):  # as it was written when nothing else was the default
            del config["rope_ext"][part]["published"]
            config["rope_ext"][part]["temperature"] = None
    again = rope_ext.from_pretrained(tmp_path)
    assert torch.equal(logits(again, ids), logits(before, ids))
    today = rope_ext.patch(tiny_llama(), name, factor=4)
    assert not torch.equal(logits(today, ids), logits(before, ids))


def test_plainly_loaded_the_record_tells_the_trained_length(tmp_path, ids) -> None:
    patched(tiny_llama(), "rerope").save_pretrained(tmp_path)
    disarm(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.max_position_embeddings == 4 * LENGTH
    description = rope_ext.describe(again)
    assert description.length == LENGTH and description.method is None
    assert "rope_ext.patch(model, 'rerope', factor=4" in str(description)
    before = snapshot(again)
    rope_ext.patch(again, "dynamic_yarn", factor=2)
    assert rope_ext.describe(again).target_length == 2 * LENGTH
    assert "saved under another patch ('rerope', factor=4" in str(rope_ext.describe(again))
    right = rope_ext.patch(tiny_llama(), "dynamic_yarn", factor=2)
    assert torch.equal(logits(again, ids), logits(right, ids))
    again.save_pretrained(tmp_path / "second")
    after = snapshot(rope_ext.unpatch(again))
    assert changed(before, after) <= {"config:dtype"}  # saving turned that into a word
    second = rope_ext.from_pretrained(tmp_path / "second")
    assert torch.equal(logits(second, ids), logits(right, ids))
    assert rope_ext.unpatch(second).config.max_position_embeddings == LENGTH


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_neox", "phi3", "phi4_multimodal"])
def test_plain_transformers_refuses_what_it_cannot_build(
    tmp_path, caplog, ids, family: str
) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model.save_pretrained(tmp_path)  # which notes dtype and class in the configuration
    before = snapshot(model)
    with caplog.at_level("INFO", "rope_ext"):
        rope_ext.patch(model, "dynamic_yarn", factor=4, sliding_layers="scale")
    assert "plain transformers raises an error" in caplog.text
    model.save_pretrained(tmp_path)
    loaders = AutoModel, AutoModelForCausalLM, type(model), type(model.get_decoder())
    for cls in loaders:
        with pytest.raises((KeyError, ValueError), match=CURE):
            cls.from_pretrained(tmp_path)
    again = rope_ext.from_pretrained(tmp_path)
    assert torch.equal(logits(again, ids), logits(model, ids))
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert str(rope_ext.describe(twin)) == str(rope_ext.describe(model))
    after = snapshot(rope_ext.unpatch(model))
    assert changed(before, after) <= {":_weight_conversions"}  # made anew by every saving
    rope_ext.unpatch(again).save_pretrained(tmp_path / "again")
    model.save_pretrained(tmp_path / "before")
    configs = [tmp_path / name / "config.json" for name in ("again", "before")]
    assert configs[0].read_text() == configs[1].read_text()


@pytest.mark.parametrize("method", ["self_extend", "dynamic_yarn"])
def test_an_engine_that_does_not_know_the_patch_serves_the_trained_length(
    tmp_path, ids, method: str
) -> None:
    """It reads no experts implementation, which alone stops transformers in this family."""
    model = rope_ext.patch(tiny_model("phi3"), method, factor=4)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["max_position_embeddings"] == LENGTH
    again = rope_ext.from_pretrained(tmp_path)
    assert rope_ext.describe(again).target_length == 4 * LENGTH
    assert torch.equal(logits(again, ids), logits(model, ids))


@pytest.mark.parametrize("method", ["ntk_by_parts", "yarn"])
def test_a_saved_table_has_the_temperature_in_the_fields_of_engines(tmp_path, method: str) -> None:
    """From the factor, vLLM and SGLang would compute another one."""
    model = rope_ext.patch(tiny_model("phi3"), method, factor=4)
    model.save_pretrained(tmp_path)
    entry = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    assert entry["short_mscale"] == entry["long_mscale"] == entry["attention_factor"]
    command = rope_ext.export(tmp_path, "vllm").command
    # Without it, vLLM serves the original_max_position_embeddings of this family.
    assert "--hf-overrides" not in command and f"--max-model-len {4 * LENGTH}" in command


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_language_model_that_sees_is_refused_and_comes_back(tmp_path, ids, family: str) -> None:
    model = tiny_llava(tiny_config(family, original_max_position_embeddings=LENGTH))
    unpatched = copy.deepcopy(model.config.text_config.rope_parameters)
    trained(rope_ext.patch(model, "t5", factor=4))  # its parameters are renamed in the file
    model.save_pretrained(tmp_path)
    for cls in (LlavaForConditionalGeneration, AutoModelForImageTextToText, AutoModel):
        with pytest.raises((KeyError, ValueError), match=CURE):
            cls.from_pretrained(tmp_path)
    again = rope_ext.from_pretrained(tmp_path)
    assert torch.equal(logits(again, ids), logits(model, ids))
    for one in (model, again):
        rope_ext.unpatch(one)
        assert "rope_ext" not in one.config.to_json_string()
        assert one.config.text_config.rope_parameters == unpatched


@pytest.mark.parametrize("case", ["ntk", "abf", "dynamic_ntk fixed"])
def test_a_larger_base_is_known_for_an_extension(tmp_path, ids, case: str) -> None:
    model = patched(tiny_llama(), case)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again, ids), logits(model, ids))
    assert current_patch(model).record.call() in str(rope_ext.describe(again))
    before = snapshot(again)
    for method in ("pi", "dynamic_yarn"):
        with pytest.raises(rope_ext.AlreadyScaledError, match="which it was saved with"):
            rope_ext.patch(again, method, factor=2)
    assert not changed(before, snapshot(again))
    length = rope_ext.describe(again).length
    rope_ext.patch(again, "pi", factor=2, compose=True)
    assert length == model.config.max_position_embeddings
    assert rope_ext.describe(again).target_length == 2 * length
    rope_ext.unpatch(again)
    assert config_of(again) == config_of(AutoModelForCausalLM.from_pretrained(tmp_path))


def save(model: PeftModel, directory: Path) -> Path:
    model.save_pretrained(directory)
    assert rope_ext.save_sidecar(model, directory) == directory / "rope_ext.json"
    return directory


def test_an_adapter_needs_what_the_patch_of_its_base_learned(tmp_path, ids, base: Path) -> None:
    model = trained(rope_ext.patch(AutoModelForCausalLM.from_pretrained(base), "t5"))
    model.save_pretrained(tmp_path)
    model = lora(rope_ext.from_pretrained(tmp_path))
    adapter = save(model, tmp_path / "adapter")
    assert torch.equal(logits(rope_ext.from_pretrained(adapter), ids), logits(model, ids))
    with pytest.raises(rope_ext.LoadError, match=r"learned by its patch.* pass base="):
        rope_ext.from_pretrained(adapter, base=base)


def test_what_an_adapter_trained_is_beside_what_its_base_learned(tmp_path, ids, base: Path) -> None:
    model = trained(rope_ext.patch(AutoModelForCausalLM.from_pretrained(base), "t5"))
    model.save_pretrained(tmp_path)
    said = logits(model, ids)
    adapted = lora(rope_ext.from_pretrained(tmp_path), modules_to_save=["rope_ext_bias"])
    again = rope_ext.from_pretrained(save(adapted, tmp_path / "adapter"))
    assert torch.equal(logits(again, ids), logits(adapted, ids))
    with again.disable_adapter():
        assert torch.equal(logits(again, ids), said)


@pytest.mark.parametrize("case", ["yarn", "dynamic_ntk", "longrope", "rerope"])
def test_an_adapter_comes_back_with_its_patch(tmp_path, ids, base: Path, case: str) -> None:
    model = lora(patched(AutoModelForCausalLM.from_pretrained(base), case))
    save(model, tmp_path / "adapter")
    again = rope_ext.from_pretrained(tmp_path / "adapter")
    assert isinstance(again, PeftModel) and not again.training
    assert torch.equal(logits(again, ids), logits(model, ids))
    own = patched(AutoModelForCausalLM.from_pretrained(base), case)
    again = rope_ext.load_adapter(own, tmp_path / "adapter", is_trainable=True)
    assert torch.equal(logits(again, ids), logits(model, ids))
    assert any(p.requires_grad for p in again.parameters())
    with again.disable_adapter():
        rope_ext.unpatch(again)
        true = AutoModelForCausalLM.from_pretrained(base)
        assert torch.equal(logits(again, ids), logits(true, ids))


def test_an_adapter_trained_on_a_saved_extension_comes_back(tmp_path, ids, base: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(base)
    patched(plain, "yarn").save_pretrained(tmp_path / "yarn")
    model = lora(plain)
    save(model, tmp_path / "adapter")
    said = logits(model, ids)
    on_saved = rope_ext.from_pretrained(tmp_path / "adapter", base=tmp_path / "yarn")
    assert torch.equal(logits(on_saved, ids), said) and current_patch(on_saved) is None
    # one whose configuration holds a record is taken back to before it
    patched(tiny_llama(), "rerope").save_pretrained(tmp_path / "rerope")
    on_rerope = rope_ext.from_pretrained(tmp_path / "adapter", base=tmp_path / "rerope")
    assert torch.equal(logits(on_rerope, ids), said)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "not patched": (tiny_llama, "this model is not patched"),
    "another method": (
        lambda: rope_ext.patch(tiny_llama(), "dual_chunk", factor=4),
        "this model is patched by rope_ext.patch.model, 'dual_chunk', factor=4",
    ),
    "another trained length": (
        lambda: patched(tiny_llama(max_position_embeddings=128), "rerope"),
        "this model was trained on 128 tokens, not 64",
    ),
    "another base": (
        lambda: patched(
            tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 5e4}), "rerope"
        ),
        "has different rotary frequencies",
    ),
    "another family": (lambda: tiny_model("gemma3_text"), "has different rotary"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_adapter_goes_only_on_the_base_it_was_trained_on(tmp_path, wrong: str) -> None:
    save(lora(patched(tiny_llama(), "rerope")), tmp_path)
    build, message = WRONG[wrong]
    with pytest.raises(rope_ext.AdapterError, match=message) as raised:
        rope_ext.load_adapter(build(), tmp_path)
    said = str(raised.value)
    assert "trained under rope_ext.patch(model, 'rerope', factor=4, log_n=False, window=20" in said
    assert f"rope_ext.from_pretrained({str(tmp_path)!r})" in said


def test_an_adapter_goes_on_a_base_with_another_kernel(tmp_path) -> None:
    save(lora(patched(tiny_llama(), "rerope")), tmp_path)  # by kernel="reference"
    own = rope_ext.patch(tiny_llama(), "rerope", factor=4, window=20, log_n=False)
    assert isinstance(rope_ext.load_adapter(own, tmp_path), PeftModel)


def test_an_adapter_in_a_subfolder_has_its_base_elsewhere(tmp_path, ids, base: Path) -> None:
    model = lora(patched(AutoModelForCausalLM.from_pretrained(base), "rerope"))
    save(model, tmp_path / "adapter")
    again = rope_ext.from_pretrained(tmp_path, subfolder="adapter")
    assert torch.equal(logits(again, ids), logits(model, ids))


def test_a_wrong_base_is_refused_before_it_is_patched(tmp_path, base: Path) -> None:
    save(lora(patched(AutoModelForCausalLM.from_pretrained(base), "yarn")), tmp_path / "adapter")
    patched(tiny_llama(), "ntk").save_pretrained(tmp_path / "ntk")
    for other in ("ntk", "nowhere"):
        with pytest.raises(rope_ext.AdapterError, match=r"base model|base="):
            rope_ext.from_pretrained(tmp_path / "adapter", base=tmp_path / other)
    with pytest.raises(rope_ext.AdapterError, match="does not contain an adapter"):
        rope_ext.from_pretrained(base, base=base)


def test_an_unpatched_adapter_takes_the_place_of_a_patched_one(tmp_path, ids, base: Path) -> None:
    """Loaded under the patch of the earlier one, it would be another model."""
    lora(patched(AutoModelForCausalLM.from_pretrained(base), "yarn")).save_pretrained(tmp_path)
    assert (tmp_path / "rope_ext.json").exists()
    lora(AutoModelForCausalLM.from_pretrained(base)).save_pretrained(tmp_path)
    with pytest.raises(rope_ext.AdapterError, match=r"no rope_ext\.json"):
        rope_ext.from_pretrained(tmp_path)
    (tmp_path / "rope_ext.json").write_text("{}")  # not ours
    lora(AutoModelForCausalLM.from_pretrained(base)).save_pretrained(tmp_path)
    assert (tmp_path / "rope_ext.json").read_text() == "{}"


def test_a_folder_without_a_sidecar_is_refused(tmp_path, base: Path) -> None:
    model = lora(patched(AutoModelForCausalLM.from_pretrained(base), "yarn"))
    model.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "rope_ext.json").unlink()  # as of a process that patched before peft
    for load in (
        lambda: rope_ext.from_pretrained(tmp_path / "adapter"),
        lambda: rope_ext.load_adapter(patched(tiny_llama(), "yarn"), tmp_path / "adapter"),
    ):
        with pytest.raises(rope_ext.AdapterError, match=r"no rope_ext\.json.*PeftModel"):
            load()
    with pytest.raises(rope_ext.NotPatchedError, match="before training"):
        rope_ext.save_sidecar(rope_ext.unpatch(model), tmp_path / "adapter")
    with pytest.raises(rope_ext.AdapterError, match=r"save_sidecar\(model, '.*/adapter'\)"):
        rope_ext.from_pretrained(tmp_path, subfolder="adapter")
    save(patched(model, "yarn"), tmp_path / "adapter")
    with pytest.raises(rope_ext.AdapterError, match="already has an adapter"):
        rope_ext.load_adapter(model, tmp_path / "adapter")


@pytest.mark.parametrize("case", ["rerope", "dynamic_yarn", "dynamic_ntk growing"])
def test_context_parallelism_is_refused(tmp_path, model, ids, case: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    patched(model, case)
    said = logits(model, ids)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh, part = init_device_mesh("cpu", (1,)), ids.clone()
        with (
            context_parallel(mesh, buffers=[part], buffer_seq_dims=[1]),
            pytest.raises(rope_ext.UnsupportedModelError, match="context parallelism"),
        ):
            logits(model, part)
        assert torch.equal(logits(model, ids), said)
    finally:
        dist.destroy_process_group()


def test_a_configuration_without_the_record_is_refused(tmp_path) -> None:
    patched(tiny_llama(), "rerope").save_pretrained(tmp_path / "saved")
    config = tiny_llama().config
    with pytest.raises(rope_ext.RecordError, match="leave config= out"):
        rope_ext.from_pretrained(tmp_path / "saved", config=config)
    tiny_llama().save_pretrained(tmp_path / "plain")
    rope_ext.from_pretrained(tmp_path / "plain", config=config)


@pytest.mark.parametrize("name", ["yarn", "dynamic_ntk"])
def test_a_head_dimension_of_null_is_written_as_a_number(ids, name: str, tmp_path: Path) -> None:
    """Two of transformers' functions multiply it as it is."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": None}
    config = transformers.MixtralConfig(
        vocab_size=128, max_position_embeddings=LENGTH, num_local_experts=2, **sizes, **heads
    )
    model = transformers.MixtralForCausalLM(config).eval()
    rope_ext.patch(model, name, factor=4)
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model(ids).logits)
    assert rope_ext.unpatch(model).config.head_dim is None
