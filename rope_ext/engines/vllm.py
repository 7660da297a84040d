"""vLLM."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from rope_ext.engines.base import Engine, Export, Refusal, model_name, precise_note, register
from rope_ext.engines.overrides import overrides
from rope_ext.patching import Patch


@register
@dataclass(frozen=True)
class VLLM(Engine):
    """``--hf-overrides``, as vLLM 0.33.0 computes them."""

    name: ClassVar[str] = "vllm"
    title: ClassVar[str] = "vLLM"

    def export(self, model: nn.Module, state: Patch) -> Export:
        if state.method.name == "dual_chunk":
            raise Refusal(
                "version 0.33.0 still takes dual_chunk_attention_config and turns queries and keys "
                "by it, but has dropped the attention that put them together (it was in 0.10), so "
                "that what it computes is neither"
            )
        fields, length = overrides(state, self.name), state.target_length
        settings = {"hf_overrides": fields, "max_model_len": length}
        flags = ["--hf-overrides", json.dumps(fields), "--max-model-len", str(length)]
        command = shlex.join(["vllm", "serve", model_name(model), *flags])
        notes = ("as vLLM 0.33.0 computes it", *precise_note(state))
        return Export("vllm", settings, command, notes=notes)
