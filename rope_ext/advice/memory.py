"""Estimates the memory that a prompt needs, without loading weights."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig

from rope_ext.errors import OptionError, RopeExtError, UnsupportedModelError, first_line
from rope_ext.patching import current_patch, unpatch
from rope_ext.quoting import Printed
from rope_ext.rotary.context import as_argument, caches_in
from rope_ext.saving.folder import Given, read_saved

GROUP = 64  # values of transformers' quantized caches that share a scale and a zero point
RESIDUAL = 128  # recent tokens of these caches that stay unquantized


@dataclass(frozen=True)
class Memory(Printed):
    """Memory on one device, in bytes; ``print`` it."""

    weights: float  # after loading
    cache: float  # keys and values of the whole prompt
    prefill: float  # peak of the prompt's forward pass, beyond weights and cache
    position_method: float
    """Upper bound for what a position method adds: one layer's queries and keys, rotated for two
    bands and cut into tiles, and its outputs in float32."""

    def __str__(self) -> str:
        parts = {"weights": self.weights, "KV cache": self.cache, "prefill": self.prefill}
        parts["total"] = sum(parts.values())
        text = [f"{name:<10}{shown(size):>12}" for name, size in parts.items()]
        return "\n".join([*text, f"position methods add at most {shown(self.position_method)}"])


class Live(TorchDispatchMode):
    """Tracks all storages created inside it; ``peak`` is the largest number of live bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.live = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._add(value.untyped_storage())
        return result

    def known(self, tensors: Iterable[torch.Tensor]) -> None:
        """Exclude tensors that already exist."""
        for tensor in tensors:
            self._known[tensor.untyped_storage()._cdata] = 0

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = storage.nbytes()
        self.live += self._known[key]
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.live -= self._known.pop(key)


def memory(
    given: Given,
    length: int,
    *,
    batch: int = 1,
    chunk: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    cache_bits: int = 16,
) -> Memory:
    """Estimate the memory that a prompt needs, with a forward pass on tensors without storage.

    Kernel workspaces, fragmentation and the framework are not included: leave ten percent of the
    GPU's memory for them. On a CPU, peak resident memory was 1.3 to 1.5 times cache and prefill
    (SmolLM2 and Gemma 3 270M at 4k to 16k tokens, bfloat16).

    ``chunk``: tokens per forward, as in ``generate(prefill_chunk_size=...)``; None: the prompt.
    ``dtype``: of weights, activations and cache. ``cache_bits``: 16, or the 8, 4 or 2 bits of
    ``cache_implementation="quantized"``.
    """
    last = length if chunk is None else min(chunk, length)
    for name, value in (("length", length), ("batch", batch), ("chunk", last)):
        if value < 1:
            raise OptionError(f"{name}={value} is not valid; it must be at least 1")
    if cache_bits not in (16, 8, 4, 2):
        raise OptionError(f"cache_bits={cache_bits} is not valid; it must be 16, 8, 4 or 2")
    model: Any = read_saved(given).model
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"the memory of {type(model).__name__} cannot be estimated: it is an encoder-decoder, "
            f"and this counts the forward of one text model"
        )
    _fix_frequencies(model)
    model.eval().to(dtype)
    live = Live()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            cache = _prefilled(model, live, shape=(batch, length), last=last)
    except (RopeExtError, MemoryError):
        raise
    except Exception as error:  # of the model's own code, with sizes that do not fit together
        raise UnsupportedModelError(
            f"the memory of {type(model).__name__} cannot be estimated, since its forward fails "
            f"({type(error).__name__}: {first_line(error)}); correct its configuration"
        ) from error
    # A sliding layer's window is a view into the whole chunk's keys, so all of them stay in memory.
    layers = () if cache is None else cache.layers
    there = [layer for layer in layers if getattr(layer, "keys", None) is not None]
    sizes = [sum(x.untyped_storage().nbytes() for x in (one.keys, one.values)) for one in there]
    stored = sum(sizes)
    prefill = live.peak - stored
    if cache_bits < 16:
        packed = (cache_bits + 2 * 16 / GROUP) / (8 * dtype.itemsize)
        recent = min(1, RESIDUAL / length)
        stored *= recent + (1 - recent) * packed
        prefill += max(sizes, default=0)  # layers are dequantized one at a time
    queries, keys, size = heads_of(model.config)
    in_bands = batch * length * size * (3 * dtype.itemsize * (queries + keys) + 3 * 4 * queries)
    weights = sum(p.untyped_storage().nbytes() for p in model.parameters())
    return Memory(weights=weights, cache=stored, prefill=prefill, position_method=in_bands)


def heads_of(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Return the largest numbers of heads of queries and of keys, and of columns, of any layer."""
    text: Any = config.get_text_config()
    # Gemma 4 has heads of two sizes, and refuses to name one for all layers.
    several = getattr(text, "is_heterogeneous", False)
    found = list(map(_heads_of_layer, text.per_layer_config if several else [text]))
    queries, keys, columns = map(max, zip(*found, strict=True))
    return queries, keys, columns


def _heads_of_layer(config: Any) -> tuple[int, int, int]:
    queries = config.num_attention_heads
    # Families without grouped keys, such as GPT-NeoX, have no such field.
    keys = getattr(config, "num_key_value_heads", None) or queries
    return queries, keys, getattr(config, "head_dim", None) or config.hidden_size // queries


def _fix_frequencies(model: nn.Module) -> None:
    """Let no frequency depend on the length: tensors without storage have no positions to read."""
    state = current_patch(model)
    if state is not None and state.method.is_dynamic:
        unpatch(model)
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):  # one for each layer type
            vars(module)["rope_type"] = dict.fromkeys(kind, "default")
        elif kind is not None:
            vars(module)["rope_type"] = "default"


def _prefilled(model: Any, live: Live, shape: tuple[int, int], last: int) -> Any:
    """Run a prompt with ``last`` tokens in its last chunk; returns its cache, if it has one."""
    model.to_empty(device="cpu").tie_weights()
    cache = None
    ids = torch.zeros(shape, dtype=torch.long)
    live.known((*model.parameters(), *model.buffers()))
    with live:
        for part in (ids[:, last:], ids[:, :last]):
            live.peak = live.live  # keep the last chunk's peak: it attends to the most tokens
            if part.shape[1]:
                options = {"use_cache": True, "logits_to_keep": 1}
                found = caches_in(model(part, **as_argument(model, cache), **options))
                cache = next(iter(found), None)
    if cache is None and last < shape[1]:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no cache, so it reads a text in one forward; leave chunk "
            f"out"
        )
    return cache


def shown(size: float) -> str:
    """Format bytes as ``"12.3 GiB"``, or in MiB below 1 GiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
