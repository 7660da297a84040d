"""The command that measures every ratio of speed: its tables, what it says of the machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import rope_ext
from lab.benchmarks import measuring, speed
from lab.benchmarks.measuring import Measured, compared
from tests.helpers.models import tiny_llama

ROOT = Path(__file__).parents[2]


def test_a_ratio_is_the_median_of_those_of_the_same_round() -> None:
    """A machine that slows down alters no ratio, and the medians of seconds are not divided."""
    seconds = {"native": [1.0, 10.0, 100.0, 1000.0, 2.0], "other": [2.0, 30.0, 200.0, 1500.0, 4.0]}
    found = compared(seconds)
    assert found["other"] == Measured(30.0, 2.0, 2.0, 2.0)  # of 2, 3, 2, 1.5 and 2
    assert found["native"] == Measured(10.0, 1.0, 1.0, 1.0)
    spread = compared({"native": [1.0] * 5, "other": [1.0, 2.0, 3.0, 4.0, 5.0]})["other"]
    assert spread == Measured(3.0, 3.0, 2.0, 4.0)
    assert str(spread) == "3.000 (2.000 to 4.000)"
    assert compared({"native": [1.0], "other": [2.0]})["other"] == Measured(2.0, 2.0, 2.0, 2.0)


def test_models_that_are_compared_share_their_weights_and_nothing_else() -> None:
    """Eight copies of a model of 8B parameters would be 128 GB."""
    model = tiny_llama()
    before = model.model.rotary_emb.inv_freq.clone()
    other = rope_ext.patch(measuring.of_same_weights(model), "ntk", factor=4)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert mine is its
    assert model.model.rotary_emb.inv_freq.equal(before)
    assert not other.model.rotary_emb.inv_freq.equal(before)


def test_parts_that_measure_nothing_are_refused(tmp_path: Path) -> None:
    words = ["--small", "--device", "cpu", "--parts", "decoding", "--method", "yarn"]
    with pytest.raises(SystemExit) as ended:
        speed.main([*words, "--output", str(tmp_path)])
    assert ended.value.code == 2


@pytest.mark.slow
def test_one_command_measures_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Every kind and attention by itself, with the machine's name, as JSON and in Markdown."""
    monkeypatch.chdir(ROOT)
    speed.main(["--small", "--device", "cpu", "--output", str(tmp_path)])
    data = json.loads((tmp_path / "speed.json").read_text())
    assert set(data["kinds"].values()) == set(speed.KINDS)
    page = (tmp_path / "speed.md").read_text()
    known = measuring.machine()
    dtypes = 1 + known["bfloat16"]
    for text in (page, capsys.readouterr().out.replace("\n", " ")):
        assert known["processor"] in text and torch.__version__ in text
    tables = re.findall(r"\*\*(.*?)\*\*\n\n((?:\|.*\n)+)", page)
    assert len(tables) == dtypes * (len(speed.KINDS) + 2)
    for title, table in tables:
        head, rule, *rows = table.splitlines()
        cells = [row.split("|")[2:-1] for row in rows]
        assert rule.count("---") == head.count("|") - 1 and rows, title
        for cell in (cell for row in cells for cell in row):
            ratio, low, high = map(float, re.findall(r"[0-9.]+", cell))
            assert 0 < low <= ratio <= high, title
    assert page.count("| `rerope` |") == 3 * dtypes  # in two models, and alone
