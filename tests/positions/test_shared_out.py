"""Patching a model whose weights are shared out among processes, before anything gathers them.

DeepSpeed's way (ZeRO-3) without DeepSpeed: weights are empty but where they are gathered; with it,
tests/recipes/test_zero3.py.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import rope_ext
from tests.helpers.models import tiny_llama


class Gathered:
    """Weights are whole as long as it lasts; ``most``: numbers that were whole at once."""

    now = most = 0

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.weights = weights

    def __enter__(self) -> None:
        for weight in self.weights:
            assert weight.numel() == 0, "gathered twice"
            weight.data = weight.ds_whole
            Gathered.now += weight.numel()
        Gathered.most = max(Gathered.most, Gathered.now)

    def __exit__(self, *error: object) -> None:
        for weight in self.weights:
            Gathered.now -= weight.numel()
            weight.data = torch.empty(0)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A model without its weights."""
    deepspeed = SimpleNamespace(zero=SimpleNamespace(GatheredParameters=Gathered))
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    monkeypatch.setattr(Gathered, "most", 0)
    monkeypatch.setattr(Gathered, "now", 0)
    model = tiny_llama()
    for number, weight in enumerate(model.parameters()):
        weight.ds_id, weight.ds_numel, weight.ds_whole = number, weight.numel(), weight.data
        weight.data = torch.empty(0)
    return model


@pytest.mark.parametrize("method", ["yarn", "rerope", "kerple_log", "sinusoidal"])
def test_a_patch_gathers_one_module_at_a_time(
    method: str, shared: nn.Module, ids: torch.Tensor
) -> None:
    own = ([w.ds_numel for w in m.parameters(recurse=False)] for m in shared.modules())
    largest = max(map(sum, own))
    rope_ext.patch(shared, method, factor=4)
    assert Gathered.now == 0 and Gathered.most == (0 if method == "yarn" else largest)
    for weight in shared.parameters():
        if hasattr(weight, "ds_id"):
            assert weight.numel() == 0
            weight.data = weight.ds_whole
    whole = rope_ext.patch(tiny_llama(), method, factor=4)
    with torch.inference_mode():
        assert torch.equal(shared(ids).logits, whole(ids).logits)


def test_a_refused_forward_leaves_nothing_gathered(
    shared: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(shared.model.layers[1].self_attn.o_proj, "forward", broken)
    with pytest.raises(rope_ext.UnsupportedModelError, match=r"probe .* failed \(no\)"):
        rope_ext.patch(shared, "rerope", factor=4)
    assert Gathered.now == 0 and Gathered.most > 0
    assert not any(module._forward_hooks for module in shared.modules())
