"""recipes/retrieval.py: rows that state facts and ask for them, on both bundled tokenizers."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import rope_ext
from recipes import data, finetune, positions
from recipes.retrieval import NAMES, WORDINGS, RetrievalRows
from rope_eval.data.prompts import encode
from tests.helpers.recipe_runs import arguments, history

ROOT = Path(__file__).parents[2]
LENGTH = 600
TEXT = "Sunlight moves over a wall while somebody counts. "


@pytest.fixture(params=["tiny-512", "tiny-bytes-512"])
def tokenizer(request: pytest.FixtureRequest) -> object:
    return AutoTokenizer.from_pretrained(ROOT / "checkpoints" / request.param)


def plain_row(tokenizer: object) -> list[int]:
    return encode(tokenizer, TEXT * LENGTH)[:LENGTH]


def facts(lines: list[str], wording: str) -> dict[str, str]:
    """The value of each name on lines of one wording."""
    pattern = re.escape(wording).replace(r"\{name\}", f"(?P<name>{'|'.join(NAMES)})")
    pattern = pattern.replace(r"\{value\}", "(?P<value>[0-9a-z]{4,8})")
    found = [match for line in lines if (match := re.fullmatch(pattern, line))]
    return {match["name"]: match["value"] for match in found}


def test_every_question_has_its_answer_earlier_in_the_row(tokenizer: object) -> None:
    make, seen, most, repeated = RetrievalRows(tokenizer, 1.0), set(), 0, []
    for seed in range(40):
        row, weights = make(plain_row(tokenizer), random.Random(seed))
        assert len(row) == len(weights) == LENGTH
        lines = tokenizer.decode(row).split("\n")
        both = [(facts(lines, said), facts(lines, asked)) for said, asked in WORDINGS]
        [(number, (stated, answers))] = [(i, pair) for i, pair in enumerate(both) if pair[1]]
        assert answers == stated
        text = "".join(lines)
        assert all(text.find(value) < text.rfind(value) for value in answers.values())
        # Only answers, and text that is not repeated, have a loss.
        scored = [
            (token, one) for token, one in zip(row, weights, strict=True) if one not in (0, 1)
        ]
        spelled = tokenizer.decode([token for token, _ in scored]).replace(" ", "")
        assert sorted(spelled) == sorted("".join(answers.values()))
        assert sum(one for _, one in scored) == pytest.approx(LENGTH / 2)
        repeated.append(weights.count(1.0) == 0)
        seen.add(number)
        most = max(most, len(answers))
    assert len(seen) > 3 and most > 2
    assert 8 < sum(repeated) < 32  # binomial: 20 with a standard deviation of 3


def test_rows_depend_on_seed_epoch_and_index_and_leave_positions_alone(tokenizer: object) -> None:
    rows = [{"input_ids": plain_row(tokenizer), "index": index} for index in (3, 7)]
    make = RetrievalRows(tokenizer, 1.0)

    def batch(order: list[int], epoch: int = 0, retrieval: object = make) -> dict:
        return data.Collator(positions.PoSE(4096), 5, epoch, retrieval)([rows[i] for i in order])

    first, again, plain = batch([0, 1]), batch([1, 0]), batch([0, 1], retrieval=None)
    assert torch.equal(first["input_ids"], again["input_ids"].flip(0))
    ignored = first["loss_weights"] == 0
    assert torch.equal(ignored, first["labels"] == data.IGNORED) and ignored.any()
    assert torch.equal(first["labels"][~ignored], first["input_ids"][~ignored])
    assert "loss_weights" not in plain
    assert torch.equal(first["position_ids"], plain["position_ids"])
    assert not torch.equal(first["input_ids"], plain["input_ids"])
    assert not torch.equal(first["input_ids"], batch([0, 1], epoch=1)["input_ids"])
    held_out = [{"input_ids": row["input_ids"]} for row in rows]
    assert data.Collator(retrieval=make)(held_out)["input_ids"].tolist() == [
        row["input_ids"] for row in rows
    ]


def test_a_run_trains_on_them(
    checkpoint: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = []

    class Watched(data.Collator):
        def __call__(self, rows: object) -> dict:
            batches.append(super().__call__(rows))
            return batches[-1]

    monkeypatch.setattr(data, "Collator", Watched)
    more = {"length": 256, "retrieval_share": 1.0, "max_steps": 1}
    finetune.main(arguments(checkpoint, texts, tmp_path / "run", **more))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for row in batches[0]["input_ids"]:
        assert sum(tokenizer.decode(row).count(name) for name in NAMES) >= 2


@pytest.mark.parametrize(
    ("positions", "chunked"), [("pose", True), ("pose", False), ("documents", True)]
)
def test_the_loss_of_a_step_is_the_mean_by_weights(
    positions: str,
    chunked: bool,
    checkpoint: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over all accumulated rows, whose weights differ; the expected loss is from whole logits."""
    batches = []

    class Watched(data.Collator):
        def __call__(self, rows: object) -> dict:
            batches.append(super().__call__(rows))
            return batches[-1]

    monkeypatch.setattr(data, "Collator", Watched)
    run = tmp_path / "run"
    more: dict[str, object] = {"length": 256, "max_steps": 1, "per_device_train_batch_size": 1}
    more |= {"gradient_accumulation_steps": 6, "learning_rate": 0.0, "chunked_loss": chunked}
    if positions == "pose":
        more["retrieval_share"] = 0.5
    else:
        more |= {"pose_chunks": 0, "document_masking": True}
    finetune.main(arguments(checkpoint, texts, run, **more))

    model = rope_ext.from_pretrained(run).eval()
    total, divisor, sums = 0.0, 0.0, set()
    for batch in batches[:6]:
        inputs = {name: batch[name] for name in batch if name not in ("labels", "loss_weights")}
        with torch.no_grad():
            logits = model(**inputs, use_cache=False).logits[0, :-1]
        labels = batch["labels"][0, 1:]
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        weights = batch.get("loss_weights", torch.ones(1, 256))[0, 1:] * (labels != data.IGNORED)
        total += float(losses @ weights)
        divisor += float(weights.sum())
        sums.add(float(weights.sum()))
    assert len(sums) > 1  # rows weigh more or less
    [(_, loss, _)] = history(run / "checkpoint-1")
    assert loss == pytest.approx(total / divisor, rel=1e-5)
