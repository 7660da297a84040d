"""Swaps of the position encoding: rows of the own length, and the whole of a small operation."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from transformers import AutoModelForCausalLM

import rope_ext
from lab import surgery
from recipes import finetune
from recipes.settings import parse
from rope_eval.run.runner import Runner
from rope_eval.settings import Settings
from rope_eval.systems import System
from rope_ext.errors import OptionError
from rope_ext.position.learned import learned
from rope_ext.saving.checkpoints import load_model
from rope_ext.saving.load import read_sidecar
from tests.helpers import pictures
from tests.helpers.recipe_runs import arguments


def test_a_learned_table_grows_and_is_trained_on(
    checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    model = rope_ext.patch(AutoModelForCausalLM.from_pretrained(checkpoint), "learned")
    (short,) = learned(model).values()
    shutil.copytree(checkpoint, tmp_path / "short")  # for the tokenizer
    model.save_pretrained(tmp_path / "short")
    given = {"method": "learned", "factor": 2, "length": 256, "pose_chunks": None, "lora_r": 0}
    given |= {"max_steps": 1, "per_device_train_batch_size": 1}
    finetune.main(arguments(tmp_path / "short", texts, tmp_path / "run", **given))
    (long,) = learned(rope_ext.from_pretrained(tmp_path / "run")).values()
    assert len(short) == 128 and len(long) == 256
    moved = (long[:128] - short).abs().max()
    assert 0 < moved < 0.02  # one step of AdamW, about the learning rate of 0.01


def test_an_encoding_begins_with_the_attention_of_the_model(
    checkpoint: Path, texts: Path, tmp_path: Path, monkeypatch
) -> None:
    """It is fitted to rows of the trained length before LoRA is added, and then trained."""
    given: list[tuple[list[int], list[float]]] = []
    fit = rope_ext.fit

    def fitted(model: nn.Module, ids: torch.Tensor) -> None:
        fit(model, ids, steps=20)
        given.append((list(ids.shape), [float(p.detach().sum()) for p in learned(model).values()]))

    monkeypatch.setattr(rope_ext, "fit", fitted)
    settings = {"method": "kerple_log", "init": "model", "length": 128, "pose_chunks": None}
    settings |= {"max_steps": 1, "learning_rate": 0}
    finetune.main(arguments(checkpoint, texts, tmp_path / "run", **settings))
    ((shape, values),) = given
    assert 1 <= shape[0] <= finetune.FITTED_ROWS and shape[1] == 128
    again = learned(rope_ext.from_pretrained(tmp_path / "run"))
    found = [float(p.detach().sum()) for name, p in again.items() if "original" not in name]
    assert found == pytest.approx(values)

    # The evaluator patches after it has loaded the adapter.
    run = str(tmp_path / "run")
    settings_of = Settings(
        models=(str(checkpoint),), methods=("adapter",), adapter=run, lengths=(128,)
    )
    runner = Runner(load_model(str(checkpoint), adapter=run), str(checkpoint), settings_of)
    system = System("k", "k", str(checkpoint), "kerple_log", {"factor": 4.0}, 128, False, "", True)
    with runner.applied(system):
        found = [float(p.detach().sum()) for p in learned(runner.model).values()]
    assert found == pytest.approx(values)

    def checked(**more: object) -> None:
        argv = arguments(checkpoint, texts, tmp_path / "other", **(settings | more))
        finetune.check(*parse(argv))

    with pytest.raises(OptionError, match="--init 'models' is not valid"):
        checked(init="models")
    for method in ("nope", "sinusoidal", "alibi"):  # plain ALiBi has a bias, but learns nothing
        with pytest.raises(OptionError, match=rf"--init model .* {method} learns nothing .* give"):
            checked(method=method)


@pytest.mark.slow
def test_an_operation_is_trained_read_and_compared(
    checkpoint: Path, texts: Path, tmp_path: Path, monkeypatch
) -> None:
    pictures.draw_small(monkeypatch)
    config = tmp_path / "recipe.yaml"
    settings = {"dataset": str(texts), "learning_rate": 0.01, "report_to": "none", "use_cpu": True}
    config.write_text(yaml.safe_dump(settings | {"disable_tqdm": True, "pose_chunks": 2}))
    drope = replace(surgery.OPERATIONS["drope"], temperatures=(0.3,))
    monkeypatch.setitem(surgery.OPERATIONS, "drope", drope)
    bench = surgery.Bench(
        name="small",
        model=str(checkpoint),
        config=str(config),
        output=tmp_path / "out",
        steps=1,
        factor=4.0,
        lengths=(128, 256),
        windows=1,
        trials=1,
        length=128,
        batch=2,
    )
    text = surgery.operate(bench, ["drope"])
    rows = [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines()]
    for name in ("yarn", "drope"):
        assert rows.count(f"{name}, 0 steps") == rows.count(f"{name}, 1 steps") == 2
    assert "drope: c " in text and text == (bench.output / "surgery.md").read_text()
    record = read_sidecar(bench.output / "drope-1").record
    assert record.method.name == "nope" and record.trained_length == 128

    def again(argv: list[str]) -> None:
        raise AssertionError("what is trained is not trained again")

    monkeypatch.setattr(finetune, "main", again)
    assert surgery.operate(bench, ["drope"]) == text
    tuned = bench.read("drope", 1, c=0.3, tune=True)
    (system,) = (s for s in tuned.report.plan.systems if s.name == tuned.system)
    assert system.method == "drope" and system.options["c"] == 0.3
