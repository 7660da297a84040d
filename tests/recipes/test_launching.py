"""Every launch file that a CPU can run, started as its header says, with a tiny model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes import finetune
from tests.helpers.checkpoint import save_checkpoint
from tests.helpers.launches import launch, log, settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, the same with tied embeddings, and a text."""
    folder = tmp_path_factory.mktemp("launching")
    save_checkpoint(folder / "model")
    tied = AutoModelForCausalLM.from_pretrained(
        save_checkpoint(folder / "tied model"), tie_word_embeddings=True
    )
    tied.save_pretrained(folder / "tied model")
    words = random.Random(0).choices(["one", "two", "three", "four", "five", "six"], k=2000)
    (folder / "text.txt").write_text(" ".join(words))
    return folder


@pytest.fixture
def alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same in this process, without a launcher."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")

    def run(name: str, **more: object) -> torch.Tensor:
        finetune.main(settings(folder, name, 1, **more))
        return log(folder / name)

    return run


PLAIN: dict[str, dict[str, object]] = {
    "accumulating": {"gradient_accumulation_steps": 2},
    "weighted": {"length": 256, "pose_chunks": 2, "retrieval_share": 0.5},
    "pose": {"length": 64, "pose_chunks": 2, "train_embeddings_and_norms": True},
    "rerope": {"method": "rerope", "train_embeddings_and_norms": True},
}
IN_TURN = """
import json, pathlib, runpy, sys
sys.modules["deepspeed"] = None  # imported late, it holds the group as a default argument
from recipes import finetune

def exchanging():
    tasks = pathlib.Path("/proc/self/task").glob("*/comm")
    return [name for name in (task.read_text() for task in tasks) if "gloo" in name]

*runs, last = json.loads(pathlib.Path(sys.argv[1]).read_text())
for words in runs:
    finetune.main(words)
assert exchanging()
sys.argv[1:] = last
runpy.run_path("recipes/finetune.py", run_name="__main__")
assert not exchanging()
"""


@pytest.mark.slow
def test_single_and_ddp(folder: Path, alone: Any) -> None:
    """The same losses and norms of gradients to 1e-5: float32 sums in another order.

    Of two processes each has half of the rows. No thread that exchanges tensors is left to be
    caught by the end of Python.
    """
    expected = {name: alone(f"{name} alone", **given) for name, given in PLAIN.items()}
    words = settings(folder, "single", 1, **PLAIN["accumulating"])
    launch("single.yaml", folder, "recipes/finetune.py", *words)
    torch.testing.assert_close(log(folder / "single"), expected["accumulating"], rtol=1e-5, atol=0)
    runs = [settings(folder, name, 2, **given) for name, given in PLAIN.items()]
    (folder / "plain.json").write_text(json.dumps(runs))
    (folder / "in_turn.py").write_text(IN_TURN)
    program = [folder / "in_turn.py", folder / "plain.json"]
    launch("ddp.yaml", folder, "--num_processes", 2, *program)
    for name in PLAIN:
        torch.testing.assert_close(log(folder / name), expected[name], rtol=1e-5, atol=0)
        assert expected[name][0, 0] > expected[name][-1, 0]  # it learns
        assert json.loads((folder / name / "recipe.json").read_text())["world_size"] == 2


SHARDED: dict[str, dict[str, object]] = {
    "lora": {"train_embeddings_and_norms": True, "gradient_accumulation_steps": 2},
    "tied": {"train_embeddings_and_norms": True, "model": "tied model"},
    "full": {"lora_r": 0, "gradient_checkpointing": True},
    "learned bias": {"method": "t5"},
    "learned network": {"method": "fire", "lora_r": 0},
}


@pytest.mark.slow
def test_fsdp2(folder: Path, alone: Any) -> None:
    """In float32 the run of one process, to 1e-5; in bfloat16 near it, and losses in float32.

    LoRA and all weights, the loss in chunks or from logits, encodings that learn. No gradients
    are left unsharded (tests/helpers/launched.py).
    """
    more = {
        name: given | ({"model": folder / given["model"]} if "model" in given else {})
        for name, given in SHARDED.items()
    }
    expected = {name: alone(f"{name} alone", **given) for name, given in more.items()}
    runs = dict(more)
    runs["bf16"] = more["lora"] | {"bf16": True}
    runs["bf16 plain"] = more["lora"] | {"bf16": True, "chunked_loss": False}
    words = [settings(folder, name, 2, **given) for name, given in runs.items()]
    (folder / "runs.json").write_text(json.dumps(words))
    program = ["tests/helpers/launched.py", folder / "runs.json"]
    launch("fsdp2.yaml", folder, "--num_processes", 2, *program)
    for name in more:
        torch.testing.assert_close(log(folder / name), expected[name], rtol=1e-5, atol=0)
    chunked, plain = log(folder / "bf16"), log(folder / "bf16 plain")
    # Two or three digits in every layer; both have their logits in bfloat16.
    torch.testing.assert_close(chunked, expected["lora"], rtol=0.05, atol=0)
    torch.testing.assert_close(chunked, plain, rtol=0.02, atol=0)
    for losses in (chunked[:, 0], plain[:, 0]):  # each a mean of two or four
        assert (losses * 256 % 1 != 0).any(), "a multiple of the steps of bfloat16"
