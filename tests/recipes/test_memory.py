"""What recipes/memory.py computes, against torch's own bookkeeping and hand-made sums."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from recipes import memory, settings, shapes
from recipes.shapes import SHAPES, config_of
from rope_ext.errors import Mistakes, OptionError, RopeExtError
from tests.families.zoo import tiny_of
from tests.helpers.models import tiny_llama

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 344, "head_dim": 32}


def model(layers: int, checkpointing: bool, device: str = "cpu") -> LlamaForCausalLM:
    config = tiny_llama(num_hidden_layers=layers, **SMALL).config
    with torch.device(device):
        made = LlamaForCausalLM(copy.deepcopy(config)).train()
    if checkpointing:
        made.gradient_checkpointing_enable()
    return made


def tracked(made: torch.nn.Module, rows: int, length: int, bf16: bool) -> int:
    """Peak of what torch's own tracker sees in a real training step, without weights and gradients.

    Not of its allocator: what a kernel takes for itself depends on the CPU, 75 kB here with
    bfloat16 units.
    """
    for parameter in made.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = 2 * sum(p.nbytes for p in made.parameters()) + sum(b.nbytes for b in made.buffers())
    ids = torch.zeros(rows, length, dtype=torch.long)
    tracker = MemTracker()
    tracker.track_external(made)
    with tracker:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = made(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"] - before


@pytest.mark.parametrize(
    ("checkpointing", "bf16"),
    [
        pytest.param(True, True, marks=pytest.mark.slow),
        pytest.param(False, False, marks=pytest.mark.slow),
    ],
)
def test_the_peak_is_that_of_torchs_tracker(checkpointing: bool, bf16: bool) -> None:
    found = memory.extrapolated(model(5, checkpointing, "meta"), 2, 256, bf16)
    assert found == tracked(model(5, checkpointing), 2, 256, bf16)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_eager_attention_is_counted_with_its_scores(checkpointing: bool) -> None:
    found = memory.extrapolated(
        model(5, checkpointing, "meta"), 2, 256, bf16=checkpointing, attention=memory.EAGER
    )
    made = model(5, checkpointing)
    made.set_attn_implementation("eager")
    assert found == tracked(made, 2, 256, bf16=checkpointing)


def test_a_plan_with_eager_attention_has_a_matrix_of_scores_for_each_head_and_layer() -> None:
    config = tiny_llama().config
    config.max_position_embeddings = 64
    words = ["--dataset", "x", "--model", "x", "--factor", "8", "--use_cpu", "true"]
    words += ["--length", "256", "--chunked_loss", "false", "--attn"]
    eager, sdpa = (
        memory.need(*settings.parse([*words, attn]), config).alone.activations
        for attn in ("eager", "sdpa")
    )
    layers, rows = config.num_hidden_layers, 8
    scores = 4 * rows * config.num_attention_heads * 256**2
    assert eager - sdpa > 0.9 * layers * scores


def test_gemma_2_is_planned_with_its_own_attention() -> None:
    """It caps its scores, which SDPA cannot do."""
    config = tiny_of(transformers.Gemma2ForCausalLM).config
    words = ["--dataset", "x", "--model", "x", "--factor", "8", "--use_cpu", "true"]
    words += ["--length", "256", "--chunked_loss"]
    found = memory.need(*settings.parse([*words, "false"]), config)
    assert found.alone.activations > 4 * 8 * config.num_attention_heads * 256**2
    with pytest.raises(RopeExtError, match=r"caps its logits .*give --chunked_loss false"):
        memory.need(*settings.parse([*words, "true"]), config)


@pytest.mark.parametrize(
    ("layers", "checkpointing", "restored"),
    [(2, False, 0), (4, True, 0), (5, False, 0), (5, False, 64), (4, True, 128)],
)
def test_all_layers_follow_from_three(layers: int, checkpointing: bool, restored: int) -> None:
    found = memory.extrapolated(
        model(layers, checkpointing, "meta"), 2, 128, bf16=False, restored=restored
    )
    made = model(layers, checkpointing)
    assert found == max(memory.step_peaks(made, 2, 128, restored=restored))
    assert found > max(memory.step_peaks(made, 2, 128)) or not restored


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("meta-llama/Llama-2-7b-hf", 6_738_415_616),
        ("meta-llama/Meta-Llama-3-8B", 8_030_261_248),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen3-8B-Base", 8_190_735_360),
        ("mistralai/Mistral-7B-v0.3", 7_248_023_552),
    ],
)
def test_published_shapes_have_the_published_number_of_parameters(name: str, number: int) -> None:
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(copy.deepcopy(SHAPES[name]))
    assert sum(parameter.numel() for parameter in made.parameters()) == number


@pytest.mark.slow
def test_the_counted_model_is_the_one_that_is_trained() -> None:
    """Llama-3-8B with LoRA of rank 8 on attention, its embedding and its 65 norms trained."""
    recipe, args = memory.read(str(ROOT / "recipes" / "llama3_8b_yarn_lora.yaml"))
    found = memory.need(recipe, args, config_of(recipe.model))
    copied = 128256 * 4096 + 65 * 4096
    assert found.trained == copied + 32 * 8 * (2 * (4096 + 4096) + 2 * (4096 + 1024))
    assert found.parameters == 8_030_261_248 + found.trained
    assert found.alone.weights == 2 * 8_030_261_248 + 4 * found.trained
    assert found.alone.gradients == 4 * found.trained
    assert found.alone.optimizer == 8 * found.trained
    # Residual streams kept for 32 layers, in bfloat16 although the trained embedding is not.
    streams = 32 * 32768 * 4096 * 2
    assert streams < found.alone.activations < 2.5 * streams  # and what one layer makes
    shared = found.sharded(8)
    assert shared.weights == found.alone.weights / 8
    assert shared.activations > 32 * 32768 * 4096 * 2
    layer = 2 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336)
    head = 2 * 128256 * 4096
    # Two layers, the output layer, the gradient of the embedding in bfloat16 and in float32;
    # norms and LoRA are the rest.
    assert shared.gathered == pytest.approx(2 * layer + 4 * head, rel=0.01)
    cut = found.context_parallel(8)
    assert cut.gathered - shared.gathered == 2 * 32768 * 8 * 128 * 2
    assert cut.activations < shared.activations / 4
    assert cut.weights == shared.weights


@pytest.mark.slow
def test_four_bits() -> None:
    """QLoRA, section 3: half a byte, a byte for 64 of them, four for 256 of those."""
    recipe, args = memory.read(str(ROOT / "recipes" / "llama3_8b_pose_24gb.yaml"))
    found = memory.need(recipe, args, config_of(recipe.model))
    linear = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336)
    constants = linear * (1 / 64 + 4 / (64 * 256))
    others = 2 * (8_030_261_248 - linear) + 4 * found.trained
    assert found.alone.weights == linear / 2 + constants + others
    assert found.sharded(8).weights == (linear / 2 + others) / 8 + constants


@pytest.mark.parametrize(
    ("words", "copies"),
    [
        ([], 3),
        (["--gradient_checkpointing", "true"], 1),
        (["--attn", "flex_attention"], None),
        (["--method", "rerope"], None),
    ],
)
def test_the_mask_of_documents_is_counted(
    words: list[str], copies: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte for each pair of tokens, and a float in each layer that keeps its activations."""
    monkeypatch.setattr(memory, "extrapolated", lambda *given, **named: 1000)
    config = memory.config_from_shape(
        "hidden=64,heads=2,layers=3,intermediate=64,vocab=64,trained=128"
    )
    given = [str(ROOT / "recipes" / "tiny_512_yarn_pose.yaml"), "--pose_chunks", "0"]
    given += ["--length", "256", "--per_device_train_batch_size", "2", *words]
    for masked in (True, False):
        found = memory.need(*memory.read(*given, "--document_masking", str(masked)), config)
        expected = 2 * 256**2 * (1 + 4 * copies) if masked and copies else 0
        assert found.alone.activations - 1000 == expected


