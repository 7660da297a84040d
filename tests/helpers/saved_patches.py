"""Patches of every method, with options that must survive saving."""

from __future__ import annotations

from typing import Any

import rope_ext

TABLE = [1.0 + 0.5 * i for i in range(8)]
FLAT = [1.0] * 8
PATCHES: dict[str, tuple[str | rope_ext.FrequencyMethod, dict[str, Any]]] = {
    "yarn": ("yarn", {"beta_fast": 16, "truncate": False}),
    "yarn precise": ("yarn", {"precise": True}),
    "dynamic_yarn": ("dynamic_yarn", {}),
    "ntk": ("ntk", {}),
    "dynamic_ntk": ("dynamic_ntk", {"alpha": "ratio"}),
    "dynamic_ntk fixed": ("dynamic_ntk", {"length": 100}),
    "dynamic_ntk growing": ("dynamic_ntk", {"mode": "growing"}),
    "pi": ("pi", {"original_max_position_embeddings": 32}),
    "mrrope": ("mrrope", {"mode": "uni"}),
    "ntk_by_parts": ("ntk_by_parts", {}),
    "llama3": ("llama3", {}),
    "longrope": ("longrope", {"long_factor": TABLE}),
    "longrope short": ("longrope", {"long_factor": TABLE, "short_factor": FLAT}),
    "longrope2": ("longrope2", {"stretch": 1.5}),
    "longrope2 table": ("longrope2", {"long_factor": TABLE}),
    "abf": ("abf", {"base": 5e5}),
    "base_truncation": ("base_truncation", {}),
    "resonance": ("resonance", {"on": rope_ext.YaRN(factor=4, beta_fast=16.0)}),
    "resonance precise": ("resonance", {"on": "pi", "precise": True}),
    "p_rope": ("p_rope", {"p": 0.5}),
    "clipped": ("clipped", {"pairs": 5}),
    "rerope": ("rerope", {"window": 20, "log_n": False, "kernel": "reference"}),
    "rerope on ntk": ("rerope", {"frequency": rope_ext.NTK(factor=2)}),
    "rerope by hand": ("rerope", {"original_max_position_embeddings": 32}),
    "leaky_rerope": ("leaky_rerope", {}),
    "self_extend": ("self_extend", {"group": 8}),
    "dpe": ("dpe", {"scales": [2, 9, 9]}),
    "lampe": ("lampe", {}),
    "dual_chunk": ("dual_chunk", {}),
    "string": ("string", {"factor": 1.5}),
    "lm_infinite": ("lm_infinite", {"sinks": 4}),
}
