"""The model to advise on: loaded, or built without weights from a configuration."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from rope_ext.errors import OptionError, brief
from rope_ext.saving.checkpoints import load_config, saved_under
from rope_ext.saving.folder import built_on_meta


def model_of(given: nn.Module | PreTrainedConfig | str | Path) -> nn.Module:
    """The model, or one without weights; the patch of a saved configuration is removed."""
    return given if isinstance(given, nn.Module) else built(given)[0]


def built(given: PreTrainedConfig | str | Path) -> tuple[nn.Module, tuple[str, ...]]:
    """The model of a configuration before its patch, without weights, and a note on the patch."""
    config = given if isinstance(given, PreTrainedConfig) else load_config(str(given))
    config = copy.deepcopy(config)
    record = saved_under(config)
    if record is None:
        return built_on_meta(config), ()
    record.restore(config)  # nothing can be built of it as it is
    note = (
        f"It was saved under {record.call()}; this is about the model without that. For the "
        f"other, load it with rope_ext.from_pretrained and pass the model."
    )
    return built_on_meta(config), (note,)


def require_length(name: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise OptionError(
            f"{name}={brief(value)} is not valid; it must be a positive number of tokens"
        )
