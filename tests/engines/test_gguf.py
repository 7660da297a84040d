"""`rope-ext gguf`: what changes in a file, and that nothing else does."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy
import pytest
from typer.testing import CliRunner

import rope_ext
from rope_eval.engines.gguf_miniature import write_model
from rope_ext.cli import app
from rope_ext.engines import llama_cpp
from tests.helpers.models import LENGTH, tiny_llama

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.slow  # with them CI installs the library


def keys(path: Path) -> dict[str, Any]:
    fields = gguf.GGUFReader(path).fields.items()
    return {name: field.contents() for name, field in fields if not name.startswith("GGUF.")}


def tensors(path: Path) -> dict[str, tuple[Any, ...]]:
    return {
        t.name: (t.shape.tolist(), t.tensor_type, hashlib.sha256(t.data.tobytes()).hexdigest())
        for t in gguf.GGUFReader(path).tensors
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Of a tiny llama, in part quantised, with keys of every kind and an alignment of its own."""
    write_model(tiny_llama(), tmp_path / "plain.gguf")
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_array("x.numbers", [1, 2, 3])
    writer.add_bool("x.flag", True)
    copied(tmp_path / "plain.gguf", writer)
    writer.add_tensor("odd", numpy.arange(5, dtype=numpy.float32))  # ends between two alignments
    write_out(writer)
    return path


def write_out(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def copied(path: Path, writer: gguf.GGUFWriter) -> gguf.GGUFWriter:
    old = gguf.GGUFReader(path)
    for name, field in old.fields.items():
        if not name.startswith(("GGUF.", "general.arch", "general.align")):
            array = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], array)
    for tensor in old.tensors:
        half = tensor.name.endswith("ffn_up.weight")
        writer.add_tensor(tensor.name, tensor.data.astype(numpy.float16) if half else tensor.data)
    return writer


def run(*words: Any) -> Any:
    given = "--factor" in words or "--method" not in words
    return CliRunner().invoke(
        app, ["gguf", *map(str, words), *([] if given else ["--factor", "4"])]
    )


def test_keys_and_tensor_are_added_and_all_else_is_kept(file: Path, tmp_path: Path) -> None:
    before, output = file.read_bytes(), tmp_path / "b.gguf"
    result = run(file, "--method", "yarn", "--option", "truncate=false", "--output", output)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"llama-server --model {output} --ctx-size 256\n"
    assert file.read_bytes() == before
    model = rope_ext.patch(tiny_llama(), "yarn", factor=4, truncate=False)
    rotary = model.model.rotary_emb
    new = keys(output)
    assert new.pop("llama.rope.scaling.attn_factor") == pytest.approx(rotary.attention_scaling)
    assert new.pop("llama.rope.scaling.original_context_length") == LENGTH
    assert new.pop("rope_ext.gguf")  # what was written here may be replaced
    assert new == {**keys(file), "llama.context_length": 4 * LENGTH}
    table = gguf.GGUFReader(output).tensors[-1]
    assert table.name == "rope_freqs.weight"
    theta = 10000.0 ** -(numpy.arange(0, 16, 2) / 16)
    numpy.testing.assert_allclose(theta / table.data, rotary.inv_freq.numpy(), rtol=1e-6)
    got = tensors(output)
    del got["rope_freqs.weight"]
    assert got == tensors(file)
    starts = [t.data_offset for t in gguf.GGUFReader(output).tensors]
    assert all(start % 64 == 0 for start in starts)


def test_what_stood_there_before_is_replaced(file: Path, tmp_path: Path) -> None:
    table, yarn, again = (tmp_path / f"{name}.gguf" for name in ("table", "yarn", "again"))
    assert run(file, "--method", "resonance", "--output", table).exit_code == 0
    other = tmp_path / "other.gguf"  # as if it were made of a folder with another base
    llama_cpp.following(rope_ext.patch(tiny_llama(), "ntk", factor=4), table, other)
    assert keys(other)["llama.rope.freq_base"] > 4e4
    llama_cpp.following(rope_ext.patch(tiny_llama(), "yarn", factor=8), other, yarn)
    assert keys(yarn)["llama.rope.freq_base"] == 1e4
    scaling = {name: value for name, value in keys(yarn).items() if ".rope.scaling." in name}
    assert scaling == {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 8,
        "llama.rope.scaling.original_context_length": LENGTH,
    }
    assert tensors(yarn) == tensors(file)
    llama_cpp.following(rope_ext.patch(tiny_llama(), "resonance", factor=4), yarn, again)
    assert again.read_bytes() == table.read_bytes()


