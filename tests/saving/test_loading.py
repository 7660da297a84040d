"""Folders that hold no model, no adapter or a broken one, and records that ask for too much."""

from __future__ import annotations

import errno
import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import rope_ext
from rope_ext.advice.memory import memory
from rope_ext.saving import checkpoints
from tests.families.checks import changed, snapshot
from tests.helpers.models import tiny_llama


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and an adapter that was trained on it under rerope."""
    root = tmp_path_factory.mktemp("folders")
    tiny_llama().save_pretrained(root / "base")
    model = rope_ext.patch(AutoModelForCausalLM.from_pretrained(root / "base"), "rerope", factor=4)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    model.save_pretrained(root / "adapter")
    rope_ext.save_sidecar(model, root / "adapter")
    return root


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def index(folder: Path, **values: Any) -> None:
    """Name the weights in an index, which ``values`` then damage."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    names = {"model.embed_tokens.weight": "model-00001-of-00001.safetensors"}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": names} | values)
    )


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("path", ["/nonexistent", "./nowhere", "no/such/folder", "a b", "", None])
def test_a_path_that_is_no_folder_is_called_that(path: Any) -> None:
    patched = rope_ext.patch(tiny_llama(), "rerope", factor=4)
    for load in (rope_ext.from_pretrained, lambda path: rope_ext.load_adapter(patched, path)):
        with pytest.raises(rope_ext.LoadError, match=r"(no folder|not a path).*Hub") as error:
            load(path)
        assert "Repo id" not in str(error.value) and isinstance(error.value, OSError)


def test_a_file_and_an_unknown_id_are_told_apart_from_folders(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(rope_ext.LoadError, match="is a file, not a folder"):
        rope_ext.from_pretrained(tmp_path / "file")
    with pytest.raises(rope_ext.LoadError, match=r"'nosuchmodel' .* no folder of that name"):
        rope_ext.from_pretrained("nosuchmodel")
    model = rope_ext.patch(tiny_llama(), "yarn", factor=4)
    monkeypatch.setattr("rope_ext.saving.hub.cached_file", lambda *_, **__: Path("-").read_text())
    with pytest.raises(rope_ext.LoadError, match="the adapter of 'my/typo'"):
        rope_ext.load_adapter(model, "my/typo")
    model.config._name_or_path, model.config.architectures = str(tmp_path / "gone"), None
    assert rope_ext.export(model, "vllm")


BROKEN_MODELS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda d: [path.unlink() for path in d.iterdir()], "configuration"),
    "no JSON": (lambda d: (d / "config.json").write_text("{"), "configuration"),
    "unknown type": (lambda d: edit(d / "config.json", model_type="nope"), "configuration"),
    "wrong kinds": (lambda d: edit(d / "config.json", hidden_size="x"), "hidden_size"),
    "no base": (lambda d: edit(d / "config.json", rope_parameters={"rope_theta": []}), "TypeError"),
    "no map": (lambda d: index(d, weight_map=None), "weights"),
    "other sizes": (lambda d: edit(d / "config.json", intermediate_size=7), "weights"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "weights"),
    "half of them": (lambda d: halve(d / "model.safetensors"), "weights"),
}


@pytest.mark.parametrize("kind", BROKEN_MODELS)
def test_a_folder_without_a_whole_model_is_refused_by_name(tmp_path, folders, kind: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders / "base", folder)
    spoil, said = BROKEN_MODELS[kind]
    spoil(folder)
    with pytest.raises(rope_ext.LoadError, match=said) as error:
        rope_ext.from_pretrained(folder)
    cure = "correct it" if kind == "wrong kinds" else "give a folder"
    assert str(folder) in str(error.value) and cure in str(error.value)
    with pytest.raises(rope_ext.AdapterError, match=r"base model .* cannot be loaded.*base="):
        rope_ext.from_pretrained(folders / "adapter", base=folder)
    if kind == "other sizes":
        edit(folder / "config.json", architectures="AModel")
        with pytest.raises(rope_ext.LoadError, match="'AModel'"):
            rope_ext.from_pretrained(folder)


