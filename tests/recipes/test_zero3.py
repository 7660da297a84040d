"""DeepSpeed ZeRO-3 as deepspeed_zero3.yaml sets it, in two processes, beside one process alone."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rope_ext
from recipes import finetune
from tests.helpers.launches import launch, log, prepare, settings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]

EVALUATED = {"eval_strategy": "steps", "eval_steps": 3, "eval_rows": 2, "eval_passkeys": 1}
RUNS: dict[str, dict[str, object]] = {
    "yarn": {"method": "yarn", "train_embeddings_and_norms": True},
    "rerope": {"method": "rerope", "gradient_accumulation_steps": 2, **EVALUATED},
    "kerple_log": {"method": "kerple_log", "lora_r": 0, "gradient_checkpointing": True},
}
"""A frequency method, a position method that is proven by a forward, parameters of our own."""


HALF = "kerple_log in bfloat16"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All of ``RUNS`` in two processes, and one of them in bfloat16, saved after every step."""
    prepare(tmp_path, monkeypatch)
    all_runs = RUNS | {HALF: RUNS["kerple_log"] | {"bf16": True}}
    train(tmp_path, {name: given | {"save_steps": 1} for name, given in all_runs.items()})
    return tmp_path


def test_zero3(folder: Path, ids: torch.Tensor) -> None:
    """One test: two workers would otherwise each make all of the runs in ``folder``."""
    trains_and_saves_what_one_process_does(folder, ids)
    goes_on_where_it_was_killed(folder)


def trained(folder: Path) -> dict[str, torch.Tensor]:
    """All that a run has saved."""
    [file] = folder.glob("*model.safetensors")
    return load_file(file)


def train(folder: Path, runs: dict[str, dict[str, object]]) -> None:
    """``runs`` in two processes."""
    # Only without --use_cpu does accelerate look at DeepSpeed at all.
    more = {"dataset": folder / "text.jsonl", "use_cpu": False}
    words = [settings(folder, name, 2, **(given | more)) for name, given in runs.items()]
    (folder / "runs.json").write_text(json.dumps(words))
    program = ["tests/helpers/launched.py", folder / "runs.json"]
    launch("deepspeed_zero3.yaml", folder, "--num_processes", 2, *program)


def trains_and_saves_what_one_process_does(folder: Path, ids: torch.Tensor) -> None:
    """Losses and norms of gradients to 1e-5: float32 sums in another order.

    AdamW makes steps of one size out of gradients of any, also where they are nothing but such
    sums; so what was learned is compared as a whole, to a thousandth of how far it has come.
    """
    for name, given in RUNS.items():
        alone = given | {"dataset": folder / "text.jsonl"}
        finetune.main(settings(folder, f"{name} of one", 1, **alone))
    untrained = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    start = untrained.state_dict()
    for name in RUNS:
        one, two = f"{name} of one", name
        torch.testing.assert_close(log(folder / two), log(folder / one), rtol=1e-5, atol=0)
        expected, found = trained(folder / one), trained(folder / two)
        assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in expected.items()}
        assert any("rope_ext_bias" in key for key in found) == ("kerple_log" in name)
        for key, value in expected.items():
            before = start.get(key.removeprefix("base_model.model."))
            moved = value if before is None else value - before
            error = (found[key] - value).norm() / moved.norm().clamp(min=1e-6)
            assert error < 1e-3, f"{name}: {key} is off by {error:.1e} of its way"
        with torch.inference_mode():
            models = [rope_ext.from_pretrained(folder / run).eval() for run in (one, two)]
            logits = [model(ids).logits for model in models]
        assert not torch.allclose(logits[0], untrained(ids).logits, atol=0.1)
        torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-3)


def goes_on_where_it_was_killed(folder: Path) -> None:
    """After its first step; in bfloat16, too, whose losses are nearly those of float32."""
    killed = {name: RUNS[name] for name in ("rerope", "kerple_log")}
    killed[HALF] = RUNS["kerple_log"] | {"bf16": True}
    for name in killed:
        first = folder / f"{name} killed" / "checkpoint-1"
        shutil.copytree(folder / name / "checkpoint-1", first)
        shutil.copy(folder / name / "recipe.json", first.parent)
        state = json.loads((first / "trainer_state.json").read_text())
        state["log_history"][0]["loss"] = 42  # only a run that goes on knows of it
        (first / "trainer_state.json").write_text(json.dumps(state))
    resumed = {"save_steps": 1, "resume_from_checkpoint": "true"}
    train(folder, {f"{name} killed": given | resumed for name, given in killed.items()})
    for name in killed:
        whole, again = log(folder / name), log(folder / f"{name} killed")
        assert again[0, 0] == 42
        torch.testing.assert_close(again[1:], whole[1:], rtol=1e-5, atol=0)
        expected, found = trained(folder / name), trained(folder / f"{name} killed")
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    exact, half = log(folder / "kerple_log"), log(folder / HALF)
    torch.testing.assert_close(half, exact, rtol=0.02, atol=0)  # two digits in every layer
    assert not torch.equal(half, exact)
