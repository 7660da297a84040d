"""Quotes text from elsewhere: names of files, strings in model files, answers of servers.

A function for each place: a terminal, a command to paste, Markdown, and CSV.
"""

import html
import os
import shlex
from collections.abc import Iterable, Sequence

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_LINKS = {"](": "]&#40;", "]:": "]&#58;"}
"""What gives a link or image its address: there, or in a line of its own."""
_BYTES = range(0xDC80, 0xDD00)  # stands for bytes of a file name that are not UTF-8


def printable(text: object, most: int | None = None) -> str:
    r"""Return ``text`` as one line that a terminal shows and does not obey.

    Control characters, line breaks, invisible characters and lone surrogates become escapes such as
    ``\x1b``. ``most`` is the number of characters after which the text is cut.
    """
    text = str(text)
    if most is not None and len(text) > most:
        text = f"{text[:most]}..."
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def printable_lines(text: object) -> str:
    """Return ``text`` as :func:`printable` does, and keep its line breaks."""
    return "\n".join(printable(line) for line in str(text).split("\n"))


def shell_join(words: Iterable[object]) -> str:
    """Return a command to paste; every word is one word, on one line."""
    return " ".join(shell_word(str(word)) for word in words)


def command_line(words: Sequence[object]) -> str:
    """Return a command to paste, and where, if it is of files that an installed wheel lacks.

    Recipes are in the repository alone. In its root the command runs as it is.
    """
    line = shell_join(words)
    scripts = [str(word) for word in words[1:3]] if words and words[0] == "python" else []
    of_repository = any(word.startswith(("recipes/", "recipes.")) for word in scripts)
    there = os.path.isfile("recipes/merge.py")
    return f"{line}  # in a clone of the repository" if of_repository and not there else line


def shell_word(word: str) -> str:
    r"""Return a word of a command: quoted if needed, and as ``$'a\nb'`` if it is not printable."""
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(_shell_escape(char) for char in word) + "'"


def in_markdown(text: object) -> str:
    """Return ``text`` for a line or table cell of Markdown: without HTML, links and images."""
    shown = printable(text)
    for char, entity in {"&": "&amp;", "<": "&lt;", "|": "&#124;", **_LINKS}.items():
        shown = shown.replace(char, entity)
    return shown


def inert_markdown(text: str) -> str:
    """Return a Markdown text with its tables and emphasis, but without HTML, links and images."""
    shown = printable_lines(text)
    for char, entity in {"<": "&lt;", **_LINKS}.items():
        shown = shown.replace(char, entity)
    return shown


def preformatted(text: object) -> str:
    """Return HTML that shows ``text`` as a terminal does, whatever is in it; long lines wrap."""
    shown = html.escape(printable_lines(text))
    return f'<pre style="font-family: monospace; white-space: pre-wrap">{shown}</pre>'


class Printed:
    """Base of results that notebooks show as the command line prints them."""

    def _repr_html_(self) -> str:
        return preformatted(self)


def in_csv(value: object) -> object:
    """Return a CSV cell; a text that a spreadsheet would compute begins with an apostrophe."""
    if not isinstance(value, str):
        return value
    shown = printable(value)
    return f"'{shown}" if value.startswith(_FORMULA) else shown


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode()


def _shell_escape(char: str) -> str:
    number = ord(char)
    if char in "\\'":
        return f"\\{char}"
    if char.isprintable():
        return char
    if number in _BYTES:
        return f"\\x{number - 0xDC00:02x}"
    return f"\\U{number:08x}"
