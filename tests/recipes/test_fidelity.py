"""Recipes against the papers and the released code they follow."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from recipes import memory, settings
from recipes.data import Chunk
from recipes.positions import DOCUMENT, ReleasedPoSE

ROOT = Path(__file__).parents[2]
LAUNCHED = ("llama2_7b_yarn_128k", "llama2_7b_pose_16k", "llama3_8b_prolong_64k")
LONGLORA = (
    "llama3_8b_yarn_lora",
    "mistral_7b_yarn_lora",
    "qwen2_5_7b_yarn_lora",
    "qwen3_8b_yarn_lora",
)


def read(name: str) -> tuple[settings.Recipe, Any]:
    return memory.read(str(ROOT / "recipes" / f"{name}.yaml"))


@pytest.mark.parametrize("name", [*LAUNCHED, *LONGLORA])
def test_a_step_is_of_64_rows(name: str) -> None:
    """On the eight devices of the launch file that heads the recipe."""
    text = (ROOT / "recipes" / f"{name}.yaml").read_text()
    launch = (ROOT / text.partition("--config_file ")[2].split()[0]).read_text()
    devices = int(re.search(r"^num_processes: (\d+)$", launch, re.MULTILINE)[1])
    _, args = read(name)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * devices == 64


def linear(step: int, up: int, steps: int) -> float:
    return step / up if step < up else (steps - step) / (steps - up)


def constant(step: int, up: int, steps: int) -> float:
    return min(1.0, step / up)


def cosine_to_a_tenth(step: int, up: int, steps: int) -> float:
    if step < up:
        return step / up
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - up) / (steps - up)))


CURVES: dict[str, tuple[Callable[[int, int, int], float], int]] = {
    "llama2_7b_yarn_128k": (linear, 20),  # finetune.py
    "llama2_7b_pose_16k": (linear, 10),  # run_train_skipos.sh
    "llama3_8b_prolong_64k": (cosine_to_a_tenth, 500),  # train_64K.sh
    "qwen3_8b_yarn_lora": (constant, 20),  # fine-tune.py
}
"""The curve of the rate in the released code, and its steps of warmup."""


@pytest.mark.parametrize("name", CURVES)
def test_the_rate_follows_the_released_curve(name: str) -> None:
    _, args = read(name)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate)
    schedule = get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        num_warmup_steps=args.get_warmup_steps(args.max_steps),
        num_training_steps=args.max_steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
    (curve, up), steps, (factor,) = CURVES[name], args.max_steps, schedule.lr_lambdas
    for step in (0, 1, 7, 10, 20, 21, 100, 399, 500, 501, 999, 2500, 4999):
        if step < steps:
            assert factor(step) == pytest.approx(curve(step, up, steps), abs=1e-12)


class Given:
    """Random numbers that are given, and between what each was asked for."""

    def __init__(self, *numbers: int) -> None:
        self.numbers, self.asked = list(numbers), []

    def randint(self, low: int, high: int) -> int:
        self.asked.append((low, high))
        return self.numbers.pop(0)


@pytest.mark.parametrize("length", [7, 8])
@pytest.mark.parametrize("tokens", [0, 1, 30])
def test_pose_cuts_documents_as_released(length: int, tokens: int) -> None:
    """``train_preprocess_function_pose``: rt1, rt2 and rt are drawn, lt1 and lt are 0."""
    target, ids = 4 * length, list(range(1000, 1000 + length + tokens))
    assert DOCUMENT == 5
    for rt1 in range(1, (length + 1) // 2 + 1):
        for rt2 in range(length, len(ids) + 1):
            for rt in (0, 5, target - length):
                rng = Given(rt1, rt2, rt)
                taken, positions = ReleasedPoSE(target, length)(ids, rng)
                assert list(taken) == ids[0:rt1] + ids[rt2 - (length - rt1) : rt2]
                assert positions.tolist() == [i if i < rt1 else i + rt for i in range(length)]
                assert rng.asked == [
                    (1, (length + 1) // 2),
                    (length, len(ids)),
                    (0, target - length),
                ]


@pytest.mark.parametrize("lengths", [[64], [64, 128, 65, 63, 200], [5, 300, 1, 64, 127, 90]])
def test_long_rows_are_spans_of_one_document_as_released(lengths: list[int]) -> None:
    """``SingleBuffer.process`` with ``min_length`` = ``pack_length``, of documents that long.

    A buffer begins empty, gives away rows while it holds one, and keeps of a document only a
    remainder of ``min_length``: so nothing of one document ever meets another.
    """
    row, expected, spans = 64, [], []
    documents = [[1000 * d + i for i in range(n)] for d, n in enumerate(lengths)]
    for document in (d for d in documents if len(d) >= row):  # they are filtered by length before
        buffer = list(document)
        while len(buffer) >= row:
            expected.append(buffer[:row])
            spans.append((0, row))
            buffer = buffer[row:] if len(buffer) - row >= row else []
    made = Chunk(row, masking=True)({"input_ids": documents})
    assert made["input_ids"].tolist() == expected
    assert [(0, int(row_.argmax()) + 1) for row_ in made["position_ids"]] == spans
    assert len(expected) == sum(Chunk(row).rows(n) for n in lengths)
