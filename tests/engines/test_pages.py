"""The commands on the pages of engines print what stands there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import rope_ext
from rope_ext.cli import app
from rope_ext.engines import gguf_model, running, verifying

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "engines"
CONSOLE = re.compile(r"```console\n\$ rope-ext (.*)\n((?:.*\n)*?)```")
NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]\d+)?(?= from)")
COMMANDS = {
    f"{path.stem}-{i}": found.groups()
    for path in sorted(PAGES.glob("*.md"))
    for i, found in enumerate(CONSOLE.finditer(path.read_text(encoding="utf-8")))
}


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that the commands name."""
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    (tmp_path / "FOLDER").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(words: str, folder: Path) -> str:
    """What a command prints."""
    if "MODEL.gguf" in words:
        pytest.importorskip("gguf")
        base = AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / "tiny-512").float()
        gguf_model.write_model(base, folder / "MODEL.gguf")
    result = CliRunner().invoke(app, shlex.split(words))
    assert result.exit_code in (0, 1), result.output
    return result.stdout


def named(*words: str) -> list[Any]:
    """The commands of these kinds; those on files of llama.cpp are slow, as CI has its library."""
    return [
        pytest.param(name, marks=pytest.mark.slow if command.startswith("gguf") else ())
        for name, (command, _) in COMMANDS.items()
        if command.split()[0] in words
    ]


@pytest.mark.parametrize("name", named("export", "gguf"))
def test_a_command_prints_what_the_page_says(beside: Path, name: str) -> None:
    words, output = COMMANDS[name]
    printed = run(words, beside)
    if output:
        assert printed == output
    else:  # a long file, which --output wrote
        config = json.loads((beside / "FOLDER" / "config.json").read_text(encoding="utf-8"))
        assert config["rope_scaling"]["rope_type"] == "linear"
        assert ("type" in config["rope_scaling"]) == ("--legacy" in words)
        assert config["max_position_embeddings"] == 2048


@pytest.mark.slow
@pytest.mark.parametrize("name", named("verify"))
def test_an_engine_is_what_the_page_says(beside: Path, name: str) -> None:
    words, output = COMMANDS[name]
    pytest.importorskip("mlx_lm" if "mlx" in words else "xllamacpp")
    printed = run(words, beside)
    assert NUMBER.sub("N", printed) == NUMBER.sub("N", output)
    found, stated = ([float(n[0]) for n in NUMBER.finditer(t)] for t in (printed, output))
    for ours, theirs in zip(found, stated, strict=True):  # rounding differs between machines
        assert ours == pytest.approx(theirs, rel=0.1) or max(ours, theirs) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in COMMANDS if n.startswith("llama_cpp")])
@torch.no_grad()
def test_the_checkpoint_is_served_by_the_printed_command(beside: Path, name: str) -> None:
    pytest.importorskip("xllamacpp")
    words, output = COMMANDS[name]
    if not words.startswith("gguf"):  # the file that it needs
        run("gguf MODEL.gguf --method pi --factor 4 --output other.gguf", beside)
    run(words, beside)
    _, *flags = shlex.split(output.splitlines()[0])
    method = re.search(r"--method (\w+)", words)[1]
    model = AutoModelForCausalLM.from_pretrained("checkpoints/tiny-512").float().eval()
    rope_ext.patch(model, method, factor=4)
    ids = torch.randint(4, 2048, (1500,), generator=torch.Generator().manual_seed(0)).tolist()
    want = verifying.log_probs_of(model, [ids])
    got = running.llama_cpp(flags, [ids], 2048)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-3)
