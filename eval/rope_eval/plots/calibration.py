"""Plots a calibration: perplexity and retrieval by attention factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rope_eval.plots.style import bare, figure_of, legend_below, style_of, ticker

Point = tuple[float, float, float | None]
"""Attention factor, perplexity, and share of answers found (None if not measured)."""


@dataclass(frozen=True)
class Line:
    """The line of one method.

    Args:
        name: name of the method.
        points: results by attention factor, with the other options as published.
        published: the published default.
        chosen: the result of the calibration.
        options: other options that differ from the default, as text.
    """

    name: str
    points: Sequence[Point]
    published: Point
    chosen: Point
    options: str


def draw(lines: Sequence[Line], trained: int, target: int, path: Path | BinaryIO) -> None:
    """Save a PNG with perplexity and, if measured, retrieval below it.

    Args:
        lines: one line per method.
        trained: trained length in tokens.
        target: target length in tokens.
        path: path of the PNG, or an open file.
    """
    titles = ["perplexity at the end (lower is better)", "answers found (higher is better)"]
    panels = 1 + all(point[2] is not None for line in lines for point in line.points)
    figure = figure_of(6.6, 1.4 + 0.2 * len(lines) + 2.9 * panels)
    grid = figure.subplots(panels, 1, squeeze=False)[:, 0]
    for index, line in enumerate(lines):
        style = style_of(index)
        for place, axes in enumerate(grid, 1):
            points = sorted((point[0], point[place]) for point in line.points)
            label = f"{line.name}{line.options}"
            axes.plot(*zip(*points, strict=True), label=label, linewidth=1.5, markersize=4, **style)
            mark = {"linestyle": "none", "color": style["color"], "zorder": 3}
            axes.plot(line.published[0], line.published[place], marker="o", markersize=11,
                      markerfacecolor="none", markeredgewidth=1.6, **mark)  # fmt: skip
            axes.plot(line.chosen[0], line.chosen[place], marker="*", markersize=15,
                      markeredgecolor="white", **mark)  # fmt: skip
    for axes, title in zip(grid, titles, strict=False):
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("attention factor (on cos and sin)")
        bare(axes)
    grid[0].set_yscale("log")
    grid[0].yaxis.set_major_locator(ticker().LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7), numticks=99))
    grid[0].yaxis.set_major_formatter(ticker().FormatStrFormatter("%g"))
    grid[0].minorticks_off()
    if panels == 2:
        grid[1].set_ylim(-0.04, 1.04)
        grid[1].yaxis.set_major_formatter(ticker().PercentFormatter(1))
    figure.suptitle(
        f"{trained} \u2192 {target} tokens, on the half of the text used for selection\n"
        f"(ring: published default, star: chosen)",
        fontsize=11,
    )
    legend_below(figure, grid[0])
    figure.savefig(path, dpi=160, format="png")
