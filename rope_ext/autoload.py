"""After ``import rope_ext``, plain ``from_pretrained`` of transformers loads saved patches.

A patch that plain transformers cannot compute is saved with a ``rope_type`` that it does not know,
so that it raises an error instead of loading the model unextended. transformers looks that name up
in its registry of rotary functions, ``ROPE_INIT_FUNCTIONS``, where ``registration.py`` puts it.

A registered function sees the configuration only. So it restores the unpatched configuration, waits
for the rotary module to be assigned to a model (a registration hook of torch, removed once the
model is loaded), puts an unextended one in its place, and patches the outermost model when
``from_pretrained`` calls its ``eval`` after loading the weights. No class or function of
transformers is replaced.
"""

from __future__ import annotations

import functools
import importlib
import threading
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from rope_ext.errors import CURE, UnsupportedModelError
from rope_ext.record import FIELD, Record, record_of
from rope_ext.rotary.sites import text_config, text_decoder
from rope_ext.saving.configuration import refusing

_UNEXPECTED = "_keys_to_ignore_on_load_unexpected"


class _Loading:
    """A model that is being built from the configuration of a patched one."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.configs: list[Any] = []  # some families copy it for each kind of layer
        self.root: weakref.ref[nn.Module] | None = None
        self.waiting: RemovableHandle | None = None  # of the hook on the outermost model
        hook: Any = self._registered  # annotated there as if it could return no module
        self.handle: RemovableHandle = register_module_module_registration_hook(hook)

    def _registered(self, parent: nn.Module, name: str, module: nn.Module) -> nn.Module | None:
        """Build rotary modules again from the restored configuration, and follow the outermost."""
        if self is not getattr(_local, "loading", None):  # of another thread, or given up
            return None
        config, root = getattr(module, "config", None), self.root and self.root()
        if getattr(module, "rope_type", None) is not None and any(
            config is one for one in self.configs
        ):
            plain: Any = type(module)(config)  # pyright: ignore[reportCallIssue]
            if self.record.has_parameters:
                setattr(plain, _UNEXPECTED, {_loading().UNEXPECTED})
            self._lead(parent)
            return plain
        if module is root:
            self._lead(parent)
        return None

    def _lead(self, model: nn.Module) -> None:
        """Wait for ``model.eval()`` instead of that of a part of it."""
        before = self.root and self.root()
        if before is not None:
            before.__dict__.pop("train", None)
        if self.waiting is not None:
            self.waiting.remove()
        self.root, self.waiting = weakref.ref(model), model.register_forward_pre_hook(self._early)
        model.__dict__["train"] = functools.partial(self._loaded, self.root)

    def _early(self, model: nn.Module, args: tuple) -> None:
        """Pre-hook of the outermost model, which would otherwise run unextended."""
        if next(model.parameters()).is_meta or _loading().current_patch(model) is not None:
            return  # a plan, which computes nothing; or the caller's own patch
        raise UnsupportedModelError(
            f"{type(model).__name__} was built from a configuration with {self.record.call()}, and "
            f"this patch is not applied yet; call model.eval() or model.train() before the first "
            f"forward"
        )

    def _loaded(self, root: weakref.ref[nn.Module], mode: bool = True) -> nn.Module:
        """Stands in for ``train`` of the outermost model, once."""
        model: Any = root()
        del model.__dict__["train"]
        self.handle.remove()
        if self.waiting is not None:
            self.waiting.remove()
        if getattr(_local, "loading", None) is self:
            _local.loading = None
        model.train(mode)
        if getattr(text_config(text_decoder(model)), FIELD, None) is not None:
            self.record.restore(model.config)
        if _loading().current_patch(model) is None:  # else the caller's own takes its place
            _loading().repatch(model, self.record)
        return model


def _loading() -> Any:
    """``rope_ext.loading``, which ``import rope_ext`` does not load."""
    return importlib.import_module("rope_ext.loading")


_local = threading.local()


def begin(config: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, float]:
    """Frequencies of a rotary module that is replaced as soon as it is part of a model."""
    record = None if refusing() else record_of(config)
    if record is None or record.plain:  # the second does not fit the rope_type
        raise KeyError(CURE)
    record.restore(config)
    loading = getattr(_local, "loading", None)
    if loading is None or loading.record != record:
        if loading is not None:  # its model was never finished
            loading.handle.remove()
        loading = _local.loading = _Loading(record)
    loading.configs.append(config)
    return torch.ones(1), 1.0
