"""The road from a model to a served long one: what folders say of themselves, and what is next."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM
from typer.main import get_command
from typer.testing import CliRunner, Result

import rope_ext
from recipes import memory, merge
from rope_eval.data.text import read_texts
from rope_ext.cli import app
from rope_ext.saving.checkpoints import load_tokenizer
from tests.helpers.checkpoint import save_checkpoint, save_texts

ROOT = Path(__file__).parents[1]
LONG = {"yarn": {}, "ntk": {}, "pi": {}, "llama3": {}, "rerope": {}, "dynamic_ntk": {}, "alibi": {}}


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("road"))


@pytest.fixture(scope="module")
def saved(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of patched models by method, without their weights."""
    folders = {}
    for name in LONG:
        folder = tmp_path_factory.mktemp(name)
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        options = {} if name == "alibi" else {"factor": 4}
        rope_ext.patch(model, name, **options).save_pretrained(folder)
        for file in folder.glob("*.safetensors"):
            file.unlink()
        folders[name] = folder
    return folders


def parsed(line: str) -> None:
    """Parse a command with the parser of the program; raises or exits if it is not valid."""
    program, *words = shlex.split(line)
    if words[:2] == ["-m", "recipes.memory"]:
        given = [word for word in words[3:] if word not in ("--card", "24")]
        memory.read(str(ROOT / words[2]), *given)
        return
    if program == "python":
        assert words[0] == "recipes/merge.py"
        merge.parser().parse_args(words[1:])
        return
    assert program == "rope-ext"
    name, *words = words
    group = get_command(app)
    with group.make_context("rope-ext", [name, *words]) as context:
        group.get_command(context, name).make_context(name, words)


def next_commands(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    lines = result.stderr.splitlines()
    return [line.removeprefix("next: ") for line in lines if line.startswith("next: ")]


@pytest.mark.parametrize("name", LONG)
def test_a_saved_folder_says_what_it_is_without_its_weights(
    saved: dict[str, Path], name: str
) -> None:
    found = rope_ext.describe(saved[name])
    assert found.length == 128 and found.target_length == (128 if name == "alibi" else 512)
    if name != "alibi":
        assert found.method == name
    result = call("describe", saved[name])
    assert result.exit_code == 0 and "no weights were read" in result.stdout, result.output
    served = f"serve it: vllm serve {saved[name]}"
    assert (served in result.stdout) is (name in ("yarn", "ntk", "pi", "llama3"))
    if name in ("rerope", "alibi"):
        assert f"rope_ext.from_pretrained({str(saved[name])!r})" in result.stdout
    result = call("diagnose", saved[name], "--length", 512)
    assert result.exit_code == 0 and "trained for 128 tokens, patched" in result.stdout


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("yarn", "vllm serve {}"),
        ("llama3", "vllm serve {}"),
        # vLLM multiplies the extended length by the factor of this type once more.
        ("pi", "vllm serve {} --max-model-len 512"),
        ("ntk", "vllm serve {}"),
    ],
)
def test_a_folder_that_holds_the_settings_needs_no_overrides(
    saved: dict[str, Path], name: str, command: str
) -> None:
    assert rope_ext.export(saved[name], "vllm").command == command.format(saved[name])
    sglang = rope_ext.export(str(saved[name]), "sglang").command
    assert sglang.endswith(f"--model-path {saved[name]} --context-length 512")
    for engine in ("llama.cpp", "ollama"):
        made = rope_ext.export(AutoConfig.from_pretrained(saved[name]), engine).command
        assert made.startswith(f"rope-ext gguf {saved[name]} MODEL.gguf")


def test_every_command_ends_with_the_next_one(checkpoint: Path, saved: dict[str, Path]) -> None:
    options = ("--method", "yarn", "--factor", 4, "--option", "yarn.beta_fast=16")
    expected: dict[tuple[Any, ...], str] = {
        ("describe", checkpoint): "recommend",
        ("describe", checkpoint, *options): "export",
        ("describe", saved["yarn"]): "verify",
        ("recommend", checkpoint, "--length", 512): "compare",
        ("recommend", checkpoint, "--length", 512, "--finetune", "--text", "a.txt"): "compare",
        ("recommend", checkpoint, "--length", 512, "--engine", "vllm"): "export",
        ("recommend", saved["yarn"], "--length", 1024): "compare",
        ("diagnose", checkpoint, "--length", 512): "recommend",
        ("diagnose", checkpoint, "--length", 512, *options): "compare",
        ("export", checkpoint, "--engine", "vllm", *options): "verify",
        ("export", saved["yarn"], "--engine", "llama.cpp"): "verify",
        ("export", saved["yarn"], "--engine", "vllm"): "verify",
    }
    for words, following in expected.items():
        found = next_commands(call(*words))
        assert {line.split()[1] for line in found} == {following}, words
        for line in found:
            parsed(line)


def test_the_road_without_training_ends_in_an_engine(checkpoint: Path, tmp_path: Path) -> None:
    """Nothing leads back: calibrate, recommend, export, verify, and what serves the model."""
    made = rope_ext.calibrate(
        *(AutoModelForCausalLM.from_pretrained(checkpoint), load_tokenizer(str(checkpoint)), 256),
        text=read_texts([save_texts(tmp_path / "texts.jsonl")]),
        methods=["yarn"],
        **{"samples": 4, "prompts": 0, "options": ["attention_factor"], "output": tmp_path / "c"},
    )
    line = f"rope-ext recommend {checkpoint} --length 256 --calibration {tmp_path / 'c'}"
    [line] = next_commands(call(*shlex.split(line)[1:]))
    assert line.startswith(f"rope-ext export {checkpoint} --method yarn --factor 2 ")
    factor = made.method.attention_factor
    assert (f"--option yarn.attention_factor={factor}" in line) is (factor is not None)
    [line] = next_commands(call(*shlex.split(line)[1:]))
    assert line.startswith("rope-ext verify ") and "--engine vllm --write miniature" in line
    line = line.replace("--write miniature", f"--write {tmp_path / 'miniature'}")
    [line] = next_commands(call(*shlex.split(line)[1:]))
    assert line.endswith("--engine vllm --url http://localhost:8000")
    parsed(line)
    words = [word for word in shlex.split(line)[1:] if not word.startswith("http")][:-1]
    words[words.index("vllm")] = "transformers"  # which runs here
    result = call(*words)
    assert next_commands(result) == [] and "done: use it: " in result.stderr
