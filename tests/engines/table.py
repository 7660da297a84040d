"""Writes the page of families and engines from the tables in ``rope_ext.engines.base``.

python -m tests.engines.table > docs/engines/families.md
"""

from __future__ import annotations

from collections.abc import Iterator

from rope_ext.engines.base import ENGINES, Family

METHODS = {
    "default": "base",
    "linear": "pi",
    "yarn": "yarn",
    "llama3": "llama3",
    "longrope": "tables",
}
TITLES = {"vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama.cpp, Ollama", "mlx": "mlx-lm"}
HEAD = """\
# Families and engines

The methods that each engine computes like transformers, by `model_type` of the language model:
*base* (a larger base: `ntk`, `abf`), *pi*, *yarn*, *llama3*, and *tables* (all other frequency
methods). For anything else, `rope_ext.export` raises an error with the reason. A question mark
means not checked, † not run: only the rotary classes of SGLang 0.5.23 were tested
(`tests/engines/test_sglang.py`), and the source of vLLM 0.33.0 was read.

Tested beyond the trained length: vLLM 0.32.0 on a CPU (`tests/engines/test_vllm_real.py`),
xllamacpp 2026.10.11549 and mlx-lm 0.32.2 (`tests/engines/test_families.py`). `python -m
tests.engines.table > docs/engines/families.md` wrote this page.
"""


def cell(engine: str, family: Family | None) -> str:
    """What one engine runs of one family."""
    if family is None:
        return "?"
    found = ", ".join(METHODS[kind] for kind in family.kinds) or "none"
    if len(family.kinds) == len(METHODS):
        found = "all"
    unrun = family.kinds and (engine == "sglang" or family.unrun)
    return f"{found} †" if unrun else found


def page() -> Iterator[str]:
    """The lines of the page."""
    yield HEAD
    yield "| family | " + " | ".join(TITLES.values()) + " |"
    yield "| --- |" + " --- |" * len(TITLES)
    names = sorted({name for engine in TITLES for name in ENGINES[engine]})
    for name in names:
        cells = " | ".join(cell(engine, ENGINES[engine].get(name)) for engine in TITLES)
        yield f"| {name} | {cells} |"


if __name__ == "__main__":
    print("\n".join(page()))
