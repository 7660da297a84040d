"""Writes the page of families and engines from the tables in ``rope_ext.engines.base``.

python -m tests.engines.table > docs/engines/families.md
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rope_ext.engines.base import ENGINES, Family
from tests.engines.record import VERSIONS

METHODS = {
    "default": "base",
    "linear": "pi",
    "yarn": "yarn",
    "llama3": "llama3",
    "longrope": "tables",
}
PATH = re.compile(r"[\w/-]+\.(py|cpp)")
TITLES = {"vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama.cpp, Ollama", "mlx": "mlx-lm"}
HEAD = f"""\
# Families and engines

The methods that each engine computes like transformers, by `model_type` of the language model:
*base* (a larger base: `ntk`, `abf`), *pi*, *yarn*, *llama3*, and *tables* (all other frequency
methods). For anything else, `rope_ext.export` raises an error with the
[reason](#what-stands-against-the-others). A question mark means not checked, † not run: only the
rotary classes of SGLang {VERSIONS["sglang"]} were tested (`tests/engines/test_sglang.py`), and the
source of vLLM 0.33.0 was read.

Tested beyond the trained length: vLLM {VERSIONS["vllm"]} on a CPU
(`tests/engines/test_vllm_real.py`), xllamacpp {VERSIONS["llama.cpp"]} and mlx-lm {VERSIONS["mlx"]}
(`tests/engines/test_families.py`). `python -m tests.engines.table > docs/engines/families.md` wrote
this page.
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
    yield from reasons()


def reasons() -> Iterator[str]:
    """What stands in an engine's source against the methods that are not in its column."""
    yield "\n## What stands against the others"
    yield "\nPaths begin at `vllm/model_executor`, `sglang/srt`, `mlx_lm` and llama.cpp's root."
    for engine, title in TITLES.items():
        yield f"\n### {title}\n"
        found: dict[str, list[str]] = {}
        for name, family in ENGINES[engine].items():
            for reason in (family.reason, f"† {family.unrun}" if family.unrun else ""):
                if reason and not (reason is family.reason and len(family.kinds) == len(METHODS)):
                    found.setdefault(general(engine, reason, name), []).append(name)
        for reason, names in found.items():
            shown = PATH.sub(lambda path: f"`{path[0]}`", reason)
            yield f"* {', '.join(names)}: {shown}"


def general(engine: str, reason: str, family: str) -> str:
    """A reason without the names by which an engine calls one family."""
    name = ENGINES[engine][family].name
    return reason.replace(f" for the architecture '{name}'", "") if name else reason


if __name__ == "__main__":
    print("\n".join(page()))
