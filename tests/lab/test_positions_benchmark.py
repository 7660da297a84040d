"""The table of training positions: equal tokens, what is told of it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lab.benchmarks import positions
from lab.benchmarks.calibration import CHECKPOINTS
from recipes import finetune
from recipes.settings import parse


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_every_scheme_takes_as_many_tokens(checkpoint: str, tmp_path: Path) -> None:
    alike = set()
    for name, scheme in positions.SCHEMES.items():
        tokens = 0
        for stage, (kind, length) in enumerate(scheme.stages):
            words = positions.words_of(checkpoint, name, stage, 2, 8, 1e-3, tmp_path / name)
            recipe, args = parse(words)
            assert finetune.check(recipe, args).target == 4096
            assert (recipe.positions, recipe.method) == (kind, scheme.method)
            assert recipe.length == length
            tokens += recipe.length * args.per_device_train_batch_size * args.max_steps
        alike.add((tokens, args.learning_rate, args.seed, recipe.dataset, recipe.retrieval_share))
    assert len(alike) == 1
    assert {kind for scheme in positions.SCHEMES.values() for kind, _ in scheme.stages} == {
        *("pose", "pose_released", "random", "random_floats", "cream", "mixed_windows"),
        "consecutive",
    }


def noise(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def told(effect: float, training: float, document: float, seed: int, seeds: int = 4) -> str:
    """A verdict on 12 documents, where trainings and documents differ by so much."""
    base = 2 + noise(seeds, 12, seed=seed)
    gaps = effect + training * noise(seeds, 1, seed=seed + 1) + document * noise(12, seed=seed + 2)
    return positions.verdict((base + gaps).tolist(), base.tolist())


@pytest.mark.parametrize(("training", "document"), [(0.05, 0.0), (0.0, 0.05), (0.02, 0.02)])
def test_equal_schemes_are_rarely_told_apart(training: float, document: float) -> None:
    """Intervals of 95 %: at most 5 % of 1000, and three standard deviations more."""
    wrong = sum("cannot tell" not in told(0, training, document, 3 * i) for i in range(1000))
    assert wrong <= 50 + 3 * (1000 * 0.05 * 0.95) ** 0.5


def test_a_clear_difference_is_told_with_its_sign_and_its_seeds() -> None:
    assert told(-0.1, 0.005, 0.01, 0).endswith("lower, 4 seeds")
    assert told(0.1, 0.005, 0.01, 0).endswith("higher, 4 seeds")
    value, low, high = told(0.1, 0.005, 0.01, 0).replace("[", "").split(" % ")[0], 9.0, 12.0
    assert low < float(value) < high  # exp(0.1) - 1 is 10.5 %


@pytest.mark.slow
def test_a_second_stage_trains_the_merged_model_of_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    positions.train("tiny-512", "short_first", seed=0, steps=4, rate=1e-2, folder=folder)
    base = positions.model_of("tiny-512", tmp_path / "run-stage-0").state_dict()
    begun = positions.AutoModelForCausalLM.from_pretrained(tmp_path / "run-base").state_dict()
    assert all(torch.equal(base[name], begun[name]) for name in base)
    before, after = (positions.model_of("tiny-512", at).state_dict() for at in (None, folder))
    key = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(base[key], before[key]) and not torch.equal(after[key], base[key])


@pytest.mark.slow
def test_a_cell_is_trained_once_and_measured(tmp_path: Path, monkeypatch, capsys) -> None:
    words = "--checkpoints tiny-512 --schemes random_floats,pose --steps 1 --seeds 1 --windows 1"
    words = [*words.split(), "--prompts", "2", "--output", str(tmp_path)]
    monkeypatch.setattr(positions, "lowest", lambda loss, rate: rate if loss(rate) else None)
    positions.main(words)
    (path,) = tmp_path.glob("tiny-512-random_floats-*.json")
    cell = json.loads(path.read_text())
    assert len(cell["after"]) == 1 and cell["after"][0].keys() == cell["before"].keys()
    assert "cannot tell, 1 seed" in " ".join(capsys.readouterr().out.split())

    # A cell that was interrupted after its training is measured, and not trained again.
    path.unlink()
    monkeypatch.setattr(finetune, "main", lambda words: pytest.fail("trained again"))
    positions.main(words)
    again = json.loads(path.read_text())
    assert again["after"] == cell["after"] and again["before"] == cell["before"]
