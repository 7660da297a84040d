"""Every causal-LM and image-text family: what patch promises holds, or patch refuses.

The exceptions are written down here, so that a family cannot turn from supported to refused, or
lose a check, without a test that fails under its name.
"""

from __future__ import annotations

import functools

import pytest

import rope_ext
from rope_ext.rotary.sites import text_decoder
from tests.families import coverage
from tests.families.checks import (
    POSITIONS,
    POSITIONS_REFUSED,
    POSITIONS_WINDOWED,
    changed,
    snapshot,
)
from tests.families.images import image_token
from tests.families.zoo import image_text_types, model_types, tiny_model

REFUSED = {
    "codegen": rope_ext.NoRopeError,  # a fixed table of sines
    "evolla": rope_ext.UnsupportedModelError,  # its encoder of proteins rotates within its decoder
    "gptj": rope_ext.NoRopeError,
    "phimoe": rope_ext.UnsupportedModelError,  # frequencies from the configuration, every forward
    "roformer": rope_ext.NoRopeError,
}
WINDOW_ONLY = {
    "beam",
    "cohere_compass",
    "cohere_compass_text",
    "recurrent_gemma",
    "unlimited_ocr",
}
WINDOW_OFF = {
    "idefics2",
    "ministral",
    "mistral",
    "mistral3",
}  # supported without their window, refused with it
USED = {  # by the most people, or one of each kind of rotation, layers and verdict
    "cohere_compass_text",
    "deepseek_v3",
    "gemma3_text",
    "gptj",
    "llama",
    "mistral3",
    "qwen3",
    "qwen3_vl",
}
NOT_BUILDABLE = {
    *("gemma3n", "gemma4_assistant", "gemma4_unified_assistant"),
    *("deepseek_ocr2", "diffusion_gemma", "emu3+images", "fast_vlm", "granite4_vision", "idefics"),
    *("inkling2", "mistral4", "muse_spark", "nemotron_h_omni", "perception_lm", "pi0"),
    *("shieldgemma2", "t5gemma2"),
}

# Families whose attention goes its own ways, or turns nothing but its sliding layers.
NO_POSITIONS = {
    "axk2",  # an indexer chooses keys and uses the same rotation
    "blt",
    "deepseek_v32",
    "deepseek_v4",
    "doge",
    "dots3_note",
    "dots3_note+images",
    "dots3_note_text",
    "falcon",
    "glm_moe_dsa",
    "gpt_neox_japanese",
    "hy_v4",
    "mistral_large4",
    "qwen4_exp",
    "qwen4_exp+images",
    "qwen4_exp_text",
}
WINDOWED_POSITIONS = {
    "afmoe",
    "aya_vision",
    "cohere2",
    "cohere2_moe",
    "cohere2_vision",
    "exaone4",
    "exaone4_5",
    "exaone_moe",
    "flint",
    "kolibri1",
    "llama4",
    "llama4+images",
    "llama4_text",
    "muse_glimmer",
} | WINDOW_ONLY

# Families of which transformers builds no yarn, no llama3, ..., to compare with.
PROPORTIONAL = {"gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text", "lfm3", "lfm3_vl"}
ONLY_LONGROPE = {"phi3", "phi4_multimodal"}
ONLY_DEFAULT = {"cosmos3_edge", "ernie4_5_vl_moe", "recurrent_gemma"}
NO_CACHE = {"blt", "recurrent_gemma"}
PATCH_AGAIN = (PROPORTIONAL - {"lfm3", "lfm3_vl"}) | ONLY_DEFAULT | {"blt"}

