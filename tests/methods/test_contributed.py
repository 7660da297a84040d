"""What docs/adding.md offers is written as it says, and passes the checks of every method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rope_ext.encodings import Encoding
from rope_ext.methods import FrequencyMethod, PositionMethod, register
from rope_ext.methods.temperature import LogN
from tests.helpers import distances, encodings
from tests.helpers.encodings import Made, parameters
from tests.helpers.models import LENGTH
from tests.helpers.positions import Seen
from tests.helpers.promises import (
    decodes_as_it_reads,
    documents_are_apart,
    is_saved_and_taken_out,
    learns,
    rows_are_as_alone,
)
from tests.methods import test_temperature
from tests.methods.cases import FACTOR, LLAMA, Case, encoding, over
from tests.methods.test_matrix import STEPS, is_the_formula
from tests.test_docs import snippets

pytestmark = pytest.mark.usefixtures("own_registry")


def of_the_page(section: str, name: str) -> Any:
    names: dict[str, Any] = {"__name__": __name__}
    exec(snippets(section)[0], names)
    return names[name]


def passes_every_check(case: Case, ids: torch.Tensor, folder: Path) -> None:
    is_the_formula(case, LLAMA, case.plain(), case.patched(), ids)
    decodes_as_it_reads(case.patched(), "dynamic", ids, STEPS)
    rows_are_as_alone(case.patched(), "left", ids)
    documents_are_apart(case.patched(), ids[:1, :70], (30, 40))
    is_saved_and_taken_out(case.plain(), case.patch, ids, folder)


def takes_temperatures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(test_temperature.GIVEN, name, {"factor": FACTOR})
    test_temperature.test_every_method_takes_both_and_they_replace_its_own(name)
    test_temperature.test_without_them_each_method_has_what_was_released_with_it(name)


def test_a_frequency_method_with_a_temperature_of_its_own(ids, tmp_path, monkeypatch) -> None:
    step: type[FrequencyMethod] = of_the_page("A frequency method", "Step")

    @register
    class Warm(step):
        name, paper, summary = "warm_step", "an example", "a step, with sharper attention"

        def own_temperature(self) -> LogN:
            return LogN()

    takes_temperatures("step", monkeypatch)
    takes_temperatures("warm_step", monkeypatch)
    passes_every_check(over("step", under=step(factor=FACTOR)), ids, tmp_path / "step")
    warm = over("warm_step", under=step(factor=FACTOR), log_n=LENGTH)
    passes_every_check(warm, ids, tmp_path / "warm")


def test_a_position_method_of_two_bands(ids, tmp_path, monkeypatch) -> None:
    halved: type[PositionMethod] = of_the_page("A position method", "Halved")

    def distance(m: int, n: int, window: int) -> float:
        return m - n if m - n < window else (m + window) / 2 - n / 2

    takes_temperatures(halved.name, monkeypatch)
    monkeypatch.setitem(distances.EVERY, "halved", distance)
    passes_every_check(over("halved", distance="halved", constants={"window": 16}), ids, tmp_path)


def test_an_encoding_with_bounds(ids, tmp_path, monkeypatch) -> None:
    slope: type[Encoding] = of_the_page("An encoding", "Slope")

    @register
    class Gentle(slope):
        name, paper, summary = "gentle", "an example", "a slope within bounds"

        @property
        def bounds(self) -> dict[str, tuple[float, float]]:
            return {"slope": (0.05, 0.4)}

    def scores(seen: Seen) -> Made:
        learned = seen.learned["slope"][:, None, None]
        return seen.logits - learned * seen.apart.clamp(max=30)

    for name in ("slope", "gentle"):
        entry = encodings.Encoding(name, scores, {"clip": 30})
        monkeypatch.setitem(encodings.ALL, name, entry)
        case = encoding(name)
        passes_every_check(case, ids, tmp_path / name)
        model = case.patched()
        learns(model, parameters(model), ids)
    with torch.no_grad():
        for slopes in parameters(model).values():
            slopes.fill_(7.0)
    model(ids).logits.sum().backward()
    assert all((slopes == 0.4).all() for slopes in parameters(model).values())
