"""Figures of the report, with one panel for each kind of encoding."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lab.laboratory.linear import LINEAR
from lab.laboratory.model import ROPE
from rope_eval.plots.style import bare, figure_of, mark_trained, style_of
from rope_eval.reports.page import Picture

KINDS: Mapping[str, tuple[str, ...]] = {
    "rotations": ("rope_25", "xpos", "3d_rpe", "repo"),
    "RoPE extended after training": (
        *("rope+yarn", "rope+log_n", "rope+rerope"),
        *("rope_25+yarn", "rope_25+log_n", "rope_25+rerope"),
    ),
    "biases by distance": ("alibi", "kerple_log", "kerple_power", "sandwich", "t5", "fire"),
    "by distance and content": ("shaw", "transformer_xl", "deberta", "cope", "dape"),
    "absolute positions": ("sinusoidal", "learned", "multiplicative", "floater"),
    "no positions": ("nope", "nope+log_n", "drope"),
    "linear attention": tuple(LINEAR),
    "rotations, from scratch only": (
        *("fope", "carope", "selective_rope", "grape_m", "rope_pp_ec", "rope_pp_eh"),
    ),
    "by content, from scratch only": ("tapa", "grape_ap"),
}
_MOST = 7  # lines of a panel in addition to RoPE's
# Size of a row of two panels in inches: legible at 400 pixels.
WIDTH = 7.2
_HEIGHT = 2.7
_GAP = 0.055  # distance between labels, as a share of the panel height
_BASELINE = {"color": "#555555", "linestyle": "--", "marker": ""}

Lines = Mapping[str, Mapping[float, float]]
"""Values by name and position on the horizontal axis."""


def kinds_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Names by kind of encoding, at most seven each, without RoPE."""
    rest = [name for name in names if name != ROPE]
    found = {kind: [n for n in members if n in rest] for kind, members in KINDS.items()}
    known = {name for members in found.values() for name in members}
    others = [name for name in rest if name not in known]
    for start in range(0, len(others), _MOST):
        found["others" if not start else f"others {start // _MOST + 1}"] = others[
            start : start + _MOST
        ]
    return {kind: members for kind, members in found.items() if members}


def panels(
    lines: Lines,
    x: str,
    y: str,
    trained: float | None = None,
    ticks: Sequence[int] = (),
    limits: tuple[float, float] | None = None,
) -> Any:
    """Draw a figure with one panel per kind; every line is labeled at its end.

    Args:
        lines: what to plot.
        x: label of the horizontal axis; logarithmic if there are ``ticks``.
        y: label of the vertical axis, which all panels share.
        trained: trained length or size on the horizontal axis.
        ticks: ticks of the horizontal axis.
        limits: limits of the vertical axis; None: the range of the lines, up to 1.3 times RoPE's
            largest value.
    """
    kinds = kinds_of(lines) or {"RoPE": []}
    down = math.ceil(len(kinds) / 2)
    figure = figure_of(WIDTH, _HEIGHT * down)
    grid = figure.subplots(down, 2, squeeze=False)
    low, high = limits or _limits(lines)
    for number, axes in enumerate(grid.flat):
        axes.set_visible(number < len(kinds))
    for axes, (kind, names) in zip(grid.flat, kinds.items(), strict=False):
        if ticks:
            axes.set_xscale("log")
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.minorticks_off()
        axes.set_title(kind, loc="left", fontsize=10, pad=16)
        axes.set(xlabel=x, ylabel=y, ylim=(low, high))
        shown = [ROPE, *names] if ROPE in lines else names
        for index, name in enumerate(shown, -1 if ROPE in lines else 0):
            style = _BASELINE if name == ROPE else style_of(index) | {"linestyle": "-"}
            places = list(lines[name])
            values = list(lines[name].values())
            axes.plot(places, values, linewidth=1.4, markersize=3, label=name, **style)
        if trained is not None:
            mark_trained(axes, [trained], max(max(lines[n], default=0) for n in shown))
        _label(axes, low, high)
        bare(axes)
    return figure


def picture_of(figure: Any, alt: str) -> Picture:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    return Picture(alt, buffer.getvalue())


def _limits(lines: Lines) -> tuple[float, float]:
    """Limits from the lowest value to 1.3 times RoPE's largest, so that outliers are cut off."""
    values = [value for line in lines.values() for value in line.values() if math.isfinite(value)]
    if not values:
        return 0.0, 1.0
    top = max(lines.get(ROPE, {}).values(), default=max(values))
    low = min(values)
    high = min(max(values), 1.3 * top)
    room = 0.05 * (high - low) or 0.05
    return low - room, high + room


def _label(axes: Any, low: float, high: float) -> None:
    """Write names at the ends of lines, moved apart where they overlap."""
    gap = _GAP * (high - low)
    ends = []
    for line in axes.get_lines():
        if line.get_label().startswith("_"):
            continue
        x = line.get_xdata()[-1]
        y = line.get_ydata()[-1]
        ends.append((min(y, high), x, line))
    ends.sort(key=lambda end: end[0])
    heights = [y for y, _, _ in ends]
    for number in range(1, len(heights)):
        heights[number] = max(heights[number], heights[number - 1] + gap)
    over = max(0.0, heights[-1] - high) if heights else 0.0
    for number in range(len(heights) - 1, -1, -1):
        most = high if number == len(heights) - 1 else heights[number + 1] - gap
        heights[number] = min(heights[number], most) if over else heights[number]
    for height, (_, x, line) in zip(heights, ends, strict=True):
        axes.annotate(line.get_label(), (x, height), (5, 0), textcoords="offset points",
                      va="center", fontsize=8, color=line.get_color(),
                      annotation_clip=False)  # fmt: skip
