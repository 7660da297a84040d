"""What vLLM and SGLang have in common: fields of the configuration, given on the command line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rope_ext.engines.base import (
    ARCHITECTURES,
    Refusal,
    is_nested,
    refuse_adapting,
    refuse_positions,
)
from rope_ext.methods.temperature import yarn_factor
from rope_ext.patching import Patch
from rope_ext.rotary.sites import text_config

_ALL = ("default", "linear", "yarn", "llama3", "longrope")


@dataclass(frozen=True)
class Family:
    """What an engine makes of the ``rope_parameters`` of a family.

    Args:
        kinds: ``rope_type`` of which it computes the same as transformers.
        reason: why not of the others.
        mla: its YaRN is DeepSeek's, which has other names for the temperature.
        usual: its YaRN has the usual temperature only.
        stretched: its YaRN takes the ends of the ramp from this many times the trained length.
        own_share: it reads ``partial_rotary_factor`` as a field beside ``rope_parameters``.
    """

    kinds: tuple[str, ...] = _ALL
    reason: str = ""
    mla: bool = False
    usual: bool = False
    stretched: int = 1
    own_share: bool = False


_AXES = Family(
    ("default", "yarn"),
    "the class that computes it takes one position for each token, and this family has three",
)
_MLA = Family(
    ("default", "yarn"), "it takes every scaling of this family for DeepSeek's YaRN", mla=True
)
_SHARED = {
    **dict.fromkeys(ARCHITECTURES, Family()),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"), _AXES),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _MLA),
}
FAMILIES: Mapping[str, Mapping[str, Family]] = {
    "vllm": {
        **_SHARED,
        # Room for long videos, which its YaRN takes for the trained length.
        **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), replace(_AXES, stretched=4)),
        "gemma3_text": Family(),
        "gpt_oss": Family(
            ("yarn",), "it builds YaRN for this family, whatever rope_type says", usual=True
        ),
        "qwen3_next": Family(),
        "qwen3_5_text": _AXES,
    },
    "sglang": {
        **_SHARED,
        "gemma3_text": Family(("default",), "it reads the base of this family and nothing else"),
        "gpt_oss": Family(),
        # srt/models/qwen3_next.py, line 640.
        "qwen3_next": Family((), "it reads the base of this family from rope_theta alone"),
        # srt/models/qwen3_5.py, lines 1307 to 1325.
        "qwen3_5_text": replace(_AXES, own_share=True),
    },
}
"""By engine and the ``model_type`` of the language model: read in vLLM 0.33.0 and SGLang 0.5.23."""


def overrides(state: Patch, engine: str) -> dict[str, Any]:
    """Fields of the configuration, with the names that vLLM and SGLang add to transformers'.

    Raises:
        Refusal: the engine would compute something else.
    """
    refuse_positions(state)
    refuse_adapting(state.method)
    config = text_config(state.decoder)
    family = FAMILIES[engine].get(config.model_type)
    if family is None or (len(state.sites) > 1 and not is_nested(config.rope_parameters)):
        raise Refusal(
            f"whether it builds {config.model_type!r} from these settings was not checked; "
            f"checked were {', '.join(FAMILIES[engine])}"
        )
    if not state.native:
        raise Refusal("it builds from transformers' types, and none has these frequencies")
    parameters = dict(config.rope_parameters)
    if is_nested(parameters):
        for site in state.scaled:
            parameters[site.layer_type] = _named(parameters[site.layer_type], family)
    else:
        parameters = _named(parameters, family)
    fields = {"rope_parameters": parameters, "max_position_embeddings": state.target_length}
    if family.own_share and "partial_rotary_factor" in parameters:
        fields["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    outer = state.outermost
    if outer is config or outer.model_type == config.model_type:
        return fields
    name = next(name for name, value in vars(outer).items() if value is config)
    return {name: fields}


def _named(parameters: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """``rope_parameters`` of one rotary embedding, with the engines' names."""
    parameters = dict(parameters)
    kind, factor = parameters["rope_type"], parameters.get("attention_factor")
    if kind not in family.kinds:
        reason = family.reason or "what it makes of this type was not checked"
        raise Refusal(f"{reason} (rope_type {kind!r})")
    if kind == "yarn":
        # The ends are where the length over beta is a number of tokens.
        betas = {name: parameters[name] * family.stretched for name in ("beta_fast", "beta_slow")}
        parameters |= betas
        usual = yarn_factor(parameters["factor"])
        if math.isclose(factor, usual, rel_tol=1e-12):
            return parameters
        if family.usual:
            raise Refusal(
                f"the YaRN that it builds for this family has the temperature {usual:g} always; "
                f"leave attention_factor out"
            )
        if family.mla:
            if factor == 1.0:
                raise Refusal("it takes attention_factor 1 for another kind of scaling")
            mscale = (factor - 1) / (usual - 1)
            return parameters | {"mscale": mscale, "mscale_all_dim": 0}
        # Both take attn_factor times 0.1 ln(s) + 1, but newer vLLM attention_factor itself.
        return parameters | {"attn_factor": factor / usual}
    if kind == "longrope":
        # Otherwise both take sqrt(1 + ln(s) / ln(length)), whatever attention_factor says.
        return parameters | {"short_mscale": factor, "long_mscale": factor}
    return parameters
