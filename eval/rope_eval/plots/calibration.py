"""The picture of a calibration: loss and retrieval against what cos and sin are multiplied by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rope_eval.plots.style import bare, figure_of, legend_below, style_of, ticker

Point = tuple[float, float, float | None]
"""What cos and sin are multiplied by, perplexity, and the share found if it was measured."""


@dataclass(frozen=True)
class Line:
    """A method.

    Args:
        name: of it.
        points: with the options of the published default beside the attention factor.
        published: the published default.
        chosen: what was found.
        options: that it differs in beside the attention factor, in words.
    """

    name: str
    points: Sequence[Point]
    published: Point
    chosen: Point
    options: str


def draw(lines: Sequence[Line], trained: int, target: int, path: Path | BinaryIO) -> None:
    """Draw them as a PNG: perplexity, and below it retrieval if it was measured.

    Args:
        lines: methods.
        trained: context, tokens.
        target: context, tokens.
        path: of the PNG, or a file that is open.
    """
    titles = ["perplexity far out (lower is better)", "answers found (higher is better)"]
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
        axes.set_xlabel("attention factor: cos and sin times it")
        bare(axes)
    grid[0].set_yscale("log")
    grid[0].yaxis.set_major_locator(ticker().LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7), numticks=99))
    grid[0].yaxis.set_major_formatter(ticker().FormatStrFormatter("%g"))
    grid[0].minorticks_off()
    if panels == 2:
        grid[1].set_ylim(-0.04, 1.04)
        grid[1].yaxis.set_major_formatter(ticker().PercentFormatter(1))
    figure.suptitle(
        f"{trained} \u2192 {target} tokens, on the half of the text that chooses\n"
        f"(ring: published default, star: chosen)",
        fontsize=11,
    )
    legend_below(figure, grid[0])
    figure.savefig(path, dpi=160, format="png")
