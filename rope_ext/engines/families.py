"""What each engine supports for each model family.

Keys are the ``model_type`` of the language model. An entry lists the values of ``rope_type`` that
the engine computes as transformers does, and the reason for the others. ``export``, ``verify``, the
tests and the table in the documentation all read these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

ALL = ("default", "linear", "yarn", "llama3", "longrope")
BASE = ("default",)


@dataclass(frozen=True)
class Family:
    """How an engine reads the RoPE parameters of a family.

    Args:
        kinds: values of ``rope_type`` that it computes as transformers does; ``"default"`` means
            that the base may differ.
        reason: why the other values are not supported.
    """

    kinds: tuple[str, ...] = ALL
    reason: str = ""


@dataclass(frozen=True)
class ServedFamily(Family):
    """A family in vLLM or SGLang.

    Args:
        mla: its YaRN is DeepSeek's, which names the temperature differently.
        usual: its YaRN supports the default temperature only.
        stretched: its YaRN computes the ramp from this many times the trained length.
        own_share: it reads ``partial_rotary_factor`` from a field next to ``rope_parameters``.
        unrun: why only the engine's rotary classes are tested; empty if the engine itself runs.
    """

    mla: bool = False
    usual: bool = False
    stretched: int = 1
    own_share: bool = False
    unrun: str = ""


@dataclass(frozen=True)
class MLXFamily(Family):
    """A family in mlx-lm.

    Args:
        inside: it reads ``rope_parameters`` instead of the older fields.
    """

    inside: bool = False


@dataclass(frozen=True)
class Architecture(Family):
    """A family in llama.cpp; ``"longrope"`` stands for any table of frequencies.

    Args:
        name: name of the architecture.
        interleaved: it rotates neighboring columns where transformers rotates the halves of a head,
            so converters reorder the rows of the query and key weights.
        keys: additional GGUF keys, without the architecture prefix, that no configuration field
            provides.
        sliding_base: base by which it rotates sliding layers, unscaled under every setting.
    """

    name: str = ""
    interleaved: bool = False
    keys: Mapping[str, Any] = field(default_factory=dict)
    sliding_base: float | None = None


def _served(*names: str, **options: Any) -> dict[str, ServedFamily]:
    return dict.fromkeys(names, ServedFamily(**options))


_AXES = ServedFamily(
    ("default", "yarn"),
    "its class takes one position per token, but this family has three",
)
_IMAGES = replace(_AXES, unrun="its model file imports torchvision, whose wheels need CUDA")
_MLA = ServedFamily(
    ("default", "yarn"), "it treats every scaling of this family as DeepSeek's YaRN", mla=True
)

_PROPORTIONAL = (
    "its layers without a window rotate by rope_type 'proportional', beside which transformers "
    "saves no scaling"
)
_UNROTATED = "its layers do not rotate, so there is nothing to scale"
VLLM: Mapping[str, ServedFamily] = {
    **_served("llama", "mistral", "mixtral", "ministral3", "qwen2", "qwen3"),
    **_served("qwen2_moe", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
    **_served("granite", "granitemoe", "glm4", "glm4_moe", "olmoe", "cohere", "stablelm"),
    **_served("ernie4_5", "minimax_m2", "nemotron", "apertus", "phi3", "exaone4"),
    **_served("llama4_text"),
    **_served("lfm2", "lfm2_moe", unrun="on CPUs, its convolutions differ from transformers'"),
    **_served("laguna", unrun="its router is not implemented for CPUs"),
    **_served("qwen3_next", unrun="on CPUs, its linear attention takes bfloat16 only"),
    **_served("arcee", "hunyuan_v1_dense", "olmo2", "olmo3", "seed_oss"),
    **_served("smollm3", "starcoder2"),
    # Its YaRN includes the room it reserves for long videos in the trained length.
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), replace(_IMAGES, stretched=4)),
    **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text"), _IMAGES),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"), _IMAGES),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _MLA),
    "kimi_k2": replace(_MLA, unrun="it is deepseek_v3 with another name"),
    "gpt_oss": ServedFamily(
        ("yarn",),
        "it builds YaRN for this family and ignores rope_type (models/gpt_oss.py)",
        usual=True,
    ),
    "gemma4_text": ServedFamily((), _PROPORTIONAL),
    "kimi_linear": ServedFamily((), _UNROTATED),
}
"""Run in vLLM 0.32.0 on a CPU, except ``unrun``: according to vLLM 0.33.0."""

SGLANG: Mapping[str, ServedFamily] = {
    **_served("llama", "mistral", "ministral3", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"),
    **_served("granite", "glm4", "glm4_moe", "olmo2", "olmoe", "cohere", "ernie4_5", "gpt_oss"),
    **_served("minimax_m2", "arcee", "apertus", "hunyuan_v1_dense", "lfm2", "lfm2_moe"),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), _AXES),
    **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text"), _AXES),
    # models/qwen3_5.py, lines 1307 to 1325
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), replace(_AXES, own_share=True)),
    "llama4_text": ServedFamily(
        ("linear", "yarn", "llama3", "longrope"), "models/llama4.py passes int(base) to get_rope"
    ),
    "qwen4_exp_text": replace(_AXES, own_share=True),  # models/qwen4_exp.py inherits it
    "laguna": ServedFamily(
        (), "configs/laguna.py reads rope_parameters before overrides are applied"
    ),
    "gemma4_text": ServedFamily((), _PROPORTIONAL),
    "kimi_linear": ServedFamily((), _UNROTATED),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _MLA),
    "gemma3_text": ServedFamily(
        BASE, "it reads only the base of this family (models/gemma3_causal.py)"
    ),
    "gemma": ServedFamily(BASE, "models/gemma.py passes only the base to get_rope"),
    "gemma2": ServedFamily(BASE, "models/gemma2.py passes only the base to get_rope"),
    "stablelm": ServedFamily(BASE, "models/stablelm.py passes only the base to get_rope"),
    "mixtral": ServedFamily((), "models/mixtral.py passes only int(base) to get_rope"),
    "granitemoe": ServedFamily((), "models/granitemoe.py passes only int(base) to get_rope"),
    "starcoder2": ServedFamily((), "models/starcoder2.py passes only int(base) to get_rope"),
    "olmo3": ServedFamily(
        (), "models/olmo2.py looks for the base outside the parameters of each layer type"
    ),
    "exaone4": ServedFamily((), "models/exaone4.py reads the base from rope_theta only"),
    # models/qwen3_next.py, line 640
    "qwen3_next": ServedFamily((), "it reads the base of this family from rope_theta only"),
    **dict.fromkeys(
        ("smollm3", "seed_oss", "nemotron", "phi3"),
        ServedFamily((), "it does not implement this family"),
    ),
}
"""According to SGLang 0.5.23, ``srt/models``."""


def _plain(file: str) -> MLXFamily:
    return MLXFamily(BASE, f"models/{file}.py passes only the base to nn.RoPE")


def _unread(file: str, field_name: str) -> MLXFamily:
    reason = f"models/{file}.py requires {field_name}, which transformers does not save"
    return MLXFamily((), reason)


_NEIGHBOURS = (
    "with a table, it rotates halves, but this family rotates neighboring columns (rope_utils.py)"
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
    "deepseek_v2": MLXFamily(("yarn",), "models/deepseek_v2.py builds YaRN and ignores the type"),
    "nemotron": MLXFamily(("default", "linear"), "models/nemotron.py supports 'linear' only"),
    "mixtral": _plain("mixtral"),
    "qwen2_moe": _plain("qwen2_moe"),
    "starcoder2": _plain("starcoder2"),
    "cohere": _plain("cohere"),
    "gemma": _plain("gemma"),
    "ernie4_5": MLXFamily(BASE, "models/ernie4_5.py passes no scaling to initialize_rope"),
    "hunyuan_v1_dense": MLXFamily(BASE, "models/hunyuan_v1_dense.py uses its own scaling (alpha)"),
    "phi3": MLXFamily(
        BASE,
        "models/phi3.py takes a table's temperature from the configuration's own "
        "original_max_position_embeddings, which transformers needs",
    ),
    "gemma2": MLXFamily((), "models/gemma2.py does not implement the sliding window"),
    "qwen3_moe": _unread("qwen3_moe", "num_experts"),
    "glm4": _unread("glm4", "partial_rotary_factor"),
    "glm4_moe": _unread("glm4_moe", "partial_rotary_factor"),
    "stablelm": _unread("stablelm", "partial_rotary_factor"),
    "qwen3_next": _unread("qwen3_next", "partial_rotary_factor"),
    "minimax_m2": _unread("minimax", "rotary_dim"),
    "exaone4": _unread("exaone4", "head_dim"),
    "apertus": _unread("apertus", "qk_norm"),
    "gpt_oss": MLXFamily(
        (), "models/gpt_oss.py only reads experts named as in the released checkpoints"
    ),
    **dict.fromkeys(
        ("arcee", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"),
        MLXFamily((), "it does not implement this family"),
    ),
    "lfm2": MLXFamily((), "models/lfm2.py passes only the base to nn.RoPE"),
    "lfm2_moe": MLXFamily((), "models/lfm2_moe.py passes only the base to nn.RoPE"),
    "laguna": MLXFamily((), "models with several rotary embeddings have not been tested"),
    "gemma4_text": MLXFamily((), _PROPORTIONAL),
    "kimi_linear": MLXFamily((), _UNROTATED),
}
"""According to mlx-lm 0.32.2, read and run."""


_LISTED = ("default", "linear", "yarn")


def _without_table(name: str, **more: Any) -> Architecture:
    reason = f"it does not read tables of frequencies for the architecture {name!r}"
    return Architecture(_LISTED, reason, name=name, **more)


LLAMA_CPP: Mapping[str, Architecture] = {
    "llama": Architecture(name="llama", interleaved=True),
    "mistral": Architecture(name="llama", interleaved=True),
    "mixtral": Architecture(name="llama", interleaved=True),
    "granite": Architecture(name="granite", interleaved=True),
    "arcee": Architecture(name="arcee", interleaved=True),
    "qwen2": _without_table("qwen2"),
    "qwen3": _without_table("qwen3"),
    "qwen2_moe": _without_table("qwen2moe"),
    "qwen3_moe": _without_table("qwen3moe"),
    "olmo2": _without_table("olmo2"),
    "granitemoe": Architecture(name="granitemoe", interleaved=True),
    "glm4_moe": _without_table(
        "glm4moe", keys={"expert_gating_func": 2, "expert_weights_norm": True}
    ),
    "minimax_m2": _without_table("minimax-m2", keys={"expert_gating_func": 2}),
    "smollm3": _without_table("smollm3", interleaved=True),
    "glm4": _without_table("glm4"),
    "starcoder2": _without_table("starcoder2"),
    "stablelm": _without_table("stablelm"),
    "cohere": _without_table("command-r"),
    "seed_oss": _without_table("seed_oss"),
    "ernie4_5": _without_table("ernie4_5"),
    "hunyuan_v1_dense": _without_table("hunyuan-dense"),
    "phi3": _without_table("phi3"),
    "gemma3_text": _without_table("gemma3", sliding_base=10000.0),
    **dict.fromkeys(
        ("lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text"),
        Architecture((), "no GGUF file of this family can be made here to run it"),
    ),
    **dict.fromkeys(
        ("laguna", "qwen4_exp_text"), Architecture((), "the gguf library does not know this family")
    ),
    "gemma4_text": Architecture((), _PROPORTIONAL),
    "kimi_linear": Architecture((), _UNROTATED),
}
"""According to the llama.cpp of xllamacpp 2026.10.11549, run. For other architectures its loader
rejects files with a table (``wrong number of tensors``)."""

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
        return name in table and set(_LISTED) <= set(table[name].kinds)

    return [name for name in VLLM if all(runs(table, name) for table in ENGINES.values())]


def miniatures() -> list[str]:
    """Families that ``verify`` supports: those with a single, flat set of RoPE parameters."""
    found = [name for table in ENGINES.values() for name, f in table.items() if f.kinds]
    return [name for name in dict.fromkeys(found) if name not in _NO_MINIATURE]


_NO_MINIATURE = ("gemma3_text", "olmo3", "kimi_k2", "laguna", "llama4_text", "lfm2", "lfm2_moe")
_NO_MINIATURE += ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text")
_NO_MINIATURE += ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text")
