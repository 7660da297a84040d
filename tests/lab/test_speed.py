"""The command that measures every ratio of speed: its tables, what it says of the machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import rope_ext
from lab.benchmarks import measuring, speed, windows
from lab.benchmarks.measuring import Measured, compared
from rope_ext.methods import build_method
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


def test_what_is_compared_takes_turns() -> None:
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) for name in "abc"}
    assert {len(values) for values in measuring.in_turns(runs, 2).values()} == {2}
    assert "".join(order) == "abc" * 3  # the first to warm up


def test_models_that_are_compared_share_their_weights_and_nothing_else() -> None:
    """Eight copies of a model of 8B parameters would be 128 GB."""
    model = tiny_llama()
    before = model.model.rotary_emb.inv_freq.clone()
    other = rope_ext.patch(measuring.of_same_weights(model), "ntk", factor=4)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert mine is its
    assert model.model.rotary_emb.inv_freq.equal(before)
    assert not other.model.rotary_emb.inv_freq.equal(before)


@pytest.mark.parametrize(
    ("known", "units"),
    [
        ({"cpu_name": "X", "avx512_bf16": True, "amx_bf16": False}, True),
        ({"cpu_name": "X", "amx_bf16": True}, True),
        ({"cpu_name": "X", "arm_bf16": True}, True),
        ({"cpu_name": "X", "avx512_bf16": False, "avx512_f": True, "amx_fp16": True}, False),
        ({}, False),
    ],
)
def test_bfloat16_is_measured_where_the_processor_has_units_for_it(
    known: dict, units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    found = measuring.machine()
    assert found["bfloat16"] is units and found["processor"]
    monkeypatch.setattr(speed.models, "load_model", lambda name, dtype, *rest: stop(dtype))
    asked: list[str] = []

    def stop(dtype: str) -> None:
        asked.append(dtype)
        raise KeyboardInterrupt

    words = SimpleNamespace(**DEFAULTS)
    with pytest.raises(KeyboardInterrupt):
        list(speed.evaluate(words))
    assert asked == ["float32"]
    monkeypatch.setattr(speed, "measure_attention", lambda *given: asked.append(given[2]) or [{}])
    *_, data = speed.evaluate(SimpleNamespace(**DEFAULTS | {"parts": "attention"}))
    assert asked[1:] == ([torch.float32, torch.bfloat16] if units else [torch.float32])
    assert list(data["attention"]) == ["float32", "bfloat16"][: 1 + units]


DEFAULTS = {
    "model": None,
    "method": None,
    "option": None,
    "factor": 4.0,
    "adapter": None,
    "compose": False,
    "trained_length": None,
    "batch_size": "1",
    "lengths": None,
    "attention_lengths": None,
    "window": 1024,
    "rounds": 3,
    "parts": "models,attention",
    "small": False,
    "dtype": "auto",
    "device": "cpu",
    "attn": None,
    "seed": 0,
}


def test_every_method_is_of_a_kind() -> None:
    kinds = {name: speed.kind(build_method(name, factor=4)) for name in EXAMPLES}
    assert kinds == EXAMPLES


EXAMPLES = {
    "yarn": "frequency",
    "dynamic_ntk": "dynamic",
    "rerope": "position",
    "string": "position",
    "alibi": "encoding",
}


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
    assert "eager, 8 key heads" in page and "compiled, 2 key heads" in page
    assert "with backward, 128" in page and "decode at 128, 2 key heads" in page


def test_a_window_in_most_layers_saves_memory(capsys: pytest.CaptureFixture[str]) -> None:
    windows.main(["--small", "--rounds", "1"])
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines()]
    mib = {row[1].strip(): float(row[2]) for row in rows if len(row) == 8}
    assert mib["nope, every 4th layer"] == mib["native"]
    assert 0.35 < mib["swan"] / mib["native"] < 0.45  # of five layers, two keep all tokens
