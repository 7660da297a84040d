"""Pictures can be read where they are small, and carry the numbers that they show."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from rope_eval.plots import calibration, results, style
from rope_eval.reports.summary import Estimate

SYSTEMS = ["none", "dynamic_yarn", "yarn (beta_fast=16)", "ntk", "rerope", "self_extend", "pi"]
TRAINED = dict.fromkeys(SYSTEMS, 512)
LENGTHS = {"short": [512, 1024, 2048, 4096], "long": [2**k for k in range(9, 18)]}
ZERO = Estimate(0.0, 0.0, 0.1, 20)


def rates(path: Path, lengths: list[int]) -> None:
    places = product((f"niah_multikey_{k}" for k in range(5)), SYSTEMS, lengths)
    results.draw_rates(dict.fromkeys(places, ZERO), TRAINED, path)


def depths(path: Path, lengths: list[int]) -> None:
    places = product(SYSTEMS, lengths, range(5))
    results.draw_depths(dict.fromkeys(places, ZERO), TRAINED, "tiny-512: passkey, % found", path)


def perplexity(path: Path, lengths: list[int]) -> None:
    places = dict.fromkeys(product(SYSTEMS, lengths), Estimate(8.0, 7.0, 9.0, 12))
    results.draw_perplexity(places, TRAINED, "tiny-512: perplexity by length", path)


def calibrated(path: Path, lengths: list[int]) -> None:
    points = [(1.0, 9.0, 0.5), (1.1, 8.0, 0.6)]
    line = calibration.Line("yarn", points, points[0], points[1], " (chosen: window=100)")
    calibration.draw([line], 512, lengths[-1], path)


@functools.cache
def drawn(draw: Callable, lengths: str) -> Any:
    """The figure of ``draw``; writing it to a file would draw it once more."""
    figures = []

    def unwritten(width: float, height: float) -> Any:
        figures.append(style.figure_of(width, height))
        figures[-1].savefig = lambda *args, **options: None
        return figures[-1]

    with pytest.MonkeyPatch.context() as patch:
        for module in (results, calibration):
            patch.setattr(module, "figure_of", unwritten)
        draw(Path("unwritten.png"), LENGTHS[lengths])
    [figure] = figures
    figure.draw_without_rendering()
    return figure


def extent(text: Any) -> Any:
    return text.get_window_extent(FigureCanvasAgg(text.figure).get_renderer())


def texts(figure: Any) -> list[Text]:
    return [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]


@pytest.mark.parametrize(
    ("draw", "lengths"),
    [
        *((draw, "long") for draw in (rates, depths, perplexity, calibrated)),
        (rates, "short"),
        (perplexity, "short"),
    ],
)
def test_the_smallest_words_are_six_pixels_at_a_width_of_400(draw: Callable, lengths: str) -> None:
    figure = drawn(draw, lengths)
    smallest = min(text.get_fontsize() for text in texts(figure))
    assert smallest * 400 / (72 * figure.get_figwidth()) >= 6


@pytest.mark.parametrize("draw", [rates, perplexity])
def test_no_line_passes_the_label_of_the_trained_length(draw: Callable) -> None:
    figure = drawn(draw, "short")
    labels = [text for text in texts(figure) if "trained length" in text.get_text()]
    assert len(labels) == sum(axes.get_visible() and axes.axison for axes in figure.axes)
    for label in labels:
        place = extent(label)
        assert place.y0 >= label.axes.bbox.y1  # lines end at the axes
        title = next(t for t in (label.axes.title, label.axes._left_title) if t.get_text())
        assert place.y1 <= extent(title).y0


def test_the_legend_is_beside_all_else() -> None:
    figure = drawn(rates, "short")
    [legend] = figure.legends
    place = extent(legend)
    others = [text for text in texts(figure) if text not in legend.get_texts()]
    assert not [text for text in others if extent(text).overlaps(place)]


@pytest.mark.parametrize(
    ("draw", "count"), [(rates, 5 * 7 * 4), (depths, 7 * 4 * 5), (perplexity, 7 * 4)]
)
def test_a_picture_carries_its_numbers(draw: Callable, count: int, tmp_path: Path) -> None:
    draw(tmp_path / "one.png", LENGTHS["short"])
    numbers = style.numbers_of(tmp_path / "one.png")
    assert len(numbers) == count
    value = {"value": 8.0, "low": 7.0, "high": 9.0, "count": 12, "note": ""}
    if draw is perplexity:
        assert numbers[0] == {"system": "none", "length": 512, **value}


def test_one_document_is_drawn_without_an_interval(tmp_path: Path) -> None:
    places = dict.fromkeys(product(SYSTEMS[:2], LENGTHS["short"]), Estimate(8.0, None, None, 1))
    results.draw_perplexity(places, TRAINED, "one", tmp_path / "one.png")
    assert {entry["low"] for entry in style.numbers_of(tmp_path / "one.png")} == {None}
