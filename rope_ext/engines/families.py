"""Loads ``families.json``: what each engine supports for each ``model_type``."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Family:
    """How an engine interprets a family's RoPE parameters."""

    kinds: tuple[str, ...] = ("default", "linear", "yarn", "llama3", "longrope")
    """Values of ``rope_type`` that the engine computes like transformers; ``"default"`` means that
    the base may differ. In llama.cpp, ``"longrope"`` stands for any table."""
    reason: str = ""  # why the other values are not supported
    mla: bool = False  # its YaRN is DeepSeek's, with other option names
    usual: bool = False  # vLLM: its YaRN supports the default temperature only
    stretched: int = 1  # vLLM: its YaRN computes the ramp for this multiple of the trained length
    own_share: bool = False  # SGLang: it reads partial_rotary_factor outside rope_parameters
    unrun: str = ""  # vLLM: why only its rotary classes are tested
    inside: bool = False  # mlx-lm: it reads rope_parameters instead of the older fields
    name: str = ""  # llama.cpp: name of the architecture
    interleaved: bool = False
    """llama.cpp: it rotates neighboring columns, and transformers the halves of a head, so
    converters reorder the rows of query and key weights."""
    by_file: bool = False  # llama.cpp: sliding layers follow keys, but ignore flags
    centered: bool = False  # llama.cpp: norm weights are stored minus 1
    keys: Mapping[str, Any] = field(default_factory=dict)
    """llama.cpp: further GGUF keys; a string names a configuration field."""
    sliding_base: float | None = None  # llama.cpp: fixed base of sliding layers


def _read(rows: list[dict[str, Any]]) -> dict[str, Family]:
    found = {}
    for row in rows:
        options = {k: v for k, v in row.items() if k not in ("families", "note")}
        if "kinds" in options:
            options["kinds"] = tuple(options["kinds"].split())
        found |= dict.fromkeys(row["families"].split(), Family(**options))
    return found


_DATA = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))
ENGINES = {name: _read(table["rows"]) for name, table in _DATA.items()}
VLLM, SGLANG, LLAMA_CPP, MLX = (ENGINES[n] for n in ("vllm", "sglang", "llama.cpp", "mlx"))
ENGINES["ollama"] = LLAMA_CPP
_NO_MINIATURE = (
    *("falcon_h1", "gemma3_text", "olmo3", "kimi_k2", "laguna", "llama4_text", "qwen4_exp_text"),
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"),
)


def miniatures() -> list[str]:
    """Families that ``verify`` supports: those with a single, flat set of RoPE parameters."""
    found = [name for table in ENGINES.values() for name, f in table.items() if f.kinds]
    return [name for name in dict.fromkeys(found) if name not in _NO_MINIATURE]
