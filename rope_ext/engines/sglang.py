"""SGLang."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from rope_ext.engines.base import Engine, Export, in_folder, model_name, precise_note, register
from rope_ext.engines.overrides import overrides
from rope_ext.patching import Patch
from rope_ext.saving.folder import Saved


@register
@dataclass(frozen=True)
class SGLang(Engine):
    """``--json-model-override-args``, as computed by SGLang 0.5.23."""

    name: ClassVar[str] = "sglang"
    title: ClassVar[str] = "SGLang"

    def export(self, model: nn.Module, state: Patch) -> Export:
        fields, length = overrides(state, self.name), state.target_length
        settings = {"json_model_override_args": fields, "context_length": length}
        flags = ["--json-model-override-args", json.dumps(fields), "--context-length", str(length)]
        launch = ["python", "-m", "sglang.launch_server", "--model-path", model_name(model)]
        notes = ("as SGLang 0.5.23 computes it", *precise_note(state))
        return Export("sglang", settings, shlex.join([*launch, *flags]), notes=notes)

    def export_saved(self, made: Export, saved: Saved, state: Patch) -> Export:
        if not in_folder(made.settings["json_model_override_args"], saved.config.to_dict()):
            return made
        launch = ["python", "-m", "sglang.launch_server", "--model-path", saved.name or "FOLDER"]
        flags = ["--context-length", str(state.target_length)]
        settings = {"context_length": state.target_length}
        notes = (*made.notes, "config.json says the rest")
        return Export("sglang", settings, shlex.join([*launch, *flags]), notes=notes)
