"""vLLM."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from torch import nn

from rope_ext.engines.base import (
    Engine,
    Export,
    Refusal,
    family_of,
    in_folder,
    model_name,
    precise_note,
    refuse_kind,
    refuse_tempered,
    register,
)
from rope_ext.engines.overrides import overrides
from rope_ext.methods import DualChunk
from rope_ext.methods.checked import not_none
from rope_ext.patching import Patch
from rope_ext.rotary.sites import text_config
from rope_ext.saving.folder import Saved

DUAL_CHUNK_FAMILIES = ("qwen2", "qwen3")
"""Whose model files pass ``dual_chunk_attention_config`` on."""


@register
@dataclass(frozen=True)
class VLLM(Engine):
    """``--hf-overrides``, as computed by vLLM 0.33.0.

    Args:
        dual_chunk: export for version 0.10, which supports Dual Chunk attention.
    """

    name: ClassVar[str] = "vllm"
    title: ClassVar[str] = "vLLM"

    dual_chunk: bool = False

    def export(self, model: nn.Module, state: Patch) -> Export:
        if state.method.name == "dual_chunk":
            return self._dual_chunk(model, state)
        fields, length = overrides(state, self.name), state.target_length
        notes = ("as vLLM 0.33.0 computes it", *precise_note(state))
        return _export(model, fields, length, notes)

    def export_shipped(self, saved: Saved, state: Patch) -> Export:
        refuse_kind(family_of(state, self.name), "longrope")
        if state.method.attention_factor is not None:
            raise Refusal("it computes the temperature of two tables by itself")
        length = state.target_length
        command = ["vllm", "serve", saved.name or "FOLDER", "--max-model-len", str(length)]
        notes = (
            "as vLLM 0.33.0 computes it; config.json says the rest",
            f"it uses the long table for all prompts, transformers beyond {state.length} tokens; "
            f"--max-model-len {state.length} selects the short one",
        )
        return Export("vllm", {"max_model_len": length}, shlex.join(command), notes=notes)

    def export_saved(self, made: Export, saved: Saved, state: Patch) -> Export:
        fields = made.settings["hf_overrides"]
        if not in_folder(fields, saved.config.to_dict()):
            return made
        settings, flags = {}, []
        if _multiplies(text_config(state.decoder).rope_parameters):
            settings = {"max_model_len": state.target_length}
            flags = ["--max-model-len", str(state.target_length)]
        command = shlex.join(["vllm", "serve", saved.name or "FOLDER", *flags])
        return Export("vllm", settings, command, notes=(*made.notes, "config.json says the rest"))

    def _dual_chunk(self, model: nn.Module, state: Patch) -> Export:
        if not self.dual_chunk:
            raise Refusal(
                "version 0.33.0 still reads dual_chunk_attention_config and rotates queries and "
                "keys by it, but has dropped the attention that combines them; for version 0.10, "
                "which has it, export with dual_chunk=True"
            )
        kind = text_config(state.decoder).model_type
        if kind not in DUAL_CHUNK_FAMILIES:
            raise Refusal(f"it supports this for {', '.join(DUAL_CHUNK_FAMILIES)}, not for {kind}")
        if state.frequencies is not None:
            raise Refusal("its Dual Chunk rotates by the unscaled frequencies only")
        method = cast(DualChunk, state.method)
        chunk, local = not_none(method.chunk), not_none(method.local)
        if 2 * (chunk - local) - 1 < chunk:
            raise Refusal(
                f"its queries for distant keys use position {2 * (chunk - local) - 1} instead of "
                f"{chunk}, because local={local} is more than half of chunk={chunk}"
            )
        scaling = state.method.attention_scaling(state.scaled[0].rope)
        if scaling != 1:
            raise Refusal(
                f"its Dual Chunk has its own temperature, which depends on the sequence length, "
                f"and cannot multiply cosine and sine by {scaling:.4g}; patch with "
                f"attention_factor=1"
            )
        refuse_tempered(state.method, state.scaled[0].rope)
        given = {"chunk_size": chunk, "local_size": local, "original_max_position_embeddings": 0}
        fields = {
            "dual_chunk_attention_config": given,
            "max_position_embeddings": state.target_length,
        }
        notes = (
            "according to the source of vLLM 0.10; not run, because it needs a GPU",
            "original_max_position_embeddings=0 turns off its temperature, as in the patch",
        )
        made = _export(model, fields, state.target_length, notes)
        backend = "VLLM_ATTENTION_BACKEND=DUAL_CHUNK_FLASH_ATTN VLLM_USE_V1=0"
        return replace(made, command=f"{backend} {made.command} --enforce-eager")


def _multiplies(parameters: Mapping[str, Any]) -> bool:
    """Whether vLLM multiplies ``max_position_embeddings``, the extended length, by the factor.

    It does for every type but these (``_get_and_verify_max_len`` of version 0.33.0).
    """
    parts = [part for part in (parameters, *parameters.values()) if isinstance(part, Mapping)]
    kinds = {part["rope_type"] for part in parts if "factor" in part}
    return not kinds <= {"yarn", "longrope", "llama3"}


def _export(
    model: nn.Module, fields: dict[str, Any], length: int, notes: tuple[str, ...]
) -> Export:
    settings = {"hf_overrides": fields, "max_model_len": length}
    flags = ["--hf-overrides", json.dumps(fields), "--max-model-len", str(length)]
    command = shlex.join(["vllm", "serve", model_name(model), *flags])
    return Export("vllm", settings, command, notes=notes)
