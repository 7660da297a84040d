"""Shared by all plots; matplotlib (the ``eval`` extra) is imported only when one is drawn."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rope_ext.errors import OptionError, optional
from rope_ext.import_path import IN_COMMAND
from rope_ext.quoting import printable_lines
from rope_ext.saving.drafts import may_replace

# Okabe and Ito's colors that stand out on white, safe for color-blind readers. Markers and dashes
# distinguish further methods.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_MARKERS = "osD^vPX*"
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))
DPI = 160
MARK = "rope-ext plot"
"""Marks, as the ``Software`` in its metadata, a plot that may be overwritten."""
TITLE = {"loc": "left", "fontsize": 11, "pad": 17}
"""Title style of axes with a mark of the trained length, whose label is below the title."""
_LINE = 460  # width of a legend line below several panels, points
UNPATCHED_STYLE = {"color": "#333333", "linestyle": "--", "marker": "x"}


def require_matplotlib() -> None:
    optional("matplotlib", "plots need", "rope-ext[eval]")


def require_png(path: Path) -> None:
    """Raise OptionError if a plot cannot be written there, or would replace another file."""
    if path.suffix.lower() != ".png" or not path.parent.is_dir():
        raise OptionError(f"cannot write {path}; give a .png file in an existing directory")
    if not may_replace(path, MARK):
        raise OptionError(f"{path} exists, and rope-ext plot did not write it; give another file")


def literal(text: str) -> str:
    """Return text for a plot, in which matplotlib finds no formula."""
    return printable_lines(text).replace("$", r"\$")


def bare(axes: Any) -> None:
    """Draw horizontal grid lines, and remove the frame at the top and right."""
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def mark_trained(axes: Any, trained: Iterable[int], last: int) -> None:
    """Draw a line at each trained length, on an axis in tokens that ends at ``last``."""
    for number, length in enumerate(sorted(set(trained))):
        axes.axvline(length, color="#777777", linewidth=1, zorder=0)
        side = "left" if length < last else "right"
        name = str(length) if number else f"trained length {length}"
        axes.annotate(name, (length, 1), (0, 2), xycoords=axes.get_xaxis_transform(),
                      textcoords="offset points", ha=side, va="bottom", fontsize=9,
                      color="#555555")  # fmt: skip


def legend_below(figure: Any, axes: Any) -> None:
    """Draw one legend for all panels, with as many columns as the longest label allows."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, min(4, _LINE // (45 + 5 * max(map(len, labels), default=0))))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9,
                  frameon=False)  # fmt: skip


def log_axis(axes: Any) -> None:
    """Label a logarithmic vertical axis at 1, 1.5, 2, 3, 4, 5 and 7 of each decade."""
    axes.yaxis.set_major_locator(ticker().LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7), numticks=99))
    axes.yaxis.set_major_formatter(ticker().FormatStrFormatter("%g"))
    axes.minorticks_off()


def style_of(index: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "linestyle": _DASHES[index // len(_COLOURS) % len(_DASHES)],
        "marker": _MARKERS[index % len(_MARKERS)],
    }


def _ignore_settings_here() -> None:
    """Use matplotlib's defaults in a command if the current folder, maybe a model's, has others.

    With them, matplotlib would run LaTeX on what they say.
    """
    import matplotlib

    here = os.path.dirname(os.path.abspath(matplotlib.matplotlib_fname()))
    if IN_COMMAND and here == os.getcwd():
        matplotlib.rcdefaults()


def figure_of(width: float, height: float) -> Any:
    """Create a figure with a size in inches; pyplot's global state is left to the user."""
    from matplotlib.figure import Figure

    _ignore_settings_here()
    return Figure(figsize=(width, height), layout="constrained")


def ticker() -> Any:
    from matplotlib import ticker as module

    return module
