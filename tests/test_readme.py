"""What the README says is so."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_example_runs(tmp_path, monkeypatch, capsys) -> None:
    example = re.search(r"```python\n(import.*?)```", README, re.DOTALL).group(1)
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    assert "512 -> 2048 tokens by yarn" in capsys.readouterr().out


def test_its_links_are_relative_and_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)[)#]", README)
    assert len(links) > 15
    for link in links:
        assert (ROOT / link).exists(), link


def test_it_stays_short() -> None:
    assert len(README.split()) <= 700
