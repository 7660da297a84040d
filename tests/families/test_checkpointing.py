"""Gradients of every family are the same with gradient checkpointing, or it is refused.

A layer that is run again may lack the forward that it belongs to, and the loss does not show it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rope_ext
from tests.families.zoo import (
    TEXT_VOCAB,
    NotBuildable,
    image_text_types,
    model_types,
    tiny_model,
)

FAST = {"gemma3_text", "llama", "moshi", "qwen3_next"}
METHODS = ("rerope", "self_extend", "alibi", "dynamic_ntk")
# Their layers run rotary modules, which get no mask.
REFUSED = {("deepseek_v4", "dynamic_ntk"), ("moshi", "dynamic_ntk")}
TOKENS = 80

Gradients = dict[str, torch.Tensor | None]


def families() -> list[object]:
    every = [*model_types(), *image_text_types()]
    return [pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in every]


def gradients(model_type: str, method: str | None, reentrant: bool | None) -> Gradients:
    """Of all parameters; ``reentrant=None`` is without checkpointing."""
    model = tiny_model(model_type)
    if method is not None:
        options: dict[str, Any] = {} if method == "alibi" else {"factor": 4}
        rope_ext.patch(model, method, **options)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, TEXT_VOCAB, (2, TOKENS), generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model(input_ids=ids, use_cache=False).logits.square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def off(one: Gradients, other: Gradients) -> float:
    """The largest relative distance of any parameter's gradients."""
    worst = 0.0
    for name, right in one.items():
        said = other[name]
        if right is None or said is None:
            worst = max(worst, 0.0 if right is said else 1.0)
            continue
        worst = max(worst, float((said - right).norm() / (right.norm() + 1e-6)))
    return worst


@pytest.mark.parametrize("model_type", families())
def test_gradients_do_not_depend_on_checkpointing(model_type: str) -> None:
    try:
        unpatched = gradients(model_type, None, None)
        by_itself = {
            reentrant: off(unpatched, gradients(model_type, None, reentrant))
            for reentrant in (False, True)
        }
    except NotBuildable as error:
        pytest.skip(str(error))
    except Exception as error:  # whatever transformers raises, there is nothing to compare
        pytest.skip(f"unpatched, it does not train with checkpointing: {error}")
    compared = 0
    for method in METHODS:
        try:
            right = gradients(model_type, method, None)
        except rope_ext.RopeExtError:
            continue  # test_families.py says which
        for reentrant, distance in by_itself.items():
            if distance > 1e-4:
                continue
            if (model_type, method) in REFUSED:
                with pytest.raises(rope_ext.UnsupportedModelError, match="checkpointing"):
                    gradients(model_type, method, reentrant)
                continue
            assert off(right, gradients(model_type, method, reentrant)) < 1e-4, (method, reentrant)
            compared += 1
    if not compared:
        pytest.skip("it is refused, or its own gradients depend on checkpointing")
