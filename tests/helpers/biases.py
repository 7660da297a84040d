"""The biases of the encodings, each as its paper has it, by distance and one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers.models.t5.modeling_t5 import T5Attention

import rope_ext
from tests.helpers.positions import Family, by_formula

Learned = dict[str, torch.Tensor]


def nope(d: torch.Tensor, heads: int, learned: Learned) -> None:
    return None


def alibi(d: torch.Tensor, heads: int, learned: Learned) -> torch.Tensor:
    assert heads & (heads - 1) == 0  # a power of two
    slopes = torch.tensor([2 ** (-8 * h / heads) for h in range(1, heads + 1)])
    return -slopes.double()[:, None, None, None] * d


def t5(d: torch.Tensor, heads: int, learned: Learned) -> torch.Tensor:
    return learned["beta"].double()[:, T5Attention._relative_position_bucket(-d, False)]


def kerple_log(d: torch.Tensor, heads: int, learned: Learned) -> torch.Tensor:
    r1, r2 = (learned[name].double()[:, None, None, None] for name in ("r1", "r2"))
    return -r1 * (1 + r2 * d).log()


def kerple_power(d: torch.Tensor, heads: int, learned: Learned) -> torch.Tensor:
    r1, r2 = (learned[name].double()[:, None, None, None] for name in ("r1", "r2"))
    return -r1 * d.double() ** r2


def sandwich(d: torch.Tensor, heads: int, learned: Learned) -> torch.Tensor:
    """As of NVIDIA NeMo, with the paper's width."""
    w = 10000.0 ** (-2 * torch.arange(1, 65, dtype=torch.float64) / 128)
    total = (d.double().unsqueeze(-1) * w).cos().sum(-1) - 64
    return total / (torch.arange(1, heads + 1)[:, None, None, None] * 8 / heads)


FORMULAS: dict[str, Callable[[torch.Tensor, int, Learned], torch.Tensor | None]] = {
    "nope": nope,
    "alibi": alibi,
    "t5": t5,
    "kerple_log": kerple_log,
    "kerple_power": kerple_power,
    "sandwich": sandwich,
}
"""Of distances ``[rows or 1, tokens, tokens]``: ``[heads, rows or 1, tokens, tokens]``."""
LEARNED = ("t5", "kerple_log", "kerple_power")


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if ".rope_ext_bias." in n}


def patch(model: nn.Module, name: str, **options: object) -> nn.Module:
    """Under an encoding, whose parameters are all different."""
    rope_ext.patch(model, name, **options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in parameters(model).values():
            drawn = 1.5 * torch.rand(parameter.shape, generator=generator)
            parameter.copy_(drawn.clamp(min=0.01))  # the least that KERPLE allows
    return model


@contextmanager
def dense(
    model: nn.Module, family: Family, name: str, tokens: torch.Tensor, learned: Learned
) -> Iterator[nn.Module]:
    """``model``, not patched, with the attention of the paper, dense and in float64.

    ``tokens``: positions, ``[rows, tokens]``; ``learned``: as :func:`parameters` of a patched one.
    """

    def bias(module: nn.Module, d: torch.Tensor) -> torch.Tensor | None:
        own = f".{module.layer_idx}."
        of_layer = {n.split(".")[-1]: p for n, p in learned.items() if own in n or name == "t5"}
        return FORMULAS[name](d, model.config.num_attention_heads, of_layer)

    with by_formula(model, family, "unturned", tokens, bias=bias):
        yield model
