"""llama.cpp itself, run on small files, gives the log-probabilities of the patched model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import rope_ext
from rope_ext.cli import app
from rope_ext.engines import gguf_model, running
from rope_ext.patching import current_patch
from tests.helpers.engines import (
    BUILD,
    FLAGS,
    TABLES,
    TOLERANCE,
    VOCABULARY,
    built,
    expected,
    prompts,
)
from tests.helpers.models import LENGTH

gguf = pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")


def served(words: list[str], file: Path, length: int) -> torch.Tensor:
    """What the server gives under a printed command, whose file stands somewhere else here."""
    words = [str(file) if word.endswith(".gguf") else word for word in words]
    return running.llama_cpp(words, prompts(length), VOCABULARY)


def patched(family: str, case: tuple[str, dict[str, Any]], file: Path | None = None) -> Any:
    name, options = case
    model = built(family)
    if file is not None:
        gguf_model.write_model(model, file)
    return rope_ext.patch(model, name, **{"factor": 4, **options})


def command(made: rope_ext.Export) -> list[list[str]]:
    """The programs of a printed command, each without its name."""
    return [shlex.split(part)[1:] for part in made.command.split(" && ")]


@pytest.mark.slow
@pytest.mark.parametrize("case", FLAGS)
@pytest.mark.parametrize("family", BUILD)
def test_the_printed_command_serves_what_was_patched(tmp_path, family: str, case: str) -> None:
    model = patched(family, FLAGS[case], tmp_path / "a.gguf")
    length = current_patch(model).target_length
    (words,) = command(rope_ext.export(model, "llama.cpp"))
    got = served(words, tmp_path / "a.gguf", length)
    torch.testing.assert_close(got, expected(model, length), rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("case", TABLES)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_printed_commands_serve_a_table(tmp_path, monkeypatch, family: str, case: str) -> None:
    monkeypatch.chdir(tmp_path)
    model = patched(family, TABLES[case], tmp_path / "MODEL.gguf")
    length = current_patch(model).target_length
    made = rope_ext.export(model, "llama.cpp")
    made.files and made.write(tmp_path)
    writing, words = command(made)
    result = CliRunner().invoke(app, writing)
    assert result.exit_code == 0, result.output
    got = served(words, tmp_path / "MODEL-long.gguf", length)
    torch.testing.assert_close(got, expected(model, length), rtol=0, atol=TOLERANCE)
    # The file says it all, which is what Ollama counts on.
    bare = ["--model", "x.gguf", "--ctx-size", str(length)]
    torch.testing.assert_close(served(bare, tmp_path / "MODEL-long.gguf", length), got)


@pytest.mark.slow
@pytest.mark.parametrize("case", FLAGS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_written_file_needs_no_flag(tmp_path, monkeypatch, family: str, case: str) -> None:
    monkeypatch.chdir(tmp_path)
    model = patched(family, FLAGS[case], tmp_path / "MODEL.gguf")
    length = current_patch(model).target_length
    try:
        made = rope_ext.export(model, "ollama")
    except rope_ext.ExportError as error:
        assert "flags of llama.cpp" in str(error) and (family, case) == ("qwen3", "yarn hotter")
        return
    writing, _ = command(made)
    result = CliRunner().invoke(app, writing)
    assert result.exit_code == 0, result.output
    made.write(tmp_path)
    source, parameter = (tmp_path / "Modelfile").read_text("utf-8").splitlines()
    words = ["--model", source.removeprefix("FROM ./"), "--ctx-size", parameter.split()[-1]]
    got = served(words, tmp_path / words[1], length)
    torch.testing.assert_close(got, expected(model, length), rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_without_its_length_the_server_takes_no_longer_prompt(tmp_path) -> None:
    model = patched("llama", FLAGS["pi"], tmp_path / "a.gguf")
    (words,) = command(rope_ext.export(model, "llama.cpp"))
    at = words.index("--override-kv")
    assert words[at + 1] == f"llama.context_length=int:{4 * LENGTH}"
    with pytest.raises(rope_ext.ExportError, match="exceeds the available context size"):
        served(words[:at] + words[at + 2 :], tmp_path / "a.gguf", 4 * LENGTH)
    with pytest.raises(rope_ext.ExportError, match="did not start"):
        served([*words, "--no-such-flag"], tmp_path / "a.gguf", 4 * LENGTH)
