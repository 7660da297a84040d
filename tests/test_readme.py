"""What the README says is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rope_ext
from rope_ext.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_example_runs(tmp_path, monkeypatch, capsys) -> None:
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    assert "512 -> 2048 tokens by yarn" in capsys.readouterr().out


def test_the_diagnosis_is_what_the_command_prints() -> None:
    words = re.search(r"\$ rope-ext (diagnose .*)\n", README).group(1)
    result = CliRunner().invoke(app, words.replace("checkpoints", f"{ROOT}/checkpoints").split())
    assert f"{words}\n{result.stdout}```" in README


@pytest.mark.parametrize("method", rope_ext.methods(), ids=lambda method: method.name)
def test_every_method_is_in_the_table_as_the_code_has_it(method: rope_ext.MethodInfo) -> None:
    assert f"| `{method.name}` | {method.use} | {method.paper} |" in README


def test_the_count_of_families_is_that_of_the_generated_page() -> None:
    page = (ROOT / "docs" / "FAMILIES.md").read_text(encoding="utf-8")
    supported, share = re.search(r"(\d+) supported \(([\d.]+)%\)", page).groups()
    assert f"{supported} ({share} %)" in README


def test_its_pictures_and_links_are_there() -> None:
    for link in re.findall(r"\]\(((?!http)[^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def test_the_share_of_position_methods_is_that_of_the_generated_page() -> None:
    page = (ROOT / "docs" / "FAMILIES.md").read_text(encoding="utf-8")
    for share in re.search(r"Position methods: ([\d.]+)% by default, ([\d.]+)%", page).groups():
        assert f"({share} %" in README
