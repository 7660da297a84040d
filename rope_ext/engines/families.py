"""What each engine supports for each model family: ``families.json``.

Families are named by the ``model_type`` of the language model. ``export``, ``verify``, the tests
and the table in the documentation all read this file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Family:
    """How an engine reads the RoPE parameters of a family.

    Args:
        kinds: values of ``rope_type`` that it computes as transformers does; ``"default"`` means
            that the base may differ. In llama.cpp, ``"longrope"`` stands for any table.
        reason: why the other values are not supported.
        mla: vLLM, SGLang: its YaRN is DeepSeek's, which names the temperature differently.
        usual: vLLM: its YaRN supports the default temperature only.
        stretched: vLLM: its YaRN computes the ramp from this many times the trained length.
        own_share: SGLang: it reads ``partial_rotary_factor`` from a field next to
            ``rope_parameters``.
        unrun: vLLM: why only its rotary classes are tested; ``""``: the engine itself runs.
        inside: mlx-lm: it reads ``rope_parameters`` instead of the older fields.
        name: llama.cpp: name of the architecture.
        interleaved: llama.cpp: it rotates neighboring columns where transformers rotates the halves
            of a head, so converters reorder the rows of the query and key weights.
        keys: llama.cpp: additional GGUF keys, without the architecture prefix, that no
            configuration field provides.
        sliding_base: llama.cpp: base by which it rotates sliding layers under every setting.
    """

    kinds: tuple[str, ...] = ("default", "linear", "yarn", "llama3", "longrope")
    reason: str = ""
    mla: bool = False
    usual: bool = False
    stretched: int = 1
    own_share: bool = False
    unrun: str = ""
    inside: bool = False
    name: str = ""
    interleaved: bool = False
    keys: Mapping[str, Any] = field(default_factory=dict)
    sliding_base: float | None = None


def _read(rows: list[dict[str, Any]]) -> dict[str, Family]:
    found = {}
    for row in rows:
        options = {k: v for k, v in row.items() if k not in ("families", "note")}
        if "kinds" in options:
            options["kinds"] = tuple(options["kinds"].split())
        found |= dict.fromkeys(row["families"].split(), Family(**options))
    return found


_DATA = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))
VLLM, SGLANG, LLAMA_CPP, MLX = (
    _read(_DATA[name]["rows"]) for name in ("vllm", "sglang", "llama.cpp", "mlx")
)
ENGINES: Mapping[str, Mapping[str, Family]] = {
    "vllm": VLLM,
    "sglang": SGLANG,
    "llama.cpp": LLAMA_CPP,
    "ollama": LLAMA_CPP,
    "mlx": MLX,
}


def everywhere() -> list[str]:
    """Families for which every engine computes YaRN, linear scaling and another base."""

    def runs(table: Mapping[str, Family], name: str) -> bool:
        return name in table and {"default", "linear", "yarn"} <= set(table[name].kinds)

    return [name for name in VLLM if all(runs(table, name) for table in ENGINES.values())]


def miniatures() -> list[str]:
    """Families that ``verify`` supports: those with a single, flat set of RoPE parameters."""
    found = [name for table in ENGINES.values() for name, f in table.items() if f.kinds]
    return [name for name in dict.fromkeys(found) if name not in _NO_MINIATURE]


_NO_MINIATURE = ("gemma3_text", "olmo3", "kimi_k2", "laguna", "llama4_text", "lfm2", "lfm2_moe")
_NO_MINIATURE += ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text")
_NO_MINIATURE += ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text")