def test_a_target_length_needs_no_configuration_from_the_hub(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def asked(*args: object, **kwargs: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(shapes, "load_config", asked)
    recipe, _ = settings.read_settings(
        ["--model", "meta-llama/Meta-Llama-3-8B", "--target_length", "65536", "--use_cpu", "true"],
        Mistakes(),
    )
    assert recipe.factor == 8


def test_a_recipe_without_a_model_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless the shape of a model is given."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("length: 64\n", encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        memory.main([str(recipe)])
    assert ended.value.code == 2
    assert "--model is missing" in capsys.readouterr().err
    shape = "hidden=64,layers=2,heads=4,kv_heads=2,intermediate=128,vocab=256"
    memory.main([str(recipe), "--shape", shape])
    assert "parameters" in capsys.readouterr().out


def test_a_shape_that_no_llama_has_is_refused() -> None:
    with pytest.raises(OptionError, match=r"heads=30 is no shape of a Llama .*multiple of the num"):
        memory.config_from_shape("hidden=4096,layers=32,heads=30")


@pytest.mark.parametrize("family", ["GPTNeoX", "Falcon"])
def test_other_families_are_counted_or_refused_in_one_line(family: str) -> None:
    """Keys that are not grouped; a step that does not run on tensors without values."""
    config = tiny_of(getattr(transformers, f"{family}ForCausalLM")).config
    config.max_position_embeddings = 64
    words = ["--dataset", "x", "--length", "32", "--lora_target", "all-linear", "--use_cpu", "true"]
    recipe, args = settings.parse([*words, "--model", "x", "--factor", "4", "--chunked_loss", "0"])
    try:
        found = memory.need(recipe, args, config)
    except OptionError as error:
        assert family == "Falcon" and "cannot be estimated" in str(error)
        return
    heads = config.num_attention_heads
    columns = config.hidden_size // heads
    rows = args.per_device_train_batch_size
    assert found.keys == 2 * rows * 32 * heads * columns * 4
