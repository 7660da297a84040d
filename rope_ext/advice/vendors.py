"""How the vendors of models extend them, or have extended them: published settings and sources.

Looked up in 2026. Configurations that transformers ships as a family's default are cited by file.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """YaRN settings that a vendor publishes for checkpoints that ship unscaled.

    Args:
        models: as the vendor names them.
        model_types: of the text model's configuration.
        configured: ``max_position_embeddings`` of the checkpoints it is for, tokens.
        trained: ``original_max_position_embeddings`` of the recipe, tokens.
        factor: the published one, and the largest.
        source: where it is published.
        note: what else the vendor says.
    """

    models: str
    model_types: tuple[str, ...]
    configured: tuple[int, ...]
    trained: int
    factor: float
    source: str
    note: str = ""


RECIPES = (
    Recipe(
        "Qwen2.5",
        ("qwen2",),
        (32768,),
        32768,
        4.0,
        "huggingface.co/Qwen/Qwen2.5-7B-Instruct",
        "It lowers quality on short prompts: choose the smallest factor that is enough.",
    ),
    Recipe(
        "Qwen3",
        ("qwen3", "qwen3_moe"),
        (32768, 40960),
        32768,
        4.0,
        "huggingface.co/Qwen/Qwen3-8B",
        "It lowers quality on short prompts: choose the smallest factor that is enough. "
        "max_position_embeddings=40960 is 32768 trained tokens and room for an answer.",
    ),
    Recipe(
        "Qwen3-Next",
        ("qwen3_next",),
        (262144,),
        262144,
        4.0,
        "huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct",
    ),
    Recipe(
        "Qwen3.5 and 3.6 (text)",
        ("qwen3_5_text", "qwen3_5_moe_text"),
        (262144,),
        262144,
        4.0,
        "huggingface.co/Qwen/Qwen3.5-9B; github.com/vllm-project/recipes/pull/398",
    ),
    Recipe(
        "Qwen3-VL",
        ("qwen3_vl_text", "qwen3_vl_moe_text"),
        (262144,),
        262144,
        3.0,
        "github.com/QwenLM/Qwen3-VL, README",
        "Factor 3 is for a million tokens of images and text together: positions of images grow "
        "more slowly than their tokens.",
    ),
)


@dataclass(frozen=True)
class Shipped:
    """The scaling that a family's published checkpoints already have.

    Args:
        models: as the vendor names them.
        model_type: of the text model's configuration.
        rope_type: in ``rope_parameters``.
        settings: in words, with lengths in tokens.
        source: where they are published.
    """

    models: str
    model_type: str
    rope_type: str
    settings: str
    source: str


SHIPPED = (
    Shipped(
        "gpt-oss",
        "gpt_oss",
        "yarn",
        "yarn, factor 32 on 4096, truncate=False",
        "transformers, gpt_oss/configuration_gpt_oss.py",
    ),
    Shipped(
        "Llama 3.1 to 3.3",
        "llama",
        "llama3",
        "llama3, factor 8 on 8192 (3.2: 32)",
        "huggingface.co/meta-llama/Llama-3.1-8B",
    ),
    Shipped(
        "Phi-3 and Phi-4-mini, 128k",
        "phi3",
        "longrope",
        "longrope tables, 4096 to 131072",
        "arXiv 2404.14219, section 2",
    ),
    Shipped(
        "Ministral 3",
        "ministral3",
        "yarn",
        "yarn, factor 16 on 16384, queries by temperature='llama4' with beta 0.1",
        "transformers, ministral3/configuration_ministral3.py",
    ),
    Shipped(
        "DeepSeek V3 and R1",
        "deepseek_v3",
        "yarn",
        "yarn, factor 40 on 4096, mscale 1",
        "arXiv 2412.19437, section 4.3",
    ),
    Shipped(
        "Kimi K2",
        "kimi_k2",
        "yarn",
        "yarn, factor 32 on 4096 (0905: 64), beta_fast 1",
        "huggingface.co/moonshotai/Kimi-K2-Instruct",
    ),
)


def recipe_for(model_type: str, configured: int) -> Recipe | None:
    """The vendor's recipe for an unscaled checkpoint of that family and length; None: none."""
    return next(
        (r for r in RECIPES if model_type in r.model_types and configured in r.configured), None
    )


def shipped_with(model_type: str, rope_type: str) -> Shipped | None:
    """The vendor's own scaling of such a checkpoint; None: not in the table."""
    return next(
        (s for s in SHIPPED if (s.model_type, s.rope_type) == (model_type, rope_type)), None
    )
