"""Models under position methods: the methods, families, caches, and the attention of the papers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    Cache,
    DynamicCache,
    StaticCache,
)

import rope_ext
from tests.families.zoo import tiny_model
from tests.helpers.distances import formula
from tests.helpers.models import LENGTH, attending_by

METHODS: dict[str, dict[str, Any]] = {  # small enough that every band matters within 90 tokens
    "rerope": {"window": 5},
    "leaky_rerope": {"window": 5, "k": 3.0},
    "self_extend": {"window": 7, "group": 3},
    "dual_chunk": {"chunk": 20, "local": 7},
    "dpe": {"window": 7, "scales": (2, 3)},
    "lampe": {"length": 80, "head": 6, "mapped": 23, "tail": 9},
    "string": {"shift": 11, "window": 3},
    "lm_infinite": {"window": 9, "sinks": 3},
}
WIDE: dict[str, dict[str, Any]] = {  # nothing is far, so nothing changes, if trained on TOLD
    "rerope": {"window": 999, "log_n": False},
    "leaky_rerope": {"window": 999, "k": 3.0, "log_n": False},
    "self_extend": {"window": 999, "group": 3, "published": True},
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
    """A tiny model and how its layers rotate, as read in transformers' own code.

    ``mapped``: layers whose positions change, None for all; ``neighbours``: pairs are next to
    each other, not half a rotation apart.
    """

    model_type: str
    overrides: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    mapped: tuple[int, ...] | None = None
    neighbours: bool = False

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
}
KINDS = ["llama", "gemma2 scaled", "gpt_oss", "smollm3", "mistral windowed"]
PACKED = [kind for kind in KINDS if kind != "gpt_oss"]  # whose code does not tell documents apart
CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),  # sliding layers keep their window
    "dynamic, all kept": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=100),
}
NEW = {"max_new_tokens": 14, "min_new_tokens": 14, "do_sample": False}  # more than a chunk of 13


def grid(kinds: Iterable[str], names: Iterable[str]) -> list[Any]:
    """Every kind with every method; by default some kinds with all geometries, others with one."""
    cases = []
    for number, kind in enumerate(kinds):
        few = GEOMETRIES if kind in KINDS else [GEOMETRIES[number % len(GEOMETRIES)]]
        for name in names:
            by_default = kind == "llama" or name in few
            marks = [] if by_default else [pytest.mark.slow]
            cases.append(pytest.param(kind, name, marks=marks))
    return cases


def by_geometry(first: str, *others: str) -> list[tuple[str, str]]:
    """Every method on the first kind, on the others one of each geometry.

    Methods of a geometry differ in numbers only, which test_distances.py has for every kind.
    """
    return [(first, name) for name in METHODS] + [(k, name) for k in others for name in GEOMETRIES]


def patch(model: nn.Module, name: str = "self_extend", **options: Any) -> nn.Module:
    """By the paper: without the numbers on cosine and sine that were released with a method."""
    paper = {"factor": 4, "attention_factor": 1, **METHODS[name]}
    return rope_ext.patch(model, name, **{**paper, **options})


def logits(model: nn.Module, ids: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **kwargs).logits


def decoded(
    model: nn.Module, ids: torch.Tensor, steps: list[int], cache: Cache | None = None
) -> torch.Tensor:
    """Logits of ``ids`` fed in pieces of those sizes through one cache."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    pieces = ids.split(steps, dim=1)
    return torch.cat([logits(model, piece, past_key_values=cache) for piece in pieces], 1)


