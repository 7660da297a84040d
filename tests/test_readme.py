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


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_the_first_example_runs(tmp_path, monkeypatch, capsys) -> None:
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    assert "512 -> 2048 tokens by yarn" in capsys.readouterr().out


def test_the_diagnosis_is_what_the_command_prints() -> None:
    advice = page("advice.md")
    words = re.search(r"\$ rope-ext (diagnose .*)\n", advice).group(1)
    result = CliRunner().invoke(app, words.replace("checkpoints", f"{ROOT}/checkpoints").split())
    assert f"{words}\n{result.stdout}```" in advice


@pytest.mark.parametrize("method", rope_ext.methods(), ids=lambda method: method.name)
def test_every_method_is_in_the_table_as_the_code_has_it(method: rope_ext.MethodInfo) -> None:
    assert f"| `{method.name}` | {method.use} | {method.paper} |" in README


def test_the_count_of_families_is_that_of_the_generated_page() -> None:
    found = re.search(r"(\d+) supported \(([\d.]+)%\)", page("FAMILIES.md"))
    for text in (README, page("using.md")):
        assert "{} ({} %)".format(*found.groups()) in text


def test_its_pictures_and_links_are_there() -> None:
    for link in re.findall(r"\]\(((?!http)[^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def test_the_share_of_position_methods_is_that_of_the_generated_page() -> None:
    found = re.search(r"Position methods: ([\d.]+)% by default, ([\d.]+)%", page("FAMILIES.md"))
    for text in (README, page("using.md")):
        assert all(f"({share} %" in text for share in found.groups())


def test_its_table_is_part_of_that_of_the_demonstration() -> None:
    rows = re.findall(r"^\| .*<br>.*\|$", README, re.MULTILINE)
    assert len(rows) > 4
    assert set(rows) <= set(page("demonstration.md").splitlines())


def test_it_is_one_screen_that_sells() -> None:
    assert len(README.splitlines()) <= 150
