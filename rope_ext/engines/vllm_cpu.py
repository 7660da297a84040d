"""vLLM's attention backend on CPUs, with banded attention under position methods.

The model's rotary embedding rotates queries and keys to the positions at which keys are cached.
Decoding reads keys from their pages by the loops of :mod:`rope_ext.attention.paged_cpu`; prompts
copy those of their request, and use torch's attention.
"""

from dataclasses import dataclass
from typing import Any

import torch
from llvmlite.binding import ffi
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from rope_ext.attention import dispatch as attention
from rope_ext.attention import paged_cpu
from rope_ext.attention.call import Call, Pairs, RotatedBand
from rope_ext.engines.served import Served
from rope_ext.engines.vllm_plugin import served_method
from rope_ext.errors import ExportError

FEW = 4
"""Most new tokens of a request that decodes: above, torch reads keys fewer times."""
# Before vLLM 0.32 loads a second model in a process, it reads `vars(x)` of what any module
# holds, and this object would answer with a function of LLVM.
ffi.lib._fntab.setdefault("__dict__", {})
_AT = (torch.device("cpu"), torch.float32)


class StoredPositions(nn.Module):
    """Rotates queries and keys to the positions at which keys are cached."""

    cos: torch.Tensor | None
    sin: torch.Tensor | None

    def __init__(self, served: Served, positions: int) -> None:
        super().__init__()
        self.pairs = _pairs(served)
        self.columns = served.columns
        table = served.stored.between(0, positions, *_AT)
        # Buffers, which torch.compile takes as inputs of its graph.
        for name, numbers in zip(("cos", "sin"), table or (None, None), strict=True):
            self.register_buffer(name, numbers, persistent=False)

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.cos is None or self.sin is None or key is None:
            return query, key
        row = positions.clamp(max=len(self.cos) - 1)
        cos = self.cos[row][:, None]
        sin = self.sin[row][:, None]
        return self._rotate(query, cos, sin), self._rotate(key, cos, sin)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = x.view(len(x), -1, self.columns)
        return self.pairs.rotate(heads, (cos, sin)).view(x.shape)


def _pairs(served: Served) -> Pairs:
    half = served.columns // 2
    return Pairs(slice(0, half), slice(half, served.columns))


