"""Plain transformers, and what read its folders before version 5."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from rope_ext.engines.base import (
    Engine,
    Export,
    Refusal,
    config_of,
    in_folder,
    is_nested,
    refuse_positions,
    register,
)
from rope_ext.patching import Patch
from rope_ext.saving.folder import Saved


@register
@dataclass(frozen=True)
class Transformers(Engine):
    """The ``config.json`` from which plain transformers builds the patch.

    Args:
        legacy: write ``rope_theta`` and ``rope_scaling`` for every family and type. Without it
            they are written as ``save_pretrained`` writes them: readers older than transformers 5
            raise an error where mlx-lm would not compute the patch.
    """

    name: ClassVar[str] = "transformers"
    title: ClassVar[str] = "transformers"

    legacy: bool = False

    def export(self, model: nn.Module, state: Patch) -> Export:
        refuse_positions(state)
        if not state.native:
            raise Refusal("it has no rope_type that builds these frequencies")
        config = config_of(model)
        text = config.get_text_config(decoder=True)
        settings = {
            "rope_parameters": text.rope_parameters,
            "max_position_embeddings": text.max_position_embeddings,
        }
        written = config.to_json_string()
        if self.legacy:
            if text is not config or is_nested(text.rope_parameters):
                raise Refusal("older readers know one rope_scaling, of the whole configuration")
            settings |= legacy(text.rope_parameters)
            written = with_fields(written, settings)
        notes = [note for note in state.notes if not note.startswith("saving: ")]
        return Export(
            "transformers",
            settings,
            "hf upload USER/NAME config.json",
            {"config.json": written},
            ("put it beside the weights; model.save_pretrained(FOLDER) writes both", *notes),
        )

    def export_shipped(self, saved: Saved, state: Patch) -> Export:
        return _as_it_is(saved, {})

    def export_saved(self, made: Export, saved: Saved, state: Patch) -> Export:
        if self.legacy or not in_folder(made.settings, saved.config.to_dict()):
            return made
        return _as_it_is(saved, made.settings)


def _as_it_is(saved: Saved, settings: Mapping[str, Any]) -> Export:
    command = shlex.join(["hf", "upload", "USER/NAME", saved.name or "FOLDER"])
    notes = ("config.json holds the settings: plain from_pretrained loads the folder",)
    return Export("transformers", settings, command, notes=notes)


def legacy(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The same under the names that were in use before ``rope_parameters``."""
    kind = parameters["rope_type"]
    scaling = {k: v for k, v in parameters.items() if k != "rope_theta"} | {"type": kind}
    return {
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": None if kind == "default" else scaling,
    }


def with_fields(config: str, fields: Mapping[str, Any]) -> str:
    """A ``config.json`` with more fields."""
    return json.dumps(json.loads(config) | dict(fields), indent=2, sort_keys=True) + "\n"
