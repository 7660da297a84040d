"""Encodings whose logits are more than a bias: each as its authors have it, dense, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

import rope_ext
from tests.helpers.biases import kerple_log, parameters
from tests.helpers.positions import Family, by_formula

Learned = dict[str, torch.Tensor]


def fire(learned: Learned, query, content, apart, places, visible, options) -> torch.Tensor:
    c, reach = learned["c"].abs(), learned["multiplier"].abs() * options["threshold"]
    far = torch.log(1 + c * torch.maximum(places.double(), reach)) + 1e-6
    x = torch.log(1 + c * apart) / far
    inner = F.relu(F.linear(x[..., None], learned["first_weight"], learned["first_bias"]))
    bias = F.linear(inner, learned["second_weight"], learned["second_bias"])
    return content + bias.movedim(-1, 1).squeeze(2)


def dape(learned: Learned, query, content, apart, places, visible, options) -> torch.Tensor:
    heads = content.shape[1]
    bias = kerple_log(apart.squeeze(1), heads, learned).transpose(0, 1).expand_as(content)
    both = torch.cat((content, bias), 1)
    first, second = (
        (learned[f"{name}_weight"], learned[f"{name}_bias"]) for name in ("first", "second")
    )
    if options.get("version") == 2:
        assert visible.shape[1] == 1 and bool((visible == visible[:1]).all())
        adapted = torch.zeros_like(content)
        for at in range(content.shape[2]):
            seen = torch.nonzero(visible[0, 0, at]).flatten()
            # One hidden key follows, as in all rows of a training sequence but the last.
            x = F.pad(both[:, :, at, seen], (0, 1))
            x = F.leaky_relu(F.conv1d(x, *first, padding=1))
            adapted[:, :, at, seen] = F.conv1d(x, *second, padding=1)[..., :-1]
    else:
        inner = F.leaky_relu(F.linear(both.movedim(1, -1), *first))
        adapted = F.linear(inner, *second).movedim(-1, 1)
    return content + bias + adapted


def cope(learned: Learned, query, content, apart, places, visible, options) -> torch.Tensor:
    table = learned["table"]
    gates = content.masked_fill(~visible, -torch.inf).sigmoid()
    counted = torch.stack([gates[..., j:].sum(-1) for j in range(gates.shape[-1])], -1)
    counted = counted.clamp(max=len(table) - 1)
    low, high = counted.floor().long(), counted.ceil().long()
    whole = query @ table.mT
    part = counted - low
    return content + whole.gather(-1, high) * part + whole.gather(-1, low) * (1 - part)


SCORED: dict[str, Callable[..., torch.Tensor]] = {"fire": fire, "dape": dape, "cope": cope}
SIZES = {  # so that within 90 tokens every part of the formula matters
    "fire": {"threshold": 20.0},
    "dape": {},
    "dape v2": {"version": 2},
    "cope": {"positions": 16},
}


def patch(model: nn.Module, name: str, **options: object) -> nn.Module:
    """Under an encoding of :data:`SIZES`, whose parameters are all different."""
    rope_ext.patch(model, name.split()[0], **SIZES[name], **options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, parameter in parameters(model).items():
            drawn = torch.randn(parameter.shape, generator=generator)
            by_head = key.endswith((".r1", ".r2"))
            small = key.endswith((".c", ".multiplier"))
            # Networks whose sums are of size 1, numbers about where they begin.
            scale = 1.0 if by_head else 0.3 if "first" in key or "table" in key else 0.2
            parameter.copy_(parameter * (1 + 0.2 * drawn) if small else scale * drawn)
            if by_head:
                parameter.abs_()
    return model


@contextmanager
def dense(
    model: nn.Module, family: Family, name: str, tokens: torch.Tensor, learned: Learned
) -> Iterator[nn.Module]:
    """As :func:`tests.helpers.biases.dense`, for these."""

    def scores(module: nn.Module, *given: torch.Tensor) -> torch.Tensor:
        own = f".{module.layer_idx}."
        of_layer = {n.split(".")[-1]: p.double() for n, p in learned.items() if own in n}
        return SCORED[name.split()[0]](of_layer, *given, SIZES[name])

    with by_formula(model, family, "unturned", tokens, scores=scores):
        yield model
