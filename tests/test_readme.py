"""What the README says is so."""

from __future__ import annotations

import re
from pathlib import Path

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


def test_its_pictures_and_links_are_there() -> None:
    """They are absolute: relative ones break on the page of a package index."""
    assert re.findall(r"\]\((?!http|#)([^)]+)\)", README) == []
    links = re.findall(r"rope-ext/rope-ext/(?:blob/)?main/([^)#]+)[)#]", README)
    assert len(links) > 30
    for link in links:
        assert (ROOT / link).exists(), link
