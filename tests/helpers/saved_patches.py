"""Patches of every method, with options that must survive saving, and what is saved under them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

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


@contextmanager
def edited(folder: Path) -> Iterator[dict[str, Any]]:
    """The ``config.json`` of a folder, to change within the block."""
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    yield config
    path.write_text(json.dumps(config), "utf-8")


def lora(model: Any, **changes: Any) -> PeftModel:
    """With an adapter that is not without effect."""
    config = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    torch.manual_seed(5)
    adapted = get_peft_model(model, LoraConfig(**config, **changes)).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "modules_to_save" in name:
                parameter += 0.1 * torch.randn_like(parameter)
    return adapted