# --- adapters ------------------------------------------------------------------------------------

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BROKEN_ADAPTERS: dict[str, Callable[[Path], Any]] = {
    "no JSON": lambda d: (d / CONFIG).write_text("{"),
    "no type": lambda d: edit(d / CONFIG, peft_type=None),
    "unknown type": lambda d: edit(d / CONFIG, peft_type="NOPE"),
    "another rank": lambda d: edit(d / CONFIG, r=7),
    "half the weights": lambda d: halve(d / WEIGHTS),
    "no weights": lambda d: (d / WEIGHTS).unlink(),
}


@pytest.mark.parametrize("kind", BROKEN_ADAPTERS)
def test_a_broken_adapter_is_refused_and_the_model_left_alone(tmp_path, folders, kind) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(folders / "adapter", folder)
    BROKEN_ADAPTERS[kind](folder)
    base = AutoModelForCausalLM.from_pretrained(folders / "base")
    before = snapshot(base)
    trained = [parameter.requires_grad for parameter in base.parameters()]
    model = rope_ext.patch(base, "rerope", factor=4)
    with pytest.raises(rope_ext.AdapterError, match=r"PeftModel\.save_pretrained"):
        rope_ext.load_adapter(model, folder)
    assert changed(before, snapshot(rope_ext.unpatch(model))) == set()
    assert [parameter.requires_grad for parameter in model.parameters()] == trained
    with pytest.raises(rope_ext.AdapterError, match=r"PeftModel\.save_pretrained"):
        rope_ext.from_pretrained(folder)
    rope_ext.load_adapter(rope_ext.patch(model, "rerope", factor=4), folders / "adapter")


@pytest.mark.parametrize("values", [{"r": 10**9}, {"rank_pattern": {"q_proj": 10**9}}])
def test_an_adapter_of_a_rank_that_no_adapter_has(tmp_path, folders, values: dict) -> None:
    """PEFT would build it before it looks into the file."""
    folder = tmp_path / "adapter"
    shutil.copytree(folders / "adapter", folder)
    edit(folder / CONFIG, **values)
    base = AutoModelForCausalLM.from_pretrained(folders / "base")
    model = rope_ext.patch(base, "rerope", factor=4)
    for load in (rope_ext.from_pretrained, lambda path: rope_ext.load_adapter(model, path)):
        with pytest.raises(rope_ext.LoadError, match="no model has more than"):
            load(folder)


def no_space(path: Path, target: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_sidecar_that_cannot_be_written_or_read_says_so(tmp_path, folders, monkeypatch) -> None:
    model = rope_ext.patch(tiny_llama(), "rerope", factor=4)
    (tmp_path / "file").write_text("x")
    with pytest.raises(rope_ext.AdapterError, match=r"cannot write .*file"):
        rope_ext.save_sidecar(model, tmp_path / "file")
    before = rope_ext.save_sidecar(model, tmp_path).read_text()
    with monkeypatch.context() as full, pytest.raises(rope_ext.AdapterError, match="No space"):
        full.setattr(Path, "replace", no_space)
        rope_ext.save_sidecar(rope_ext.patch(model, "yarn", factor=4, replace=True), tmp_path)
    assert [path.name for path in tmp_path.glob("rope_ext*")] == ["rope_ext.json"]
    assert (tmp_path / "rope_ext.json").read_text() == before
    rope_ext.patch(model, "rerope", factor=4, replace=True)
    shutil.copytree(folders / "adapter", tmp_path / "adapter")
    infinite = before.replace('"attention_scaling": 1.0', '"attention_scaling": NaN')
    for text in ("[" * 99999, "\udcff".join("{}"), infinite):
        path = tmp_path / "adapter" / "rope_ext.json"
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(rope_ext.RecordError, match="cannot load the record"):
            rope_ext.load_adapter(model, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"_name_or_path": "/elsewhere"}, "no patch writes '_name_or_path'"),
        ({"auto_map": {"AutoModelForCausalLM": "code.Model"}}, "no patch writes 'auto_map'"),
        ({"__class__": 3}, "no patch writes '__class__'"),
        ({"rope_parameters": "default"}, "rope_parameters='default'"),
        ({"max_position_embeddings": True}, "max_position_embeddings=True"),
    ],
)
def test_a_record_sets_only_what_a_patch_writes(tmp_path, config: dict, message: str) -> None:
    rope_ext.patch(tiny_llama(), "rerope", factor=4).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert set(saved["rope_ext"]["config"]) <= {
        *("rope_parameters", "max_position_embeddings", "original_max_position_embeddings"),
        *("rope_ext", "experts_implementation"),
    }
    saved["rope_ext"]["config"] |= config
    (tmp_path / "config.json").write_text(json.dumps(saved))
    with pytest.raises(rope_ext.RecordError, match=message):
        rope_ext.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "values",
    [
        {"num_hidden_layers": 10**7},
        {"head_dim": 10**9},
        {"hidden_size": 10**9},
        {"num_attention_heads": 10**7},
        {"head_dim": 2**15, "num_attention_heads": 2**13},
        {"vision_config": {"depths": [2, 2], "num_hidden_layers": 10**7}},
        {"parts": [{"num_hidden_layers": 10**7}]},
        {"num_labels": 10**9},
    ],
)
@pytest.mark.every
def test_a_configuration_of_a_size_that_no_model_has(tmp_path, folders, values: dict) -> None:
    """It is refused before anything of that size is built."""
    folder = tmp_path / "model"
    shutil.copytree(folders / "base", folder)
    edit(folder / "config.json", **values)
    start = time.monotonic()
    for load in (rope_ext.describe, rope_ext.from_pretrained, checkpoints.load_model):
        with pytest.raises(rope_ext.errors.RopeExtError, match="no model has more than"):
            load(str(folder))
    assert time.monotonic() - start < 10


