"""Evaluation while training: what is held out, asked, logged and drawn."""

from __future__ import annotations

import json
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import rope_ext
from recipes import data, evaluation, finetune, settings
from rope_eval.forward import score
from tests.helpers.recipe_runs import arguments, history

EVALUATED = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "eval_rows": 3,
    "eval_length": 100,
    "eval_passkeys": 4,
}


def entries(folder: Path, name: str) -> list[dict[str, Any]]:
    state = json.loads((folder / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if name in entry]


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_held_out_is_not_trained_on(
    streaming: bool, checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    words = arguments(checkpoint, texts, tmp_path, streaming=streaming, **EVALUATED)
    recipe, args = settings.parse(words)
    plan = finetune.check(recipe, args)
    read = finetune.read(recipe, args, plan)
    rows, held = read.rows, read.held_out
    whole = [row["text"] for row in data.documents(str(texts))]
    tokens = data.Tokenize(plan.tokenizer)({"text": whole})["input_ids"]
    # Three rows of a hundred are in the first document of some 350.
    parts = [tokens[0][:100], tokens[0][100:200], tokens[0][200:300]]
    assert [row["input_ids"].tolist() for row in held] == parts
    trained = [tuple(row["input_ids"]) for row in islice(rows, 60)]

    def shared(document: list[int]) -> bool:  # a piece of some ten words, which are random
        pieces = {tuple(document[i : i + 40]) for i in range(len(document) - 40)}
        return any(row[i : i + 40] in pieces for row in trained for i in range(len(row) - 40))

    assert not shared(tokens[0])
    assert shared(tokens[1])
    [note] = read.notes
    assert f"evaluation: 1, with {len(tokens[0])} tokens, of which it uses 300" in note


@pytest.mark.parametrize("streaming", [False, True])
def test_more_than_half_of_the_data_is_not_held_out(
    streaming: bool, checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "books.jsonl"
    words = arguments(checkpoint, file, tmp_path / "run", streaming=streaming, **EVALUATED)
    recipe, args = settings.parse(words)
    plan = finetune.check(recipe, args)
    long, short = "one two three four five " * 40, "six seven " * 4
    for texts, said in (
        ([long], "here 1 with 100% of the text; give --eval_dataset or fewer --eval_rows"),
        ([long, long], "here 1 with 100% of the text"),
        ([long, short], "here 1 with 96% of the text"),
    ):
        file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
        with pytest.raises(data.DataError, match=said):
            finetune.read(recipe, args, plan)


@pytest.mark.slow
def test_a_run_that_is_evaluated(checkpoint: Path, texts: Path, tmp_path: Path) -> None:
    """Losses as without; what is logged is that of the saved model; a resumed run agrees."""
    run, plain = tmp_path / "run", tmp_path / "plain"
    (tmp_path / "other.txt").write_text("ten nine eight two " * 300)
    more = {"max_steps": 3, "save_steps": 2, "lora_dropout": 0.3}
    evaluated = more | EVALUATED | {"eval_dataset": tmp_path / "other.txt"}
    finetune.main(arguments(checkpoint, texts, run, **evaluated))
    finetune.main(arguments(checkpoint, texts, plain, **more))
    assert history(run / "checkpoint-3") == history(plain / "checkpoint-3")
    logged = entries(run / "checkpoint-3", "eval_loss")
    assert [entry["step"] for entry in logged] == [1, 2, 3]

    recipe, args = settings.parse(arguments(checkpoint, texts, run, **evaluated))
    args.resume_from_checkpoint, args.output_dir = None, str(tmp_path / "none")
    plan = finetune.check(recipe, args)
    held = finetune.read(recipe, args, plan).held_out
    model = rope_ext.from_pretrained(run)
    losses = [float(score(model, [row["input_ids"].tolist()], 99)[0].mean()) for row in held]
    # float32 sums in another order
    assert logged[-1]["eval_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert all(88 < len(case.ids) <= 100 for case in plan.passkeys)
    assert logged[-1]["eval_passkey"] == evaluation.found(model, plan.passkeys)

    shown = json.loads((run / "evaluation.json").read_text())
    assert shown["length"] == 100
    names = ("step", "eval_loss", "eval_passkey")
    assert shown["curve"] == [{name: entry[name] for name in names} for entry in logged]
    assert (run / "evaluation.png").read_bytes().startswith(b"\x89PNG")

    killed = tmp_path / "killed"
    shutil.copytree(run, killed, ignore=shutil.ignore_patterns("checkpoint-3", "adapter_*"))
    shutil.copytree(run / "checkpoint-2", killed / "checkpoint-2", dirs_exist_ok=True)
    words = arguments(checkpoint, texts, killed, **evaluated)
    finetune.main([*words, "--resume_from_checkpoint", "true"])
    assert history(killed / "checkpoint-3") == history(run / "checkpoint-3")
    assert json.loads((killed / "evaluation.json").read_text()) == shown
    weights = [load_file(folder / "adapter_model.safetensors") for folder in (run, killed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.slow
def test_the_best_model_stays_when_a_finished_run_is_resumed(
    checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    (tmp_path / "other.txt").write_text("ten nine eight two " * 300)
    given = EVALUATED | {"eval_dataset": tmp_path / "other.txt", "load_best_model_at_end": True}
    given |= {"save_steps": 1, "learning_rate": 0.5, "lr_scheduler_type": "constant"}
    words = arguments(checkpoint, texts, tmp_path / "run", **given)
    finetune.main(words)
    best = load_file(tmp_path / "run" / "checkpoint-1" / "adapter_model.safetensors")
    finetune.main([*words, "--resume_from_checkpoint", "true"])
    kept = load_file(tmp_path / "run" / "adapter_model.safetensors")
    assert all(torch.equal(kept[name], weight) for name, weight in best.items())


def test_passkeys_are_found_where_the_model_writes_them(checkpoint: Path) -> None:
    """Of a model that knows the answers of two of four."""
    cases = evaluation.passkeys(AutoTokenizer.from_pretrained(checkpoint), 128, 4)
    known = {tuple(case.ids) for case in cases[:2]}
    assert [case.depth for case in cases] == [0.125, 0.375, 0.625, 0.875]
    assert len({case.answers for case in cases}) == 4

    class Model(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            following = input_ids.roll(-1, 1)
            wrong = 0 if tuple(input_ids[0].tolist()) in known else 1
            logits = torch.nn.functional.one_hot((following + wrong) % 400, 400).float()
            return type("Output", (), {"logits": logits})

    model = Model()
    model.config = rope_ext.from_pretrained(checkpoint).config
    assert evaluation.found(model, cases) == 0.5
