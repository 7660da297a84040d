"""What SECURITY.md promises of folders and files from elsewhere, and no other test covers."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import peft
import pytest
import torch
from typer.testing import CliRunner

import rope_ext
from checkpoints import pretrained
from lab.evidence.questions import MANUALS
from recipes import django_docs, finetune
from rope_eval.plots import style
from rope_ext.advice.describe import write_card
from rope_ext.cli import app
from rope_ext.errors import AdapterError, LoadError, MeasureError, OptionError, RopeExtError
from rope_ext.import_path import isolated
from rope_ext.saving.checkpoints import load_config, load_tokenizer
from tests.helpers.checkpoint import save_checkpoint, save_texts
from tests.helpers.models import tiny_llama
from tests.helpers.recipe_runs import arguments
from tests.helpers.sources import ROOT

PLANTED = (
    *(
        "accelerate",
        "ast",
        "ctypes",
        "datasets",
        "filelock",
        "gguf",
        "jinja2",
        "json",
        "matplotlib",
    ),
    *("mlx", "mlx_lm", "numpy", "peft", "pip", "rich", "rope_eval", "scipy", "struct", "tempfile"),
    *("tokenizers", "torch", "transformers", "typer", "typing", "xllamacpp"),
)
"""Names of Python files in the model folder: of all that the commands import, and their children.

Not those that Python imports for ``-m`` before it looks for the package.
"""
COMMAND = "import sys; from rope_ext.cli import app; sys.exit(app(prog_name='rope-ext'))"
PACKAGES = os.pathsep.join([str(ROOT), str(ROOT / "eval")])


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with Python files that leave a file beside it when they are imported."""
    folder = save_checkpoint(tmp_path_factory.mktemp("hostile") / "model")
    for name in PLANTED:
        (folder / f"{name}.py").write_text(
            f"open({str(folder.parent / 'executed')!r}, 'a').write({name!r}); raise SystemExit(9)"
        )
    return folder


@pytest.fixture
def executed(hostile: Path) -> Iterator[Path]:
    """The file that exists once a planted file was executed."""
    found = hostile.parent / "executed"
    found.unlink(missing_ok=True)
    yield found
    found.unlink(missing_ok=True)


def started(hostile: Path, *words: str, path: str = PACKAGES) -> subprocess.CompletedProcess[str]:
    """Run Python in the model folder."""
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *words], cwd=hostile, env=environment, capture_output=True, text=True
    )


@pytest.fixture
def script(tmp_path: Path) -> str:
    """The command `rope-ext`, as pip installs it."""
    path = tmp_path / "rope-ext"
    path.write_text(COMMAND)
    return str(path)


def test_the_command_in_a_model_folder_executes_nothing_of_it(
    script: str, hostile: Path, executed: Path
) -> None:
    done = started(hostile, script, "describe", ".", path=f"{PACKAGES}{os.pathsep}")
    assert done.returncode == 0, done.stderr
    assert "trained for 128 tokens" in done.stdout and not executed.exists()


def test_the_module_in_a_model_folder_executes_nothing_of_it(hostile: Path, executed: Path) -> None:
    done = started(hostile, "-m", "rope_ext", "--help")
    assert done.returncode == 0, done.stderr
    assert "describe" in done.stdout and not executed.exists()


@pytest.mark.slow
@pytest.mark.parametrize("start", ["command", "module"])
@pytest.mark.parametrize("engine", ["llama.cpp", "mlx", "transformers"])
def test_verify_in_a_model_folder_executes_nothing_of_it(
    start: str, engine: str, script: str, hostile: Path, executed: Path
) -> None:
    pytest.importorskip({"llama.cpp": "xllamacpp", "mlx": "mlx.core"}.get(engine, "torch"))
    words = ["-m", "rope_ext"] if start == "module" else [script]
    words += ["verify", ".", "--method", "yarn", "--factor", "2", "--engine", engine]
    done = started(hostile, *words)
    assert done.returncode == 0, done.stderr
    assert "as patched" in done.stdout and not executed.exists()


