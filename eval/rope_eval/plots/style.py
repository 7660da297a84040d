"""What all pictures share: that they can be drawn, colours, and the mark of the trained length.

matplotlib is the ``eval`` extra. It is imported only to draw.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rope_ext.errors import MeasureError

# Okabe and Ito's colours that stand out on white, safe for colour-blind readers; markers and
# dashes tell further methods apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_MARKERS = "osD^vPX*"
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))
NUMBERS = "rope_ext"
"""The key of the PNG text chunk that holds the numbers a picture was drawn from, as JSON."""
TITLE = {"loc": "left", "fontsize": 11, "pad": 17}
"""Of axes with a mark of the trained length, whose label is between the two."""
_LINE = 460  # of a legend, points: what fits below a picture of several panels
UNPATCHED_STYLE = {"color": "#333333", "linestyle": "--", "marker": "x"}


def require_matplotlib() -> None:
    """Check that the pictures can be drawn.

    Raises:
        MeasureError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MeasureError(
            "the pictures need matplotlib, which is not installed; "
            'install it with: pip install "rope-ext[eval]"'
        )


def bare(axes: Any) -> None:
    """Horizontal grid lines, and no frame above and to the right."""
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def mark_trained(axes: Any, trained: Iterable[int], last: int) -> None:
    """A vertical line at each trained length, on an axis of tokens that ends at ``last``.

    Its label is above the axes, where no line of the picture passes.
    """
    for number, length in enumerate(sorted(set(trained))):
        axes.axvline(length, color="#777777", linewidth=1, zorder=0)
        side = "left" if length < last else "right"
        name = str(length) if number else f"trained length {length}"
        axes.annotate(name, (length, 1), (0, 2), xycoords=axes.get_xaxis_transform(),
                      textcoords="offset points", ha=side, va="bottom", fontsize=9,
                      color="#555555")  # fmt: skip


def legend_below(figure: Any, axes: Any) -> None:
    """One legend for all panels, in as many columns as their longest name allows."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, min(4, _LINE // (45 + 5 * max(map(len, labels), default=0))))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9,
                  frameon=False)  # fmt: skip


def save(
    figure: Any, path: Path | BinaryIO, numbers: Sequence[Mapping[str, Any]], dpi: int = 160
) -> None:
    """Write a PNG with the numbers that it shows in it; ``numbers_of`` reads them.

    Args:
        figure: from ``figure_of``.
        path: of the PNG, or a file that is open.
        numbers: plain data.
        dpi: pixels per inch.
    """
    figure.savefig(path, dpi=dpi, format="png", metadata={NUMBERS: json.dumps(list(numbers))})


def numbers_of(path: Path) -> list[dict[str, Any]]:
    """The numbers that a picture of ``save`` was drawn from."""
    from PIL import Image

    with Image.open(path) as image:
        return json.loads(image.info[NUMBERS])


def style_of(index: int) -> dict[str, Any]:
    """Colour, dashes and marker of the line of that number."""
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "linestyle": _DASHES[index // len(_COLOURS) % len(_DASHES)],
        "marker": _MARKERS[index % len(_MARKERS)],
    }


def figure_of(width: float, height: float) -> Any:
    """A figure in inches; without pyplot, whose state would belong to the user."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def ticker() -> Any:
    """The module of matplotlib of that name."""
    from matplotlib import ticker as module

    return module
