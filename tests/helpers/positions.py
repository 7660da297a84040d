"""Models under position methods: methods, families, caches, and reference attention."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import QuantizedLayer

import rope_ext
from tests.families.zoo import tiny_model
from tests.helpers.distances import formula
from tests.helpers.methods import defaults
from tests.helpers.models import LENGTH, attending_by

METHODS: dict[str, dict[str, Any]] = {  # small enough that every band matters within 90 tokens
    "rerope": {"window": 5},
    "leaky_rerope": {"window": 5, "k": 3.0},
    "self_extend": {"window": 7, "group": 3},
    "jet_long": {"window": 7, "step": 25},
    "dual_chunk": {"chunk": 20, "local": 7},
    "dpe": {"window": 7, "scales": (2, 3)},
    "lampe": {"length": 80, "head": 6, "mapped": 23, "tail": 9},
    "string": {"shift": 11, "window": 3},
    "lm_infinite": {"window": 9, "sinks": 3},
}
WIDE: dict[str, dict[str, Any]] = {  # nothing changes at a trained length of TOLD
    "rerope": {"window": 999, "log_n": False},
    "leaky_rerope": {"window": 999, "k": 3.0, "log_n": False},
    "self_extend": {"window": 999, "group": 3, "published": True},
    "jet_long": {"window": 999, "step": 1999},
    "dual_chunk": {"chunk": 999, "local": 7},
    "dpe": {"window": 999, "scales": (2, 3), "published": True},
    "lampe": {"length": 7996, "head": 999, "mapped": 500},
    "string": {"shift": 999, "window": 3},
    "lm_infinite": {"window": 999},
}
TOLD = {"original_max_position_embeddings": 1999}
GEOMETRIES = ["rerope", "self_extend", "dual_chunk", "dpe"]  # constant, callable, by chunk or pair
EXACT = {"atol": 1e-4, "rtol": 0}  # float32 sums in another order; logits are of size 5
SCALE = {"sliding_layers": "scale"}


_BUILT: dict[str, nn.Module] = {}  # a copy takes half of the time


@dataclass(frozen=True)
class Family:
    """A tiny model and how its layers rotate, according to transformers' code.

    ``mapped``: layers whose positions change, None for all; ``neighbours``: pairs are next to
    each other, not half a rotation apart; ``crosses``: it has layers that attend to an encoder,
    which do not rotate.
    """

    model_type: str
    overrides: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    mapped: tuple[int, ...] | None = None
    neighbours: bool = False
    crosses: bool = False

    def model(self) -> nn.Module:
        key = repr(self)
        if key not in _BUILT:
            _BUILT[key] = tiny_model(self.model_type, **self.overrides)
        return copy.deepcopy(_BUILT[key])


FAMILIES = {
    "llama": Family("llama"),
    "mistral": Family("mistral", {"sliding_window": None}),
    "mistral windowed": Family("mistral", {}, SCALE),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "gemma2": Family("gemma2", mapped=(1,)),  # logits are capped
    "gemma2 scaled": Family("gemma2", {}, SCALE),
    "gemma3_text": Family("gemma3_text", mapped=(1,)),
    "gemma3_text scaled": Family("gemma3_text", {}, SCALE),
    "phi3": Family("phi3"),
    "olmo2": Family("olmo2"),
    "glm4": Family("glm4", neighbours=True),
    "cohere": Family("cohere", neighbours=True),
    "cohere2": Family("cohere2", {}, SCALE, mapped=(0,), neighbours=True),
    "gpt_oss": Family("gpt_oss", mapped=(1,)),  # a sink in every head
    "gpt_oss scaled": Family("gpt_oss", {}, SCALE),
    "smollm3": Family("smollm3", mapped=(0,)),
    "stablelm": Family("stablelm"),
    "gpt_neox": Family("gpt_neox"),
    "granite": Family("granite"),
    "gemma": Family("gemma"),  # multiplies its embeddings
}
KINDS = ["llama", "gemma2 scaled", "gpt_oss", "smollm3", "mistral windowed"]


class Lossless(QuantizedLayer):
    """A layer of a quantized cache that does not round, so that decoding has to be exact."""

    def __init__(self) -> None:
        super().__init__(residual_length=8)

    def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        return tensor

    def _dequantize(self, q_tensor: torch.Tensor) -> torch.Tensor:
        return q_tensor


CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),  # sliding layers keep their window
    "dynamic, all kept": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=100),
    "quantized": lambda config: Cache(layer_class_to_replicate=Lossless),
}
NEW = {"max_new_tokens": 14, "min_new_tokens": 14, "do_sample": False}  # more than a chunk of 13


def patch(model: nn.Module, name: str = "self_extend", **options: Any) -> nn.Module:
    """As in the paper, without the factors of cosine and sine in a method's released code."""
    paper = {"factor": 4, "attention_factor": 1, **METHODS[name]}
    return rope_ext.patch(model, name, **{**paper, **options})


