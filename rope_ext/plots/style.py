"""What all pictures share: that they can be drawn, colours, and the mark of the trained length.

matplotlib is the ``eval`` extra. It is imported only to draw.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

from rope_ext.errors import MeasureError

# Okabe and Ito's colours that stand out on white, safe for colour-blind readers; markers and
# dashes tell further methods apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_MARKERS = "osD^vPX*"
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))
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
    """A vertical line at each trained length, on an axis of tokens that ends at ``last``."""
    for length in sorted(set(trained)):
        axes.axvline(length, color="#777777", linewidth=1, zorder=0)
        side = "left" if length < last else "right"
        axes.text(length, 0.02, f" trained length {length} ", ha=side, fontsize=8,
                  color="#555555", transform=axes.get_xaxis_transform())  # fmt: skip


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
