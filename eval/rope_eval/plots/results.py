"""Plots of results by length, and by length and depth; each saves a PNG to a path or file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from textwrap import wrap
from typing import Any, BinaryIO

from rope_eval.plots import style
from rope_eval.reports.summary import Estimate, is_unpatched, number

_MOST_SHADED = 4  # lines; the intervals of more would hide them
_WIDTH = 6.6  # inches of a plot with panels: at 400 pixels, 10 points are still 8 pixels
_CELL = 0.42  # inches of a heat map cell, in which "100" fits
_HEIGHT = 12  # ratio of highest to lowest perplexity shown; lines above leave the plot


def draw_lines(
    path: Path | BinaryIO,
    panels: Mapping[str, Mapping[tuple[str, int], Estimate]],
    kind: str,
    trained: Mapping[str, int],
) -> None:
    """Plot perplexity (``loss``) or rates by length: a panel per title, a line per system.

    Intervals are shaded, for many systems only that of the unpatched model. Perplexities above
    ``_HEIGHT`` times the lowest leave the plot; the legend has the last value of each.
    """
    systems, lengths = _axes_of(next(iter(panels.values())))
    across = min(2, len(panels))
    down = math.ceil(len(panels) / across)
    slanted = sum(len(str(length)) for length in lengths) > 40 // across
    figure = style.figure_of(_WIDTH, 1.0 + 0.1 * len(systems) + (3.6 / across + 0.6) * down)
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    for index, (title, estimates) in enumerate(panels.items()):
        axes = grid.flat[index]
        bottom, top = _limits(estimates, kind, few=_are_few(systems))
        _draw_systems(axes, estimates, kind, top=top, systems=systems, lengths=lengths)
        axes.set(xscale="log", ylim=(bottom, top))
        axes.set_xticks(lengths, [str(n) for n in lengths], rotation=45 if slanted else 0)
        axes.minorticks_off()
        if kind == "loss":
            axes.set_yscale("log")
            style.log_axis(axes)
        else:
            axes.yaxis.set_major_formatter(style.ticker().PercentFormatter(1))
        if index + across >= len(panels):  # the last panel of its column
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("context, tokens")
        axes.set_title(style.literal(title), **style.TITLE)
        style.bare(axes)
        style.mark_trained(axes, trained.values(), lengths[-1])
    _remove_unused(grid, len(panels))
    style.legend_below(figure, grid.flat[0])
    what = "perplexity, lower is better" if kind == "loss" else "found"
    figure.supylabel(f"{what} (shaded: 95 % intervals)", fontsize=10)
    figure.savefig(path, dpi=style.DPI, format="png")


def _are_few(systems: Sequence[str]) -> bool:
    """Whether the intervals of all systems can be shaded."""
    return len(systems) <= _MOST_SHADED


def _limits(
    estimates: Mapping[tuple[str, int], Estimate], kind: str, few: bool
) -> tuple[float, float]:
    """Lowest and highest value to show: fixed for rates, of finite values for perplexity."""
    if kind != "loss":
        return -0.03, 1.03
    finite = [estimate for estimate in estimates.values() if math.isfinite(estimate.value)]
    lowest = [one.low or one.value if few else one.value for one in finite]
    highest = [one.value for one in finite]
    bottom = 0.9 * min(lowest, default=1)
    return bottom, min(1.1 * max(highest, default=2), bottom * _HEIGHT)


def _draw_systems(
    axes: Any,
    estimates: Mapping[tuple[str, int], Estimate],
    kind: str,
    top: float,
    systems: Sequence[str],
    lengths: Sequence[int],
) -> None:
    """Draw a line per system; the legend marks with an arrow a last perplexity above ``top``."""
    for place, (system, look) in enumerate(_styles(systems).items()):
        line = [estimates[system, length] for length in lengths]
        label = _title(system)
        shift = 1.0
        if kind == "loss":
            last = line[-1].value
            label += f"  {chr(0x2191) + ' ' if last > top else ''}{number(last)}"
        else:
            # Shift rates sideways, so that equal ones do not hide each other.
            shift = 2 ** (0.02 * (place - len(systems) / 2))
        places = [length * shift for length in lengths]
        values = [estimate.value for estimate in line]
        axes.plot(places, values, label=label, linewidth=1.7, markersize=5, **look)
        ends = [(estimate.low, estimate.high) for estimate in line]
        if (_are_few(systems) or is_unpatched(system)) and None not in chain(*ends):
            lows, highs = zip(*ends, strict=True)
            axes.fill_between(lengths, lows, highs, color=look["color"], alpha=0.12, linewidth=0)


def _remove_unused(grid: Any, count: int) -> None:
    """Hide the places of a grid after its first ``count`` plots."""
    for axes in grid.flat[count:]:
        axes.set_axis_off()


def draw_depths(
    path: Path | BinaryIO,
    estimates: Mapping[tuple[str, int, int], Estimate],
    trained: Mapping[str, int],
    title: str,
) -> None:
    """Plot rates, by (system, length, depth bin): one heat map per system, depths as rows."""
    systems, lengths = _axes_of(estimates)
    depths = 1 + max(depth for _, _, depth in estimates)
    width = max(1.6, _CELL * len(lengths) + 0.1)
    height = 0.32 * depths + 0.9
    across = max(1, min(len(systems), 3, int((_WIDTH - 1.2) // width)))
    down = math.ceil(len(systems) / across)
    figure = style.figure_of(max(5.0, width * across + 1.4), max(3.0, height * down + 0.8))
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    image = None
    for index, (system, axes) in enumerate(zip(systems, grid.flat, strict=False)):
        rates = [[estimates[system, n, depth].value for n in lengths] for depth in range(depths)]
        image = axes.imshow(rates, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        for row, values in enumerate(rates):
            for column, value in enumerate(values):
                # Low rates are dark.
                colour = "black" if value > 0.45 else "white"
                axes.text(column, row, f"{100 * value:.0f}", ha="center", va="center",
                          fontsize=9, color=colour)  # fmt: skip
        # Between the column of the trained length and the next one.
        edge = sum(length <= trained[system] for length in lengths) - 0.5
        axes.axvline(edge, color="#D55E00", linewidth=2)
        axes.set_title("\n".join(wrap(_title(system), int(13 * width))), fontsize=10)
        axes.set_xticks(range(len(lengths)), [str(n) for n in lengths], fontsize=9, rotation=45)
        ends = [f"{100 * edge / depths:.0f}" for edge in range(depths + 1)]
        names = [f"{low}-{high} %" for low, high in pairwise(ends)]
        axes.set_yticks(range(depths), names, fontsize=9)
        axes.tick_params(length=0, labelbottom=index + across >= len(systems))
    _remove_unused(grid, len(systems))
    bar = figure.colorbar(image, ax=grid, format=style.ticker().PercentFormatter(1), shrink=0.8)
    bar.outline.set_visible(False)
    figure.supxlabel("context, tokens (orange line: trained length)", fontsize=10)
    figure.supylabel("depth", fontsize=10)
    figure.suptitle(style.literal(title), fontsize=11)
    figure.savefig(path, dpi=style.DPI, format="png")


def _title(system: str) -> str:
    return style.literal(system)


def _styles(systems: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Color, dashes and marker of each line; the first unpatched model is grey."""
    grey = next(filter(is_unpatched, systems), None)
    others = [system for system in systems if system != grey]
    return {
        s: style.UNPATCHED_STYLE if s == grey else style.style_of(others.index(s)) for s in systems
    }


def _axes_of(estimates: Mapping[tuple, Estimate]) -> tuple[list[str], list[int]]:
    return list(dict.fromkeys(key[0] for key in estimates)), sorted({key[1] for key in estimates})
