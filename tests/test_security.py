"""What SECURITY.md promises of folders and files from elsewhere, and no other test covers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rope_ext
from rope_ext.advice.describe import write_card
from rope_ext.errors import AdapterError
from rope_ext.import_path import isolated
from tests.helpers.checkpoint import save_checkpoint
from tests.helpers.models import tiny_llama
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
def test_lm_eval_in_a_model_folder_executes_nothing_of_it(hostile: Path, executed: Path) -> None:
    pytest.importorskip("lm_eval")
    done = started(hostile, "-m", "rope_eval.lm_eval", "ls", "tasks")
    assert done.returncode == 0, done.stderr
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
