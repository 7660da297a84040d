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

The methods that each engine computes as transformers does, by `model_type` of the language model.
*All* means a different base (`ntk`, `abf`), `pi`, `yarn`, `llama3`, and tables, which export every
other frequency method. For anything else, `rope_ext.export` raises an error with the reason below.

Every entry for llama.cpp and mlx-lm was run in the engine itself, beyond the trained length
(`python -m pytest tests/engines/test_families.py`), and so was every entry for vLLM, on a CPU
(`tests/engines/test_vllm_real.py`). Entries marked *classes* were run with the engine's rotary
classes only (`tests/engines/test_servers.py`).
Versions: vLLM 0.32.0, its classes of 0.33.0, SGLang 0.5.23, the llama.cpp of xllamacpp
2026.10.11549, mlx-lm 0.32.2.

`python -m tests.engines.table --write docs/engines/families.md` generates this page.
"""


def cell(engine: str, family: Family | None) -> str:
    """What one engine runs of one family."""
    if family is None:
        return "not checked"
    if not family.kinds:
        return "none"
    found = ", ".join(METHODS[kind] for kind in family.kinds)
    if len(family.kinds) == len(METHODS):
        found = "all"
    unrun = engine == "sglang" or getattr(family, "unrun", "")
    return f"{found} (classes)" if unrun else found


def page() -> Iterator[str]:
    """The lines of the page."""
    yield HEAD
    yield "| family | " + " | ".join(TITLES.values()) + " |"
    yield "| --- |" + " --- |" * len(TITLES)
    names = sorted({name for engine in TITLES for name in ENGINES[engine]})
    for name in names:
        cells = " | ".join(cell(engine, ENGINES[engine].get(name)) for engine in TITLES)
        yield f"| {name} | {cells} |"
    yield "\n## Why not\n\n| engine | reason | families |\n| --- | --- | --- |"
    for engine, title in TITLES.items():
        reasons: dict[str, list[str]] = {}
        for name, family in ENGINES[engine].items():
            if family.reason:
                reasons.setdefault(family.reason, []).append(name)
            if getattr(family, "unrun", ""):
                reasons.setdefault(f"classes only: {family.unrun}", []).append(name)
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
