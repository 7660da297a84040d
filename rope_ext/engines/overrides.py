"""Shared by vLLM and SGLang: configuration fields set on the command line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rope_ext.config.settings import path_to_text
from rope_ext.engines.base import (
    Refusal,
    family_of,
    is_nested,
    refuse_adapting,
    refuse_kind,
    refuse_positions,
    served_config,
)
from rope_ext.engines.families import Family
from rope_ext.methods.temperature import yarn_factor
from rope_ext.patching import Patch
from rope_ext.rotary.sites import text_config


def overrides(state: Patch, engine: str) -> dict[str, Any]:
    """Configuration fields, with the names that vLLM and SGLang add to those of transformers.

    Raises:
        Refusal: the engine would compute something else.
    """
    refuse_positions(state)
    refuse_adapting(state.method)
    config = text_config(state.decoder)
    family = family_of(state, engine)
    if len(state.sites) > 1 and not is_nested(config.rope_parameters):
        raise Refusal("models with several rotary embeddings have not been tested")
    if not state.native:
        raise Refusal("it builds frequencies by rope_type, and none matches these")
    parameters = dict(config.rope_parameters)
    if is_nested(parameters):
        for site in state.scaled:
            parameters[site.layer_type] = _named(parameters[site.layer_type], family)
    else:
        parameters = _named(parameters, family)
    fields = {"rope_parameters": parameters, "max_position_embeddings": state.target_length}
    if family.own_share and "partial_rotary_factor" in parameters:
        fields["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    if engine == "vllm" and "llama_4_scaling_beta" in parameters:  # models/mistral.py, line 106
        fields["llama_4_scaling"] = {
            "beta": parameters["llama_4_scaling_beta"],
            "original_max_position_embeddings": parameters["original_max_position_embeddings"],
        }
    path = path_to_text(served_config(state.outermost))
    if engine == "sglang" and len(path) > 1:
        raise Refusal(f"its overrides replace {'.'.join(path)} instead of updating it")
    for name in reversed(path):
        fields = {name: fields}
    return fields


def _named(parameters: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """``rope_parameters`` of one rotary embedding, with the engines' names."""
    parameters = dict(parameters)
    kind = parameters["rope_type"]
    factor: Any = parameters.get("attention_factor")
    refuse_kind(family, kind)
    if kind == "yarn":
        # The ends are where the length over beta is a number of tokens.
        betas = {name: parameters[name] * family.stretched for name in ("beta_fast", "beta_slow")}
        parameters |= betas
        usual = yarn_factor(parameters["factor"])
        if factor is None:  # raised: the checkpoint's own entry, which the engine reads already
            if family.mla or family.usual or "mscale" in parameters:
                return parameters
            return parameters | {"attention_factor": usual}  # that of its factor would be kept
        if math.isclose(factor, usual, rel_tol=1e-12):
            return parameters
        if family.usual:
            raise Refusal(
                f"its YaRN for this family always has the temperature {usual:g}; leave "
                f"attention_factor out"
            )
        if family.mla:
            if factor == 1.0:
                raise Refusal("it treats attention_factor 1 as another kind of scaling")
            mscale = (factor - 1) / (usual - 1)
            return parameters | {"mscale": mscale, "mscale_all_dim": 0}
        # Both take attn_factor times 0.1 ln(s) + 1, but newer vLLM attention_factor itself.
        return parameters | {"attn_factor": factor / usual}
    if kind == "longrope":
        # Otherwise both take sqrt(1 + ln(s) / ln(length)), whatever attention_factor says.
        return parameters | {"short_mscale": factor, "long_mscale": factor}
    return parameters
