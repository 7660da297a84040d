"""Ollama, which runs llama.cpp on a file that contains all settings."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from rope_ext.engines.base import Engine, Export, Refusal, precise_note, register
from rope_ext.engines.llama_cpp import from_folder, gguf_command, gguf_names, planned, settings
from rope_ext.patching import Patch
from rope_ext.saving.folder import Saved


@register
@dataclass(frozen=True)
class Ollama(Engine):
    """A Modelfile, and the command that writes the GGUF file for it."""

    name: ClassVar[str] = "ollama"
    title: ClassVar[str] = "Ollama"

    def export(self, model: nn.Module, state: Patch) -> Export:
        made = planned(state, in_file=True)
        if any("-beta-" in flag for flag in made.flags):
            raise Refusal(
                "beta_fast and beta_slow are flags of llama.cpp without keys in the file, and it "
                "accepts no flags"
            )
        source, long, notes = gguf_names(model)
        before, files = gguf_command(state, source, long)
        modelfile = f"FROM ./{long}\nPARAMETER num_ctx {state.target_length}\n"
        notes = (
            *notes,
            "tested with the llama.cpp that Ollama runs, not with Ollama itself",
            *precise_note(state),
        )
        command = f"{shlex.join(before)} && ollama create NAME --file Modelfile"
        files = {**files, "Modelfile": modelfile}
        return Export("ollama", settings(made), command, files, notes)

    def export_saved(self, made: Export, saved: Saved, state: Patch) -> Export:
        return from_folder(made, saved, state, "ollama create NAME --file Modelfile")
