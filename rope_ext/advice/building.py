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
    if isinstance(given, nn.Module):
        return given
    config = given if isinstance(given, PreTrainedConfig) else load_config(str(given))
    record = saved_under(config)
    if record is not None:
        config = copy.deepcopy(config)
        record.restore(config)  # nothing can be built of it as it is
    return built_on_meta(config)


def require_length(name: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise OptionError(
            f"{name}={brief(value)} is not valid; it must be a positive number of tokens"
        )
