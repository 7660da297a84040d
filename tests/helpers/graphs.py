"""Helpers for full-graph compilation: caches, configuration, and the number of graphs."""

from __future__ import annotations

from torch import nn
from torch._dynamo.utils import counters
from transformers import CompileConfig, StaticCache


def static(model: nn.Module, room: int = 100) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=room)


def whole(backend: str = "eager") -> CompileConfig:
    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    return config


def graphs() -> int:
    return counters["stats"]["unique_graphs"]
