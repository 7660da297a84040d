"""Exports patches to transformers and mlx-lm, which read a folder's ``config.json``."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from rope_ext.apply.configuration import SCALING_FIELDS
from rope_ext.engines import base
from rope_ext.engines.base import Export, Refusal
from rope_ext.methods.temperature import yarn_factor
from rope_ext.patching import Patch
from rope_ext.saving.folder import Saved

_NEEDED = dict.fromkeys(("partial_rotary_factor", "num_experts"))
"""Fields that released checkpoints have, but transformers does not save."""


def transformers(state: Patch, saved: Saved | None, legacy: bool = False) -> Export:
    """Return the ``config.json`` from which plain transformers builds the patch.

    ``legacy``: write ``rope_theta`` and ``rope_scaling`` for every family and type. Otherwise they
    are written as in ``save_pretrained``: readers older than transformers 5 raise an error if
    mlx-lm would not compute the patch.
    """
    settings: dict[str, Any] = {}
    if not base.is_shipped(saved, state):
        base.refuse_positions(state, dynamic=True)
        if not state.saved.native:
            raise Refusal("no rope_type builds these frequencies")
        text = state.model.config.get_text_config(decoder=True)
        settings = {n: getattr(text, n) for n in ("rope_parameters", "max_position_embeddings")}
    whole = saved is not None and base.in_folder(settings, saved.config.to_dict())
    if saved is not None and whole and not (legacy and settings):
        return as_it_is(saved, settings)
    config = state.model.config
    written, parameters = config.to_json_string(), settings["rope_parameters"]
    if legacy:
        if config.get_text_config(decoder=True) is not config or base.is_nested(parameters):
            raise Refusal("older readers know one rope_scaling, of the whole configuration")
        settings |= _legacy(parameters)
        written = _with_fields(written, settings)
    note = "put it beside the weights; model.save_pretrained(FOLDER) writes both"
    others = [note for note in state.notes if not note.startswith("saving: ")]
    files, command = {"config.json": written}, "hf upload USER/NAME config.json"
    return Export("transformers", settings, command, files, (note, *others))


def as_it_is(saved: Saved, settings: Mapping[str, Any] | None = None) -> Export:
    command = shlex.join(["hf", "upload", "USER/NAME", base.folder_of(saved)])
    note = "config.json holds the settings: plain from_pretrained loads the folder"
    return Export("transformers", settings or {}, command, notes=(note,))


def mlx(state: Patch, saved: Saved | None) -> Export:
    """Return a ``config.json`` for mlx-lm 0.32.2, with field names from before transformers 5.

    A saved folder either runs as patched or raises an error (``apply/configuration.py``).
    """
    family = base.family_of(state, "mlx")
    base.refuse_unproven(state, family.sliding_base)
    parameters = _parameters(base.Scaling.from_patch(state))
    base.refuse_kind(family, parameters["rope_type"])
    fields = {"rope_parameters": parameters} if family.inside else _legacy(parameters)
    own = state.model.config
    head = own.hidden_size // own.num_attention_heads
    for name, value in (_NEEDED | {"head_dim": head}).items():
        value = parameters.get(name, getattr(own, name, value))
        if value is not None:
            fields[name] = value
    config = _with_fields(own.to_json_string(), fields)
    where = "FOLDER: written by model.save_pretrained, with this config.json in it"
    where = where if saved is None else "put this config.json into the folder"
    command = shlex.join(["mlx_lm.generate", "--model", base.folder_of(saved), "--prompt", "..."])
    notes = ("as mlx-lm 0.32.2 computes it", where, *base.precise_note(state))
    return Export("mlx", fields, command, {"config.json": config}, notes)


def _parameters(scaling: base.Scaling) -> dict[str, Any]:
    """Return ``rope_parameters`` that mlx-lm and transformers interpret equally."""
    parameters = dict(scaling.parameters)
    kind, own = parameters["rope_type"], bool(parameters.get("mscale_all_dim"))
    if kind == "yarn" and parameters.get("truncate", True) and not own:  # not DeepSeek's
        # attention_factor is ignored; this is (0.1 mscale ln(s) + 1) / 1.
        grown = yarn_factor(parameters["factor"]) - 1
        return parameters | {"mscale": (scaling.scaling - 1) / grown, "mscale_all_dim": 0}
    if own or kind in ("default", "linear", "llama3"):
        return parameters
    if scaling.scaling < 1:
        raise Refusal("it cannot multiply the cosine and sine of a table by less than 1")
    others = {name: value for name, value in parameters.items() if name not in SCALING_FIELDS}
    return {
        **others,
        "rope_type": "longrope",
        "rope_theta": scaling.rope.base,
        **dict.fromkeys(("short_factor", "long_factor"), scaling.divisors),
        "factor": scaling.target / scaling.rope.length,
        "attention_factor": scaling.scaling,
        # It multiplies cosine and sine by sqrt(1 + ln(s) / ln(length)), for a length that we set.
        "original_max_position_embeddings": scaling.target ** (1 / scaling.scaling**2),
    }


def _legacy(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same settings under the names used before ``rope_parameters``."""
    kind = parameters["rope_type"]
    scaling = {k: v for k, v in parameters.items() if k != "rope_theta"} | {"type": kind}
    return {
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": None if kind == "default" else scaling,
    }


def _with_fields(config: str, fields: Mapping[str, Any]) -> str:
    return json.dumps(json.loads(config) | dict(fields), indent=2, sort_keys=True) + "\n"
