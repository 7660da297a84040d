"""Attention in both directions by the papers' formulas, dense, in float64, for any encoder.

It shares no code with rope_ext: the rotary modules of an unpatched model return cosine 1 and sine
0, and the attention function rotates each pair of query and key by its own distance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

from tests.families.zoo import tiny_model, tiny_of
from tests.helpers.distances import EVERY
from tests.helpers.models import attending_by

LOG_N = ("rerope", "leaky_rerope", "self_extend", "dpe")  # as released, or by our default


CLOSE = {"atol": 1e-4, "rtol": 0}  # angles are float32; hidden states are of size 5


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 60, (count,), generator=generator)


def encoder(name: str = "EuroBertModel", **overrides: Any) -> nn.Module:
    return tiny_of(getattr(transformers, name), **overrides)


FAMILIES = (
    "ModernBertModel",  # windows in most layers
    "NomicBertModel",
    "GteModel",
    "JinaEmbeddingsV3Model",
    "UltrabertModel",
    "EmbeddingGemma2TextModel",
    "gemma3_text",  # EmbeddingGemma, whose mask is a function of its own
    "llama",
    "qwen3",
    "mistral",
)


def whole(name: str) -> nn.Module:
    """An encoder, or a decoder that reads in both directions."""
    if name == "gemma3_text":
        return tiny_model(name, use_bidirectional_attention=True).model
    if name[0].isupper():
        return encoder(name)
    without_window = {"sliding_window": None} if name == "mistral" else {}
    model = tiny_model(name, **without_window).model
    model.config.is_causal = False
    return model


def states(model: nn.Module, ids: torch.Tensor, **given: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **given)[0]


@dataclass(frozen=True)
class Layer:
    """What a formula for the logits of one layer is given, in float64.

    Args:
        module: the attention module.
        query, key: not rotated, ``[rows, heads, tokens, columns]``.
        logits: rotated, scaled and capped.
        distance: tokens from query to key, ``[rows, 1, queries, keys]``; negative: a later key.
        scale: of the products.
    """

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    logits: torch.Tensor
    distance: torch.Tensor
    scale: float


@dataclass
class Oracle:
    """The attention function.

    Args:
        places: position of every token in its own text, ``[rows, tokens]``.
        texts: number of every token's text, ``[rows, tokens]``; -1: padding.
        inv_freq: the frequencies of every attention module.
        distance: effective distances between tokens m >= n, and whether the key is the later one;
            None: as trained.
        log_n: trained length of a temperature, or None.
        scores: makes the logits, and what is added to the values of pairs of tokens.
        mapped: whether a module is changed.
    """

    places: torch.Tensor
    texts: torch.Tensor
    inv_freq: dict[nn.Module, torch.Tensor]
    distance: Callable[[int, int, bool], Any] | None
    log_n: int | None
    scores: Callable[[Layer], Any] | None
    mapped: Callable[[nn.Module], bool]
    made: dict[str, Any] = field(default_factory=dict)

    def distances(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Effective distances, ``[rows, queries, keys, groups]``, and which keys they show."""
        if "distances" not in self.made:
            size = int(self.places.max()) + 1
            rows = [[self._between(m, n) for n in range(size)] for m in range(size)]
            shown = torch.tensor([[one is not None for one in row] for row in rows])
            groups = max(len(one) for row in rows for one in row if one is not None)
            table = torch.tensor(
                [[one or [0.0] * groups for one in row] for row in rows], dtype=torch.float64
            )
            m, n = self.places[:, :, None], self.places[:, None]
            self.made["distances"] = table[m, n], shown[m, n]
        return self.made["distances"]

    def _between(self, m: int, n: int) -> list[float] | None:
        if self.distance is None:
            return [float(m - n)]
        later = n > m
        found = self.distance(n, m, True) if later else self.distance(m, n, False)
        if found is None:
            return None
        sign = -1.0 if later else 1.0
        return [sign * float(one) for one in (found if isinstance(found, list) else [found])]

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        q, k, v = query.double(), key.double(), value.double()
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        mapped, theta = self.mapped(module), self.inv_freq[module].double()
        texts = self.texts
        visible = (texts[:, :, None] == texts[:, None]) & (texts[:, None] >= 0)
        visible = visible[:, None]
        apart = (self.places[:, :, None] - self.places[:, None])[:, None]
        used = apart[..., None].double()[:, 0]
        if mapped:
            used, shown = self.distances()
            visible = visible & shown[:, None]
        if attention_mask is not None:  # a window of the family
            visible = visible & attention_mask
        sizes = [len(part) for part in torch.arange(len(theta)).tensor_split(used.shape[-1])]
        angle = used.repeat_interleave(torch.tensor(sizes), -1) * theta
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        logits = scale * _products(q, k, angle)
        if mapped and self.log_n is not None:
            count = visible_tokens(texts)
            heat = (count.double().log() / math.log(self.log_n)).clamp(min=1)
            logits = logits * heat[:, None, :, None]
        if softcap is not None:
            logits = softcap * (logits / softcap).tanh()
        of_pairs = None
        if mapped and self.scores is not None:
            made = self.scores(Layer(module, q, k, logits, apart, scale))
            logits, of_pairs = made if isinstance(made, tuple) else (made, None)
        logits = logits.masked_fill(~visible, -math.inf)
        weights = logits.softmax(-1).nan_to_num(0.0)  # padding may see nothing
        out = weights @ v
        if of_pairs is not None:
            out = out + torch.einsum("bhij,bijd->bhid", weights, of_pairs)
        return out.transpose(1, 2).to(value.dtype), None