def padded(rows: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, attention mask, and positions counted from each row's first token."""
    mask = pad_sequence([torch.ones_like(row) for row in rows], True, padding_side=side)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return pad_sequence(rows, True, padding_side=side), mask, positions


def gradients(model: nn.Module, ids: torch.Tensor, **given: Any) -> list[torch.Tensor]:
    model.zero_grad()
    model(ids, labels=ids, **given).loss.backward()
    return [p.grad.clone() for n, p in model.named_parameters() if "proj" in n]


# --- the paper's distances, put into an unpatched model ------------------------------------------


@dataclass(frozen=True)
class ByFormula:
    """Attention over the effective distance of every single pair, dense, in float64.

    Args:
        family: how its layers rotate.
        distance: ``[rows or 1, tokens, tokens]``, or ``[..., groups of pairs]``; infinite where
            nothing is seen.
        positions: under which the model itself rotates, ``[rows or 1, tokens]``.
        temperature: of every query, ``[tokens]``.
        bias: what a module adds to its logits at given distances, ``[heads, ...]``.
        scores: what it makes of its logits; it is given the module, queries as they are
            before the rotation (from 0 on), logits, distances, places of queries, visibility.
    """

    family: Family
    distance: torch.Tensor
    positions: torch.Tensor
    temperature: torch.Tensor
    bias: Callable[[nn.Module, torch.Tensor], torch.Tensor | None] | None = None
    scores: Callable[..., torch.Tensor] | None = None

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
        logits, visible = q @ k.mT, attention_mask
        mapped = self.family.mapped is None or module.layer_idx in self.family.mapped
        if mapped:
            native = self.positions[:, :, None] - self.positions[:, None]
            distance = self.distance if self.distance.ndim == 4 else self.distance.unsqueeze(-1)
            by = (distance - native.unsqueeze(-1)).masked_fill(distance.isinf(), 0)
            logits = self._turned(module, q, k, by) * self.temperature[:, None]
            visible = visible & distance.isfinite()[..., 0][:, None]
        logits = logits * (q.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            logits = softcap * (logits / softcap).tanh()
        if mapped and self.bias is not None:
            apart = self.positions[:, :, None] - self.positions[:, None]
            added = self.bias(module, apart.clamp(min=0))
            logits = logits if added is None else logits + added.transpose(0, 1).double()
        if mapped and self.scores is not None:
            places = self.positions[:, None, :, None]
            apart = (places - places.mT).clamp(min=0)
            logits = self.scores(module, self._back(module, q), logits, apart, places, visible)
        weights = logits.masked_fill(~visible, -1e30).exp()
        total = weights.sum(-1, keepdim=True)
        if s_aux is not None:
            total = total + s_aux.double().exp()[:, None, None]
        weights = weights / total
        return (weights @ v).transpose(1, 2).to(value.dtype), weights

    def _back(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Before the model turned it."""
        theta = module.by_formula_inv_freq.double()
        first, second, _ = self._columns(len(theta), x.shape[-1])
        angle = self.positions[:, None, :, None] * theta
        a, b, out = x[..., first], x[..., second], x.clone()
        out[..., first] = a * angle.cos() + b * angle.sin()
        out[..., second] = b * angle.cos() - a * angle.sin()
        return out

    def _columns(self, pairs: int, columns: int) -> tuple[slice, slice, slice]:
        """Of the first and the second of each pair, and of the rest."""
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
        if self.family.neighbours:
            first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        return first, second, slice(2 * pairs, columns)

    def _turned(self, module: nn.Module, q, k, by: torch.Tensor) -> torch.Tensor:
        theta = module.by_formula_inv_freq.double()
        pairs, columns = len(theta), q.shape[-1]
        first, second, rest = self._columns(pairs, columns)
        groups = [len(part) for part in torch.arange(pairs).tensor_split(by.shape[-1])]
        angle = by[:, None].repeat_interleave(torch.tensor(groups), -1) * theta
        a, b = q[..., None, first], q[..., None, second]
        turned = torch.cat(
            (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1
        )
        keys = torch.cat((k[..., first], k[..., second]), -1)
        turned = (turned * keys[:, :, None]).sum(-1)
        return turned + q[..., rest] @ k[..., rest].mT


@contextmanager
def by_formula(
    model: nn.Module,
    family: Family,
    name: str,
    tokens: torch.Tensor,
    *,
    log_n: int | None = LENGTH,
    bias: Callable[[nn.Module, torch.Tensor], torch.Tensor | None] | None = None,
    scores: Callable[..., torch.Tensor] | None = None,
    **constants: Any,
) -> Iterator[nn.Module]:
    """``model``, not under a position method, with the attention of the paper.

    ``tokens``: positions, ``[rows, tokens]``; ``log_n``: the trained length; ``bias`` and
    ``scores``: as of :class:`ByFormula`.
    """
    buffers = dict(model.named_buffers())
    kinds = getattr(model.config, "layer_types", None)
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            own = f"{kinds[module.layer_idx]}_inv_freq" if kinds else "inv_freq"
            found = [b for n, b in buffers.items() if n.split(".")[-1] in (own, "inv_freq")]
            module.by_formula_inv_freq = found[0].clone()
    t = tokens - tokens[:, :1]
    temperature = torch.ones(t.shape[1], dtype=torch.float64)
    if log_n is not None and name in ("rerope", "leaky_rerope", "self_extend", "dpe"):
        temperature = ((t[0] + 1).double().log() / math.log(log_n)).clamp(min=1)
    distance = torch.stack([formula(name, row, **constants) for row in t])
    with attending_by(model, ByFormula(family, distance, t, temperature, bias, scores)):
        yield model
