"""Options of PEFT, quantized bases and optimizers in recipes/finetune.py and memory.py."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Llama4ForCausalLM

import rope_ext
from recipes import finetune, memory, settings
from rope_ext import OptionError
from tests.families.zoo import tiny_of
from tests.helpers.checkpoint import save_config
from tests.helpers.models import tiny_llama
from tests.helpers.recipe_runs import arguments


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"use_rslora": True, "init_lora_weights": "gaussian"},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"},
    ],
    ids=str,
)
def test_an_adapter_with_options_of_peft_reloads(
    options: dict[str, object], tmp_path: Path, ids: torch.Tensor
) -> None:
    tiny_llama().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = rope_ext.patch(base, "yarn", factor=4)
    untrained = model(ids).logits.detach()
    recipe = settings.Recipe(lora_options=json.dumps(options), lora_target=["all-linear"])
    whole = finetune.with_lora(model, recipe)
    with torch.no_grad():
        # float32; a part of the weights is moved into the adapter and added again
        torch.testing.assert_close(whole(ids).logits, untrained, rtol=1e-3, atol=1e-3)
        for name, parameter in whole.named_parameters():
            if "lora_" in name:
                parameter += 0.02
        expected = whole(ids).logits
    assert (expected - untrained).abs().max() > 0.01
    whole.save_pretrained(tmp_path / "adapter")
    rope_ext.save_sidecar(whole, tmp_path / "adapter")
    again = rope_ext.from_pretrained(tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("target", "layers"),
    [("all-linear", {*"qkvo", "gate", "up", "down"}), (r".*layers\.0\..*(q|up)_proj", {"q", "up"})],
)
def test_targets_are_all_linear_layers_or_a_pattern(target: str, layers: set[str]) -> None:
    whole = finetune.with_lora(tiny_llama(), settings.Recipe(lora_target=[target]))
    names = [name.split(".") for name, p in whole.named_parameters() if p.requires_grad]
    assert {name[-4].removesuffix("_proj") for name in names} == layers
    assert ({name[4] for name in names} == {"0"}) == target.startswith(".")


def test_all_linear_layers_leave_those_of_an_encoding_alone(ids: torch.Tensor) -> None:
    model = rope_ext.patch(tiny_llama(), "fire", factor=4)
    whole = finetune.with_lora(model, settings.Recipe(lora_target=["all-linear"]))
    whole(input_ids=ids, labels=ids).loss.backward()
    trained = [name for name, p in whole.named_parameters() if p.requires_grad]
    assert not [name for name in trained if "rope_ext" in name and "lora_" in name]
    assert [name for name in trained if "rope_ext" in name]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"lora_options": '{"use_dorra": true}'}, "no 'use_dorra'; did you mean 'use_dora'"),
        ({"lora_options": '{"r": 4}'}, "give --lora_r"),
        ({"lora_options": '{"init_lora_weights": "eva"}'}, "needs data"),
        ({"lora_options": '{"init_lora_weights": "pissa_niter_4"}'}, "cannot repeat it"),
        (
            {"lora_options": '{"init_lora_weights": "pissa"}', "restoration": 5},
            "changes the base weights",
        ),
        ({"lora_options": '{"bias": "foo"}'}, "bias 'foo' is not valid; give one of none, all, lo"),
        ({"lora_options": '{"rank_pattern": 5}'}, "--lora_options .* cannot be used"),
        ({"lora_options": '{"use_dora": true}', "lora_r": 0}, "--lora_options needs LoRA"),
        ({"lora_target": ".*nothing.*"}, "cannot add LoRA"),
        ({"quantize": True, "quantize_bits": 3}, "--quantize_bits 3"),
        ({"optim": "schedule_free_adamw"}, "--optim schedule_free_adamw cannot be used here"),
        ({"optim": "lomo"}, "--optim lomo cannot be used here"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_before_the_weights_are_loaded(
    more: dict[str, object], message: str, refused: Callable[..., None]
) -> None:
    refused(message, **more)


@pytest.mark.parametrize("options", [{"init_lora_weights": "pissa"}, {"use_dora": True}], ids=str)
def test_a_run_with_options_of_peft(
    options: dict[str, object], checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    more = {"lora_options": json.dumps(options), "lora_target": "all-linear"}
    finetune.main(arguments(checkpoint, texts, tmp_path / "run", **more))
    assert rope_ext.describe(rope_ext.from_pretrained(tmp_path / "run")).target_length == 512


def test_lora_on_a_router_is_refused_before_the_weights_are_loaded(
    checkpoint: Path, tmp_path: Path, refused: Callable[..., None]
) -> None:
    """Whose layer is a linear one that returns two tensors."""
    config = tiny_of(Llama4ForCausalLM, max_position_embeddings=128).config
    folder = save_config(tmp_path / "model", config, checkpoint)
    refused("forward fails.*--lora_target", model=folder, lora_target="all-linear")


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
def test_an_optimizer_of_torchao_needs_no_bitsandbytes(
    checkpoint: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "bitsandbytes" else find(name, *more),
    )
    words = arguments(checkpoint, texts, tmp_path / "run", optim="adamw_torch_8bit")
    recipe, args = settings.parse(words)
    settings.check_together(recipe, args)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_run_on_a_quantized_base(
    bits: int, checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    more = {"quantize": True, "quantize_bits": bits, "lora_target": "all-linear"}
    finetune.main(arguments(checkpoint, texts, tmp_path / "run", **more))
    adapter = rope_ext.from_pretrained(tmp_path / "run")
    assert rope_ext.describe(adapter).target_length == 512


def test_dora_on_eight_bits_is_refused_on_a_cpu(
    checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    more = {"quantize": True, "quantize_bits": 8, "lora_options": '{"use_dora": true}'}
    with pytest.raises(OptionError, match="use_dora"):
        finetune.main(arguments(checkpoint, texts, tmp_path / "run", **more))
    assert not (tmp_path / "run").exists()


def test_the_planner_counts_states_or_says_that_it_does_not() -> None:
    weights = [torch.nn.Parameter(torch.zeros(64, 256)), torch.nn.Parameter(torch.zeros(100))]
    count = 64 * 256
    assert memory.optimizer_bytes("adamw_torch", weights) == 2 * 4 * (count + 100)
    blocks = count / 256
    assert memory.optimizer_bytes("adamw_torch_8bit", weights) == 2 * (count + 4 * blocks + 400)
    assert memory.optimizer_bytes("lion_32bit", weights) == 4 * (count + 100)
    assert memory.optimizer_bytes("adafactor", weights) is None


def test_the_planner_knows_options_of_peft_and_eight_bits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shape = "hidden=64,heads=2,layers=2,intermediate=128,vocab=64,trained=128"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: none/of-this\ndataset: python-library\nlength: 64\npose_chunks: 2\n")

    def found(*words: str) -> memory.Need:
        config = memory.config_from_shape(shape)
        return memory.need(*memory.read(str(recipe), *words), config)

    plain = found()
    dora = found("--lora_options", '{"use_dora": true}')
    assert dora.trained - plain.trained == 2 * 4 * 64  # a magnitude for each output of 8 layers
    four, eight = found("--quantize", "true"), found("--quantize", "true", "--quantize_bits", "8")
    linear = 2 * (4 * 64 * 64 + 3 * 64 * 128)
    assert eight.alone.weights > four.alone.weights + linear / 4
    assert "not estimated" in memory.line(found("--optim", "adafactor"), 1)
    assert "not estimated" not in memory.line(plain, 1)
