"""The command line: outputs of a real run, and mistakes told before any weights are loaded."""

from __future__ import annotations

import csv
import json
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from matplotlib import image
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config
from typer.main import get_command
from typer.testing import CliRunner, Result

import rope_ext
from rope_ext.cli import app
from rope_ext.command.arguments import parse_compose
from rope_ext.errors import OptionError
from rope_ext.quoting import command_line
from rope_ext.saving import checkpoints as models
from tests.helpers.checkpoint import save_checkpoint, save_texts
from tests.helpers.models import tiny_llama

PICTURES = ["passkey.png", "perplexity.png", "rates.png"]
FILES = [".rope-ext", "cases.jsonl", "cells.csv", *PICTURES]
FILES += ["report.html", "results.json", "table.md"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def loader_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        models, "load_model", lambda *args, **options: pytest.fail("the model was loaded")
    )


def call(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def arguments(checkpoint: Path, output: Path) -> list[object]:
    return [
        *("compare", "--model", checkpoint, "--methods", "yarn,dynamic_ntk", "--output", output),
        *("--lengths", "128,256", "--windows", 3, "--trials", 2, "--depths", 2),
    ]


def quick(checkpoint: Path, output: Path) -> list[object]:
    """Of one file, for the text that is taken by default is read for a second."""
    return [*arguments(checkpoint, output), "--text", __file__]


def instead(words: list[object], change: list[str]) -> list[object]:
    """The options in ``change`` in place of those of the same name."""
    name = change[0]
    if name in words:
        place = words.index(name)
        words = [*words[:place], *words[place + 2 :]]
    return [*words, *change]


def test_compare_writes_everything(
    checkpoint: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    texts = save_texts(tmp_path / "texts.jsonl")
    words = [*arguments(checkpoint, tmp_path / "out"), "--text", texts]
    result = call(*words, "--option", "yarn.beta_fast=16")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(FILES)
    data = json.loads((tmp_path / "out" / "results.json").read_text())
    assert data["systems"][1]["options"] == {"factor": 4.0, "beta_fast": 16}
    assert [row["task"] for row in data["summary"]] == 6 * ["perplexity"] + 6 * ["passkey"]
    rows = list(csv.DictReader((tmp_path / "out" / "cells.csv").open()))
    assert float(rows[0]["value"]) == data["summary"][0]["value"]
    height, width, _ = image.imread(tmp_path / "out" / "perplexity.png").shape
    assert height > 300 and width > 600
    *_, sentence = data["recommendations"]
    assert " ".join(result.stdout.split()).endswith(sentence)
    assert (result.stdout + result.stderr).count(data["next"][0]) == 1
    # A second run needs a decision; resumed, it measures nothing and says the same.
    assert "--resume" in call(*words).stderr
    request.getfixturevalue("loader_fails")
    again = call(*words, "--option", "yarn.beta_fast=16", "--resume")
    assert again.exit_code == 0 and again.stdout == result.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "error: the rotary embedding of LlamaModel is scaled by its configuration"),
        ("--compose", "256 -> 2048 tokens"),
        ("--compose raise", "64 -> 512 tokens"),
        ("--compose=raise", "64 -> 512 tokens"),
        ("--compose stack", "256 -> 2048 tokens"),
    ],
)
def test_a_scaled_checkpoint_is_stacked_on_or_raised(words: str, said: str, tmp_path: Path) -> None:
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = tiny_llama().config
    config.max_position_embeddings = 256
    config.rope_parameters = {**config.rope_parameters, **scaled}
    config.save_pretrained(tmp_path)
    words = f"describe {tmp_path} --method yarn --factor 8 {words}"
    assert said in " ".join(call(*words.split()).output.split())
    with pytest.raises(OptionError, match=r"--compose no is not valid; it must be stack .* raise"):
        parse_compose("no")


