"""Reads drafts of speculative decoding whose ``config.json`` holds their model in an entry."""

import os
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

ENTRIES = ("transformer_layer_config", "model")
"""Entries of the library speculators, and of vLLM's ``EAGLEConfig``."""


def entry_of(saved: Mapping[str, Any]) -> str | None:
    """Return the entry of ``config.json`` with the draft's model; None if there is none.

    It is the only part that transformers knows; what it loads by itself is read as it is.
    """
    if _is_known(saved):
        return None
    parts = {name: saved.get(name) for name in ENTRIES}
    return next((name for name, part in parts.items() if _is_known(part)), None)


def _is_known(part: Any) -> bool:
    """Whether transformers has the ``model_type`` of a configuration, which may be any JSON."""
    kind = part.get("model_type") if isinstance(part, Mapping) else None
    return isinstance(kind, str) and kind in CONFIG_MAPPING


def read_entry(saved: Mapping[str, Any], entry: str, place: str) -> PreTrainedConfig:
    """Return the configuration of a draft's model."""
    part = dict(saved[entry])
    config = CONFIG_MAPPING[part["model_type"]].from_dict(part)
    config.name_or_path = place
    return config


def around(config: PreTrainedConfig) -> tuple[dict[str, Any], str] | None:
    """Return the JSON that ``config`` was read from, and its entry; None if it is all of it."""
    place = config.name_or_path
    if not place or os.path.isfile(place):  # a GGUF file, which would be read as JSON
        return None
    try:
        # Whoever loaded it from the Hub has it: no connection is waited for.
        saved = PreTrainedConfig.get_config_dict(place, local_files_only=True)[0]
    except (OSError, ValueError):  # it was built in Python, and no folder has its name
        return None
    entry = entry_of(saved)
    return None if entry is None else (saved, entry)
