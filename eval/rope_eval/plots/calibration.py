"""Plots a calibration: perplexity and retrieval by attention factor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rope_eval.plots.style import bare, figure_of, legend_below, log_axis, style_of, ticker
from rope_ext.config.record import option_texts

SCALAR = "attention_factor"


def draw(choices: Sequence[Any], trained: int, target: int, path: Path | BinaryIO) -> None:
    """Save a PNG with perplexity and, if measured, retrieval below it.

    A line has the candidates of a method that differ in the attention factor alone.
    """
    panels = 1 + all(t.found_beyond is not None for choice in choices for t in choice.tried)
    figure = figure_of(6.6, 1.4 + 0.2 * len(choices) + 2.9 * panels)
    grid = figure.subplots(panels, 1, squeeze=False)[:, 0]
    for index, choice in enumerate(choices):
        published, style = choice.published, style_of(index)
        beside = published.options() | {SCALAR: None}
        line = [t for t in choice.tried if t.method.options() | {SCALAR: None} == beside]
        line.sort(key=lambda trial: trial.attention_factor)
        known = option_texts(published)
        new = [t for t in option_texts(choice.method) if t not in known and SCALAR not in t]
        label = published.name + (f" (chosen: {', '.join(new)})" if new else "")
        mark = {"linestyle": "none", "color": style["color"], "zorder": 3}
        ring = {"marker": "o", "markersize": 11, "markerfacecolor": "none", "markeredgewidth": 1.6}
        star = {"marker": "*", "markersize": 15, "markeredgecolor": "white"}
        for panel, axes in enumerate(grid):

            def point(trial: Any, panel: int = panel) -> tuple[float, float]:
                value = trial.found_beyond if panel else math.exp(min(trial.far, 700))
                return trial.attention_factor, value

            points = zip(*map(point, line), strict=True)
            axes.plot(*points, label=label, linewidth=1.5, markersize=4, **style)
            axes.plot(*point(choice.tried[0]), **mark, **ring)
            axes.plot(*point(choice.trial), **mark, **star)
    titles = ["perplexity at the end (lower is better)", "answers found (higher is better)"]
    for axes, title in zip(grid, titles, strict=False):
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("attention factor (on cos and sin)")
        bare(axes)
    grid[0].set_yscale("log")
    log_axis(grid[0])
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
