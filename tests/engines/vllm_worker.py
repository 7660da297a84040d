"""Runs models in vLLM one after the other: reads a job in each line, and answers it in a line.

A job names a folder, the settings of the engine, and prompts of token IDs. The answer holds the
log-probability of every token of every prompt but the first, the tokens that follow with theirs,
and what the engine counted; or the error.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from typing import Any

NEW = 6  # tokens after each prompt
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the engine prints

import torch  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import PoolerConfig  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402
from vllm.pooling_params import PoolingParams  # noqa: E402

from rope_ext.engines import vllm_plugin  # noqa: E402

registry._run_in_subprocess = lambda look: look()  # a process for each architecture


def as_on_a_gpu() -> None:
    """Serve position methods by the backend for GPUs, whose kernel Triton interprets."""
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    load_general_plugins()
    vllm_plugin.on_gpu = lambda: True
    register_backend(AttentionBackendEnum.CPU_ATTN, vllm_plugin.PAGED)
    triton_attn.triton_reshape_and_cache_flash = cache
    triton_attn.TritonAttentionImpl.forward = attend


def cache(key: Any, value: Any, keys: Any, values: Any, slots: Any, *scales: Any) -> None:
    """In place of vLLM's kernel, which asks for a GPU: ``keys``, ``[blocks, tokens, ...]``."""
    there = slots >= 0  # negative: padding
    at = slots[there] // keys.shape[1], slots[there] % keys.shape[1]
    keys[at] = key[: len(there)][there]
    values[at] = value[: len(there)][there]


def attend(
    self: Any,
    layer: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    attn_metadata: Any,
    output: torch.Tensor,
    *more: Any,
    **also: Any,
) -> torch.Tensor:
    """In place of vLLM's kernel, too, in layers with a window."""
    if attn_metadata is None:
        return output.fill_(0)
    starts = attn_metadata.query_start_loc.tolist()
    for request, last in enumerate(attn_metadata.seq_lens.tolist()):
        new = slice(starts[request], starts[request + 1])
        blocks = attn_metadata.block_table[request, : -(-last // kv_cache.shape[2])].long()
        kept = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :last]
        keys, values = kept.repeat_interleave(self.num_heads // self.num_kv_heads, 0).chunk(2, -1)
        at = torch.arange(last)
        distance = at[last - (new.stop - new.start) :, None] - at
        seen = (distance >= 0) & (distance <= self.sliding_window[0])
        by_head = query[new].transpose(0, 1)
        out = scaled_dot_product_attention(by_head, keys, values, seen, scale=self.scale)
        output[new] = out.transpose(0, 1).reshape(output[new].shape)
    return output


if INTERPRETED:
    as_on_a_gpu()
gc.freeze()  # the engine collects nine times for each model


def run(job: dict[str, Any]) -> dict[str, Any]:
    """What the engine computes for the prompts of a job."""
    given: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 8}
    llm = None
    own, version = vllm_plugin.version, job["settings"].pop("vllm_version", None)
    vllm_plugin.version = version or own
    try:
        if "runner" in job["settings"]:  # hidden states; it asks for a tokenizer
            given["pooler_config"] = PoolerConfig(task="token_embed")
        else:
            given["skip_tokenizer_init"] = True
        llm = LLM(
            job["folder"],
            enforce_eager=True,
            disable_log_stats=False,
            **{**given, **job["settings"]},
        )
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        if "runner" in job["settings"]:
            found = llm.encode(
                prompts,
                pooling_task="token_embed",
                pooling_params=PoolingParams(use_activation=False),
                use_tqdm=False,
            )
            return {"rows": [one.outputs.data.float().tolist() for one in found]}
        more = SamplingParams(
            temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=0, detokenize=False
        )
        # Apart, since what returns log-probabilities of prompts reads no cached prefixes.
        every = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        rows, added = [], []
        for made in llm.generate(prompts, every, use_tqdm=False):
            rows.append(values(made.prompt_token_ids[1:], made.prompt_logprobs[1:]))
        for made in llm.generate(prompts, more, use_tqdm=False):
            (out,) = made.outputs
            added.append([list(out.token_ids), values(out.token_ids, out.logprobs)])
        counted = {one.name: one.value for one in llm.get_metrics() if hasattr(one, "value")}
        return {"rows": rows, "added": added, "counted": counted}
    finally:
        vllm_plugin.version = own
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def values(tokens: Any, found: Any) -> list[float]:
    return [entries[token].logprob for token, entries in zip(tokens, found, strict=True)]


for line in sys.stdin:
    try:
        answer = run(json.loads(line))
    except Exception as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), file=answers, flush=True)
