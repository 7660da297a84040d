"""Continuous batching of transformers under a position map: many requests in one row.

Keys are cached in pages, rotated as in any other cache, which depends on their positions only. So
requests may share the pages of a prefix. Each request of a row is a forward of its own that
continues a cache, and nothing of it outlives the row.
"""

import functools
import inspect
from itertools import pairwise
from typing import Any

import transformers
from torch import Tensor, nn

from rope_ext.attention import paged
from rope_ext.errors import CacheError
from rope_ext.position.forward import PositionForward
from rope_ext.position.masks import BatchMask
from rope_ext.rotary.context import NOTE

PAGED = "paged|eager"
"""The name under which transformers accepts any attention function for continuous batching."""
ARGUMENTS = (
    "cache",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "write_index",
    "read_index",
    "logits_indices",
    "logits_processor_args",
    "block_table",
)
"""Arguments of a row of requests, which layers pass on to their attention function."""


class PagedForward(PositionForward):
    """One forward of continuous batching.

    ``query`` are the positions of all tokens in the row, so that hooks in front of attention need
    no requests.
    """

    ends: Tensor  # where each request's tokens end in the row, int32, [requests + 1], from 0 on
    pages: Any  # transformers' PagedAttentionCache

    def locate(self, positions: Tensor) -> None:
        """Record the model's position ids, and begin the forward of every request."""
        if self.located:
            return
        self.located = True
        self.device = positions.device
        self.query = self.key = self._checked(positions)
        self.batches: dict[str, paged.Batch] = {}  # for the paged kernel, by kind of allocator
        first = self.query[0].tolist()
        self.filled_of = {  # tokens in the pages of each request, by its tokens in the row
            (start, end): first[start]
            for start, end in pairwise(self.ends.tolist())
            if start < end  # else padding, after the last request
        }
        self._check_pages()

    @functools.cached_property
    def requests(self) -> list[tuple[slice, PositionForward]]:
        """The forward of each request, which the paged kernel does without."""
        found = []
        for (start, end), filled in self.filled_of.items():
            request = PositionForward(
                patched_by=self.map,
                rows=1,
                tokens=end - start,
                filled=filled,
                cache=None,
                traced=False,
            )
            request.locate(self.query[:, start:end])
            found.append((slice(start, end), request))
        return found

    def _check_pages(self) -> None:
        """Raise CacheError if pages hold keys that another patch has rotated."""
        continued = any(self.filled_of.values())
        if continued and getattr(self.pages, NOTE, None) != self.map.key:
            raise CacheError(
                f"the pages of this continuous batching were filled before the model was patched "
                f"with {self.map.named}, so their keys carry other rotations; stop its manager, "
                f"and start another one"
            )
        setattr(self.pages, NOTE, self.map.key)

    def split(self, documents: Tensor) -> None:
        """Ignore the documents that transformers finds in positions; requests are known."""

    def mask_of(self, row: BatchMask, request: PositionForward, keys: int) -> BatchMask:
        """Return the mask of a request that sees its last ``keys`` tokens, once for all layers."""
        known = row.requests
        if (request, keys) not in known:
            known[request, keys] = row.of_request(request, keys)
        return known[request, keys]


def initialize(attention: Any, named: str, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``model.init_continuous_batching``, whose manager then uses our attention function.

    ``attention`` raises an error if the model's attention function is not ours any more.
    """
    attention()
    require_pages(named)
    manager = original.__func__(_Accepted(original.__self__), *args, **kwargs)
    config = manager.continuous_batching_config
    if any(config.cuda_graph_booleans):
        raise CacheError(
            f"continuous batching with CUDA graphs cannot follow the requests of {named}; leave "
            f"use_cuda_graph, q_padding_interval_size and kv_padding_interval_size out of the "
            f"ContinuousBatchingConfig"
        )
    return manager


def require_pages(named: str) -> None:
    """Raise CacheError unless this version of transformers gives pages to attention functions."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    update: Any = getattr(PagedAttentionCache, "update")  # noqa: B009
    if "kwargs" not in inspect.signature(update).parameters:
        raise CacheError(
            f"continuous batching under {named} needs transformers 5.19 or later, and this is "
            f"{transformers.__version__}; upgrade it, or call generate with a padded batch"
        )


class RowCache:
    """Replaces the pages in a decoder, whose layers then leave caching to the attention function.

    From transformers 5.24 on, layers cache keys before they call that function, where some
    encodings have yet to rotate them, and a decoder given pages requests no masks, which tell
    windows. Before, layers are given no cache.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


class _Accepted:
    """A model as the manager of continuous batching wants it, with an attention that it accepts.

    The model's own configuration is not changed, since other threads may call it meanwhile.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @functools.cached_property
    def config(self) -> Any:
        return _Named(self._model.config)


class _Named:
    """A configuration with another attention implementation."""

    _attn_implementation = PAGED

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)
