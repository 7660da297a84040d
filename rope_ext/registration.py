"""Registers the ``rope_type`` of saved patches with transformers, as soon as that is imported.

``import rope_ext`` imports neither torch nor transformers, so that the command line shows its help
at once. The registered function loads ``rope_ext.autoload`` when a saved patch is built.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from rope_ext.errors import CURE

_REGISTRY = "transformers.modeling_rope_utils"


def register() -> None:
    """Put the function into ``ROPE_INIT_FUNCTIONS``, now or when transformers is imported."""
    if _REGISTRY in sys.modules:
        _add(sys.modules[_REGISTRY])
    else:
        sys.meta_path.insert(0, _Waiting())


def _add(module: ModuleType) -> None:
    module.ROPE_INIT_FUNCTIONS[CURE] = _begin


def _begin(*args: Any, **kwargs: Any) -> Any:
    return importlib.import_module("rope_ext.autoload").begin(*args, **kwargs)


class _Waiting(importlib.abc.MetaPathFinder):
    """Finds the registry's module as Python does, once, and adds the function when it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _add(module)

            spec.loader.exec_module = exec_module
        return spec