WORKS = {
    "describe M": "not patched",
    "describe M --method YaRN --factor 4 --option yarn.beta_fast=16": "beta_fast=16",
    "describe M --method alibi": "alibi",  # which needs no factor
    "describe M --method rerope --factor 4": "next: rope-ext export",  # vLLM runs it, by our plugin
    "diagnose M --length 512": "at 512 tokens: trained for 128 tokens",
    "diagnose M --length 512 --method yarn --factor 4": "before the patch, 0 at 512 after",
    "recommend M --length 1k": "rope_ext.patch(model, 'self_extend', factor=8",
    "recommend M --length 1k --finetune": "rope_ext.patch(model, 'yarn', factor=8)",
}
REFUSED = {
    "descibe m": "No such command 'descibe'",
    "describe": "'model'; see rope-ext describe --help",
    "describe --method": "requires an argument; see rope-ext describe --help",
    "describe M --method yarn --factor 2 --trained-length 0": "embeddings=0 is not valid",
    "describe m --factr 2": "--factr",
    "describe M --method yran": "did you mean 'yarn'?",
    "describe M --method yarn": "needs factor=...; on the command line: --factor NUMBER",
    "describe M --method longrope --factor 4": "--option longrope.long_factor=VALUE",
    "describe M --method yarn --factor 4 --option beta_fast=no": "--option yarn.beta_fast=",
    "describe M --method yarn --factor 4 --option yarn=8": "--option 'yarn=8' is not valid",
    "describe M --option yarn.beta_fast=16": "--option yarn.beta_fast=16 needs --method",
    "export M --engine vllm --method yarn": "needs factor=...; on the command line: --factor",
    "export M --engine vlm --method yarn --factor 2": "did you mean 'vllm'?",
    "export M --engine tei --method yarn --factor 2": "an NTK of its own",
    "recommend M --length 1k --engine onnx": "torch.onnx.export",
    "verify M --method yarn": "needs factor=...; on the command line: --factor",
    "recommend M --length 128": "within the 128 tokens",
    "recommend 128k --length M": "is not a number of tokens; use a number such as 32768, 32k",
    "recommend M --length 32k,64k": "is not a single length; use 32768, 32k or 1m",
    "search m --length 4k": "Missing option '--output'",
    "eval m --tasks passkey --lengths 1k --trails 2": "--trails",
    "eval m --lengths 1k": "give --tasks some of perplexity, longppl, passkey",
    "compare m": "no length to measure; give --lengths",
    "compare --lengths 1k": "no model is given; give a directory, Hub ID or .gguf file first",
    "compare C --methods yarn,yran": "unknown method 'yran'; did you mean 'yarn'?",
    "compare C --methods yarn,longrope": "longrope needs long_factor=...; on the command line",
    "compare C --option yarn.beta_fst=1": "did you mean 'beta_fast'",
    "compare C --option beta_fast=1": "use METHOD.NAME=VALUE",
    "compare C --factor 1": "set --factor to a number above 1",
    "compare C --lengths 128,2kb": "not a number of tokens",
    "compare C --lengths 128,9000000": "give a longer --text",
    "compare C --dtype int8": "one of 'auto', 'float32', 'bfloat16', 'float16'",
    "compare C --resume --overwrite": "contradict each other",
    "compare C --device abacus": "device 'abacus' cannot be used here",
    "compare C --text missing.txt": "cannot read the text missing.txt",
    "compare C --output empty.txt": "cannot write to empty.txt",
    "compare C --adapter /none": "the directory does not exist, and",
    "compare C --trials 0": "trials=0 is not valid",
    "compare C --chat yes": "no chat template",
    "compare C --text empty.txt": "the text empty.txt is empty",
    "compare C --text hf:nobody/nothing": "cannot read hf:nobody/nothing",
    "eval M --model M --tasks passkey --lengths 1k --method none": "a model is given twice",
    "eval M --tasks perplexity --lengths 128 --method none --stride x": "--stride 'x' is not a num",
    "eval M --tasks needle --lengths 1k --method none --new-tokens x": "--new-tokens 'x' is not a",
    "eval M --tasks needle --lengths 1k --method none --new-tokens 0": "tokens=0 is not valid",
    "eval M --tasks ruler --lengths 1k --method none --ruler-tasks niah": "unknown task 'niah'",
    "compare C --model nowhere/at/all": "there is no folder or file 'nowhere/at/all'",
}
"""M is the checkpoint, C a whole command line of `compare`, to which a wrong option is added."""


@pytest.mark.parametrize("words", WORKS)
def test_advice_reads_no_weights(words: str, checkpoint: Path, loader_fails: None) -> None:
    result = call(*(checkpoint if word == "M" else word for word in words.split()))
    assert result.exit_code == 0 and WORKS[words] in result.output


