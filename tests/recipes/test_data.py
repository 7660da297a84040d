"""recipes/files.py and contents.py: which files are read, and what a run says about its data."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from itertools import islice
from pathlib import Path

import datasets
import pytest
from transformers import AutoTokenizer

from recipes import contents, data, finetune, settings
from recipes.files import list_files
from rope_ext import OptionError
from tests.helpers.recipe_runs import arguments


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of all kinds, some of them hidden or broken."""
    folder = tmp_path / "documents"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "log.txt").write_text("hidden")
    (folder / "a.txt").write_text("one")
    (folder / "B.TXT").write_text("two")
    (folder / "c.txt.gz").write_bytes(gzip.compress(b"three"))
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(b'{"text": "four"}\n{"text": "five"}\n'))
    (folder / "e.json").write_text(json.dumps([{"text": "six"}, {"text": "seven \ud800"}]))
    datasets.Dataset.from_dict({"text": ["eight"]}).to_parquet(folder / "f.parquet")
    (folder / "page.html").write_text("<p>")
    return folder


def break_files(folder: Path) -> None:
    (folder / "x.txt").write_bytes(b"good \xff bad")
    (folder / "y.jsonl").write_text('{"text": "nine"}\n{"text": "te')
    (folder / "z.parquet").write_bytes(b"nothing")


READ = ["eight", "five", "four", "one", "seven ?", "six", "three", "two"]


@pytest.mark.parametrize("streaming", [False, True])
def test_all_kinds_of_files_are_read_and_broken_ones_named(folder: Path, streaming: bool) -> None:
    def texts(**more: bool) -> list[dict]:
        return list(data.documents(str(folder), streaming=streaming, **more))

    rows = texts()
    assert sorted(row["text"].replace("\ufffd", "?") for row in rows) == READ
    break_files(folder)
    rows = texts()
    found = [row["text"] for row in rows if row["text"] is not None]
    assert sorted(text.replace("\ufffd", "?") for text in found) == sorted([*READ, "nine"])
    problems = sorted(row["problem"] for row in rows if row["problem"])
    assert len(problems) == 3
    for problem, name in zip(problems, ("x.txt", "y.jsonl, line 2", "z.parquet"), strict=True):
        assert name in problem
    assert "0xff" in problems[0]
    with pytest.raises(data.DataError, match=r"x\.txt"):
        texts(strict=True)
    (folder / "x.txt").write_text("good")  # what was read before is not used again
    assert "good" in [row["text"] for row in texts()]