def logits(model: nn.Module, ids: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **kwargs).logits


def decoded(
    model: nn.Module, ids: torch.Tensor, steps: list[int], cache: Cache | None = None
) -> torch.Tensor:
    """Return logits of ``ids``, fed through one cache in pieces of these sizes."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    pieces = ids.split(steps, dim=1)
    return torch.cat([logits(model, piece, past_key_values=cache) for piece in pieces], 1)


def padded(rows: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, attention mask, and positions counted from each row's first token."""
    mask = pad_sequence([torch.ones_like(row) for row in rows], True, padding_side=side)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return pad_sequence(rows, True, padding_side=side), mask, positions


def gradients(model: nn.Module, ids: torch.Tensor, **given: Any) -> list[torch.Tensor]:
    model.zero_grad()
    model(ids, labels=ids, **given).loss.backward()
    return [p.grad.clone() for n, p in model.named_parameters() if "proj" in n]


@dataclass(frozen=True)
class Seen:
    """Arguments of an encoding's formula for one attention layer, in float64.

    Args:
        module: the layer.
        query, key: not rotated, ``[rows, heads, tokens, columns]``.
        logits: scaled products of both, rotated to the distances of the method.
        apart: distances, ``[rows or 1, 1, queries, keys]``; 0 for later keys.
        places: positions of the queries, ``[rows or 1, 1, queries, 1]``.
        visible: ``[rows, 1, queries, keys]``.
        scale: of the products.
        theta: frequencies.
        inputs: of the layer.
        products: of pairs of columns times a complex number, and of the other columns.
        learned: by name, where somebody puts it in.
    """

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    logits: torch.Tensor
    apart: torch.Tensor
    places: torch.Tensor
    visible: torch.Tensor
    scale: float
    theta: torch.Tensor
    inputs: torch.Tensor
    products: Callable[..., torch.Tensor]
    learned: dict[str, torch.Tensor] = field(default_factory=dict)

    def turned(self, factor: torch.Tensor) -> torch.Tensor:
        """Return logits per pair of columns, ``[rows, heads, i, j, pairs]``."""
        return self.scale * self.products(self.query, self.key, factor)


