"""Finds folders and files on disk or on the Hub, and converts loading errors."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.utils import cached_file

from rope_ext.errors import LoadError, RopeExtError, first_line, nowhere

_OF_HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision")
_OF_HUB += ("subfolder", "token")
_GIVE = "give a folder that save_pretrained wrote, or a Hub ID"


def of_hub(kwargs: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that locate files, and those named."""
    return {name: kwargs[name] for name in (*_OF_HUB, *more) if name in kwargs}


def find(path: str, name: str, connection_errors: bool = True, **where: Any) -> str | None:
    """Return the path of a file in a directory or Hub repository; None if there is no such file."""
    return cached_file(
        path,
        name,
        **where,
        _raise_exceptions_for_gated_repo=connection_errors,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=connection_errors,
    )


def require_place(path: str | PathLike[str]) -> str:
    """Return ``path`` as a string; raises LoadError if it is neither a directory nor a Hub ID."""
    if not isinstance(path, (str, PathLike)):
        raise LoadError(f"{path!r} is not a path; pass a directory, or a Hub ID")
    name = str(path)
    fault = "it is a file, not a folder"
    if os.path.isdir(name):
        return name
    if not os.path.exists(name):
        try:
            validate_repo_id(name)
            return name
        except HFValidationError:
            fault = "the directory does not exist, and it is not a valid Hub ID"
    raise LoadError(f"there is no folder {name!r} to load from ({fault}); {_GIVE}")


@contextmanager
def loading(
    what: str, path: str, kind: type[RopeExtError] = LoadError, advice: str = _GIVE
) -> Iterator[None]:
    """Convert errors of transformers and peft: on damaged files, they raise any exception."""
    try:
        yield
    except (RopeExtError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = first_line(error)
        if not isinstance(error, (ImportError, OSError, RuntimeError, ValueError)):
            reason = f"{type(error).__name__}: {reason}"  # the line alone may be unclear
        if isinstance(error, ImportError):  # for example attention kernels
            raise kind(
                f"cannot load the {what} of {path!r}, which needs a package ({reason}); "
                f"install it, or if it is for attention only, pass attn_implementation='sdpa'"
            ) from error
        raise kind(
            f"cannot load the {what} of {path!r} ({reason}){nowhere(path)}; {advice}"
        ) from error
