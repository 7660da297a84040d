"""The model to advise on: loaded, or built without weights from a configuration."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import PreTrainedConfig

from rope_ext.errors import OptionError, brief
from rope_ext.saving.folder import built_on_meta


def model_of(given: nn.Module | PreTrainedConfig | str | Path) -> nn.Module:
    """The model, or one without weights; the patch of a saved configuration is removed."""
    return built(given)[0]


def built(
    given: nn.Module | PreTrainedConfig | str | Path,
) -> tuple[nn.Module, tuple[str, ...]]:
    """Like :func:`model_of`, with a note if a patch was removed."""
    from rope_ext.saving.checkpoints import load_config, saved_under

    if isinstance(given, (str, Path)):
        given = cast(PreTrainedConfig, load_config(str(given)))
    if not isinstance(given, PreTrainedConfig):
        return given, ()
    config, notes = copy.deepcopy(given), ()
    record = saved_under(config)
    if record is not None:  # nothing can be built of it as it is
        record.restore(config)
        notes = (
            f"It was saved under {record.call()}; this is about the model without that. For the "
            f"other, load it with rope_ext.from_pretrained and pass the model.",
        )
    return built_on_meta(config), notes


def require_length(name: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise OptionError(
            f"{name}={brief(value)} is not valid; it must be a positive number of tokens"
        )
