"""Tables, and a self-contained HTML page with text, tables and plots."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rope_ext.quoting import in_markdown, printable_lines

BOLD = "Bold: the 95 % interval excludes zero, and the difference is at least 0.5 (% or points)."
"""Explains ``Cell.clear`` on every page with such a cell."""


@dataclass(frozen=True)
class Cell:
    """A table cell; ``clear`` if an interval excludes zero.

    The text ``below`` is smaller; if there is one, ``clear`` applies to it.
    """

    text: str
    clear: bool = False
    below: str = ""

    def markdown(self) -> str:
        text = in_markdown(self.text)
        below = in_markdown(self.below)
        below = f"**{below}**" if self.clear else below
        return f"{text}<br>{below}" if self.below else text


@dataclass(frozen=True)
class Row:
    """A table row."""

    cells: tuple[Cell, ...]
    unpatched: bool = False


@dataclass(frozen=True)
class Table:
    """A table as plain data, with output for the terminal, Markdown and HTML."""

    title: str
    header: tuple[str, ...]
    rows: tuple[Row, ...]
    sentences: tuple[str, ...] = ()

    def markdown(self) -> str:
        lines = [
            f"| {' | '.join(map(in_markdown, self.header))} |",
            f"|{' --- |' * len(self.header)}",
        ]
        lines += [f"| {' | '.join(cell.markdown() for cell in row.cells)} |" for row in self.rows]
        return "\n".join(lines)


@dataclass(frozen=True)
class Picture:
    """A PNG and its description."""

    alt: str
    content: bytes

    @property
    def data(self) -> str:
        return base64.b64encode(self.content).decode()


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    name: str
    sentences: tuple[str, ...]
    tables: Sequence[Table] = ()
    pictures: list[Picture] = field(default_factory=list)


def render(
    title: str,
    sentences: Sequence[str],
    notes: Sequence[str],
    sections: Sequence[Section],
    settings: str,
    essentials: Sequence[str] = (),
    next_lines: Sequence[str] = (),
) -> str:
    """Build the page; arguments are text, not HTML. ``settings`` are collapsed."""
    from jinja2 import Environment

    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    # Names of files and models, which may be foreign, must not be markup.
    return Environment(autoescape=True, finalize=_literal).from_string(text).render(locals())


def _literal(value: Any) -> Any:
    """Return a text without control characters: somebody may print the page in a terminal."""
    return printable_lines(value) if isinstance(value, str) else value
