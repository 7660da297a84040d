"""Texts, tokenizers, names, devices and numbers that are of no use: told in one line, and early."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from rope_eval.data.text import read_texts
from rope_ext.arguments import parse_lengths, parse_options
from rope_ext.cli import app
from rope_ext.errors import MeasureError, OptionError
from rope_ext.saving import checkpoints as models


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "half \\ud83d of a pair"}', "line 2: the text has half of a surrogate pair"),
        ('{"text": ' + "[" * 100_000, 'line 2: expected a JSON object with a "text" field'),
        ('{"text": 3}', "that is a string"),
    ],
    ids=["surrogate", "deep", "number"],
)
def test_lines_that_are_no_text(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "fine \\ud83d\\ude00"}}\n{line}\n')
    with pytest.raises(MeasureError, match=message):
        read_texts([path])


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.jsonl", b'{"text": "word"}\r\n'), ("a.txt", b"word")],
    ids=["jsonl", "txt"],
)
def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + content)
    assert read_texts([path]) == ["word"]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (pyarrow.array([1, 2]), "int64"),
        (pyarrow.array([1.5, None]), "double|float64"),
        (pyarrow.array([["a"], ["b"]]), "List"),
        (pyarrow.array([b"ab\xff", b"c"]), "binary"),
        (pyarrow.array([{"a": "b"}]), "{"),
    ],
    ids=["int", "float", "list", "binary", "struct"],
)
def test_a_column_that_holds_no_strings(
    tmp_path: Path, values: pyarrow.Array, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": values}), path)
    with pytest.raises(MeasureError, match=rf"a.parquet holds no strings but .*({kind})"):
        read_texts([path])


def test_the_empty_name_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.txt").write_text("text that nobody asked for")
    with pytest.raises(MeasureError, match="the name of a text is empty"):
        read_texts([""])
    words = [
        "compare",
        "--model",
        str(tmp_path),
        "--methods",
        "yarn",
        "--lengths",
        "128",
        "--text",
        "",
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and "the name of a text is empty" in result.stderr


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000], ids=["nul", "long"])
def test_names_that_no_file_can_have(name: str) -> None:
    with pytest.raises(MeasureError, match="cannot read the text"):
        read_texts([name])
    with pytest.raises(MeasureError, match="cannot load the configuration"):
        models.load_config(name)


def test_a_folder_named_like_a_text_is_looked_into(tmp_path: Path) -> None:
    (tmp_path / "notes.md").mkdir()
    (tmp_path / "notes.md" / "a.txt").write_text("word")
    assert read_texts([tmp_path]) == ["word"]


@pytest.mark.parametrize("name", ["/nonexistent", "./nonexistent", "../a/b/c", "a/b/c", "", "~/x"])
def test_a_folder_that_is_not_there_is_not_called_a_repository(name: str) -> None:
    for load in (models.load_config, models.load_tokenizer):
        with pytest.raises(MeasureError, match="the directory does not exist") as caught:
            load(name)
        assert "Repo id" not in str(caught.value)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(MeasureError, match="it is a file, not a folder"):
        models.load_config(str(tmp_path / "model.gguf"))


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    """Transformers makes an empty one up for some families."""
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(MeasureError, match="tokenizer"):
        models.load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("damage", ["half", "garbage", "none"])
def test_weights_that_cannot_be_read(checkpoint: Path, tmp_path: Path, damage: str) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "broken")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.unlink()
    if damage != "none":
        path.write_bytes(content[: len(content) // 2] if damage == "half" else b"garbage" * 10)
    with pytest.raises(MeasureError, match="cannot load the weights of"):
        models.load_model(str(folder), device="cpu")


@pytest.mark.parametrize("device", ["meta", "privateuseone", "", "cpu:x", "abacus"])
def test_devices_of_no_use(device: str) -> None:
    with pytest.raises(MeasureError, match="cannot be used here"):
        models.resolve_device(device)


def test_an_unknown_attention_is_told_before_the_weights_are_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "load_config", lambda model: pytest.fail("too late"))
    for name, said in (
        ("nope", "set --attn to one"),
        ("sdap", "did you mean 'sdpa'"),
        ("rope_ext", ""),
        ("", ""),
    ):
        with pytest.raises(OptionError, match=f"unknown attention implementation '{name}'.*{said}"):
            models.load_model(str(checkpoint), device="cpu", attn=name)


def test_an_attention_that_is_not_installed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*args: object, **options: object) -> None:
        raise ImportError("the package for it is not installed")

    monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", missing)
    with pytest.raises(MeasureError, match=r"the package .* is not installed\); install what"):
        models.load_model(str(checkpoint), device="cpu", attn="flash_attention_2")


def test_lengths_in_thousands_and_millions() -> None:
    assert parse_lengths("512,4k,128K,1m,1M") == (512, 4096, 2**17, 2**20, 2**20)


@pytest.mark.parametrize("text", ["9" * 5000, "1" + "0" * 30, "1e3", "nan", "-1", "²", "k", "1km"])
def test_lengths_that_are_no_numbers_of_tokens(text: str) -> None:
    with pytest.raises(OptionError, match="not a number of tokens"):
        parse_lengths(text)


def test_options_that_are_nested_too_deep(tmp_path: Path) -> None:
    deep = "[" * 100_000
    assert parse_options([f"yarn.a={deep}"])["yarn"]["a"] == deep  # a word: the method refuses it
    (tmp_path / "deep.json").write_text(deep)
    with pytest.raises(OptionError, match="cannot read options"):
        parse_options([f"longrope={tmp_path / 'deep.json'}"])
