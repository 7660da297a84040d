"""SGLang plugin for position methods; SGLang loads it automatically (``sglang.srt.plugins``).

No card and no SGLang process has run it so far. SGLang rotates queries and keys in the model, and
computes attention in a backend. For a folder saved under a position method, both are replaced; its
pools, prefix cache and CUDA graphs stay. Other models are unchanged.
"""

import inspect
from typing import Any

import torch
from sglang.srt.arg_groups.choices import add_attention_backend_choices
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.model_executor.cuda_graph_config import Backend as Graph
from sglang.srt.model_executor.cuda_graph_config import Phase, check_cuda_graph_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import (
    attention_backends,
    get_parallel,
    get_spec,
    process_model_config,
)
from sglang.srt.utils import get_device_capability, is_cuda
from sglang.version import __version__ as version
from torch import nn

from rope_ext.attention import cards, paged
from rope_ext.engines.configs import SGLANG_BACKEND, SGLANG_VERSIONS
from rope_ext.engines.served import Served, StoredKeys, paged_tables, read_served
from rope_ext.errors import CURE, ExportError


def register() -> None:
    """Entry point: SGLang calls it in each of its processes, and logs the errors that it raises."""
    add_attention_backend_choices([SGLANG_BACKEND])
    register_attention_backend(SGLANG_BACKEND)(Paged)
    HookRegistry.register("sglang.srt.layers.rotary_embedding.get_rope", get_rope, HookType.AROUND)


def get_rope(original: Any, *args: Any, **kwargs: Any) -> nn.Module:
    """Return the rotary embedding for an SGLang model; another one under a position method."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    if (given.get("rope_scaling") or {}).get("rope_type") != CURE:
        return original(*args, **kwargs)
    if version.partition(".post")[0] not in SGLANG_VERSIONS:
        raise ExportError(
            f"rope_ext serves position methods in SGLang {', '.join(SGLANG_VERSIONS)}, not in "
            f"{version}; install sglang=={SGLANG_VERSIONS[-1]}, or use vLLM or transformers"
        )
    config = process_model_config()
    served = read_served(config.hf_text_config.to_dict(), "SGLang")
    if served is None:
        raise ExportError(f"rope_type is {CURE!r}, but config.json has no record of a patch")
    _refuse_settings(served)
    served.refuse_pairs()
    device = torch.get_default_device()  # SGLang builds models under theirs
    return StoredKeys(paged_tables(served, config.context_len, str(device)))


def _refuse_settings(served: Served) -> None:
    """Raise if the server is set to what the backend does not compute."""
    name = served.method.name
    others = set(attention_backends()) - {SGLANG_BACKEND}
    if others:
        raise ExportError(
            f"rope_ext serves {name} with --attention-backend {SGLANG_BACKEND}, not with "
            f"{' and '.join(sorted(map(str, others)))}; start the server with the command that "
            f"rope-ext export prints"
        )
    if not is_cuda() or get_device_capability() < cards.AMPERE:
        raise ExportError(
            f"rope_ext serves {name} in SGLang on NVIDIA GPUs of compute capability 8.0 or later"
        )
    if get_spec().speculative_algorithm is not None:
        raise ExportError(f"rope_ext serves {name} in SGLang without --speculative-algorithm")
    if check_cuda_graph_backend(Phase.PREFILL, Graph.FULL):
        raise ExportError(f"rope_ext serves {name} without --cuda-graph-backend-prefill full")
    parallel = get_parallel()
    if parallel.attn_cp_size > 1 or parallel.attn_dcp_size > 1:
        raise ExportError(f"rope_ext serves {name} in SGLang without context parallelism")


class Paged(AttentionBackend):
    """Attention of a position method on SGLang's pools of tokens, which are pages of one."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        config = runner.model_config
        served = read_served(config.hf_text_config.to_dict(), "SGLang")
        if served is None:
            raise ExportError(
                f"--attention-backend {SGLANG_BACKEND} serves models that rope_ext patched with a "
                f"position method, and this is not one; leave it out"
            )
        self.pool = runner.token_to_kv_pool
        self.req_to_token = runner.req_to_token_pool.req_to_token
        _refuse_layers(runner.model, self.pool, served)
        (device,) = {x.stored.device for x in runner.model.modules() if isinstance(x, StoredKeys)}
        self.tables = paged_tables(served, config.context_len, str(device))
        self.scaling = served.scaling
        # The first query of every request of a decoding step, which has one of each.
        rows = len(self.req_to_token)
        self.starts = torch.arange(rows + 1, dtype=torch.int32, device=self.req_to_token.device)

    def shared_read_ends(self, fm: Any) -> SharedReadEnds:
        """Every layer reads the table of tokens: the scheduler waits until a step is done."""
        read_in_layers = fm.is_decode()
        return SharedReadEnds.POST_REPLAY if read_in_layers else SharedReadEnds.UNKNOWN

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if max_bs >= len(self.starts):
            rows = max_bs + 1
            self.starts = torch.arange(rows, dtype=torch.int32, device=self.starts.device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Note where the requests of a step are; graphs read the same tensors when replayed."""
        count = forward_batch.batch_size
        starts = self.starts[: count + 1]
        most = 1
        if not forward_batch.forward_mode.is_decode_or_idle():
            lengths = forward_batch.extend_seq_lens
            starts = nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
            most = max(forward_batch.extend_seq_lens_cpu)
        self.forward_metadata = paged.Batch(
            pages=self.req_to_token,
            pages_of=forward_batch.req_pool_indices,
            lengths=forward_batch.seq_lens,
            starts=starts,
            max_queries=most,
        )

    @torch.compiler.disable
    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Cache keys and values; return ``[tokens, heads * columns]``, as ``q`` is."""
        if save_kv_cache:
            self.pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys = self.pool.get_key_buffer(layer.layer_id)
        values = self.pool.get_value_buffer(layer.layer_id)
        out = torch.empty_like(query)
        logits = paged.Logits(
            scale=layer.scaling * self.scaling, softcap=float(layer.logit_cap or 0)
        )
        batch = self.forward_metadata
        assert isinstance(batch, paged.Batch)
        # [tokens, heads, columns]: each token is a page with one slot.
        paged.attend(
            query=query,
            key_cache=keys.unsqueeze(2),
            value_cache=values.unsqueeze(2),
            out=out,
            batch=batch,
            tables=self.tables,
            logits=logits,
        )
        return out.view(q.shape)

    forward_decode = forward_extend


def _refuse_layers(model: nn.Module, pool: Any, served: Served) -> None:
    """Raise unless all layers and their pool are what the kernel computes."""
    plain = type(pool) is MHATokenToKVPool and pool.kv_cache_layout == "nhd"
    if not plain or pool.store_dtype != pool.dtype or pool.is_quantized_kv_cache:
        raise ExportError(
            f"rope_ext serves {served.method.name} in SGLang without --kv-cache-dtype, "
            f"--enable-unified-memory and SGLANG_USE_HND_KVCACHE"
        )
    layers = [x for x in model.modules() if isinstance(x, RadixAttention)]
    for layer in layers:
        whole = layer.qk_head_dim == layer.v_head_dim == served.columns <= paged.MOST_COLUMNS
        window = layer.sliding_window_size != -1
        causal = layer.attn_type == AttentionType.DECODER and not layer.is_cross_attention
        if window or not (whole and causal):
            raise ExportError(
                f"rope_ext serves {served.method.name} in SGLang without windows, for decoders "
                f"whose heads rotate as a whole, of at most {paged.MOST_COLUMNS} columns"
            )
