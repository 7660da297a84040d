"""The wheel that users install: both packages, and every command outside of the repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "checkpoints" / "tiny-bytes-512"
COMMANDS = (
    *("calibrate", "card", "compare", "describe", "diagnose", "eval", "export", "gguf", "methods"),
    *("plot", "recommend", "search", "verify"),
)
RUN = "from rope_ext.cli import app; app(prog_name='rope-ext')"

HELP = """
import sys
from rope_ext.cli import app
for name in sys.argv[1:]:
    try:
        app([name, "--help"], prog_name="rope-ext")
    except SystemExit as left:
        assert left.code == 0, name
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the contents of the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder)]
    subprocess.run([*build, str(ROOT)], check=True)
    (wheel,) = folder.glob("rope_ext-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Python with the wheel, in a folder that holds nothing of the repository."""
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", *words]
    return subprocess.run(
        command, env=environment, cwd=site.parent, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_the_wheel_has_both_packages_and_nothing_else(site: Path) -> None:
    names = {path.name for path in site.iterdir() if path.suffix != ".dist-info"}
    assert names == {"rope_ext", "rope_eval"}
    (metadata,) = site.glob("*.dist-info/METADATA")
    links = re.findall(r"\]\(([^)]+)\)", metadata.read_text("utf-8"))  # of README.md
    assert links and all(link.startswith("https://") for link in links)
    found = run(site, "import rope_eval, rope_ext; print(rope_eval.__file__, rope_ext.__file__)")
    assert found.stdout.split() == [
        str(site / name / "__init__.py") for name in ("rope_eval", "rope_ext")
    ], found.stderr


@pytest.mark.slow
def test_what_is_published_is_complete(tmp_path: Path) -> None:
    """The source distribution builds the wheel, and a package index can show the page."""
    pytest.importorskip("build")
    pytest.importorskip("twine")
    build = ["-m", "build", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run([sys.executable, *build], check=True, capture_output=True)
    files = sorted(map(str, tmp_path.iterdir()))
    assert [Path(file).suffix for file in files] == [".whl", ".gz"]
    check = [sys.executable, "-m", "twine", "check", "--strict", *files]
    subprocess.run(check, check=True, capture_output=True)


@pytest.mark.slow
def test_every_command_runs_outside_of_the_repository(site: Path) -> None:
    listed = run(site, RUN, "--help")
    assert listed.returncode == 0, listed.stderr
    assert all(f" {name} " in listed.stdout for name in COMMANDS)
    helped = run(site, HELP, *COMMANDS)
    assert helped.returncode == 0, helped.stderr
    assert helped.stdout.lower().count("usage: ") == len(COMMANDS)
    settings = ["--lengths", "512", "--windows", "2", "--trials", "1", "--depths", "1"]
    words = ["compare", "--model", str(CHECKPOINT), "--methods", "yarn", "--factor", "2"]
    compared = run(site, RUN, *words, *settings, "--output", "out")
    assert compared.returncode == 0, compared.stderr
    assert (site.parent / "out" / "report.html").is_file()


@pytest.mark.slow
def test_calibration_runs_outside_of_the_repository(site: Path) -> None:
    words = ["--model", str(CHECKPOINT), "--length", "640", "--samples", "4", "--prompts", "0"]
    words += ["--text", str(CHECKPOINT / "held_out.jsonl"), "--output", "calibrate"]
    made = run(site, RUN, "calibrate", *words)
    assert made.returncode == 0, made.stderr
    assert (site.parent / "calibrate" / "calibration.json").is_file()
