"""Loads and lengthens models of sentence-transformers, which keep a transformers model inside."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedConfig

from rope_ext.errors import LoadError, optional
from rope_ext.saving import hub

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
_CONFIG = "config.json"
_TOKENIZER = "tokenizer_config.json"


def saved_by_them(path: str) -> bool:
    """Whether sentence-transformers wrote a directory or Hub repository."""
    return hub.find(path, MODULES, connection_errors=False) is not None


def load_unpatched(path: str, config: PreTrainedConfig, kwargs: Mapping[str, Any]) -> Any:
    """Load the SentenceTransformer or CrossEncoder in a directory with another configuration.

    ``config`` replaces that of the transformers model in it; ``kwargs`` are arguments of
    transformers' ``from_pretrained``.
    """
    package = optional(
        "sentence_transformers",
        needs=f"{path} needs",
        extra="sentence-transformers",
        kind=LoadError,
    )
    if not os.path.isdir(path):
        raise LoadError(
            f"{path} was saved by sentence-transformers under a patch, and is read from a folder "
            f"only; download it with huggingface_hub.snapshot_download, then give that folder"
        )
    settings = _read(path, SETTINGS)
    name = str(settings.get("model_type", "SentenceTransformer"))
    cls = getattr(package, name, None)
    if cls is None:
        raise LoadError(f"{path}: sentence-transformers has no class {name!r}; update it")
    with TemporaryDirectory() as place:
        for file in Path(path).resolve().iterdir():
            if file.name != _CONFIG:
                _link(file, Path(place) / file.name)
        config.save_pretrained(place)
        return cls(place, model_kwargs={k: v for k, v in kwargs.items() if k != "config"})


def saved_length(path: str) -> int | None:
    """Return the length at which a saved model cuts texts, tokens; None if it is not saved."""
    length = _read(path, _TOKENIZER).get("model_max_length")
    return length if isinstance(length, int) else None


def _read(path: str, name: str) -> dict[str, Any]:
    file = Path(path) / name
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise LoadError(f"cannot read {file}: {error}; save the model again") from error
    return found if isinstance(found, dict) else {}


def _link(source: Path, target: Path) -> None:
    """Link a file or folder, or copy it where the system has no links."""
    try:
        target.symlink_to(source, target_is_directory=source.is_dir())
    except OSError:
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
