"""Tables, and one HTML file that needs nothing beside it: sentences, tables, pictures."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

BOLD = "Bold: the 95 % interval excludes zero, and the difference is at least 0.5 (% or points)."
"""What ``Cell.clear`` means to a reader; on every page with such a cell."""


@dataclass(frozen=True)
class Cell:
    """Of a table; ``clear`` where an interval excludes that nothing is there.

    What stands ``below`` the text is smaller, and then that is what is clear or not.
    """

    text: str
    clear: bool = False
    below: str = ""

    def markdown(self) -> str:
        below = f"**{self.below}**" if self.clear else self.below
        return f"{self.text}<br>{below}" if self.below else self.text


@dataclass(frozen=True)
class Row:
    """Of a table."""

    cells: tuple[Cell, ...]
    unpatched: bool = False


@dataclass(frozen=True)
class Table:
    """In plain data, for the terminal, Markdown and HTML alike, and what follows from it."""

    title: str
    header: tuple[str, ...]
    rows: tuple[Row, ...]
    sentences: tuple[str, ...] = ()

    def markdown(self) -> str:
        """The table in GitHub's Markdown."""
        lines = [f"| {' | '.join(self.header)} |", f"|{' --- |' * len(self.header)}"]
        lines += [f"| {' | '.join(cell.markdown() for cell in row.cells)} |" for row in self.rows]
        return "\n".join(lines)


@dataclass(frozen=True)
class Picture:
    """A PNG and what it shows."""

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
) -> str:
    """The page; what is given is text, not HTML. ``settings`` are folded away."""
    from jinja2 import Environment

    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return Environment(autoescape=True).from_string(text).render(locals())