UNREADABLE = {  # the field that the error names, and its value
    "rope_parameters.rope_type": 1.5,
    "rope_parameters.partial_rotary_factor": math.inf,
    "rope_parameters": [1],
    "attention_factor": [1],
    "partial_rotary_factor": 0,
    "id2label": 0,
    "dtype": [],
    "hidden_act": "none",
    "num_labels": "two",
    "num_attention_heads": 3,
    "layer_types": ["none", "none"],
    "model_type": {"a": 1},
}


@pytest.mark.parametrize("field", UNREADABLE)
@pytest.mark.every
def test_an_error_names_the_field_of_a_configuration_that_cannot_be_read(
    tmp_path, folders, field: str
) -> None:
    """Transformers raises KeyError: None, or that an int has no attribute items."""
    folder = tmp_path / "model"
    shutil.copytree(folders / "base", folder)
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
    *_, name = field.split(".")
    if field == "attention_factor" or "." in field or name == "partial_rotary_factor":
        edit(folder / "config.json", rope_parameters={**rope, name: UNREADABLE[field]})
    else:
        edit(folder / "config.json", **{name: UNREADABLE[field]})
    for read in (
        rope_ext.describe,
        lambda path: rope_ext.recommend(path, 512),
        lambda path: rope_ext.export(path, "vllm"),
        lambda path: memory(path, 64),
    ):
        with pytest.raises(rope_ext.RopeExtError, match=name) as raised:
            read(str(folder))
        assert "\n" not in str(raised.value)


def nested(depth: int) -> dict:
    found: dict = {}
    for _ in range(depth):
        found = {"text_config": found}
    return found


ABSURD = (
    {"sliding_window": "64"},
    {"sliding_window": [64], "layer_types": ["sliding_attention", "full_attention"]},
    {"rope_parameters": 10**400},
    {"rope_parameters": {"rope_type": "yarn", "factor": 10**400, "rope_theta": 10000.0}},
    {"rope_parameters": {"rope_type": "longrope", "factor": 4.0, "long_factor": [1.0] * 10**5}},
    {"max_position_embeddings": 10**400},
    {"text_config": nested(900)},
    {"layer_types": ["full_attention"] * 10**6},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "full_attention": {}}},
)


@pytest.mark.parametrize("values", ABSURD, ids=lambda values: " ".join(values))
@pytest.mark.every
def test_a_configuration_that_makes_no_sense_is_read_or_refused_in_one_line(
    tmp_path, folders, values: dict
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders / "base", folder)
    edit(folder / "config.json", **values)
    for read in (
        rope_ext.describe,
        lambda path: rope_ext.recommend(path, 512),
        lambda path: rope_ext.export(path, "vllm"),
    ):
        try:
            read(str(folder))
        except rope_ext.RopeExtError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000