TEXTS = [f"document {number}" for number in range(200)]
BAD_LINES = {  # lines 12 and 13 cannot be read
    "not json": [b'{"text": "x', b"["],
    "not an object": [b"[1, 2]", b"3"],
    "not text": [b'{"text": "\xff"}', b"\xfe\xfe"],
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("bad", BAD_LINES)
@pytest.mark.parametrize("suffix", ["jsonl", "json", "jsonl.gz"])
def test_a_bad_line_is_left_out_alone(
    suffix: str, bad: str, streaming: bool, tmp_path: Path
) -> None:
    lines = [json.dumps({"text": text}).encode() for text in TEXTS]
    lines[11:11] = BAD_LINES[bad]
    content = b"\n".join(lines)
    file = tmp_path / f"a.{suffix}"
    file.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    rows = list(data.documents(str(file), streaming=streaming))
    assert [row["text"] for row in rows if row["text"] is not None] == TEXTS
    [problem] = [row["problem"] for row in rows if row["problem"]]
    assert f"{file}, line 12" in problem and "2 rows left out, 200 read" in problem
    with pytest.raises(data.DataError, match=r"line 12 .*--bad_files skip"):
        list(data.documents(str(file), streaming=streaming, strict=True))


@pytest.mark.parametrize("suffix", ["jsonl", "json", "txt"])
def test_of_a_compressed_file_that_breaks_off_the_beginning_is_read(
    suffix: str, tmp_path: Path
) -> None:
    words = random.Random(0).choices(range(10**6), k=9999)
    texts = [f"{number} {word}" for number, word in enumerate(words)]
    lines = texts if suffix == "txt" else [json.dumps({"text": text}) for text in texts]
    whole = gzip.compress("\n".join(lines).encode())
    file = tmp_path / f"a.{suffix}.gz"
    file.write_bytes(whole[: len(whole) // 2])
    rows = list(data.documents(str(file)))
    found = [row["text"] for row in rows if row["text"] is not None]
    if suffix == "txt":
        [text] = found
        found = text.splitlines()
    assert 1000 < len(found) < 9000 and found == texts[: len(found)]
    assert "cannot be read to its end" in rows[-1]["problem"]
    assert "the rest of the file is missing" in rows[-1]["problem"]
    damaged = bytearray(whole)
    damaged[len(whole) // 2 : len(whole) // 2 + 200] = bytes(200)
    file.write_bytes(damaged)
    rows = list(data.documents(str(file)))
    assert rows[0]["text"] and str(file) in rows[-1]["problem"]


def test_a_line_ends_at_a_newline_only(tmp_path: Path) -> None:
    texts = ["one\u2028two", "three\x85four", "five\u2029six"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    for suffix in ("json", "jsonl"):
        file = tmp_path / f"a.{suffix}"
        file.write_text("\r\n".join(lines), encoding="utf-8", newline="")
        assert list(data.documents(str(file))["text"]) == texts


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    root, books, own = tmp_path / "root", tmp_path / "books", tmp_path / "root" / "own"
    for folder in (own, books / "inner", root / ".hidden"):
        folder.mkdir(parents=True)
    for file in (own / "a.txt", books / "b.txt", books / "inner" / "c.txt"):
        file.write_text(file.stem)
    for link, target in (
        (root / ".hidden" / "books", books),  # hidden: not read, and not instead of the next
        (root / "books", books),
        (root / "again", books / "inner"),  # is read with books
        (root / "to own", own),
        (own / "up", root),
        (books / "loop", books),
        (books / "back", tmp_path),
    ):
        link.symlink_to(target)
    assert sorted(data.documents(str(root))["text"]) == ["a", "b", "c"]
    only = tmp_path / "only"
    only.mkdir()
    (only / "link").symlink_to(books / "inner")
    assert list_files(only).files == (only / "link" / "c.txt",)


def test_a_folder_of_saved_datasets_names_them(tmp_path: Path) -> None:
    saved = tmp_path / "all" / "inner"
    datasets.Dataset.from_dict({"text": ["one"]}).save_to_disk(saved.parent / ".cache")
    datasets.Dataset.from_dict({"text": ["one"]}).save_to_disk(saved)
    with pytest.raises(data.DataError, match=f"1 dataset of save_to_disk.* such as {saved}"):
        data.documents(str(saved.parent))


def test_an_empty_folder_has_no_files(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match=r"it has 0 files$"):
        data.documents(str(tmp_path))


def test_a_folder_without_a_readable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"\xff")
    with pytest.raises(data.DataError, match=r"x\.txt is not UTF-8"):
        data.documents(str(tmp_path))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_of_save_to_disk_is_read(tmp_path: Path, streaming: bool) -> None:
    saved = datasets.Dataset.from_dict({"content": ["one", "two"]})
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"test": saved}).save_to_disk(tmp_path / "splits")
    options = {"column": "content", "streaming": streaming}
    for name, split in (("one", "train"), ("splits", "test")):
        found = data.documents(str(tmp_path / name), split=split, **options)
        assert [row["text"] for row in islice(found, 9)] == ["one", "two"]
    with pytest.raises(data.DataError, match="--dataset_split one of test"):
        data.documents(str(tmp_path / "splits"), **options)


def test_a_run_says_what_it_reads(
    checkpoint: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    break_files(folder)
    for number in range(4):  # two of them are the same
        (folder / f"long {number}.txt").write_text(f"word{number % 3} " * 200)
    more = {"minimum_document": 100, "max_steps": 3}
    finetune.main(arguments(checkpoint, folder, tmp_path / "run", **more))
    told = capsys.readouterr().err
    assert "13 of 15 files (1 with other suffixes: .html, 1 hidden)" in told
    assert "13 documents (1 duplicates)" in told
    assert "9 of 13 documents have fewer than 100 tokens and are dropped, with" in told
    for name in ("x.txt", "y.jsonl", "z.parquet"):
        assert f"{name}" in told
    rows = int(told.partition(" rows of 64 tokens")[0].rpartition(" ")[2])
    assert f"{6 / rows:.3g} passes" in told


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "saved"])
def test_what_other_code_made_is_not_used_again(
    kind: str, chat: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    row = {"prompt": "one two ", "completion": "three"} if chat else {"text": "one two " * 20}
    file = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        file.write_text(json.dumps(row))
    else:
        datasets.Dataset.from_list([row]).save_to_disk(file)

    def cached() -> str:
        pack = data.packer("packed", tokenizer, 32, masking=False, most=32, chat=chat)
        tokenize = data.tokenization(tokenizer, chat)
        rows, _ = data.rows(
            data.documents(str(file), chat=chat), tokenizer, pack, tokenize=tokenize
        )
        return rows.cache_files[0]["filename"]

    before = cached()
    assert cached() == before
    monkeypatch.setattr(contents, "CODE", contents.CODE[1:])
    assert cached() != before


@pytest.mark.parametrize("streaming", [False, True])
def test_a_run_is_not_resumed_on_other_data(
    checkpoint: Path, texts: Path, tmp_path: Path, streaming: bool
) -> None:
    documents, run = tmp_path / "documents.jsonl", tmp_path / "run"
    documents.write_bytes(texts.read_bytes())
    words = arguments(checkpoint, documents, run, save_steps=1, streaming=streaming)
    finetune.main(words)
    shutil.rmtree(run / "checkpoint-2")
    documents.write_text(documents.read_text() + "\n" + json.dumps({"text": "more"}))
    with pytest.raises(OptionError, match="other training data"):
        finetune.main([*words, "--resume_from_checkpoint", "true"])
    documents.write_bytes(texts.read_bytes())
    finetune.main([*words, "--resume_from_checkpoint", "true"])
    assert (run / "checkpoint-2").exists()


@pytest.mark.parametrize("kind", ["jsonl", "saved"])
def test_the_hash_of_a_mixture_covers_every_text(
    kind: str, checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / f"a.{kind}"
    words = arguments(checkpoint, file, tmp_path / "run", dataset=None)
    part = json.dumps({"dataset": str(file), "weight": 1})
    recipe, args = settings.parse([*words, "--datasets", part])
    plan = finetune.check(recipe, args)

    def digest(texts: list[str]) -> str:
        if kind == "jsonl":
            file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
        else:
            shutil.rmtree(file, ignore_errors=True)
            datasets.Dataset.from_dict({"text": texts}).save_to_disk(file)
        [contents] = finetune.read(recipe, args, plan).contents
        assert contents.documents == len(texts)
        return contents.digest

    texts = [f"one two three {number} " * 9 for number in range(40)]
    changed = [*texts[:30], texts[30].replace("one", "six"), *texts[31:]]
    assert digest(texts) == digest(texts) != digest(changed)