@pytest.mark.parametrize("words", REFUSED)
def test_mistakes_are_one_line_and_exit_2(
    words: str,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    loader_fails: None,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    given: list[object] = [checkpoint if word == "M" else word for word in words.split()]
    if given[1:2] == ["C"]:
        given = instead(quick(checkpoint, tmp_path / "out"), words.split()[2:])
    result = call(*given)
    assert result.exit_code == 2 and result.stdout == ""
    # Versions of typer write an option in quotes, and an argument in capitals.
    assert REFUSED[words].lower() in result.stderr.lower()
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


DAMAGED = {
    "rope_parameters": {"rope_type": None, "rope_theta": 10000.0},
    "num_hidden_layers": 10**7,
    "id2label": 0,
    "vocab_size": 8,
    "num_key_value_heads": 3,
}
READING = ("describe M", "recommend M --length 1k", "export M --engine vllm", "memory M --length 9")
RUNNING = (
    "verify M --method yarn --factor 2 --engine transformers",
    "eval M --tasks passkey --method none --lengths 128 --trials 1 --output O",
)


@pytest.mark.parametrize("field", DAMAGED)
@pytest.mark.every
def test_a_damaged_configuration_is_one_line_in_every_command(
    field: str, checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "damaged")
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**saved, field: DAMAGED[field]}))
    for words in (*READING, *RUNNING):
        names = {"M": folder, "O": tmp_path / "out"}
        result = call(*(names.get(word, word) for word in words.split()))
        lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        # The sizes of weights do not fit a description, and those of heads no verdict.
        assert result.exit_code in (0, 2) and len(lines) == (result.exit_code == 2), words
        assert isinstance(result.exception, SystemExit | None), words
        if field not in ("vocab_size", "num_key_value_heads"):
            assert result.exit_code == 2, words


def test_a_model_without_the_tokens_of_its_tokenizer_is_one_line(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model")
    tiny_llama(vocab_size=100, max_position_embeddings=128).save_pretrained(folder)
    words = ("--tasks", "passkey", "--method", "none", "--lengths", 128, "--trials", 1)
    result = call("eval", folder, *words, "--output", tmp_path / "out")
    assert result.exit_code == 2 and "only 100 tokens" in result.stderr


def test_the_trained_length_of_a_recipe_reaches_the_next_command(tmp_path: Path) -> None:
    Qwen3Config(max_position_embeddings=40960).save_pretrained(tmp_path)
    told = call("recommend", tmp_path, "--length", "128k", "--engine", "vllm").stderr
    assert "--engine vllm" in told and "--trained-length 32768" in told
    words = ("export", tmp_path, "--engine", "vllm", "--method", "yarn", "--factor", 4)
    for length in (32768, "32k"):
        given = call(*words, "--trained-length", length).stdout
        assert '"original_max_position_embeddings": 32768' in given
    wrong = call(*words, "--trained-length", "32kk")
    assert wrong.exit_code == 2 and "--trained-length '32kk' is not a number" in wrong.stderr
    words = ("recommend", tmp_path, "--length", "32k", "--trained-length", "16k")
    told = call(*words)
    assert told.exit_code == 0 and "16384 -> 32768 tokens" in told.stdout
    assert "--trained-length 16384" in told.stderr


def test_plot_reads_no_weights(checkpoint: Path, tmp_path: Path, loader_fails: None) -> None:
    words = ["distances", checkpoint, "--method", "rerope, dca", "--output", tmp_path / "one.png"]
    result = call("plot", *words, "--length", "1k", "--option", "dual_chunk.chunk=64")
    assert result.exit_code == 0, result.output
    assert "--factor 4 --option dual_chunk.chunk=64 --lengths 128,1024" in result.stderr
    longer = call("plot", *words, "--trained-length", 256)  # over the one before
    assert "--trained-length 256 --lengths 256,1024" in longer.stderr, longer.output
    height, width, _ = image.imread(tmp_path / "one.png").shape
    assert height > 500 and width > 1000
    assert call("plot", *words).exit_code == 0  # over the one before
    for change, message in (
        (["--method", "yarn"], "distances cannot show yarn; plot spectrum, angles"),
        (["--output", tmp_path / "one.pdf"], "give a .png file"),
        (["--output", tmp_path / "theirs.png"], "rope-ext plot did not write it"),
    ):
        (tmp_path / "theirs.png").write_text("a picture of somebody else")
        wrong = call("plot", *words, *change)
        assert wrong.exit_code == 2 and message in wrong.stderr
        assert wrong.stderr.count("\n") == 1


def test_a_model_saved_under_a_patch(checkpoint: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    rope_ext.patch(model, "rerope", factor=4, window=20).save_pretrained(tmp_path / "saved")
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path / "saved")
    result = call("recommend", tmp_path / "saved", "--length", "1k")
    assert result.exit_code == 0 and "128 -> 1024 tokens" in result.stdout, result.stderr
    result = call("describe", tmp_path / "saved", "--method", "yarn", "--factor", 4)
    assert result.exit_code == 0 and "yarn(factor=4" in result.stdout
    result = call("describe", tmp_path / "saved")
    assert "only vllm and sglang with rope_ext installed can run it" in result.stdout
    assert "--engine vllm" in result.stderr
    assert call("export", tmp_path / "saved", "--engine", "vllm").exit_code == 0
    within = call("diagnose", tmp_path / "saved", "--length", 256)  # which the patch reaches
    assert within.exit_code == 0 and "recommend" not in within.stderr
    assert "recommend" in call("diagnose", tmp_path / "saved", "--length", "1k").stderr

    def measured(model: Path, output: Path) -> list[dict]:
        words = instead(quick(model, output), ["--methods", "rerope"])
        result = call(*words, "--option", "window=20", "--windows", 1)
        told = "saved with rope_ext.patch(model, 'rerope', factor=4, window=20)" in result.stderr
        assert result.exit_code == 0 and told is (model != checkpoint), result.stderr
        _, *lines = (output / "cases.jsonl").read_text().splitlines()
        return [json.loads(line)["value"] for line in lines]

    assert measured(tmp_path / "saved", tmp_path / "a") == measured(checkpoint, tmp_path / "b")
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    rope_ext.patch(plain, "yarn", factor=4).save_pretrained(tmp_path / "plain")
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path / "plain")
    words = instead(quick(tmp_path / "plain", tmp_path / "c"), ["--methods", "unpatched"])
    result = call(*words, "--windows", 1)
    assert result.exit_code == 0 and "and unpatched keeps that" in result.stderr, result.stderr


