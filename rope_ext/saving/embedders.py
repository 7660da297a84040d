"""Loads and lengthens models of sentence-transformers, which keep a transformers model inside."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from rope_ext.errors import LoadError, RopeExtError, optional
from rope_ext.saving import gguf_source, hub

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
_DEFAULT = "SentenceTransformer"  # where older versions named none
_CONFIG = "config.json"
_TOKENIZER = "tokenizer_config.json"


def saved_by_them(path: str) -> bool:
    """Whether sentence-transformers wrote a directory or Hub repository; a GGUF file is neither."""
    named = bool(path) and not gguf_source.is_file_name(path)
    return named and hub.find(path, MODULES, connection_errors=False) is not None


def kind_of(given: str | os.PathLike[str] | nn.Module) -> str | None:
    """Return the class of sentence-transformers of a model or place, such as ``"CrossEncoder"``.

    ``given`` is a loaded model, a folder or a Hub ID. None: it is of transformers alone.
    """
    if isinstance(given, nn.Module):
        return getattr(given, "model_type", None) if hasattr(given, "transformers_model") else None
    if not saved_by_them(str(given)):
        return None
    return str(_settings(str(given), SETTINGS).get("model_type") or _DEFAULT)


def load_with(config: PreTrainedConfig, path: str, kwargs: Mapping[str, Any]) -> Any:
    """Load the SentenceTransformer or CrossEncoder in a directory with another configuration.

    ``config`` replaces that of the transformers model in it; ``kwargs`` are arguments of
    transformers' ``from_pretrained``, and ``device``.
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
    name = kind_of(path) or _DEFAULT
    cls = getattr(package, name, None)
    if cls is None:
        raise LoadError(f"{path}: sentence-transformers has no class {name!r}; update it")
    # The class reads the configuration from its folder only: a folder of links with another one.
    with TemporaryDirectory() as place:
        for file in Path(path).resolve().iterdir():
            if file.name != _CONFIG:
                _link(file, Path(place) / file.name)
        config.save_pretrained(place)
        own = {name: kwargs[name] for name in ("device", "trust_remote_code") if name in kwargs}
        more = {name: kwargs[name] for name in kwargs.keys() - own.keys() - {"config"}}
        return cls(place, **own, model_kwargs=more)


def saved_length(path: str) -> int | None:
    """Return the length at which a saved model cuts texts, tokens; None if it is not saved."""
    length = _settings(path, _TOKENIZER).get("model_max_length")
    return length if isinstance(length, int) else None


def read_json(file: Path, kind: type[RopeExtError] = LoadError) -> Any:
    """Return the content of a JSON file of a saved model; raises ``kind`` if it has none."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise kind(f"cannot read {file}: {error}; save the model again") from error


def _settings(path: str, name: str) -> dict[str, Any]:
    """Return the settings in a file of a directory or Hub repository; empty if there is none."""
    file = hub.find(path, name, connection_errors=False)
    found = {} if file is None else read_json(Path(file))
    return found if isinstance(found, dict) else {}


def _link(source: Path, target: Path) -> None:
    """Link a file or folder, or copy it where the system has no links."""
    try:
        target.symlink_to(source, target_is_directory=source.is_dir())
    except OSError:
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
