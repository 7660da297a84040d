"""Dtypes, compilation, threads and devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rope_ext
from tests.helpers.models import tiny_llama
from tests.helpers.positions import EXACT, FAMILIES, METHODS, decoded, logits, patch


@pytest.mark.parametrize("name", METHODS)
def test_bfloat16_is_as_close_to_float32_as_unpatched(name: str, ids) -> None:
    model, plain = patch(tiny_llama(), name), tiny_llama()
    right, plain_right = logits(model, ids), logits(plain, ids)
    lost = (logits(plain.to(torch.bfloat16), ids).float() - plain_right).pow(2).mean().sqrt()
    model.to(torch.bfloat16)
    for said in (logits(model, ids), decoded(model, ids, [40, 45, *[1] * 5])):
        assert said.dtype == torch.bfloat16
        assert (said.float() - right).pow(2).mean().sqrt() < 2 * lost


@pytest.mark.slow
@pytest.mark.parametrize(("name", "when"), [("rerope", "before"), ("dpe", "after")])
def test_torch_compile_before_or_after(name: str, when: str, ids) -> None:
    torch.compiler.reset()
    plain, right = logits(tiny_llama(), ids), logits(patch(tiny_llama(), name), ids)
    model = tiny_llama()
    if when == "before":
        model = torch.compile(model, backend="eager")
        torch.testing.assert_close(logits(model, ids), plain, **EXACT)
        patch(model, name)
    else:
        model = torch.compile(patch(model, name), backend="eager")
    torch.testing.assert_close(logits(model, ids), right, **EXACT)
    torch.testing.assert_close(logits(model, ids[:, :70]), right[:, :70], **EXACT)  # another shape
    rope_ext.unpatch(model)
    torch.testing.assert_close(logits(model, ids), plain, **EXACT)


@pytest.mark.parametrize("kind", ["smollm3", "llama"])
def test_a_mask_follows_its_layers_to_another_device(kind: str, ids) -> None:
    """Layers from the second on lie on meta, where no tensor of another device can be used."""
    model = patch(FAMILIES[kind].model())
    rest = [*model.model.layers[1:], model.model.norm, model.lm_head]
    torch.nn.ModuleList(rest).to("meta")

    def move(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        def there(x: Any) -> Any:  # as accelerate does
            if isinstance(x, tuple):
                return tuple(map(there, x))
            return x.to("meta") if isinstance(x, torch.Tensor) else x

        return tuple(map(there, args)), {name: there(x) for name, x in kwargs.items()}

    for module in rest:
        module.register_forward_pre_hook(move, with_kwargs=True)
    given = {"attention_mask": torch.ones_like(ids)}
    given["attention_mask"][1, :25] = 0
    if kind == "llama":  # by dense logits, for the positions jump
        given["position_ids"] = torch.cat((torch.arange(33), torch.arange(60, 117))).expand(2, -1)
    assert logits(model, ids, **given, use_cache=False).is_meta
