"""A GGUF file is loaded like any model, and scaling in it that transformers ignores is reported."""

from __future__ import annotations

import ast
import re
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import rope_ext
from rope_ext.cli import app
from rope_ext.errors import RopeExtError
from rope_ext.methods import Rope, build_method
from rope_ext.saving import checkpoints, gguf_source
from tests.helpers.models import LENGTH, tiny_llama

pytest.importorskip("gguf")
from rope_eval.engines.gguf_miniature import write_model
from rope_ext.engines import llama_cpp

TABLE = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_model(tiny_llama(), path)
    return path


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(torch.arange(3, 3 * LENGTH)[None] % 120 + 3).logits


def test_every_spelling_loads_the_same_model(file: Path, monkeypatch) -> None:
    expected = logits(tiny_llama())
    monkeypatch.chdir(file.parent)
    for path, options in ((file, {}), ("tiny.gguf", {}), (file.parent, {"gguf_file": file.name})):
        torch.testing.assert_close(
            logits(rope_ext.from_pretrained(path, **options)), expected, rtol=0, atol=1e-5
        )
    loaded = checkpoints.load_model(str(file))
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("loader", ["transformers", "rope_ext"])
def test_a_patched_model_is_saved_and_reloaded(file: Path, tmp_path: Path, loader: str) -> None:
    if loader == "transformers":
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    else:
        model = rope_ext.from_pretrained(file)
    rope_ext.patch(model, "self_extend", factor=4, window=16)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(rope_ext.from_pretrained(tmp_path)), expected)
    assert rope_ext.export(rope_ext.patch(model, "yarn", factor=4, replace=True), "llama.cpp")


@pytest.mark.parametrize("engine", ["llama.cpp", "ollama"])
@pytest.mark.parametrize("method", ["yarn", "llama3"])
def test_export_names_the_original_file(file: Path, method: str, engine: str) -> None:
    model = rope_ext.patch(rope_ext.from_pretrained(file), method, factor=4)
    assert str(file) in rope_ext.export(model, engine).command


@pytest.mark.parametrize(
    "options",
    [
        ["yarn"],
        ["yarn", "yarn.attention_factor=1.3"],
        ["yarn", "yarn.beta_fast=2"],
        ["pi"],
        ["llama3"],
        ["llama3", "llama3.attention_factor=1.1"],
        ["mrrope"],
        ["longrope", f"longrope.long_factor={TABLE}"],
    ],
    ids=str,
)
def test_the_patch_in_the_note_restores_what_a_file_scales(
    file: Path, tmp_path: Path, caplog, options: list[str]
) -> None:
    name, *more = options
    path = tmp_path / "scaled.gguf"
    values = {one.split(".")[1].split("=")[0]: ast.literal_eval(one.split("=")[1]) for one in more}
    llama_cpp.extended(file, path, build_method(name, factor=4, **values))
    wanted = rope_ext.patch(tiny_llama(), name, factor=4, **values)

    loaded = rope_ext.from_pretrained(path)
    assert loaded.config.max_position_embeddings == LENGTH
    torch.testing.assert_close(logits(loaded), logits(tiny_llama()), rtol=0, atol=1e-5)
    (note,) = (record.getMessage() for record in caplog.records)
    assert note.removeprefix("rope_ext: ") in rope_ext.describe(path).notes
    assert note.removeprefix("rope_ext: ") in rope_ext.recommend(path, 1024).reasons
    if "..." in note:  # a table is too long for a line
        found = gguf_source.read_scaling(path)
        rope_ext.patch(loaded, found.method, original_max_position_embeddings=found.length)
    else:
        eval(re.search(r"rope_ext\.patch\(.*\)", note)[0], {"rope_ext": rope_ext, "model": loaded})
    torch.testing.assert_close(logits(loaded), logits(wanted), rtol=0, atol=1e-4)


