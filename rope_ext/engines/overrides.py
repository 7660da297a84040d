"""What vLLM and SGLang have in common: fields of the configuration, given on the command line."""

from __future__ import annotations

import math
from typing import Any

from rope_ext.engines.base import Refusal, refuse_unproven, temperature
from rope_ext.patching import Patch
from rope_ext.rotary.sites import text_config


def overrides(state: Patch) -> dict[str, Any]:
    """Fields of the configuration, with the names that vLLM and SGLang add to transformers'."""
    refuse_unproven(state)
    if not state.native:
        raise Refusal("it builds from transformers' types, and none has these frequencies")
    parameters = dict(text_config(state.decoder).rope_parameters)
    kind, factor = parameters["rope_type"], parameters.get("attention_factor")
    if kind == "yarn":
        # Both take attn_factor times 0.1 ln(s) + 1, but newer vLLM attention_factor itself.
        multiplier = factor / temperature(parameters["factor"])
        if not math.isclose(multiplier, 1.0, rel_tol=1e-12):
            parameters["attn_factor"] = multiplier
    elif kind == "longrope":
        # Otherwise both take sqrt(1 + ln(s) / ln(length)), whatever attention_factor says.
        parameters |= {"short_mscale": factor, "long_mscale": factor}
    elif kind not in ("default", "linear", "llama3"):
        raise Refusal(f"what it makes of rope_type {kind!r} was not checked")
    return {"rope_parameters": parameters, "max_position_embeddings": state.target_length}
