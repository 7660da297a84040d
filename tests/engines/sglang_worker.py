"""Runs the plugin of SGLang on a CPU, in Triton's interpreter, without what SGLang depends on.

``python sglang_worker.py FOLDER < JOBS > ANSWERS``: FOLDER holds the package sglang, installed
without dependencies. Of it, ``REAL`` is executed: the plugins and their hooks, the list of
backends and their base class, the attention layer, the batch and the pools. Whatever these import
of the rest is replaced by an object that answers no to everything. With ``-`` for FOLDER, small
stand-ins replace these, too. Models are transformers' own, with SGLang's attention layers.

A job names a folder, the version and the settings of a server, and its steps: in each, for some
requests, their first and last token, and the pages of another request that a new one shares. The
answer holds the log-probability of every token of every prompt but the first, or an error.
"""

from __future__ import annotations

import enum
import importlib
import importlib.machinery
import inspect
import json
import sys
import traceback
import types
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig

import rope_ext
from tests.engines.rotary_of_sglang import ROTARY, No, Operation

SRT = "sglang.srt"
REAL = {
    f"{SRT}.plugins",
    f"{SRT}.plugins.hook_registry",
    f"{SRT}.arg_groups.choices",
    f"{SRT}.layers.attention.attention_registry",
    f"{SRT}.layers.attention.base_attn_backend",
    f"{SRT}.layers.attention.graph_utils",
    f"{SRT}.layers.radix_attention",
    f"{SRT}.mem_cache.memory_pool",
    f"{SRT}.model_executor.cuda_graph_config",
    f"{SRT}.model_executor.forward_batch_info",
    f"{SRT}.model_executor.forward_context",
}
TOKENS = 2000  # of the pool
answers = sys.stdout
sys.stdout = sys.stderr


class Absent(types.ModuleType):
    """A module that is not executed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("BaseFusedOp", "PluggableLayer"):
            return Operation
        # A name in capitals may be inherited from.
        found = type(name, (), {}) if name[0].isupper() and not name.isupper() else No()
        setattr(self, name, found)
        return found


class Finder:
    """Finds what is real of the package, empty parents of it, and nothing else."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] not in ("sglang", "vllm", "msgspec", "orjson"):
            return None
        if self.folder is not None and (name in REAL or name.startswith(ROTARY)):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> Absent:
        module = Absent(spec.name)
        module.__path__ = []
        real = [ROTARY, *REAL]
        if self.folder is not None and any(x.startswith(f"{spec.name}.") for x in real):
            module.__path__ = [str(self.folder.joinpath(*spec.name.split(".")))]
        return module

    def exec_module(self, module: Any) -> None:
        pass


def of(name: str) -> Any:
    return importlib.import_module(f"{SRT}.{name}")


HOOKED: dict[str, Any] = {}
LISTED: dict[str, Any] = {}