class Backend(CPUAttentionBackend):
    """vLLM's CPU backend, with banded attention under position methods."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """Selected while a model is built."""
        return CPUAttentionBackendImpl if served_method() is None else Banded

    @staticmethod
    def select(served: Served) -> None:
        """Do nothing: vLLM has one backend on CPUs."""

    @staticmethod
    def rotary_embedding(served: Served) -> nn.Module:
        """Return the rotary embedding of the layers that the method changes."""
        return StoredPositions(served, get_current_vllm_config().model_config.max_model_len)


@dataclass(frozen=True)
class Step:
    """What all layers share in a step."""

    tokens: torch.Tensor | slice  # those of requests that decode
    decoding: paged_cpu.Queries | None
    prompts: list[tuple[int, slice, int]]  # request, its new tokens, and number of all its tokens


class Banded(CPUAttentionBackendImpl):
    """Attention of a position method on vLLM's pages; vLLM's own in layers with a window."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        served = served_method()
        assert served is not None
        self.served = served
        plain = self.alibi_slopes is None and self.sinks is None and not self.logits_soft_cap
        if self.is_fp8_kv_cache or not plain or served.columns != self.head_size:
            raise ExportError(
                f"rope_ext serves {served.method.name} in vLLM without --kv-cache-dtype, ALiBi, "
                f"soft caps and sinks, for heads that rotate as a whole"
            )
        self.windowed = self.sliding_window != -1  # the method leaves such layers alone
        if self.windowed:
            return
        self.pairs = _pairs(served)
        self._compile(get_current_vllm_config().model_config.dtype)

    def _compile(self, dtype: torch.dtype) -> None:
        """Compile what decodes, so that the first request does not wait for it."""
        if dtype in paged_cpu.DTYPES:
            query = torch.zeros(1, self.num_heads, self.head_size, dtype=dtype)
            cache = torch.zeros(1, self.num_kv_heads, 1, 2 * self.head_size, dtype=dtype)
            pages = torch.zeros(1, 1, dtype=torch.int32)
            paged_cpu.attend(
                query=query, cache=cache, pages=pages, queries=self._decoding([0], [0])
            )

    def do_kv_cache_update(
        self,
        layer: nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Cache keys and values side by side."""
        if self.windowed:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
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
        if self.windowed:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *more, **also
            )
        if attn_metadata is None:  # vLLM's warmup run
            return output
        step = getattr(attn_metadata, "_rope_ext_step", None)
        if step is None:
            step = self._step(attn_metadata, kv_cache.dtype)
            attn_metadata._rope_ext_step = step
        out = output.view(len(output), self.num_heads, self.head_size)
        if step.decoding is not None:
            pages = attn_metadata.block_table
            out[step.tokens] = paged_cpu.attend(
                query=query[step.tokens], cache=kv_cache, pages=pages, queries=step.decoding
            ).to(out.dtype)
        for request, new, last in step.prompts:
            blocks = attn_metadata.block_table[request, : -(-last // kv_cache.shape[2])]
            kept = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[None, :, :last]
            keys, values = kept.chunk(2, dim=-1)
            out[new] = self._attend(query[new].transpose(0, 1)[None], keys, values)
        return output

    def _step(self, attn_metadata: Any, dtype: torch.dtype) -> Step:
        """Sort requests into those that decode, and prompts."""
        few = FEW if dtype in paged_cpu.DTYPES else 0
        starts = attn_metadata.query_start_loc.tolist()
        tokens: list[int] = []
        requests: list[int] = []
        positions: list[int] = []
        prompts = []
        for request, last in enumerate(attn_metadata.seq_lens.tolist()):
            new = range(starts[request], starts[request + 1])
            if 0 < len(new) <= few:
                tokens += new
                requests += [request] * len(new)
                positions += range(last - len(new), last)
            elif new:
                prompts.append((request, slice(new.start, new.stop), last))
        alone = tokens == list(range(len(tokens)))
        return Step(
            tokens=slice(0, len(tokens)) if alone else torch.tensor(tokens),
            decoding=self._decoding(requests, positions) if tokens else None,
            prompts=prompts,
        )

    def _decoding(self, requests: list[int], positions: list[int]) -> paged_cpu.Queries:
        """Return what the layers share for single queries at ``positions`` of ``requests``."""
        served = self.served
        places = torch.tensor(positions)
        last = max(positions) + 1
        bands = [
            RotatedBand(seen, of_query.at(places, torch.float32), of_key.between(0, last, *_AT))
            for seen, of_query, of_key in served.bands
        ]
        temperature = served.temperature(places)
        one = torch.ones(len(positions), dtype=torch.float32)
        scales = one if temperature is None else temperature
        return paged_cpu.Queries.from_bands(
            requests=requests,
            positions=positions,
            bands=bands,
            pairs=self.head_size // 2,
            scales=scales * (self.scale * served.scaling),
        )

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return attention, ``[queries, heads, columns]``; the queries are the last keys."""
        served = self.served
        last = key.shape[2]
        first = last - query.shape[2]
        bands = [
            RotatedBand(seen, of_query.between(first, last, *_AT), of_key.between(0, last, *_AT))
            for seen, of_query, of_key in served.bands
        ]
        temperature = served.temperature(torch.arange(first, last))
        if temperature is not None:
            query = (query * temperature[:, None]).to(query.dtype)
        call = Call(bands, self.pairs, self.scale * served.scaling)
        return attention.attend(query, key, value, call=call)[0].transpose(0, 1)
