"""Texts, tokenizers, names, devices and numbers that are of no use: told in one line, and early."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from rope_eval.data.text import read_texts
from rope_eval.tasks.haystack import read_haystack
from rope_ext.command.arguments import parse_lengths
from rope_ext.errors import MeasureError, OptionError
from rope_ext.saving import checkpoints as models
from tests.helpers.models import tiny_llama


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ' + "[" * 100_000, "line 2 is not JSON"),
        ('{"text": 3}', "row 2: the field 'text' must hold a string"),
    ],
    ids=["deep", "number"],
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


def test_an_error_names_the_option_that_gave_the_text(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" ")
    with pytest.raises(MeasureError, match=r"empty.txt is empty; give --haystack a file"):
        read_haystack([str(tmp_path / "empty.txt")])


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


def test_lengths_in_thousands_and_millions() -> None:
    assert parse_lengths("512,4k,128K,1m,1M") == (512, 4096, 2**17, 2**20, 2**20)


@pytest.mark.parametrize("text", ["9" * 5000, "1e3", "-1", "²", "1km"])
def test_lengths_that_are_no_numbers_of_tokens(text: str) -> None:
    with pytest.raises(OptionError, match="not a number of tokens"):
        parse_lengths(text)


def test_a_token_beyond_the_models_is_refused() -> None:
    model = tiny_llama()
    last = model.config.vocab_size - 1
    models.require_tokens(model, last, "this text")
    with pytest.raises(MeasureError, match=f"token {last + 1}, .*only {last + 1} tokens"):
        models.require_tokens(model, last + 1, "this text")
