"""Absolute encodings and other rotations by hand: every pair of tokens, dense, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import rope_ext
from tests.families.zoo import tiny_model
from tests.helpers.models import LENGTH, attending_by

Learned = dict[str, torch.Tensor]
FAMILIES = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": None},
    "gemma": {},  # multiplies its embeddings
    "gpt_neox": {},  # turns a quarter of each head
}
CHOSEN: dict[str, dict] = {  # small enough that everything matters within 90 tokens
    "sinusoidal": {},
    "learned": {"length": 100},
    "multiplicative": {"length": 100},
    "floater": {"hidden": 8},
    "xpos": {"scale_base": 16},  # so that 70 queries at most are turned together
    "3d_rpe": {"chunk": 20, "base": 2.0},
    "drope": {},
}
VARIANTS = {
    "hierarchical": ("learned", {"factor": 4, "length": 16, "extend": "hierarchical"}),
    "interpolate": ("learned", {"factor": 2, "length": 30, "extend": "interpolate"}),
    "sines": ("multiplicative", {"table": "sinusoidal"}),
    "scaled": ("sinusoidal", {"scale": 0.3, "base": 100.0}),
    "first": ("floater", {"into": "first", "step": 0.2, "hidden": 8}),
    "discrete": ("floater", {"flow": "discrete", "hidden": 8}),
}
ADDED = ("sinusoidal", "learned", "multiplicative", "floater")


def first_of(*values: object) -> list:
    """Cases of a test; all but the first are slow, as they take longer than they tell."""
    return [values[0], *(pytest.param(value, marks=pytest.mark.slow) for value in values[1:])]


def family(name: str) -> nn.Module:
    return tiny_model(name, **FAMILIES[name])


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n.split(".")[-1]: p for n, p in model.named_parameters() if ".rope_ext_input." in n}


def patch(model: nn.Module, name: str, **options: object) -> nn.Module:
    """Under an encoding of :data:`CHOSEN` or :data:`VARIANTS`, with parameters all different."""
    name, chosen = VARIANTS.get(name, (name, CHOSEN.get(name, {})))
    rope_ext.patch(model, name, **{**chosen, **options})
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in parameters(model).values():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def scale_of(model: nn.Module) -> float:
    """What the patch measured, or was given."""
    found = [b for n, b in model.named_buffers() if n.endswith("rope_ext_input.scale")]
    return float(found[0]) if found else 0.3


# --- what is done in front of the layers ---------------------------------------------------------


def sinusoid(t: int, columns: int, base: float = 10000.0) -> torch.Tensor:
    found = [
        (math.sin, math.cos)[column % 2](t / base ** (column // 2 * 2 / columns))
        for column in range(columns)
    ]
    return torch.tensor(found, dtype=torch.float64)


def path(learned: Learned, tokens: int, step: float) -> torch.Tensor:
    """The classical Runge-Kutta method, one step a token, written out in columns."""
    w1, b1, w2, b2 = (
        learned[f"{layer}_{kind}"].double()
        for layer in ("first", "second")
        for kind in ("weight", "bias")
    )

    def f(tau: float, p: torch.Tensor) -> torch.Tensor:
        inner = (w1[:, :-1] @ p + w1[:, -1] * tau + b1).clamp(min=0)
        return w2[:, :-1] @ inner + w2[:, -1] * tau + b2

    found = [learned["start"].double()]
    for t in range(tokens - 1):
        tau, p = t * step, found[-1]
        k1 = f(tau, p)
        k2 = f(tau + step / 2, p + k1 * step / 2)
        k3 = f(tau + step / 2, p + k2 * step / 2)
        k4 = f(tau + step, p + k3 * step)
        found.append(p + step * (k1 + 2 * k2 + 2 * k3 + k4) / 6)
    return torch.stack(found)


def recursion(learned: Learned, tokens: int) -> torch.Tensor:
    """``p + f(p)`` from token to token, one number at a time."""
    w1, b1, w2, b2 = (learned[name].double() for name in list(learned)[1:])
    found = [learned["start"].double()]
    for _ in range(tokens - 1):
        p = found[-1]
        inner = [(row @ p + bias).tanh() for row, bias in zip(w1, b1, strict=True)]
        found.append(p + sum(x * column for x, column in zip(inner, w2.T, strict=True)) + b2)
    return torch.stack(found)


def entered(name: str, x: torch.Tensor, t: torch.Tensor, learned: Learned, scale: float):
    """Hidden states of one row at the positions ``t``, with what ``name`` makes of them."""
    columns = x.shape[-1]
    if name == "discrete":
        return x + scale * recursion(learned, int(t.max()) + 1)[t]
    if name == "floater" or name == "first":
        rows = path(learned, int(t.max()) + 1, 0.1 if name == "floater" else 0.2)
        return x + scale * rows[t]
    if name in ("sinusoidal", "scaled"):
        base = 10000.0 if name == "sinusoidal" else 100.0
        return x + scale * torch.stack([sinusoid(int(i), columns, base) for i in t])
    if name == "sines":
        return x * torch.stack([sinusoid(int(i), columns) for i in t])
    table = learned["table"].double()
    if name == "learned":
        return x + table[t]
    if name == "multiplicative":
        return x * table[t]
    if name == "hierarchical":  # Su's u, of which p is made again
        u = (table - 0.4 * table[0]) / 0.6
        return x + torch.stack([0.4 * u[i // 16] + 0.6 * u[i % 16] for i in t.tolist()])
    assert name == "interpolate"  # 2 * 64 positions on 30 entries, whose last one holds on
    at = (t.double() * 30 / (2 * LENGTH)).clamp(max=29)
    return x + (1 - (at[:, None] - torch.arange(30)).abs()).clamp(min=0) @ table


# --- what is done in the attention ---------------------------------------------------------------


def turned(name: str, t: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    """What a pair's product of two tokens is multiplied by: complex, ``[query, key, pair]``."""
    apart = (t[:, None] - t).double()[..., None]
    if name == "xpos":
        pairs = len(theta)
        zeta = (torch.arange(pairs).double() / pairs + 0.4) / 1.4
        return torch.polar(zeta ** (apart.clamp(min=0) / 16), apart * theta)
    if name == "3d_rpe":
        state = torch.stack(
            [  # definition 1, of the pair 1: e^(i m theta) (cos(phi) i + sin(phi))
                torch.polar(torch.ones(1).double(), i % 20 * theta)
                * complex(math.sin(2.0 ** -(i // 20)), math.cos(2.0 ** -(i // 20)))
                for i in t.tolist()
            ]
        )
        return state[:, None] * state.conj()
    return torch.ones(len(t), len(t), len(theta), dtype=torch.complex128)


def scale_query(name: str, t: torch.Tensor) -> torch.Tensor:
    beyond = ((t + 1).double() / LENGTH).clamp(min=1)
    return 1 + 0.2 * beyond.log() if name == "drope" else torch.ones(len(t)).double()


@dataclass(frozen=True)
class ByHand:
    """Attention over every single pair of columns of every pair of tokens."""

    name: str
    theta: torch.Tensor
    t: torch.Tensor
    positions: torch.Tensor

    def __call__(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        groups, pairs = query.shape[1] // key.shape[1], len(self.theta)
        q, k, v = query.double(), key.double(), value.double()
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        rest = q[..., 2 * pairs :] @ k[..., 2 * pairs :].mT
        native = torch.polar(
            torch.ones(1).double(),
            (self.positions[:, None] - self.positions)[..., None] * self.theta,
        )
        factor = turned(self.name, self.t, self.theta) / native  # which the model has turned by
        q, k = (torch.complex(x[..., :pairs], x[..., pairs : 2 * pairs]) for x in (q, k))
        products = torch.einsum("rhip,rhjp,ijp->rhij", q, k.conj(), factor)
        logits = (products.real + rest) * scaling * scale_query(self.name, self.t)[:, None]
        weights = logits.masked_fill(~attention_mask, -1e30).softmax(-1)
        return (weights @ v).transpose(1, 2).to(value.dtype), weights


@contextmanager
def by_hand(
    model: nn.Module, name: str, positions: torch.Tensor, learned: Learned, scale: float = 1.0
) -> Iterator[nn.Module]:
    """``model``, not patched, as the papers have it.

    ``positions``: as the model is given them, ``[tokens]``; ``learned``: as :func:`parameters` of
    a patched one; ``scale``: of what is added.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    theta = next(b for n, b in model.named_buffers() if n.endswith("inv_freq")).double()
    t = positions - positions[0]
    of_encoding = VARIANTS.get(name, (name, {}))[0]

    def enter(layer: nn.Module, args: tuple) -> tuple:
        x = torch.stack([entered(name, row.double(), t, learned, scale) for row in args[0]])
        return (x.to(args[0].dtype), *args[1:])

    with ExitStack() as stack:
        if of_encoding in ADDED:
            layers = decoder.layers if name in ("floater", "discrete") else decoder.layers[:1]
            for layer in layers:
                stack.callback(layer.register_forward_pre_hook(enter).remove)
        stack.enter_context(attending_by(model, ByHand(of_encoding, theta, t, positions)))
        yield model