def stand_in() -> None:
    """Define the few names that the plugin uses, in modules that are not executed."""

    class Modes(enum.Enum):
        EXTEND, DECODE, MIXED = range(3)

        def is_decode(self) -> bool:
            return self is Modes.DECODE

        is_decode_or_idle = is_decode

    @dataclass
    class ForwardBatch:
        forward_mode: Any
        batch_size: int
        input_ids: Any
        req_pool_indices: Any
        seq_lens: Any
        out_cache_loc: Any
        seq_lens_sum: int
        extend_seq_lens: Any = None
        extend_seq_lens_cpu: Any = None
        positions: Any = None

    class AttentionBackend:
        forward_metadata = None

        def init_forward_metadata(self, batch: Any) -> None:
            self.init_forward_metadata_out_graph(batch)

    class KVWriteLoc:
        @staticmethod
        def for_batch(batch: Any) -> Any:
            return batch.out_cache_loc

    class MHATokenToKVPool:
        kv_cache_layout = "nhd"
        is_quantized_kv_cache = False

        def __init__(self, size: int, page: int, dtype: Any, heads: int, columns: int, layers: int):
            self.dtype = self.store_dtype = dtype
            self.made = torch.zeros(layers, 2, size + page, heads, columns, dtype=dtype)

        def set_kv_buffer(self, layer: Any, where: Any, key: Any, value: Any) -> None:
            self.made[layer.layer_id, 0, where] = key
            self.made[layer.layer_id, 1, where] = value

        def get_key_buffer(self, layer: int) -> Any:
            return self.made[layer, 0]

        def get_value_buffer(self, layer: int) -> Any:
            return self.made[layer, 1]

    class RadixAttention(torch.nn.Module):
        is_cross_attention, sliding_window_size, logit_cap, attn_type = False, -1, 0.0, "decoder"

        def __init__(self, heads: int, columns: int, scale: float, kv: int, layer: int) -> None:
            super().__init__()
            self.tp_q_head_num, self.tp_k_head_num = heads, kv
            self.qk_head_dim = self.v_head_dim = columns
            self.scaling, self.layer_id = scale, layer

        def forward(self, q: Any, k: Any, v: Any, batch: Any) -> Any:
            backend = of("model_executor.forward_context").backend
            k, v = (x.view(len(x), self.tp_k_head_num, -1) for x in (k, v))
            decodes = batch.forward_mode.is_decode()
            attend = backend.forward_decode if decodes else backend.forward_extend
            return attend(q, k, v, self, batch, True)

    class Hooks(enum.Enum):
        AROUND = "around"

    class Registry:
        register = staticmethod(lambda target, hook, kind: HOOKED.update({target: hook}))

    def get_rope(
        head_size: int, rotary_dim: int, max_position: int, base: float, rope_scaling: Any = None
    ) -> Any:
        if rope_scaling["rope_type"] == "default":
            return torch.nn.Identity()
        raise ValueError(f"Unknown RoPE scaling type {rope_scaling['rope_type']}")

    graphs = of("model_executor.cuda_graph_config")
    graphs.Backend, graphs.Phase = SimpleNamespace(FULL="full"), SimpleNamespace(PREFILL="prefill")
    graphs.check_cuda_graph_backend = lambda phase, name: (
        getattr(graphs.get_exec().graph.cuda_graph_config, phase).backend == name
    )
    of("arg_groups.choices").add_attention_backend_choices = lambda names: None
    listed = of("layers.attention.attention_registry")
    listed.ATTENTION_BACKENDS = LISTED
    listed.register_attention_backend = lambda name: lambda made: LISTED.update({name: made})
    base = of("layers.attention.base_attn_backend")
    base.AttentionBackend = AttentionBackend
    base.SharedReadEnds = enum.Enum("SharedReadEnds", "POST_REPLAY UNKNOWN")
    radix = of("layers.radix_attention")
    radix.RadixAttention, radix.AttentionType = RadixAttention, SimpleNamespace(DECODER="decoder")
    pools = of("mem_cache.memory_pool")
    pools.KVWriteLoc, pools.MHATokenToKVPool = KVWriteLoc, MHATokenToKVPool
    batches = of("model_executor.forward_batch_info")
    batches.ForwardBatch, batches.ForwardMode = ForwardBatch, Modes
    hooks = of("plugins.hook_registry")
    hooks.HookRegistry, hooks.HookType = Registry, Hooks
    of("layers.rotary_embedding").get_rope = get_rope


STARTED: dict[str, Any] = {}
"""The settings of the server that is started, and its configuration."""