@pytest.mark.parametrize("engine", ["llama.cpp", "ollama"])
def test_a_file_that_scales_is_not_scaled_once_more(file: Path, tmp_path: Path, engine) -> None:
    path = tmp_path / "scaled.gguf"
    llama_cpp.extended(file, path, build_method("llama3", factor=4))
    model = rope_ext.patch(rope_ext.from_pretrained(path), "yarn", factor=4)
    with pytest.raises(rope_ext.ExportError, match="scales its rotary embedding already"):
        rope_ext.export(model, engine)
    words = ["verify", str(path), "--method", "yarn", "--factor", "4", "--engine", "llama.cpp"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and "scales its rotary embedding already" in result.stderr


def test_a_table_of_llama_3_is_recognized(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "llama3.gguf"
    rope = Rope.geometric(10000.0, 16, 8192)
    divisors = rope.inv_freq / build_method("llama3", factor=32).inv_freq(rope)
    made = llama_cpp.Plan({"llama.context_length": 131072}, {}, divisors.tolist())
    llama_cpp.GGUFFile.read(file).write(path, made)
    found = gguf_source.read_scaling(path)
    assert found.method == build_method("llama3", factor=32)
    assert found.length == 8192


def test_a_larger_base_is_in_force(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "ntk.gguf"
    llama_cpp.extended(file, path, rope_ext.NTK(factor=4))
    assert gguf_source.read_scaling(path) is None
    wanted = rope_ext.patch(tiny_llama(), "ntk", factor=4)
    got = logits(rope_ext.from_pretrained(path))
    torch.testing.assert_close(got, logits(wanted), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "words",
    [
        ["describe", "{folder}", "--gguf-file", "tiny.gguf"],
        ["recommend", "{file}", "--length", "256"],
        ["diagnose", "--length", "256", "--model", "{folder}", "--gguf-file=tiny.gguf"],
        ["export", "{file}", "--engine", "llama.cpp", "--method", "yarn", "--factor", "4"],
    ],
    ids=lambda words: words[0],
)
def test_commands_take_a_file(file: Path, words: list[str]) -> None:
    words = [word.format(folder=file.parent, file=file) for word in words]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert str(file) in result.output  # in the next command


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + bytes(40), b"PK" * 99, None])
def test_another_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "broken.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(rope_ext.RopeExtError, match=r"broken\.gguf"):
        rope_ext.from_pretrained(path)
    with pytest.raises(rope_ext.RopeExtError, match=r"broken\.gguf"):
        rope_ext.describe(path)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(rope_ext.LoadError, match=r"cannot read .*gone\.gguf as a GGUF file"):
        gguf_source.read_scaling(tmp_path / "gone.gguf")


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words)) + words.encode()


def header(*keys: bytes, tensors: int = 0, count: int | None = None) -> bytes:
    counts = struct.pack("<QQ", tensors, len(keys) if count is None else count)
    return b"GGUF" + struct.pack("<I", 3) + counts + b"".join(keys)


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int) -> bytes:
    return struct.pack("<IQ", kind, count)


@pytest.mark.parametrize(
    "content",
    [
        header(key("a", 9, array(0, 2**40))),
        header(key("a", 9, array(8, 2**40))),
        header(key("a", 9, array(9, 1) * 5000)),
        header(key("a", 8, struct.pack("<Q", 2**40))),
        header(key("a", 13, b"")),
        header(count=2**40),
        header(tensors=2**40),
        header(text("a") + struct.pack("<I", 2**31), tensors=1)[:-4],
        header(key("llama.block_count", 4, struct.pack("<I", 10**7))),
        header(key("llama.attention.key_length", 4, struct.pack("<I", 10**9))),
    ],
)
@pytest.mark.every
def test_a_header_that_declares_more_than_there_can_be(tmp_path: Path, content: bytes) -> None:
    """The library would create what is declared, for minutes and in gigabytes."""
    path = tmp_path / "a.gguf"
    path.write_bytes(content + b"\0" * 64)
    start = time.monotonic()
    for load in (rope_ext.describe, rope_ext.from_pretrained, checkpoints.load_tokenizer):
        with pytest.raises(RopeExtError) as error:
            load(str(path))
        assert "\n" not in str(error.value) and str(path) in str(error.value)
    assert time.monotonic() - start < 10
