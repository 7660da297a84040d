"""Keeps the current folder off the import path of the commands and of their child processes.

A model folder from elsewhere may contain a ``torch.py``. Python looks for modules in the current
folder first if it runs ``python -m``, ``python -c`` or has an empty entry in ``PYTHONPATH``.
Importing this module cleans the path of a command; other programs that import the package keep
theirs. ``__init__.py`` imports it before anything else, so it may import only what Python has
already loaded.
"""

import os
import sys

_PACKAGES = ("rope_ext", "rope_eval")
_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""The folder that contains this package: its code is already running."""


def isolated(code: str, *words: str, folder: str | None = None) -> list[str]:
    """Return the command that runs ``code`` in Python, without the current folder on its path.

    It ignores ``PYTHONPATH`` and the user's site-packages, and finds packages in ``folder`` after
    those of the environment. Works on Python 3.10, which has no ``-P``.
    """
    if folder is not None:
        code = f"import sys; sys.path.append({os.path.abspath(folder)!r})\n{code}"
    return [sys.executable, "-I", "-c", code, *words]


def _started_module() -> str | None:
    """Return the module of ``python -m``, None if Python was started otherwise.

    To be called while Python looks for that module: later, ``sys.argv[0]`` is its file.
    """
    if sys.argv[:1] != ["-m"]:
        return None
    word = sys.orig_argv[-len(sys.argv)]  # the last one before the arguments
    return word.partition("m")[2] if word.startswith("-") else word  # -mrope_ext is one word


def _is_command(module: str | None) -> bool:
    if module is not None:
        return module.partition(".")[0] in _PACKAGES
    return os.path.basename(sys.argv[0] if sys.argv else "").startswith("rope-ext")


def _remove(entry: str) -> None:
    """Remove an entry from the path, unless it is where this package was found."""
    folder = os.path.abspath(entry)
    if folder in sys.path and os.path.realpath(folder) != os.path.realpath(_HOME):
        sys.path.remove(folder)


def _protect(module: str | None) -> None:
    if module is not None and not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        _remove("")
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    relative = [entry for entry in entries if not os.path.isabs(entry)]
    if "PYTHONPATH" in os.environ and not sys.flags.ignore_environment:
        for entry in relative:
            _remove(entry)
    # For children of this process, also those that other libraries start. Python 3.10 ignores
    # PYTHONSAFEPATH.
    os.environ["PYTHONPATH"] = os.pathsep.join(one for one in entries if one not in relative)
    os.environ["PYTHONSAFEPATH"] = "1"


_module = _started_module()
IN_COMMAND = _is_command(_module)
"""Whether this process is one of our commands, and not a program that imports the package."""
if IN_COMMAND:
    _protect(_module)
