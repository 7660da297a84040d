"""Ulysses as ulysses.yaml sets it: two processes that share each row, beside one process alone."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from accelerate import ParallelismConfig

from recipes import finetune, settings
from rope_ext import OptionError
from tests.helpers import launches
from tests.helpers.recipe_runs import arguments

TEXTS: dict[str, dict[str, object]] = {
    "consecutive positions": {"gradient_accumulation_steps": 2},
    "pose": {"pose_chunks": 2},
}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.parametrize("name", TEXTS)
def test_two_processes_train_as_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and norms of gradients to 1e-5: float32 sums in another order."""
    launches.prepare(tmp_path, monkeypatch)
    given = {"dataset": tmp_path / "text.jsonl", "chunked_loss": False, **TEXTS[name]}
    # Both processes have the same rows. Only without --use_cpu does accelerate use DeepSpeed.
    words = launches.settings(tmp_path, "two", 1, **given, **{"use_cpu": False})
    words += ["--dataloader_drop_last", "true"]
    (tmp_path / "runs.json").write_text(json.dumps([words]))
    options = ("--num_processes", 2, "--parallelism_config_sp_size", 2)
    program = ("tests/helpers/launched.py", tmp_path / "runs.json")
    launches.launch("ulysses.yaml", tmp_path, *options, *program)
    finetune.main(launches.settings(tmp_path, "one", 1, **given))
    found, expected = (launches.log(tmp_path / run) for run in ("two", "one"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert expected[0, 0] > expected[-1, 0]  # it learns


@pytest.mark.parametrize(("sp_size", "steps"), [(8, 16), (4, 8)])
def test_devices_that_share_a_row_count_once_in_the_rows_of_a_step(
    sp_size: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As accelerate launch sets them for eight devices with ulysses.yaml.
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", str(sp_size))
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_BACKEND", "deepspeed")
    values: dict[str, object] = {
        "rows_per_step": 16,
        "target_length": None,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 1,
    }
    settings.derive(values, set())
    assert values["gradient_accumulation_steps"] == steps


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"eval_strategy": "steps"}, "eval_strategy"),
        ({"dataloader_drop_last": False}, "same number of rows"),
        ({"retrieval_share": 0.5}, "weights the loss of labels"),
        ({"format": "chat", "gradient_accumulation_steps": 2}, "different numbers"),
        ({"method": "rerope", "pose_chunks": 0}, "its own attention"),
    ],
    ids=str,
)
def test_settings_that_ulysses_would_train_incorrectly_are_refused(
    more: dict[str, object],
    message: str,
    checkpoint: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = {"length": 256, "dataloader_drop_last": True, **more}
    recipe, args = settings.parse(arguments(checkpoint, texts, tmp_path / "run", **more))
    monkeypatch.setattr(args, "parallelism_config", ParallelismConfig(sp_size=2))
    with pytest.raises(OptionError, match=message):
        finetune.check(recipe, args)