def publish() -> None:
    """Define what a server publishes before it builds a model, for the job that runs."""
    context = of("runtime_context")
    backend = lambda: STARTED.get("attention_backend", "rope_ext")  # noqa: E731
    context.attention_backends = lambda: (backend(), STARTED.get("decode", backend()))
    context.get_parallel = lambda: SimpleNamespace(
        attn_cp_size=1, attn_dcp_size=STARTED.get("dcp", 1)
    )
    context.get_spec = lambda: SimpleNamespace(speculative_algorithm=STARTED.get("draft"))
    context.process_model_config = lambda: model_config(STARTED["config"])
    graphs = of("model_executor.cuda_graph_config")
    phase = lambda: SimpleNamespace(backend=STARTED.get("prefill_graph", "breakable"))  # noqa: E731
    config = lambda: SimpleNamespace(cuda_graph_config=SimpleNamespace(prefill=phase()))  # noqa: E731
    context.get_exec = lambda: SimpleNamespace(graph=config())
    graphs.get_exec = context.get_exec
    saver = SimpleNamespace(region=lambda tag: nullcontext())
    of("utils.torch_memory_saver_adapter").TorchMemorySaverAdapter.create = lambda enable: saver
    of("mem_cache.utils").maybe_init_custom_mem_pool = lambda device: (False, None, None)
    of("utils").ceil_align = lambda number, to: -(-number // to) * to


def model_config(config: Any) -> Any:
    return SimpleNamespace(hf_text_config=config, context_len=config.max_position_embeddings)


def load(folder: Path | None) -> Any:
    """Load the plugin as SGLang does, by its entry point; returns the hooked ``get_rope``."""
    rotary = of("layers.rotary_embedding")
    entry = SimpleNamespace(
        name="rope_ext",
        value="",
        dist=None,
        load=lambda: importlib.import_module("rope_ext.engines.sglang_plugin").register,
    )
    if folder is None:
        entry.load()()
        original, hook = rotary.get_rope, HOOKED[f"{ROTARY}.get_rope"]
        return lambda *args, **kwargs: hook(original, *args, **kwargs)
    plugins = of("plugins")
    with mock.patch.object(plugins, "entry_points", lambda group: [entry]):
        plugins.load_plugins()
    assert "rope_ext" in of("arg_groups.choices").ATTENTION_BACKEND_CHOICES
    return rotary.get_rope


class Attention(torch.nn.Module):
    """SGLang's order in llama, qwen2 and qwen3: project, norm, rotate, attend."""

    def __init__(self, own: Any, config: Any, layer: int, get_rope: Any, server: Server) -> None:
        super().__init__()
        self.own, self.server = own, server
        heads, self.kv = config.num_attention_heads, config.num_key_value_heads
        self.columns = own.head_dim
        parameters = config.rope_parameters
        self.rotary_emb = get_rope(
            self.columns,
            rotary_dim=self.columns,
            max_position=config.max_position_embeddings,
            base=parameters["rope_theta"],
            rope_scaling=parameters,
        )
        attention = of("layers.radix_attention").RadixAttention
        self.attn = attention(heads, self.columns, own.scaling, self.kv, layer)
        if window := server.settings.get("window"):
            self.attn.sliding_window_size = window

    def forward(self, hidden_states: torch.Tensor, **also: Any) -> tuple[torch.Tensor, None]:
        (x,) = hidden_states
        parts = [project(x) for project in (self.own.q_proj, self.own.k_proj, self.own.v_proj)]
        for at, norm in enumerate(("q_norm", "k_norm")):
            if hasattr(self.own, norm):
                heads = parts[at].view(len(x), -1, self.columns)
                parts[at] = getattr(self.own, norm)(heads).flatten(1)
        q, k, v = torch.cat(parts, -1).split([part.shape[-1] for part in parts], -1)
        batch = self.server.batch
        q, k = self.rotary_emb(batch.positions, q, k)
        return self.own.o_proj(self.attn(q, k, v, batch))[None], None


class Server:
    """Runs steps of requests, whose tokens are anywhere in the pool."""

    def __init__(self, job: dict[str, Any], get_rope: Any) -> None:
        self.settings = job["settings"]
        if self.settings.get("without_plugin"):
            get_rope = inspect.unwrap(get_rope)
        config = AutoConfig.from_pretrained(job["folder"])
        STARTED.clear()
        STARTED.update(self.settings, config=config)
        loaded = rope_ext.from_pretrained(job["folder"], dtype=torch.float32)
        self.model = loaded if self.settings.get("plain") else rope_ext.unpatch(loaded)
        for number, layer in enumerate(self.model.model.layers):
            layer.self_attn = Attention(layer.self_attn, config, number, get_rope, self)
        pools = of("mem_cache.memory_pool")
        columns = self.model.model.layers[0].self_attn.columns
        sizes = (torch.float32, config.num_key_value_heads, columns, config.num_hidden_layers)
        more = () if pools.MHATokenToKVPool.__init__.__code__.co_argcount == 7 else ("cpu", False)
        pool = pools.MHATokenToKVPool(TOKENS, 1, *sizes, *more)
        for name, value in self.settings.get("pool", {}).items():
            setattr(pool, name, value)
        self.rows = torch.zeros(9, config.max_position_embeddings, dtype=torch.int32)
        runner = SimpleNamespace(
            model=self.model,
            model_config=model_config(config),
            token_to_kv_pool=pool,
            req_to_token_pool=SimpleNamespace(req_to_token=self.rows, size=8),
        )
        backends = of("layers.attention.attention_registry").ATTENTION_BACKENDS
        self.backend = backends["rope_ext"](runner)
        self.backend.init_cuda_graph_state(8, 8)
        make = torch.Generator().manual_seed(0)
        self.free = (1 + torch.randperm(TOKENS, generator=make)).tolist()
        self.row_of = (1 + torch.randperm(8, generator=make)).tolist()
        self.graphs: dict[int, Any] = {}
        self.batch: Any = None

    def step(self, prompts: list[list[int]], parts: list[list[int]]) -> torch.Tensor:
        """Run ``[request, first, last, shared with]``; returns the logits of their tokens."""
        for request, first, last, *other in parts:
            row = self.rows[self.row_of[request]]
            if other:
                row[:first] = self.rows[self.row_of[other[0]], :first]
            row[first:last] = torch.tensor([self.free.pop() for _ in range(last - first)])
        modes = of("model_executor.forward_batch_info").ForwardMode
        counts = [part[2] - part[1] for part in parts]
        decodes = all(count == 1 for count in counts)
        mode = modes.DECODE if decodes else modes.MIXED if 1 in counts else modes.EXTEND
        indices = torch.tensor([self.row_of[part[0]] for part in parts])
        ids = torch.tensor([t for r, first, last, *_ in parts for t in prompts[r][first:last]])
        where = [self.rows[self.row_of[r], first:last] for r, first, last, *_ in parts]
        given = {
            "input_ids": ids,
            "req_pool_indices": indices,
            "seq_lens": torch.tensor([part[2] for part in parts]),
            "out_cache_loc": torch.cat(where).long(),
            "positions": torch.cat([torch.arange(part[1], part[2]) for part in parts]),
        }
        self.prepare(mode, len(parts), given, None if decodes else counts)
        context = of("model_executor.forward_context")
        if hasattr(context, "__file__"):
            context.set_forward_context(context.ForwardContext(attn_backend=self.backend))
        else:
            context.backend = self.backend
        with torch.no_grad():
            places = self.batch.positions[None]
            out = self.model(self.batch.input_ids[None], position_ids=places, use_cache=False)
        return out.logits[0]

    def prepare(self, mode: Any, size: int, given: dict[str, Any], counts: Any) -> None:
        """Decoding replays a graph: the same tensors with other values, and no metadata."""
        if counts is None and size in self.graphs:
            self.batch, self.backend.forward_metadata = self.graphs[size]
            for name, value in given.items():
                getattr(self.batch, name).copy_(value)
            return
        batch = of("model_executor.forward_batch_info").ForwardBatch(
            forward_mode=mode, batch_size=size, seq_lens_sum=int(given["seq_lens"].sum()), **given
        )
        if counts is not None:
            batch.extend_seq_lens = torch.tensor(counts, dtype=torch.int32)
            batch.extend_seq_lens_cpu = counts
        self.batch = batch
        self.backend.init_forward_metadata(batch)
        if counts is None:
            self.graphs[size] = (batch, self.backend.forward_metadata)


def run(job: dict[str, Any], get_rope: Any) -> dict[str, Any]:
    """What the model computes for the prompts of a job, step by step."""
    prompts = job["prompts"]
    with torch.device("cpu"):
        server = Server(job, get_rope)
    rows = [[float("nan")] * len(prompt) for prompt in prompts]
    for parts in job["steps"]:
        logits = server.step(prompts, parts).log_softmax(-1)
        places = [(r, t) for r, first, last, *_ in parts for t in range(first, last)]
        for at, (request, place) in enumerate(places):
            if place + 1 < len(prompts[request]):
                rows[request][place + 1] = float(logits[at, prompts[request][place + 1]])
    return {"rows": [row[1:] for row in rows]}


if __name__ == "__main__":
    given = None if sys.argv[1] == "-" else Path(sys.argv[1])
    sys.meta_path.insert(0, Finder(given))  # type: ignore[arg-type]
    if given is None:
        stand_in()
    else:
        sys.path.append(str(given))
    hooked = None
    for line in sys.stdin:
        try:
            asked = json.loads(line)
            if hooked is None:
                publish()
                hooked = load(given)
            plugin = importlib.import_module("rope_ext.engines.sglang_plugin")
            plugin.version = asked.get("version", "0.5.23")
            plugin.is_cuda = lambda: STARTED.get("cuda", True)
            plugin.get_device_capability = lambda: (9, 0)
            answer = run(asked, hooked)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
