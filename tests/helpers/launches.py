"""Runs recipes with a tiny model, with the commands in the headers of the launch files."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch

from tests.helpers.checkpoint import save_checkpoint

ROOT = Path(__file__).parents[2]


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a model and ``text.jsonl`` into ``folder``, for DeepSpeed on CPUs."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    save_checkpoint(folder / "model")
    draw = random.Random(0).choices
    lines = [" ".join(draw(["one", "two", "three", "four", "five"], k=400)) for _ in range(8)]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))


def settings(folder: Path, name: str, processes: int, **more: object) -> list[str]:
    """Return settings of a run of three steps with four rows, into ``folder / name``."""
    values = {
        "model": folder / "model",
        "dataset": folder / "text.txt",
        "output_dir": folder / name,
        "length": 256,
        "max_steps": 3,
        "per_device_train_batch_size": 4 // processes,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return [str(word) for item in (values | more).items() for word in (f"--{item[0]}", item[1])]


def launch(file: str, folder: Path, *command: object) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", port]
    start += ["--config_file", ROOT / "recipes" / "accelerate" / file, *command]
    environment = os.environ | {
        "HF_DATASETS_CACHE": str(folder / f"cache of {file}"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    done = subprocess.run(
        list(map(str, start)), cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]


def log(folder: Path) -> torch.Tensor:
    """Return loss and gradient norm of each step, ``[3, 2]``."""
    state = json.loads((folder / "checkpoint-3" / "trainer_state.json").read_text())
    logs = [(e["loss"], e["grad_norm"]) for e in state["log_history"] if "loss" in e]
    return torch.tensor(logs, dtype=torch.float64)
