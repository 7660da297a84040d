"""Quotes text from elsewhere: names of files, strings in model files, answers of servers."""


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


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode()