def visible_tokens(texts: torch.Tensor) -> torch.Tensor:
    """Number of tokens in the text of every token, ``[rows, tokens]``."""
    return (texts[:, :, None] == texts[:, None]).sum(-1)


def _products(q: torch.Tensor, k: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Products of queries and keys whose pairs (halves of the columns) are rotated by ``angle``."""
    pairs = angle.shape[-1]
    of_q = torch.complex(q[..., :pairs], q[..., pairs : 2 * pairs])
    of_k = torch.complex(k[..., :pairs], k[..., pairs : 2 * pairs])
    turn = torch.polar(torch.ones_like(angle), angle)
    rotated = torch.einsum("bhip,bijp,bhjp->bhij", of_q, turn, of_k.conj()).real
    return rotated + q[..., 2 * pairs :] @ k[..., 2 * pairs :].mT


@contextmanager
def in_both_directions(
    model: nn.Module,
    name: str | None,
    places: torch.Tensor,
    texts: torch.Tensor,
    *,
    log_n: int | None = None,
    scores: Callable[[Layer], Any] | None = None,
    changed: Callable[[nn.Module], bool] | None = None,
    **constants: Any,
) -> Iterator[nn.Module]:
    """An unpatched ``model`` with the attention of a paper; ``name=None``: as it was trained."""
    formula = None
    if name is not None:

        def formula(m: int, n: int, later: bool) -> Any:
            found = EVERY[name](m, n, **constants)
            if name == "lm_infinite" and later:  # no later key is one of the first tokens
                found = m - n if m - n < constants["window"] else None
            return found

    frequencies = {}
    kinds = getattr(model.config, "layer_types", None)
    buffers = {n.rpartition(".")[2]: b for n, b in model.named_buffers()}
    for module in attention_modules(model):
        own = f"{kinds[module.layer_idx]}_inv_freq" if kinds else "inv_freq"
        frequencies[module] = buffers.get(own, buffers.get("inv_freq")).clone()

    def still(module: nn.Module, args: tuple, output: Any) -> Any:
        return torch.ones_like(output[0]), torch.zeros_like(output[1])

    handles = []
    for module in model.modules():
        if any("inv_freq" in name for name, _ in module.named_buffers(recurse=False)):
            handles.append(module.register_forward_hook(still))
    whole = changed or (lambda module: getattr(module, "sliding_window", None) is None)
    oracle = Oracle(places, texts, frequencies, formula, log_n, scores, whole)
    try:
        with attending_by(model, oracle):
            yield model
    finally:
        for handle in handles:
            handle.remove()


def attention_modules(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if getattr(m, "is_causal", None) is not None]
