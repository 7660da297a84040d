"""Small plots for reports, since full-size ones take half a second each; test_cli.py uses them."""

from __future__ import annotations

from typing import Any

import pytest

from rope_eval.plots import style


def draw_small(patched: pytest.MonkeyPatch) -> None:
    def small(width: float, height: float) -> Any:
        from matplotlib.figure import Figure

        return Figure(figsize=(width / 4, height / 4))

    patched.setattr(style, "figure_of", small)
