"""mlx-lm, which reads transformers folders with the field names from before version 5."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from rope_ext.apply.rebuild import SCALING_FIELDS
from rope_ext.engines.base import (
    Engine,
    Export,
    Refusal,
    Scaling,
    config_of,
    family_of,
    precise_note,
    refuse_kind,
    refuse_unproven,
    register,
)
from rope_ext.engines.transformers import legacy, with_fields
from rope_ext.methods.temperature import yarn_factor
from rope_ext.patching import Patch
from rope_ext.saving.folder import Saved


@register
@dataclass(frozen=True)
class MLX(Engine):
    """A ``config.json`` that mlx-lm 0.32.2 reads, also where ``save_pretrained`` cannot write one.

    A saved folder either runs as patched or raises an error (``apply/older_readers.py``).
    """

    name: ClassVar[str] = "mlx"
    title: ClassVar[str] = "mlx-lm"

    def export(self, model: nn.Module, state: Patch) -> Export:
        refuse_unproven(state)
        if not state.native:
            raise Refusal("it builds frequencies by rope_type, and none matches these")
        family = family_of(state, self.name)
        parameters = parameters_for(Scaling.from_patch(state))
        refuse_kind(family, parameters["rope_type"])
        fields = {"rope_parameters": parameters} if family.inside else legacy(parameters)
        config = with_fields(config_of(model).to_json_string(), fields)
        command = shlex.join(["mlx_lm.generate", "--model", "FOLDER", "--prompt", "..."])
        notes = (
            "as mlx-lm 0.32.2 computes it",
            "FOLDER: written by model.save_pretrained, with this config.json in it",
            *precise_note(state),
        )
        return Export("mlx", fields, command, {"config.json": config}, notes)

    def export_saved(self, made: Export, saved: Saved, state: Patch) -> Export:
        command = made.command.replace("FOLDER", shlex.quote(saved.name or "FOLDER"), 1)
        notes = ("as mlx-lm 0.32.2 computes it", "put this config.json into the folder")
        return replace(made, command=command, notes=(*notes, *precise_note(state)))


def parameters_for(scaling: Scaling) -> dict[str, Any]:
    """``rope_parameters`` that mlx-lm and transformers interpret equally."""
    parameters = dict(scaling.parameters)
    kind = parameters["rope_type"]
    if kind == "yarn" and parameters.get("mscale_all_dim"):  # DeepSeek's own, which it reads
        return parameters
    if kind == "yarn" and parameters.get("truncate", True):
        # attention_factor is ignored; this is (0.1 mscale ln(s) + 1) / 1.
        grown = yarn_factor(parameters["factor"]) - 1
        parameters |= {"mscale": (scaling.scaling - 1) / grown, "mscale_all_dim": 0}
        return parameters
    if kind in ("default", "linear", "llama3"):
        return parameters
    if scaling.scaling < 1:
        raise Refusal("it cannot multiply the cosine and sine of a table by less than 1")
    # Its number on cosine and sine is sqrt(1 + ln(s) / ln(length)), of a length of our choice.
    length = scaling.target ** (1 / scaling.scaling**2)
    table = scaling.divisors
    others = {name: value for name, value in parameters.items() if name not in SCALING_FIELDS}
    return {
        **others,
        "rope_type": "longrope",
        "rope_theta": scaling.rope.base,
        "short_factor": table,
        "long_factor": table,
        "factor": scaling.target / scaling.rope.length,
        "attention_factor": scaling.scaling,
        "original_max_position_embeddings": length,
    }
