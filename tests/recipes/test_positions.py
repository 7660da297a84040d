"""recipes/positions.py: positions that are random or skip, and what is trained on them."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

import rope_ext
from recipes import data, finetune, settings
from recipes.positions import PoSE, ReleasedPoSE, Scattered
from tests.helpers.models import tiny_llama
from tests.helpers.recipe_runs import arguments, history


@given(
    length=st.integers(1, 40),
    room=st.integers(0, 200),
    seed=st.integers(0, 2**20),
)
def test_random_positions_are_sorted_distinct_and_below_the_target(
    length: int, room: int, seed: int
) -> None:
    row = {"input_ids": list(range(length)), "index": 3}
    batch = data.Collator(Scattered(length + room), seed)([row])
    (found,) = batch["position_ids"].tolist()
    assert found == sorted(set(found))
    assert found[0] >= 0
    assert found[-1] < length + room
    assert batch["input_ids"].tolist() == batch["labels"].tolist() == [row["input_ids"]]
    assert batch["attention_mask"].tolist() == [[1] * length]


def test_every_set_of_random_positions_is_as_likely() -> None:
    rng = random.Random(0)
    drawn = Counter(tuple(Scattered(5)([7, 8], rng)[1].tolist()) for _ in range(4000))
    assert set(drawn) == set(itertools.combinations(range(5), 2))
    # 400 of each are expected; five standard deviations are 95.
    assert all(305 < times < 495 for times in drawn.values())


@given(
    length=st.integers(2, 24),
    more=st.integers(0, 80),
    room=st.integers(1, 100),
    seed=st.integers(0, 2**20),
)
def test_released_pose_takes_two_pieces_of_one_document(
    length: int, more: int, room: int, seed: int
) -> None:
    ids = list(range(100, 100 + length + more))
    taken, positions = ReleasedPoSE(length + room, length)(ids, random.Random(seed))
    places, positions = [id - 100 for id in taken], positions.tolist()
    assert len(places) == len(positions) == length
    jumps = [i for i in range(1, length) if places[i] - places[i - 1] != 1]
    skips = [i for i in range(1, length) if positions[i] - positions[i - 1] != 1]
    assert places[0] == positions[0] == 0
    assert len(jumps) <= 1
    assert len(skips) <= 1
    assert {*jumps, *skips} <= set(range(1, (length + 1) // 2 + 1))  # at most half a row
    assert len({*jumps, *skips}) <= 1
    assert places == sorted(set(places))
    assert positions == sorted(set(positions))
    assert positions[-1] < length + room


@pytest.mark.parametrize("scheme", [Scattered(256), ReleasedPoSE(256, 32)], ids=["random", "pose"])
def test_every_token_sees_all_before_it(scheme: Any) -> None:
    """With the collator's mask of ones, and not without it: the mask code sees documents."""
    model = rope_ext.patch(tiny_llama(), "yarn", factor=4)
    batch = data.Collator(scheme, seed=3)([{"input_ids": list(range(3, 35)), "index": 0}])
    assert (batch["position_ids"].diff() > 1).any()
    ids = batch.pop("input_ids")
    del batch["labels"]

    def seen(**inputs: torch.Tensor) -> torch.Tensor:
        embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
        model(inputs_embeds=embeds, use_cache=False, **inputs).logits[0, -1].sum().backward()
        return embeds.grad[0].abs().amax(-1)

    assert (seen(**batch) > 0).all()
    del batch["attention_mask"]
    assert seen(**batch)[0] == 0


def test_the_rows_of_released_pose_are_documents(checkpoint: Path, texts: Path) -> None:
    """Of at least a row, and of five rows at most, as the authors' code cuts them."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    whole = [row["text"] for row in data.documents(str(texts))]
    ids = data.Tokenize(tokenizer)({"text": whole})["input_ids"]
    for length in (50, 200):
        for streaming in (False, True):
            source = data.documents(str(texts), streaming=streaming)
            pack = data.packer("document", tokenizer, length, False, 5 * length)
            rows = data.rows(source, tokenizer, pack, minimum=length)
            found = [list(row["input_ids"]) for row in itertools.islice(rows, len(ids))]
            assert sorted(found) == sorted(row[: 5 * length] for row in ids)


@pytest.mark.parametrize(
    "scheme",
    ["random", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pose", "pose_released"))],
)
def test_a_run_on_positions_of_the_target(
    scheme: str, checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    """LoRA and YaRN on rows shorter than the trained length; each scheme is another run."""
    run = tmp_path / "run"
    finetune.main(
        arguments(checkpoint, texts, run, pose_chunks=None, positions=scheme, max_steps=1)
    )
    ((_, loss, norm),) = history(run / "checkpoint-1")
    assert loss > 0
    assert norm > 0
    assert rope_ext.describe(rope_ext.from_pretrained(run)).target_length == 512
    recipe, _ = settings.parse(
        arguments(checkpoint, texts, run, pose_chunks=None, positions=scheme)
    )
    made = finetune.scheme(recipe, 512)
    assert (
        made
        == {
            "random": Scattered(512),
            "pose": PoSE(512, 2),
            "pose_released": ReleasedPoSE(512, 64),
        }[scheme]
    )


def test_chunks_alone_are_pose(checkpoint: Path, texts: Path, tmp_path: Path) -> None:
    recipe, _ = settings.parse(arguments(checkpoint, texts, tmp_path, pose_chunks=3))
    assert finetune.scheme(recipe, 512) == PoSE(512, 3)
    recipe, _ = settings.parse(arguments(checkpoint, texts, tmp_path, pose_chunks=0))
    assert finetune.scheme(recipe, 512) is None