@pytest.mark.parametrize("method", ["yarn", "pi", "ntk", "resonance", "llama3"])
def test_a_folder_says_the_patch(file: Path, tmp_path: Path, method: str) -> None:
    """Saved, it is a patch no more: its configuration scales."""
    folder, output, direct = (tmp_path / name for name in ("saved", "b.gguf", "c.gguf"))
    rope_ext.patch(tiny_llama(), method, factor=4).save_pretrained(folder)
    result = run(folder, file, "--output", output)
    assert result.exit_code == 0, result.output
    assert run(file, "--method", method, "--output", direct).exit_code == 0
    ours, theirs = keys(output), keys(direct)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name] == (pytest.approx(value) if isinstance(value, float) else value)
    assert tensors(output).keys() == tensors(direct).keys()
    last = [gguf.GGUFReader(path).tensors[-1].data for path in (output, direct)]
    numpy.testing.assert_allclose(*last, rtol=1e-6)  # a saved table is rounded


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "dynamic_ntk"], "length=TOKENS to fix them"),
        (["--method", "rerope"], "no setting that changes the positions"),
        (["--method", "yarm"], "did you mean 'yarn'"),
        (["--method", "yarn", "--factor", "0.5"], "set --factor to a number above 1"),
        ([], "give --method and --factor, or the folder of a patched model before the file"),
    ],
)
def test_what_cannot_be_written_is_refused(file: Path, tmp_path, words, message) -> None:
    before = list(tmp_path.iterdir())
    result = run(file, *words, "--output", tmp_path / "b.gguf")
    assert result.exit_code == 2 and message in result.stderr
    assert list(tmp_path.iterdir()) == before


def test_other_files_are_refused(file: Path, tmp_path: Path) -> None:
    result = run(file, "--method", "yarn", "--output", file)
    assert result.exit_code == 2 and "give --output another name" in result.stderr
    (tmp_path / "text.gguf").write_text("no such file")
    result = run(tmp_path / "text.gguf", "--method", "yarn", "--output", tmp_path / "b.gguf")
    assert result.exit_code == 2 and "as written by convert_hf_to_gguf.py" in result.stderr
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:-4000])
    result = run(tmp_path / "cut.gguf", "--method", "yarn", "--output", tmp_path / "b.gguf")
    assert result.exit_code == 2 and result.stderr.startswith("error: cannot read")
    big = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    write_out(big)
    result = run(tmp_path / "big.gguf", "--method", "yarn", "--output", tmp_path / "b.gguf")
    assert result.exit_code == 2 and "big-endian" in result.stderr
    result = run(tmp_path / "none.gguf", "--method", "yarn", "--output", tmp_path / "b.gguf")
    assert result.exit_code == 2 and "no folder or file" in result.stderr
    assert run(file, "--method", "pi", "--output", tmp_path / "b.gguf").exit_code == 0
    result = run(tmp_path / "b.gguf", "--method", "pi", "--output", tmp_path / "c.gguf")
    assert result.exit_code == 2 and "already scales its rotary embedding" in result.stderr
    other = rope_ext.patch(tiny_llama(head_dim=32), "pi", factor=2)
    with pytest.raises(rope_ext.ExportError, match=r"with 8 rotary pairs, but .* with 16"):
        llama_cpp.following(other, file, tmp_path / "c.gguf")
    other = rope_ext.patch(tiny_llama(hidden_size=128, head_dim=16), "pi", factor=2)
    with pytest.raises(rope_ext.ExportError, match=r"width 64 .* width 128"):
        llama_cpp.following(other, file, tmp_path / "c.gguf")
    with pytest.raises(rope_ext.ExportError, match="there is none; patch it"):
        llama_cpp.following(tiny_llama(), file, tmp_path / "c.gguf")


def test_tables_that_convert_hf_to_gguf_writes_scale_already(file: Path, tmp_path: Path) -> None:
    """Files of Phi-3 with LongRoPE have no ``rope.scaling.type``."""
    given, output = tmp_path / "tables.gguf", tmp_path / "b.gguf"
    writer = copied(file, gguf.GGUFWriter(given, "llama"))
    for length in ("long", "short"):
        writer.add_tensor(f"rope_factors_{length}.weight", numpy.ones(8, numpy.float32))
    write_out(writer)
    result = run(given, "--method", "yarn", "--output", output)
    assert result.exit_code == 2 and "already scales its rotary embedding" in result.stderr
    llama_cpp.following(rope_ext.patch(tiny_llama(), "yarn", factor=4), given, output)
    assert not any("rope" in name for name in tensors(output))


def test_output_that_is_the_input_is_refused_through_links(file: Path, tmp_path: Path) -> None:
    before = file.read_bytes()
    (tmp_path / "soft.gguf").symlink_to(file)
    (tmp_path / "hard.gguf").hardlink_to(file)
    (tmp_path / "folder").mkdir()
    write_model(tiny_llama(), tmp_path / "theirs.gguf")
    for output in ("soft.gguf", "hard.gguf", "folder", "theirs.gguf"):
        result = run(file, "--method", "yarn", "--output", tmp_path / output)
        assert result.exit_code == 2 and "give --output another name" in result.stderr
        assert file.read_bytes() == before


def test_output_that_is_a_link_is_written_through(file: Path, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    link = tmp_path / "latest.gguf"
    link.symlink_to("store/b.gguf")  # leads to nothing yet
    for _ in range(2):
        assert run(file, "--method", "yarn", "--output", link).exit_code == 0
        assert link.is_symlink()
        assert keys(tmp_path / "store" / "b.gguf")["llama.rope.scaling.type"] == "yarn"
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["b.gguf"]
