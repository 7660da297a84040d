"""Warns once if inputs, a draft model or an adapter do not match a model's extension."""

import functools
import json
import logging
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rope_ext.config.record import SIDECAR, Record
from rope_ext.errors import RecordError
from rope_ext.rotary.context import arguments, cache_among
from rope_ext.rotary.sites import PatchTarget, text_config
from rope_ext.rotary.swapping import Changes, wrap

_logger = logging.getLogger("rope_ext")


class Limit:
    """Decoder pre-hook that warns once if a forward has more tokens than the patch reaches."""

    def __init__(self, method: str, trained: int, target: int) -> None:
        self.method, self.trained, self.target = method, trained, target
        self.told = self.told_of_draft = False

    def __call__(self, decoder: nn.Module, args: tuple, kwargs: dict) -> None:
        if torch.compiler.is_compiling() or self.told:
            return
        given = arguments(decoder, args, kwargs)
        inputs = given.get("input_ids")
        inputs = given.get("inputs_embeds") if inputs is None else inputs
        cache = cache_among(given)
        filled = cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0
        if not isinstance(inputs, torch.Tensor) or not isinstance(filled, int):
            return  # do not wait for a length on a device
        tokens, positions = inputs.shape[1] + filled, given.get("position_ids")
        if tokens > self.target and isinstance(positions, torch.Tensor) and not positions.is_meta:
            tokens = int(positions.max()) + 1  # packed and padded rows are longer
        if tokens > self.target:
            self.told = True
            _logger.warning(
                "rope_ext: this text has %d tokens, more than the %d that %s reaches; patch with "
                "factor=%g or more (replace=True)",
                *(tokens, self.target, self.method, math.ceil(tokens / self.trained * 100) / 100),
            )

    def generate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Check the draft model of assisted generation, then call ``model.generate``."""
        draft = kwargs.get("assistant_model")
        if isinstance(draft, nn.Module) and not self.told_of_draft:
            reach = getattr(text_config(draft), "max_position_embeddings", None)
            if isinstance(reach, int) and reach < self.target:
                self.told_of_draft = True
                _logger.warning(
                    "rope_ext: the assistant_model reaches %d tokens and this model %d; beyond "
                    "that its drafts are rejected and only cost time; extend it too: "
                    "rope_ext.patch(assistant_model, ..., factor=%g)",
                    *(reach, self.target, math.ceil(self.target / reach * 100) / 100),
                )
        return original(*args, **kwargs)


def add_warnings(place: PatchTarget, record: Record, changes: Changes) -> None:
    """Warn about longer texts, shorter drafts, and adapters that were trained otherwise."""
    method = record.resolved
    if not method.is_dynamic and method.kind in ("frequency", "position"):
        limit = Limit(method.name, record.trained_length, record.target_length)
        changes.append(place.decoder.register_forward_pre_hook(limit, with_kwargs=True).remove)
        wrap(place.model, "generate", limit.generate, changes)
    wrap(place.model, "load_adapter", functools.partial(_load_adapter, record), changes)


def _load_adapter(record: Record, original: Any, *args: Any, **kwargs: Any) -> Any:
    folder = kwargs.get("peft_model_id", args[0] if args else None)
    file = Path(str(folder)) / SIDECAR
    try:
        trained = Record.from_json(json.loads(file.read_text(encoding="utf-8")), str(file))
    except (OSError, ValueError, RecordError):  # on the Hub, or trained without a patch
        trained = record
    if not trained.same(record):
        _logger.warning(
            "rope_ext: the adapter in %s was trained under %s, and this model is patched by %s; "
            "patch it like that (replace=True)",
            *(folder, trained.call(), record.call()),
        )
    return original(*args, **kwargs)