def test_the_version_is_shown_as_a_command_and_as_a_module(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = f"rope-ext {rope_ext.__version__}\n"
    assert call("--version").stdout == shown
    monkeypatch.setattr(sys, "argv", ["rope_ext", "--version"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module("rope_ext", run_name="__main__")
    assert left.value.code == 0 and capsys.readouterr().out == shown


HELP = """
import sys
from rope_ext.cli import app
try:
    app(sys.argv[1:])
except SystemExit as left:
    print(left.code, sorted({"torch", "transformers"} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("recommend ./missing --length 32k", "no folder or file './missing'"),
        ("describe /missing/model", "no folder or file '/missing/model'"),
        ("compare ./missing --methods yarn --lengths 4k", "no folder or file './missing'"),
        ("recommend M --length 32kk", "--length '32kk' is not a number of tokens"),
        ("compare M --methods yarn --lengths 4k,32kk", "--lengths '32kk' is not a number"),
        ("memory M --length 32k --chunk 4kk", "--chunk '4kk' is not a number"),
    ],
)
def test_a_mistake_is_refused_before_torch_is_imported(words: str, said: str) -> None:
    """As fast as a misspelled option: importing torch and transformers takes seconds."""
    if words.startswith("compare") and metadata.version("transformers").startswith("5.17."):
        pytest.skip("its tokenizers import all of it")
    command = [sys.executable, "-c", HELP, *words.split()]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    assert made.stdout.splitlines()[-1] == "2 []"
    assert said in " ".join(made.stderr.split())


def test_a_command_of_the_repository_says_so_where_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed wheel has no recipes; in a clone, the line runs as it is."""
    words = ["python", "recipes/merge.py", "adapter", "--output", "merged"]
    here = command_line(words)
    assert shlex.split(here, comments=True) == words and "#" not in here
    monkeypatch.chdir(tmp_path)
    away = command_line(words)
    assert shlex.split(away, comments=True) == words and "clone of the repository" in away


def test_serve_refuses_what_it_cannot_serve_before_loading(checkpoint: Path) -> None:
    pytest.importorskip("fastapi")
    with socket.create_server(("localhost", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words, reason in (
            ([str(checkpoint), "--method", "yarm", "--factor", "4"], "yarn"),
            (
                [str(checkpoint), "--method", "yarn", "--factor", "4", "--port", port],
                "another --port",
            ),
            ([str(checkpoint), "--port", "70000"], "--port"),
            ([str(checkpoint), "--host", "no.such.host.invalid"], "--host"),
            ([str(checkpoint), "--dtype", "float7"], "--dtype"),
            ([str(checkpoint), "--device", "foo"], "--device"),
        ):
            result = call("serve", *words)
            assert result.exit_code == 2 and reason in result.stderr


def test_serve_names_a_folder_without_weights_and_tokenizer(
    checkpoint: Path, tmp_path: Path
) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    shutil.copy(checkpoint / "config.json", tmp_path)
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    result = call("serve", str(tmp_path), "--device", "cpu", "--port", port)
    assert result.exit_code == 2 and "tokenizer" in result.stderr


def test_the_list_of_commands_fits_80_columns_in_one_style() -> None:
    """Each summary is one whole sentence that begins with a verb, none is cut off."""
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}, terminal_width=80).stdout
    _, _, listed = shown.partition("Commands:")
    rows = [line.split(maxsplit=1) for line in listed.splitlines() if line.strip()]
    assert [name for name, _ in rows] == list(get_command(app).commands)
    for name, summary in rows:
        assert re.fullmatch(r"[A-Z][^.;]*\.", summary), (name, summary)


@pytest.mark.parametrize("name", [None, *sorted(get_command(app).commands)])
def test_help_imports_no_torch(name: str | None) -> None:
    """So it shows at once: torch and transformers take seconds to import."""
    words = [sys.executable, "-c", HELP, *filter(None, [name]), "--help"]
    made = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "--help" in made.stdout and made.stdout.splitlines()[-1] == "0 []"


@pytest.mark.parametrize(
    ("words", "other"),
    [
        ("describe M --method yarn", "describe --model M --methods yarn"),
        ("verify M --method yarn", "verify --methods yarn --model=M"),
        ("plot angles M --method pi --output o", "plot angles --model M --methods pi --output o"),
        ("gguf M F --output o", "gguf --model M F --output o"),
        (
            "calibrate M --method pi --length 1 --output o",
            "calibrate --model M --methods pi --length 1 --output o",
        ),
    ],
)
def test_a_model_and_a_method_are_given_in_either_way(words: str, other: str) -> None:
    def read(line: str) -> dict[str, object]:
        name, *rest = line.split()
        group = get_command(app)
        with group.make_context("rope-ext", [name, *rest]) as context:
            return group.get_command(context, name).make_context(name, rest).params

    assert read(words) == read(other)


@pytest.mark.usefixtures("loader_fails")
def test_evaluations_take_the_model_first(checkpoint: Path, tmp_path: Path) -> None:
    words = ("--method", "yran", "--lengths", "64", "--output", tmp_path / "out")
    evaluated = (("eval", checkpoint, "--tasks", "passkey"), ("eval", "passkey", checkpoint))
    for first in (("compare", checkpoint), *evaluated):
        result = call(*first, *words)
        assert result.stderr.startswith("error: unknown method 'yran'"), result.output


def called(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


HOSTILE = "a [red] $x$ | <img src=x> ![x](http:x) \x1b[31m\nrm -rf c\u202ed 'e'"
"""What a name must not do: end a command, color a terminal, break markup, load an image."""


def test_the_name_of_a_folder_is_no_command(checkpoint: Path, tmp_path: Path) -> None:
    """Names have line breaks, and whatever is printed may be pasted into a shell."""
    model = tmp_path / HOSTILE
    shutil.copytree(checkpoint, model)
    words = [str(model), "--method", "yarn", "--factor", "4"]
    for engine in ("vllm", "sglang", "llama.cpp"):
        done = called("export", *words, "--engine", engine)
        assert done.exit_code == 0 and "\x1b" not in done.output, done.output
        _, *notes = done.stdout.splitlines()
        assert all(note.startswith("# ") for note in notes), done.stdout
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("next: ")
        shown = f"printf '%s\\0' {done.stderr.removeprefix('next: ')}"
        given = subprocess.run(["bash", "-c", shown], capture_output=True, check=True).stdout
        assert str(model).encode() in given.split(b"\0")
    for command, more in (("describe", ()), ("diagnose", ("--length", "2k"))):
        done = called(command, *words, *more)
        assert done.exit_code == 0 and "\x1b" not in done.output
    done = called("describe", str(model / "missing"))
    assert done.exit_code == 2 and done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1 and "\x1b" not in done.stderr


def test_a_card_has_no_html_of_a_name_or_a_report(checkpoint: Path, tmp_path: Path) -> None:
    folder, report = tmp_path / HOSTILE, tmp_path / "report"
    model = rope_ext.patch(AutoModelForCausalLM.from_pretrained(checkpoint), "yarn", factor=4)
    model.save_pretrained(folder)
    report.mkdir()
    table = "| a | b |\n| --- | --- |\n| <script>x</script> | ![x](http://x) |\n"
    (report / "table.md").write_text(table, encoding="utf-8")
    done = called("card", str(folder), "--report", str(report))
    assert done.exit_code == 0, done.output
    card = (folder / "README.md").read_text(encoding="utf-8")
    prose = "".join(card.split("```")[::2])  # without blocks of code
    assert "<script" not in prose and "<img" not in prose and "](" not in prose
    assert "| a | b |\n| --- | --- |" in prose
