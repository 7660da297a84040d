"""KERPLE's parameters stay within their bounds and have gradients there, as in the authors' code.

Before it uses a parameter, that replaces its data by the clamped data (chijames/KERPLE,
megatron/mpu/layers.py, lines 260 and 398): autograd sees a leaf within its bounds.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rope_ext
from tests.helpers.encodings import ALL, dense, parameters
from tests.helpers.models import tiny_llama
from tests.helpers.positions import FAMILIES

LEAST = torch.tensor(0.01)


def of_kerple(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in parameters(model).items() if n.split(".")[-1] in ("r1", "r2")}


def small(name: str, value: float = 0.02) -> nn.Module:
    """Parameters close above the bound."""
    model = rope_ext.patch(tiny_llama(), name)
    with torch.no_grad():
        for parameter in of_kerple(model).values():
            parameter.fill_(value)
    return model


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("name", ["kerple_log", "kerple_power"])
def test_a_training_run_is_that_of_the_authors(name: str, optimizer: type, ids) -> None:
    """Every gradient and every value, across both bounds and back."""
    ids, bare = ids[:1, :24], tiny_llama().requires_grad_(False)
    model = small(name).requires_grad_(False)
    ours = of_kerple(model)
    for parameter in ours.values():
        parameter.requires_grad_()
    theirs = {key: nn.Parameter(value.detach().clone()) for key, value in ours.items()}
    most = {key: 2.0 if name == "kerple_power" and "r2" in key else None for key in ours}
    rate = 0.5 if optimizer is torch.optim.SGD else 0.03
    steps = [optimizer(list(one.values()), lr=rate) for one in (ours, theirs)]
    left = returned = 0
    for step in range(10):
        sign = 1 if step < 4 else -1  # then the gradients point back inside
        for key, value in theirs.items():
            value.data = value.data.clamp(0.01, most[key])
        with dense(bare, FAMILIES["llama"], ALL[name], torch.arange(24)[None], theirs):
            (sign * bare(ids, labels=ids).loss).backward()
        (sign * model(ids, labels=ids).loss).backward()
        for key, value in ours.items():
            assert bool((value >= LEAST).all())  # what is stored
            torch.testing.assert_close(value.grad, theirs[key].grad, atol=2e-5, rtol=1e-3)
            torch.testing.assert_close(value, theirs[key], atol=2e-4, rtol=1e-3)
            returned += int((value > 0.011).sum()) if step == 9 else 0
        for one in steps:
            one.step()
            one.zero_grad()
        left += sum(int((value < LEAST).sum()) for value in ours.values())
    assert left and returned