@pytest.mark.slow
def test_lm_eval_in_a_model_folder_executes_nothing_of_it(
    hostile: Path, executed: Path, tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval")
    folder = tmp_path / "model"
    # `python -m rope_eval...` itself would run a rope_eval.py of this folder.
    shutil.copytree(hostile, folder, ignore=shutil.ignore_patterns("rope_eval.py"))
    done = started(folder, "-m", "rope_eval.lm_eval", "ls", "tasks")
    assert done.returncode == 0, done.stderr
    assert not executed.exists()


def test_a_plot_in_a_model_folder_does_not_use_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On import, matplotlib reads those of the current folder; it runs LaTeX if they say so."""
    settings = tmp_path / "matplotlibrc"
    settings.write_text("text.usetex: True")
    folder = save_checkpoint(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(style, "IN_COMMAND", True)
    words = ["plot", "spectrum", str(folder), "--method", "yarn", "--factor", "2"]
    with matplotlib.rc_context(fname=settings):
        done = CliRunner().invoke(app, [*words, "--output", "one.png"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "one.png").exists()


def test_pip_in_a_model_folder_is_that_of_the_environment(
    hostile: Path, executed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hostile)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("ROPE_EXT_PRETRAINED", str(tmp_path / "pretrained"))
    with pytest.raises(pretrained.UnavailableError, match="cannot download"):
        pretrained.smollm2()
    assert not executed.exists()


@pytest.mark.parametrize("path", ["", PACKAGES, f"{os.pathsep}{PACKAGES}"])
def test_a_child_process_imports_nothing_from_the_current_folder(
    path: str, hostile: Path, executed: Path
) -> None:
    _, *words = isolated("import json, struct, sys; print(*sys.argv[1:])", "a", "b")
    done = started(hostile, *words, path=path)
    assert (done.returncode, done.stdout) == (0, "a b\n"), done.stderr
    assert not executed.exists()


def test_a_child_process_finds_packages_where_it_is_told_to(hostile: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.py").write_text("print('found')")
    _, *words = isolated("import elsewhere", folder=str(tmp_path))
    assert started(hostile, *words).stdout == "found\n"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no safe path")
def test_children_that_other_libraries_start_import_nothing_from_the_current_folder(
    tmp_path: Path, hostile: Path, executed: Path
) -> None:
    """As torch lists packages with pip, and multiprocessing starts its helpers."""
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import json, struct'])"
    script = tmp_path / "rope-ext"
    script.write_text(f"import rope_ext; {child}")
    done = started(hostile, str(script), path=f"{PACKAGES}{os.pathsep}")
    assert done.returncode == 0 and not executed.exists(), done.stderr


@pytest.mark.parametrize("words", [["-c", "import rope_ext, mine"], ["mine.py"]])
def test_other_programs_keep_their_import_path(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import rope_ext, yours")
    (tmp_path / "yours.py").write_text("print('imported')")
    done = started(tmp_path, *words)
    assert done.stdout == "imported\n", done.stderr


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A file of the user outside of the folder from elsewhere."""
    path = tmp_path / "private.txt"
    path.write_text("keep me")
    return path


def test_what_is_written_into_a_model_folder_does_not_follow_links(
    tmp_path: Path, private: Path
) -> None:
    """A patch beside an adapter, a model card, and settings for an engine."""
    folder = tmp_path / "model"
    model = rope_ext.patch(tiny_llama(), "yarn", factor=4)
    model.save_pretrained(folder)
    (folder / "rope_ext.json").symlink_to(private)
    with pytest.raises(AdapterError, match="symbolic link"):
        rope_ext.save_sidecar(model, folder)
    (folder / "README.md").symlink_to(tmp_path / "absent.md")
    with pytest.raises(OSError, match="symbolic link"):
        write_card(folder)
    (folder / "config.json").rename(tmp_path / "config.json")
    before = (tmp_path / "config.json").read_bytes()
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(OSError, match="symbolic link"):
        rope_ext.export(model, "transformers").write(folder)
    assert private.read_text() == "keep me" and not (tmp_path / "absent.md").exists()
    assert (tmp_path / "config.json").read_bytes() == before


@pytest.mark.parametrize("name", ["rope_ext.json", "adapter_config.json"])
def test_a_file_of_settings_that_is_too_large_is_not_read(name: str, tmp_path: Path) -> None:
    """A file without content of its own takes no space in an archive."""
    base = save_checkpoint(tmp_path / "base")
    model = rope_ext.patch(tiny_llama(), "yarn", factor=4)
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    tuned.peft_config["default"].base_model_name_or_path = str(base)
    tuned.save_pretrained(tmp_path / "adapter")
    rope_ext.save_sidecar(model, tmp_path / "adapter")
    with (tmp_path / "adapter" / name).open("r+b") as file:
        file.truncate(2**40)
    for read in (rope_ext.describe, rope_ext.from_pretrained):
        with pytest.raises(RopeExtError, match="more than 16 MB"):
            read(str(tmp_path / "adapter"))


def test_a_run_does_not_write_through_links_in_its_directory(tmp_path: Path, private: Path) -> None:
    """A directory from elsewhere in which a run is resumed or started."""
    for name in ("evaluation.json", "checkpoint-5/trainer_state.json", "checkpoint-6"):
        output = tmp_path / name.replace("/", "-")
        link = output / name
        link.parent.mkdir(parents=True)
        link.symlink_to(tmp_path if name == "checkpoint-6" else private)
        words = arguments(save_checkpoint(tmp_path / "model"), tmp_path / "texts.jsonl", output)
        save_texts(tmp_path / "texts.jsonl")
        with pytest.raises(OptionError, match="symbolic link"):
            finetune.main(words)
    assert private.read_text() == "keep me"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="it has no pipes")
