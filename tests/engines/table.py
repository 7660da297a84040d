"""Writes the page of families and engines from the tables in ``rope_ext.engines.families``.

python -m tests.engines.table --write docs/engines/families.md
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from rope_ext.engines.families import ENGINES, Family

METHODS = {
    "default": "another base (`ntk`, `abf`)",
    "linear": "`pi`",
    "yarn": "`yarn`",
    "llama3": "`llama3`",
    "longrope": "tables",
}
TITLES = {"vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama.cpp, Ollama", "mlx": "mlx-lm"}
HEAD = """\
# Families and engines

Which methods each engine computes as transformers does, by `model_type` of the language model.
*All*: another base (`ntk`, `abf`), `pi`, `yarn`, `llama3`, and tables, by which every other
frequency method is exported. `rope_ext.export` refuses the rest with the reason below.

Every entry of llama.cpp and mlx-lm is run in the engine itself, beyond the trained length
(`python -m pytest tests/engines/test_families.py`), and every entry of vLLM and SGLang with the
engine's own rotary classes (`tests/engines/test_servers.py`), but for families that vLLM builds by
transformers' own model (*backend*), whose rotary module is transformers'.
Versions: vLLM 0.33.0, SGLang 0.5.23, the llama.cpp of xllamacpp 2026.10.11549, mlx-lm 0.32.2.

This page is written by `python -m tests.engines.table --write docs/engines/families.md`.
"""


def cell(family: Family | None) -> str:
    """What one engine runs of one family."""
    if family is None:
        return "not checked"
    if len(family.kinds) == len(METHODS):
        return "all (backend)" if getattr(family, "backend", False) else "all"
    if not family.kinds:
        return "none"
    return ", ".join(METHODS[kind] for kind in family.kinds)


def page() -> Iterator[str]:
    """The lines of the page."""
    yield HEAD
    yield "| family | " + " | ".join(TITLES.values()) + " |"
    yield "| --- |" + " --- |" * len(TITLES)
    names = sorted({name for engine in TITLES for name in ENGINES[engine]})
    for name in names:
        cells = " | ".join(cell(ENGINES[engine].get(name)) for engine in TITLES)
        yield f"| {name} | {cells} |"
    yield "\n## Why not\n\n| engine | reason | families |\n| --- | --- | --- |"
    for engine, title in TITLES.items():
        reasons: dict[str, list[str]] = {}
        for name, family in ENGINES[engine].items():
            if family.reason:
                reasons.setdefault(family.reason, []).append(name)
        for reason, families in reasons.items():
            yield f"| {title} | {reason} | {', '.join(families)} |"


def text() -> str:
    """The page."""
    return "\n".join(page()) + "\n"


def main(write: Annotated[Path | None, typer.Option(help="File to write.")] = None) -> None:
    """Print the page, or write it."""
    if write is None:
        print(text(), end="")
    else:
        write.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