# Families whose pixels are laid out in ways that the tests do not know.
TEXT_ALONE = {
    *("chameleon", "deepseek_vl_hybrid", "fuyu", "gemma4", "gemma4_unified", "granite_docling"),
    *("mllama+images", "molmo2", "muse_glimmer", "unlimited_ocr"),
}
# With an image their positions have three axes, or a prompt is read in both directions.
SEVERAL_AXES = {
    *("cohere_compass", "cosmos3_edge", "cosmos3_omni", "ernie4_5_vl_moe", "glm46v", "glm4v"),
    *("glm4v_moe", "glm_ocr", "glmga", "hunyuan_vl", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl"),
    *("qwen3_5+images", "qwen3_5_moe+images", "qwen3_vl", "qwen3_vl_moe"),
}
BOTH_DIRECTIONS = {"paligemma"}
NO_GENERATION = {"qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"}  # a token id that is not there

family = functools.cache(coverage.check_family)


def expected(model_type: str) -> str:
    if model_type in REFUSED:
        return coverage.REFUSED
    if model_type in WINDOW_ONLY:
        return coverage.WINDOW_ONLY
    decoder = text_decoder(tiny_model(model_type))
    if any(name.endswith("inv_freq") for name, _ in decoder.named_buffers()):
        return coverage.SUPPORTED
    return coverage.NO_ROPE


def required(model_type: str) -> set[str]:
    """The checks that must have been made and passed."""
    names = {"repeatable", "changes", "unpatch yarn", "unpatch dynamic_ntk"}
    native = {"yarn", "linear", "llama3", "longrope"}
    if model_type in PROPORTIONAL:
        native = {"linear"}
    elif model_type in ONLY_LONGROPE:
        native = {"longrope"}
    elif model_type in ONLY_DEFAULT:
        native = set()
    names |= {f"native {rope_type}" for rope_type in native}
    if model_type not in NO_CACHE:
        names |= {"cached yarn", "cached dynamic_ntk"}
    if model_type not in NO_POSITIONS:
        names |= {"positions unchanged", "positions changed"}
        if model_type not in NO_CACHE:
            names |= {"cached rerope", "cached self_extend", "cached dual_chunk"}
        if model_type not in WINDOWED_POSITIONS - WINDOW_ONLY:
            names |= {"unpatch rerope"}
    model = tiny_model(model_type)
    if image_token(model) is not None and model_type not in TEXT_ALONE:
        names |= {"image changes", *({"image native yarn"} if "yarn" in native else ())}
        makes = {"image generate yarn"}
        if model_type not in NO_POSITIONS | SEVERAL_AXES:
            names |= {"image positions unchanged"}
            makes |= {"image generate rerope"} if model_type not in BOTH_DIRECTIONS else set()
        names |= makes if model_type not in NO_GENERATION else set()
    config = model.config.get_text_config(decoder=True)
    sets = {name for name, part in (config.rope_parameters or {}).items() if isinstance(part, dict)}
    kinds = [kind for kind in getattr(config, "layer_types", None) or () if "attention" in kind]
    limited = {"sliding" in kind or "chunked" in kind for kind in kinds}
    if model_type not in WINDOW_ONLY:
        names |= {"sliding untouched"} if any("sliding" in name for name in sets) else set()
        names |= {"sliding kept"} if not sets and len(limited) == 2 else set()
    return names | {"reloaded and patched again" if model_type in PATCH_AGAIN else "reloaded"}


def by_use() -> list[object]:
    """All families; those that fewer people use are for the slow tests."""
    every = [*model_types(), *image_text_types()]
    assert set(every) >= USED
    slow = [pytest.mark.slow]
    return [pytest.param(name, marks=[] if name in USED else slow) for name in every]


@pytest.mark.parametrize("model_type", by_use())
def test_family(model_type: str) -> None:
    result = family(model_type)
    if result.verdict == coverage.NOT_BUILDABLE:
        assert model_type in NOT_BUILDABLE, result.reason
        return
    assert result.verdict == expected(model_type), result.reason
    if result.verdict in (coverage.SUPPORTED, coverage.WINDOW_ONLY):
        assert required(model_type) <= {check.name for check in result.checks if check.passed}
        assert [check for check in result.checks if check.passed is False] == []
        assert (coverage.TEXT_ALONE in result.remarks) == (model_type in TEXT_ALONE)
        windowed = {True: POSITIONS_WINDOWED, False: POSITIONS}[model_type in WINDOWED_POSITIONS]
        accepted = POSITIONS_REFUSED if model_type in NO_POSITIONS else windowed
        assert result.positions == accepted
    assert (result.saves == "patch again") == (model_type in PATCH_AGAIN)


@pytest.mark.parametrize(
    "model_type", sorted({*REFUSED, *WINDOW_ONLY, *WINDOW_OFF, "bart", "jamba"})
)
def test_refused_by_default_and_left_alone(model_type: str) -> None:
    model = tiny_model(model_type)
    before = snapshot(model)
    error = REFUSED.get(model_type, rope_ext.UnsupportedModelError)
    if model_type in ("bart", "jamba"):
        error = rope_ext.NoRopeError
    with pytest.raises(error):
        rope_ext.patch(model, "yarn", factor=4)
    assert changed(before, snapshot(model)) == set()