def test_pipes_in_folders_from_elsewhere_are_not_read(tmp_path: Path) -> None:
    """Reading one waits for ever; an archive can contain them."""
    results = tmp_path / "results"
    (results / ".rope-ext").mkdir(parents=True)
    os.mkfifo(results / ".rope-ext" / "files.json")
    model = save_checkpoint(tmp_path / "model")
    words = ["eval", model, "--tasks", "passkey", "--method", "none", "--lengths", 128]
    words += ["--trials", 1, "--output", results, "--overwrite"]
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == 2 and "not a regular file" in done.stderr
    run = tmp_path / "run" / "checkpoint-5"
    run.mkdir(parents=True)
    os.mkfifo(run / "trainer_state.json")
    with pytest.raises(OptionError, match="not a regular file"):
        finetune.main(arguments(model, save_texts(tmp_path / "texts.jsonl"), run.parent))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tokenizer_config.json", {"model_max_length": "long"}),
        ("generation_config.json", {"eos_token_id": "end"}),
    ],
)
def test_damaged_files_beside_a_model_are_one_line(name: str, values: dict, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model")
    file = folder / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    words = ["eval", folder, "--tasks", "passkey", "--method", "none", "--lengths", 128]
    done = CliRunner().invoke(
        app, list(map(str, [*words, "--trials", 1, "--output", tmp_path / "out"]))
    )
    assert done.exit_code == 2 and done.stderr.count("error: ") == 1, done.output
    assert isinstance(done.exception, SystemExit)


def test_a_card_has_no_links_whose_address_is_elsewhere(tmp_path: Path) -> None:
    rope_ext.patch(tiny_llama(), "yarn", factor=4).save_pretrained(tmp_path / "model")
    (tmp_path / "table.md").write_text("# Report\n![a][1] [b](http://c)\n\n[1]: http://d/e.png\n")
    card = write_card(tmp_path / "model", report=tmp_path).read_text()
    assert "[1]:" not in card and "](" not in card.partition("## Evaluation")[2]


@pytest.fixture
def releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which pip takes packages instead of the network; a release leaves a file."""
    folder = tmp_path / "releases"
    folder.mkdir()
    setup = f"open({str(tmp_path / 'executed')!r}, 'w').close(); raise SystemExit(9)".encode()
    for package in ("django-5.2.8", "flask-3.1.2"):
        with tarfile.open(folder / f"{package}.tar.gz", "w:gz") as files:
            entry = tarfile.TarInfo(f"{package}/setup.py")
            entry.size = len(setup)
            files.addfile(entry, io.BytesIO(setup))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_a_release_with_another_sum_is_not_executed(
    releases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pip executes a source release to read its metadata."""
    monkeypatch.setattr(django_docs, "FOLDER", tmp_path / "django")
    with pytest.raises(SystemExit, match="cannot download django"):
        django_docs.archive()
    flask = next(manual for manual in MANUALS if manual.package == "flask")
    with pytest.raises(MeasureError, match="cannot download flask"):
        flask.read(tmp_path / "manuals")
    assert not (tmp_path / "executed").exists()


def test_a_cached_checkpoint_that_was_changed_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROPE_EXT_PRETRAINED", str(tmp_path))
    for name, find in (
        ("SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf", pretrained.smollm2),
        ("gemma-3-270m/gemma-3-270m-Q4_K_M.gguf", pretrained.gemma3),
    ):
        file = tmp_path / name
        file.parent.mkdir()
        file.write_bytes(b"GGUF of another")
        with pytest.raises(pretrained.UnavailableError, match="SHA-256"):
            find()
        assert file.exists()


@pytest.fixture
def leaves(tmp_path: Path) -> str:
    """Python code that leaves the file ``executed``."""
    return f"open({str(tmp_path / 'executed')!r}, 'w').close()"


def test_code_that_a_configuration_names_is_not_executed(tmp_path: Path, leaves: str) -> None:
    folder = save_checkpoint(tmp_path / "model")
    (folder / "theirs.py").write_text(leaves)
    saved = json.loads((folder / "config.json").read_text())
    named = {"AutoConfig": "theirs.A", "AutoModelForCausalLM": "theirs.B"}
    for model_type in ("llama", "theirs"):
        values = {**saved, "auto_map": named, "model_type": model_type}
        (folder / "config.json").write_text(json.dumps(values))
        for load in (rope_ext.describe, rope_ext.from_pretrained, load_config, load_tokenizer):
            with contextlib.suppress(RopeExtError):  # the unknown type
                load(str(folder))
    assert not (tmp_path / "executed").exists()


class Pickled:
    """Executes code when it is unpickled."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> Any:
        return exec, (self.code,)


def test_pickles_in_place_of_weights_are_not_executed(tmp_path: Path, leaves: str) -> None:
    folder = save_checkpoint(tmp_path / "model")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    torch.save({"model.embed_tokens.weight": Pickled(leaves)}, folder / "pytorch_model.bin")
    with pytest.raises(LoadError):
        rope_ext.from_pretrained(folder)
    adapter = tmp_path / "adapter"
    model = rope_ext.patch(tiny_llama(), "t5")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(adapter)
    rope_ext.save_sidecar(model, adapter)
    (adapter / "adapter_model.safetensors").unlink()
    torch.save({"a": Pickled(leaves)}, adapter / "adapter_model.bin")
    with pytest.raises(RopeExtError):
        rope_ext.load_adapter(rope_ext.patch(tiny_llama(), "t5"), adapter)
    assert not (tmp_path / "executed").exists()
