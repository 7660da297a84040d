"""What each engine makes of each family: the only place that says so.

Keys are the ``model_type`` of the language model. An entry names the ``rope_type`` that the engine
computes as transformers does, and what in the engine's code stands against the others. ``export``,
``verify``, the tests and the table in the documentation read these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

ALL = ("default", "linear", "yarn", "llama3", "longrope")
BASE = ("default",)


@dataclass(frozen=True)
class Family:
    """What an engine makes of the RoPE parameters of a family.

    Args:
        kinds: ``rope_type`` that it computes as transformers does; ``"default"`` is another base.
        reason: what in its code stands against the others.
    """

    kinds: tuple[str, ...] = ALL
    reason: str = ""


@dataclass(frozen=True)
class ServedFamily(Family):
    """A family in vLLM or SGLang.

    Args:
        mla: its YaRN is DeepSeek's, which has other names for the temperature.
        usual: its YaRN has the usual temperature only.
        stretched: its YaRN takes the ends of the ramp from this many times the trained length.
        own_share: it reads ``partial_rotary_factor`` as a field beside ``rope_parameters``.
        backend: the model is transformers' own, with its rotary module.
    """

    mla: bool = False
    usual: bool = False
    stretched: int = 1
    own_share: bool = False
    backend: bool = False


@dataclass(frozen=True)
class MLXFamily(Family):
    """A family in mlx-lm.

    Args:
        inside: it reads ``rope_parameters`` and not the older names.
    """

    inside: bool = False


@dataclass(frozen=True)
class Architecture(Family):
    """A family in llama.cpp; ``"longrope"`` stands for any table of frequencies.

    Args:
        name: of the architecture.
        neighbours: it rotates neighbouring columns, where transformers rotates the halves of a
            head, so that a converter reorders the rows of queries and keys.
        keys: of a file, without the architecture, that no field of a configuration gives.
    """

    name: str = ""
    neighbours: bool = False
    keys: Mapping[str, Any] = field(default_factory=dict)


def _served(*names: str, **options: Any) -> dict[str, ServedFamily]:
    return dict.fromkeys(names, ServedFamily(**options))


_AXES = ServedFamily(
    ("default", "yarn"),
    "the class that computes it takes one position for each token, and this family has three",
)
_MLA = ServedFamily(
    ("default", "yarn"), "it takes every scaling of this family for DeepSeek's YaRN", mla=True
)

VLLM: Mapping[str, ServedFamily] = {
    **_served("llama", "mistral", "mixtral", "ministral3", "qwen2", "qwen3"),
    **_served("qwen2_moe", "qwen3_moe", "qwen3_next", "gemma", "gemma2", "gemma3_text"),
    **_served("granite", "granitemoe", "glm4", "glm4_moe", "olmoe", "cohere", "stablelm"),
    **_served("ernie4_5", "minimax_m2", "nemotron", "apertus", "phi3", "exaone4"),
    # model_executor/models/registry.py: TransformersForCausalLM
    **_served("arcee", "hunyuan_v1_dense", "olmo2", "olmo3", "seed_oss", backend=True),
    **_served("smollm3", "starcoder2", backend=True),
    # Room for long videos, which its YaRN takes for the trained length.
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), replace(_AXES, stretched=4)),
    **dict.fromkeys(("qwen3_vl_text", "qwen3_5_text"), _AXES),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _MLA),
    "gpt_oss": ServedFamily(
        ("yarn",),
        "it builds YaRN for this family, whatever rope_type says (models/gpt_oss.py)",
        usual=True,
    ),
}
"""Read in vLLM 0.33.0, ``model_executor/models``."""

SGLANG: Mapping[str, ServedFamily] = {
    **_served("llama", "mistral", "ministral3", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"),
    **_served("granite", "glm4", "glm4_moe", "olmo2", "olmoe", "cohere", "ernie4_5", "gpt_oss"),
    **_served("minimax_m2", "arcee", "apertus", "hunyuan_v1_dense"),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"), _AXES),
    # models/qwen3_5.py, lines 1307 to 1325
    "qwen3_5_text": replace(_AXES, own_share=True),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _MLA),
    "gemma3_text": ServedFamily(
        BASE, "it reads the base of this family and nothing else (models/gemma3_causal.py)"
    ),
    "gemma": ServedFamily(BASE, "models/gemma.py passes the base to get_rope, and no scaling"),
    "gemma2": ServedFamily(BASE, "models/gemma2.py passes the base to get_rope, and no scaling"),
    "stablelm": ServedFamily(
        BASE, "models/stablelm.py passes the base to get_rope, and no scaling"
    ),
    "mixtral": ServedFamily((), "models/mixtral.py passes int(base) to get_rope, and no scaling"),
    "granitemoe": ServedFamily(
        (), "models/granitemoe.py passes int(base) to get_rope, and no scaling"
    ),
    "starcoder2": ServedFamily(
        (), "models/starcoder2.py passes int(base) to get_rope, and no scaling"
    ),
    "olmo3": ServedFamily(
        (), "models/olmo2.py looks for the base beside the parameters of the kinds of layers"
    ),
    "exaone4": ServedFamily((), "models/exaone4.py reads the base from rope_theta alone"),
    # models/qwen3_next.py, line 640
    "qwen3_next": ServedFamily((), "it reads the base of this family from rope_theta alone"),
    **dict.fromkeys(
        ("smollm3", "seed_oss", "nemotron", "phi3"),
        ServedFamily((), "it has no model file of this family"),
    ),
}
"""Read in SGLang 0.5.23, ``srt/models``."""


def _plain(file: str) -> MLXFamily:
    return MLXFamily(BASE, f"models/{file}.py passes the base to nn.RoPE, and no scaling")


def _unread(file: str, field_name: str) -> MLXFamily:
    reason = f"models/{file}.py wants {field_name}, which transformers does not save"
    return MLXFamily((), reason)


_NEIGHBOURS = (
    "it rotates halves under a table, where this family rotates neighbours (rope_utils.py)"
)
MLX: Mapping[str, MLXFamily] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "olmo2", "olmoe", "granite", "granitemoe"),
        MLXFamily(),
    ),
    **dict.fromkeys(("smollm3", "seed_oss", "dots1"), MLXFamily()),
    "ministral3": MLXFamily(
        ("default", "linear", "yarn", "llama3"),
        "models/ministral3.py scales queries by the length that sets a table's temperature",
        inside=True,
    ),
    "deepseek_v3": MLXFamily(("default", "linear", "yarn", "llama3"), _NEIGHBOURS),
    "glm4_moe_lite": MLXFamily(("default", "linear", "yarn", "llama3"), _NEIGHBOURS),
    "deepseek_v2": MLXFamily(("yarn",), "models/deepseek_v2.py builds YaRN, whatever type says"),
    "nemotron": MLXFamily(("default", "linear"), "models/nemotron.py takes 'linear' only"),
    "mixtral": _plain("mixtral"),
    "qwen2_moe": _plain("qwen2_moe"),
    "starcoder2": _plain("starcoder2"),
    "cohere": _plain("cohere"),
    "gemma": _plain("gemma"),
    "ernie4_5": MLXFamily(BASE, "models/ernie4_5.py passes no scaling to initialize_rope"),
    "hunyuan_v1_dense": MLXFamily(
        BASE, "models/hunyuan_v1_dense.py has a scaling of its own (alpha)"
    ),
    "phi3": MLXFamily(
        BASE,
        "models/phi3.py takes a table's temperature from the configuration's own "
        "original_max_position_embeddings, which transformers needs",
    ),
    "gemma2": MLXFamily((), "models/gemma2.py has no sliding window"),
    "qwen3_moe": _unread("qwen3_moe", "num_experts"),
    "glm4": _unread("glm4", "partial_rotary_factor"),
    "glm4_moe": _unread("glm4_moe", "partial_rotary_factor"),
    "stablelm": _unread("stablelm", "partial_rotary_factor"),
    "qwen3_next": _unread("qwen3_next", "partial_rotary_factor"),
    "minimax_m2": _unread("minimax", "rotary_dim"),
    "exaone4": _unread("exaone4", "head_dim"),
    "apertus": _unread("apertus", "qk_norm"),
    "gpt_oss": MLXFamily(
        (), "models/gpt_oss.py reads the experts in the names of the released checkpoints only"
    ),
    **dict.fromkeys(("arcee", "qwen3_5_text"), MLXFamily((), "it has no model file of this name")),
}
"""Read and run in mlx-lm 0.32.2."""


_LISTED = ("default", "linear", "yarn")


def _without_table(name: str, **more: Any) -> Architecture:
    reason = f"these frequencies are a table, which it does not read for the architecture {name!r}"
    return Architecture(_LISTED, reason, name=name, **more)


LLAMA_CPP: Mapping[str, Architecture] = {
    "llama": Architecture(name="llama", neighbours=True),
    "mistral": Architecture(name="llama", neighbours=True),
    "mixtral": Architecture(name="llama", neighbours=True),
    "granite": Architecture(name="granite", neighbours=True),
    "arcee": Architecture(name="arcee", neighbours=True),
    "qwen2": _without_table("qwen2"),
    "qwen3": _without_table("qwen3"),
    "qwen2_moe": _without_table("qwen2moe"),
    "qwen3_moe": _without_table("qwen3moe"),
    "olmo2": _without_table("olmo2"),
    "granitemoe": Architecture(name="granitemoe", neighbours=True),
    "glm4_moe": _without_table(
        "glm4moe", keys={"expert_gating_func": 2, "expert_weights_norm": True}
    ),
    "minimax_m2": _without_table("minimax-m2", keys={"expert_gating_func": 2}),
    "smollm3": _without_table("smollm3", neighbours=True),
    "glm4": _without_table("glm4"),
    "starcoder2": _without_table("starcoder2"),
    "stablelm": _without_table("stablelm"),
    "cohere": _without_table("command-r"),
    "seed_oss": _without_table("seed_oss"),
    "ernie4_5": _without_table("ernie4_5"),
    "hunyuan_v1_dense": _without_table("hunyuan-dense"),
    "phi3": _without_table("phi3"),
}
"""Run in the llama.cpp of xllamacpp 2026.10.11549: files that have a table of another architecture
are refused by its loader (``wrong number of tensors``)."""

ENGINES: Mapping[str, Mapping[str, Family]] = {
    "vllm": VLLM,
    "sglang": SGLANG,
    "llama.cpp": LLAMA_CPP,
    "ollama": LLAMA_CPP,
    "mlx": MLX,
}


def everywhere() -> list[str]:
    """Families of which every engine computes YaRN, linear scaling and another base."""

    def runs(table: Mapping[str, Family], name: str) -> bool:
        return name in table and set(_LISTED) <= set(table[name].kinds)

    return [name for name in VLLM if all(runs(table, name) for table in ENGINES.values())]


def miniatures() -> list[str]:
    """Families of which ``verify`` makes a miniature: those with one flat set of parameters."""
    found = [name for table in ENGINES.values() for name, f in table.items() if f.kinds]
    return [name for name in dict.fromkeys(found) if name not in _NO_MINIATURE]


_NO_MINIATURE = ("gemma3_text", "olmo3", "qwen3_next", "qwen3_5_text")
_NO_MINIATURE += ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text")
