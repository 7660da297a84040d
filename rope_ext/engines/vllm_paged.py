"""vLLM's attention backend CUSTOM: position methods on GPUs; no card has run it so far.

The model's rotary embedding rotates keys to what is cached, and leaves queries alone; the kernel of
:mod:`rope_ext.attention.paged` does the rest. Metadata, cache layout and CUDA graphs are those of
vLLM's own Triton backend, whose ``forward`` alone is replaced.
"""

from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from rope_ext.attention import cards, paged
from rope_ext.engines.served import Served, StoredKeys, paged_tables
from rope_ext.engines.vllm_plugin import served_method
from rope_ext.errors import ExportError


def _current_tables(served: Served) -> paged.Tables:
    """Return the tables of the model that is being loaded."""
    config = get_current_vllm_config()
    device = str(config.device_config.device)
    return paged_tables(served, config.model_config.max_model_len, device)


class Backend(TritonAttentionBackend):
    """vLLM's Triton backend, with the attention of position methods."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return AttentionBackendEnum.CUSTOM.name

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        """Selected while a model is built."""
        return TritonAttentionImpl if served_method() is None else PagedAttention

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 2 == 0 and head_size <= paged.MOST_COLUMNS

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability >= cards.AMPERE

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False  # decoding splits keys, prompts do not

    @staticmethod
    def select(served: Served) -> None:
        """Select this backend for the layers of the model that is being loaded."""
        config = get_current_vllm_config().attention_config
        own = AttentionBackendEnum.CUSTOM
        others = {x for x in (config.backend, *config.backend_per_kind.values()) if x} - {own}
        if others:
            names = " and ".join(sorted(x.name for x in others))
            raise ExportError(
                f"rope_ext serves {served.method.name} with --attention-backend CUSTOM, not with "
                f"{names}; leave out --attention-backend"
            )
        served.refuse_pairs()
        config.backend = own  # models make their rotary embedding before their attention

    @staticmethod
    def rotary_embedding(served: Served) -> nn.Module:
        """Return the rotary embedding of the layers that the method changes."""
        return StoredKeys(_current_tables(served))


class PagedAttention(TritonAttentionImpl):
    """Attention of a position method on vLLM's pages; vLLM's own in layers with a window."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        served = served_method()
        assert served is not None
        quantised = self.kv_cache_dtype not in Backend.supported_kv_cache_dtypes
        plain = self.attn_type == AttentionType.DECODER and self.alibi_slopes is None
        if quantised or not plain or served.columns != self.head_size:
            raise ExportError(
                f"rope_ext serves {served.method.name} on GPUs without --kv-cache-dtype fp8 and "
                f"ALiBi, for decoders whose heads rotate as a whole"
            )
        self.windowed = self.sliding_window != (-1, -1)  # the method leaves such layers alone
        self.tables = _current_tables(served)
        self.logits = paged.Logits(
            scale=self.scale * served.scaling,
            softcap=float(self.logits_soft_cap),
            sinks=self.sinks,
        )

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

    def fused_rope_kvcache_supported(self) -> bool:
        return False

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
        if self.windowed:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *more, **also
            )
        if attn_metadata is None:  # vLLM's profiling run
            return output.fill_(0)
        count = attn_metadata.num_actual_tokens
        keys, values = kv_cache.split(self.head_size, dim=-1)
        batch = paged.Batch(
            pages=attn_metadata.block_table,
            lengths=attn_metadata.seq_lens,
            starts=attn_metadata.query_start_loc,
            max_queries=attn_metadata.max_query_len,
        )
        out = output[:count].view(count, self.num_heads, self.head_size)
        paged.attend(
            query=query[:count],
            key_cache=keys,
            value_cache=values,
            out=out,
            batch=batch,
            tables=self.tables,
            logits=self.logits,
        )
        return output
