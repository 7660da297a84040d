"""Settings and logs of a small run of recipes/finetune.py."""

from __future__ import annotations

import json
from pathlib import Path

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def arguments(checkpoint: Path, texts: Path, output: Path, **more: object) -> list[str]:
    """Return settings of two steps with PoSE; settings of None are left out."""
    values = {
        "model": checkpoint,
        "dataset": texts,
        "output_dir": output,
        "factor": 4,
        "length": 64,
        "pose_chunks": 2,
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    given = {name: value for name, value in (values | more).items() if value is not None}
    return [
        word
        for name, value in given.items()
        for word in (f"--{name}", *map(str, value if isinstance(value, list) else [value]))
    ]


def history(folder: Path) -> list[tuple[int, float, float]]:
    """Return step, loss and gradient norm from a checkpoint."""
    state = json.loads((folder / "trainer_state.json").read_text())
    return [(e["step"], e["loss"], e["grad_norm"]) for e in state["log_history"] if "loss" in e]