@dataclass(frozen=True)
class ByFormula:
    """Reference attention with effective distances of every pair, dense, in float64.

    Args:
        family: how its layers rotate.
        distance: ``[rows or 1, tokens, tokens]``, or ``[..., groups of pairs]``; infinite where
            nothing is seen.
        positions: under which the model itself rotates, ``[rows or 1, tokens]``.
        temperature: of every query, ``[tokens]``.
        scores: makes the logits of a layer, and what is added to the values of pairs of tokens.
    """

    family: Family
    distance: torch.Tensor
    positions: torch.Tensor
    temperature: torch.Tensor
    scores: Callable[[Seen], Any] | None = None

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        groups = query.shape[1] // key.shape[1]
        q, k, v = query.double(), key.double(), value.double()
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        logits, visible, of_pairs = q @ k.mT, attention_mask, None
        theta, at = module.by_formula_inv_freq.double(), self.positions
        mapped = self.family.mapped is None or module.layer_idx in self.family.mapped
        if self.family.crosses and not module.is_causal:
            mapped = False
            visible = torch.ones_like(logits, dtype=torch.bool) if visible is None else visible
        if mapped:
            native = (at[:, :, None] - at[:, None])[..., None]
            distance = self.distance if self.distance.ndim == 4 else self.distance.unsqueeze(-1)
            by = (distance - native).masked_fill(distance.isinf(), 0)
            sizes = [len(part) for part in torch.arange(len(theta)).tensor_split(by.shape[-1])]
            angle = by[:, None].repeat_interleave(torch.tensor(sizes), -1) * theta
            logits = self._products(q, k, _turn(angle)) * self.temperature[:, None]
            visible = visible & distance.isfinite()[..., 0][:, None]
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        logits = logits * scale
        if softcap is not None:
            logits = softcap * (logits / softcap).tanh()
        if mapped and self.scores is not None:
            places = at[:, None, :, None]
            apart = (places - places.mT).clamp(min=0)
            back = [self._back(x, _turn(-places.double() * theta)) for x in (q, k)]
            given = (*back, logits, apart, places, visible, scale, theta, module.by_formula_input)
            made = self.scores(Seen(module, *given, self._products))
            logits, of_pairs = made if isinstance(made, tuple) else (made, None)
        weights = logits.masked_fill(~visible, -1e30).exp()
        total = weights.sum(-1, keepdim=True)
        if s_aux is not None:
            total = total + s_aux.double().exp()[:, None, None]
        weights = weights / total
        out = weights @ v
        if of_pairs is not None:
            out = out + torch.einsum("bhij,aijd->bhid", weights, of_pairs)
        return out.transpose(1, 2).to(value.dtype), weights

    def _parts(self, x: torch.Tensor, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return pairs of columns as complex numbers, and the other columns."""
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
        if self.family.neighbours:
            first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        return torch.complex(x[..., first], x[..., second]), x[..., 2 * pairs :]

    def _back(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        """Return ``x`` without the model's rotation."""
        z, rest = self._parts(x, turn.shape[-1])
        z = z * turn
        both = (z.real, z.imag)
        joined = (
            torch.stack(both, -1).flatten(-2) if self.family.neighbours else torch.cat(both, -1)
        )
        return torch.cat((joined, rest), -1)

    def _products(self, q: torch.Tensor, k: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        (a, rest), (b, other) = (self._parts(x, factor.shape[-1]) for x in (q, k))
        return ((a[..., None, :] * factor * b.conj()[:, :, None]).sum(-1)).real + rest @ other.mT


def _turn(angle: torch.Tensor) -> torch.Tensor:
    return torch.polar(torch.ones_like(angle), angle)


@contextmanager
def by_formula(
    model: nn.Module,
    family: Family,
    name: str,
    tokens: torch.Tensor,
    *,
    log_n: int | None = LENGTH,
    scores: Callable[[Seen], Any] | None = None,
    **constants: Any,
) -> Iterator[nn.Module]:
    """``model``, not under a position method, with the attention of the paper.

    ``tokens``: positions, ``[rows, tokens]``; ``log_n``: the trained length; ``scores``: as of
    :class:`ByFormula`.
    """
    buffers = dict(model.named_buffers())
    kinds = getattr(model.config, "layer_types", None)
    handles = []

    def keep(module: nn.Module, args: tuple, kwargs: dict) -> None:
        module.by_formula_input = args[0] if args else kwargs["hidden_states"]

    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            own = f"{kinds[module.layer_idx]}_inv_freq" if kinds else "inv_freq"
            found = [b for n, b in buffers.items() if n.split(".")[-1] in (own, "inv_freq")]
            module.by_formula_inv_freq = found[0].clone()
            handles.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    t = tokens - tokens[:, :1]
    temperature = torch.ones(t.shape[1], dtype=torch.float64)
    own = defaults(name).temperature
    if log_n is not None and own is not None:
        temperature = own(t[0], log_n)
    distance = torch.stack([formula(name, row, **constants) for row in t])
    try:
        with attending_by(model, ByFormula(family, distance, t, temperature, scores)):
            yield model
    finally:
        for handle in handles:
            handle.remove()
