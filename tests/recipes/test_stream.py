"""recipes/stream.py: streams that are shuffled, mixed, and resumed where they stood."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pytest

from recipes import data, evaluation, finetune, settings, stream
from rope_ext import OptionError
from tests.helpers.recipe_runs import arguments, history


def words(batch: Mapping[str, list[str]]) -> dict[str, Any]:
    """Documents of numbers, a token each."""
    return {"input_ids": [[int(word) for word in text.split()] for text in batch["text"]]}


def numbered(documents: int, tokens: int, first: int = 0) -> datasets.Dataset:
    """Document i says i, over and over."""
    texts = [" ".join([str(first + i)] * tokens) for i in range(documents)]
    return datasets.Dataset.from_dict({"text": texts})


def made(
    documents: Any, pack: Any = None, seed: int = 0, tokenize: Any = words, **more: Any
) -> stream.Source:
    if isinstance(documents, datasets.Dataset):
        documents = documents.to_iterable_dataset()
    return stream.Source(documents, tokenize, pack or data.Pack(8), 1, seed, **more)


def ids(rows: Iterator[Mapping[str, Any]], number: int) -> list[tuple[int, ...]]:
    return [tuple(row["input_ids"]) for row in islice(rows, number)]


def folder_of(tmp_path: Path, suffix: str) -> Any:
    """Ninety documents in three files of a kind, streamed."""
    folder = tmp_path / suffix
    folder.mkdir()
    for part in range(3):
        texts = numbered(30, 20, first=30 * part)["text"]
        if suffix == "jsonl":
            lines = "\n".join(json.dumps({"text": text}) for text in texts)
            (folder / f"{part}.jsonl").write_text(lines)
        elif suffix == "parquet":
            datasets.Dataset.from_dict({"text": texts}).to_parquet(folder / f"{part}.parquet")
        else:
            for i, text in enumerate(texts):
                (folder / f"{part}-{i}.txt").write_text(text)
    return data.documents(str(folder), streaming=True)


@pytest.mark.parametrize(
    "kind",
    [
        "parquet",
        "rest",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("jsonl", "txt", "in memory")),
    ],
)
def test_a_stream_goes_on_from_any_row(kind: str, tmp_path: Path) -> None:
    """From its state as JSON, in the first pass and in later ones, to the token."""
    in_memory = kind in ("in memory", "rest")
    documents = numbered(90, 20) if in_memory else folder_of(tmp_path, kind)
    if kind == "rest":  # what held-out documents leave
        held = documents["text"][:7]
        documents = evaluation.without(documents.to_iterable_dataset(), held)

    def fresh() -> stream.Stream:
        return stream.Stream([made(documents, block=40)], [1.0], seed=0)

    whole = fresh()
    reading = iter(whole)
    expected, states = [], {}
    for given in range(320):  # a pass has 225 rows
        if given % 101 == 0:
            states[given] = json.dumps(whole.state(given)) if given else None
        expected.append(next(reading))
    assert len(set(ids(iter(expected), 200))) > 50
    for given, state in states.items():
        again = fresh()
        if state is not None:
            again.start(json.loads(state))
        rows = list(islice(again, 320))
        assert all(len(row["input_ids"]) == 0 for row in rows[:given])
        assert ids(iter(rows[given:]), 320) == ids(iter(expected[given:]), 320)
        assert [row["index"] for row in rows[given:]] == list(range(given, 320))


def test_each_pass_has_every_row_once_in_another_order() -> None:
    """Of 60 documents of one row each."""
    found = ids(iter(stream.Stream([made(numbered(60, 8))], [1.0], seed=5)), 180)
    passes = [found[:60], found[60:120], found[120:]]
    assert len({tuple(each) for each in passes}) == 3
    for each in passes:
        assert sorted(each) == [(i,) * 8 for i in range(60)]
    assert ids(iter(stream.Stream([made(numbered(60, 8), seed=1)], [1.0], seed=1)), 60) != passes[0]


def test_files_are_read_in_another_order_in_each_pass(tmp_path: Path) -> None:
    """Also without the documents that are held out, of which none is read."""
    documents = folder_of(tmp_path, "jsonl")  # three files of thirty documents
    held = [row["text"] for row in documents.take(7)]
    for number, read in ((90, documents), (83, evaluation.without(documents, held))):
        source = made(read, data.Pack(20), block=1)
        found = ids(iter(stream.Stream([source], [1.0], seed=0)), 6 * number)
        passes = [found[i : i + number] for i in range(0, len(found), number)]
        assert {row[0] for row in found} == set(range(90 - number, 90))
        assert len({tuple(dict.fromkeys(row[0] // 30 for row in each)) for each in passes}) > 1


def test_shares_of_a_mixture_are_exact_in_every_thousand_rows() -> None:
    sources = [made(numbered(50, 8, first=100 * i)) for i in range(3)]
    rows = ids(iter(stream.Stream(sources, [0.3, 0.3, 0.4], seed=0)), 2000)
    for part in range(2):
        counts = Counter(row[0] // 100 for row in rows[1000 * part : 1000 * (part + 1)])
        assert counts == {0: 300, 1: 300, 2: 400}
    assert len({row[0] // 100 for row in rows[:8]}) > 1
    assert {row[0] for row in rows} >= {*range(50), *range(100, 150), *range(200, 250)}


def test_a_mixture_has_rows_of_several_kinds(checkpoint: Path, texts: Path, tmp_path: Path) -> None:
    """Every row says where its documents begin, in one batch or another."""
    mixture = [
        json.dumps({"dataset": str(texts), "weight": 0.5, "rows": rows})
        for rows in ("chunked", "packed")
    ]
    words = arguments(
        checkpoint,
        texts,
        tmp_path,
        dataset=None,
        datasets=mixture,
        length=256,
        pose_chunks=0,
        document_masking=True,
    )
    recipe, args = settings.parse(words)
    rows = finetune.read(recipe, args, finetune.check(recipe, args)).rows
    batch = data.Collator()(list(islice(rows, 40)))
    assert (batch["labels"][:, 0] == data.IGNORED).all()
    starts = (batch["position_ids"] == 0).sum(1)
    assert set(starts.tolist()) == {1, 2}  # documents of some 350 tokens


def test_bookending_by_hand() -> None:
    """B and E are 0 and 1; the documents are 10 to 14, and 20 to 26."""
    documents = {"input_ids": [[0, 10, 11, 12, 13, 14, 1], [0, 20, 21, 22, 23, 24, 25, 26, 1]]}
    found = data.Bookend(5, (0,), (1,))(documents)["input_ids"].tolist()
    assert found == [[0, 10, 11, 12, 1], [0, 13, 14, 1, 1], [0, 20, 21, 22, 1], [0, 23, 24, 25, 1]]
    exact = data.Bookend(7, (0,), (1,))(documents)["input_ids"].tolist()
    assert exact == [[0, 10, 11, 12, 13, 14, 1], [0, 20, 21, 22, 23, 24, 1]]
    headless = data.Bookend(4, (), (1,))({"input_ids": [[5, 6, 7, 8, 1]]})["input_ids"]
    assert headless.tolist() == [[5, 6, 7, 1]]


@pytest.mark.parametrize(
    "mixed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["stream", "mixture"]
)
def test_a_killed_run_goes_on_with_the_rows_that_follow(
    mixed: bool, checkpoint: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and norms to the bit, PoSE positions among them; Trainer counts steps as before."""
    monkeypatch.setattr(data, "Source", partial(stream.Source, block=8))
    run, killed = tmp_path / "run", tmp_path / "killed"
    more: dict[str, Any] = {"max_steps": 4, "save_steps": 2, "gradient_accumulation_steps": 2}
    if mixed:
        parts = [{"dataset": str(texts), "weight": 0.25}, {"dataset": str(texts), "weight": 0.75}]
        more |= {"dataset": None, "datasets": [json.dumps(part) for part in parts]}
    else:
        more["streaming"] = True
    finetune.main(arguments(checkpoint, texts, run, **more))
    shutil.copytree(run, killed, ignore=shutil.ignore_patterns("checkpoint-4", "*.safetensors"))
    shutil.copytree(run / "checkpoint-2", killed / "checkpoint-2", dirs_exist_ok=True)
    assert json.loads((killed / "checkpoint-2" / "stream.json").read_text())["rows"] == 8
    given = arguments(checkpoint, texts, killed, **more)
    finetune.main([*given, "--resume_from_checkpoint", "true"])
    assert history(killed / "checkpoint-4") == history(run / "checkpoint-4")
    epochs = [
        [entry["epoch"] for entry in json.loads(file.read_text())["log_history"]]
        for file in sorted(tmp_path.glob("*/checkpoint-4/trainer_state.json"))
    ]
    assert epochs[0] == epochs[1]
    state = killed / "checkpoint-2" / "stream.json"
    for damaged in ("[" * 99999, "[]", '{"rows": 8, "sources": []}', '{"rows": "8"}'):
        state.write_text(damaged)
        with pytest.raises(OptionError, match=r"cannot read .*stream\.json"):
            finetune.main([*given, "--resume_from_checkpoint", str(state.parent)])
    assert not (killed / "stream.json").exists()  # it is no part of the model


@pytest.mark.parametrize("state", ["[" * 99999, '{"global_step": 5, "max_steps": "5"}'])
def test_a_damaged_state_of_a_run_is_no_checkpoint(
    state: str, checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "run" / "checkpoint-5"
    damaged.mkdir(parents=True)
    (damaged / "trainer_state.json").write_text(state)
    given = arguments(checkpoint, texts, tmp_path / "run")
    with pytest.raises(OptionError, match="no checkpoint to resume from"):
        finetune.main([*given, "--resume_from_checkpoint", str(damaged)])


def test_a_deep_file_is_left_out_like_others_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text('{"text": ' + "[" * 99999)
    with pytest.raises(data.DataError, match="is not JSON"):
        data.documents(str(tmp_path), strict=True)
