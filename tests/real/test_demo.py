"""`make demo` on its pretrained model, with a shorter prompt and a text that is not downloaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import demo
from lab.evidence.questions import Manual
from tests.helpers import pretrained

TEXT = "The city has a harbor, an old market and two bridges over the river. " * 400


@pytest.mark.slow
def test_the_demo_shows_what_each_method_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretrained.smollm2()  # or the test is skipped
    monkeypatch.setattr(Manual, "read", lambda manual, cache: TEXT)
    demo.main(["--length", "2048", "--methods", "yarn", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.endswith("found")]
    assert [row.split()[0] for row in rows] == ["unpatched", "yarn"]
    assert not rows[0].endswith("not found")  # within the trained length
    assert (tmp_path / "demo.png").stat().st_size > 1000
