"""The layout of every family is found whatever the sizes of its weights, as trained ones differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rope_ext.errors import NoRopeError, UnsupportedModelError
from rope_ext.position.layers import find_layouts
from rope_ext.rotary.sites import find_sites, text_decoder
from tests.families.zoo import NotBuildable, model_types, tiny_model

FAST = {"gemma3_text", "llama", "qwen2"}
DTYPES = [torch.float32, torch.bfloat16]

# Their norms come after the rotation. With weights that differ within a pair, as trained ones do,
# what they return is no rotation of what they return for tokens that are not rotated.
NORM_AFTER_ROTATION = {"hunyuan_v1_dense", "hunyuan_v1_moe"}


def families() -> list[object]:
    """All of them, whose decoders those with images share; most are for the slow tests."""
    return [pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in model_types()]


def found(decoder: nn.Module) -> dict[str, Any]:
    """By attention layer: its pairs, heads, and whether it has a window."""
    layouts = find_layouts(decoder, find_sites(decoder))
    names = {module: name for name, module in decoder.named_modules()}
    return {
        names[module]: layout and (str(layout.pairs), layout.local, layout.heads, layout.site.name)
        for module, layout in layouts.items()
    }


@torch.no_grad()
def as_trained(layers: list[nn.Module], zero_norms: bool) -> None:
    """Give the projections of attention layers outlier and dead columns and large biases.

    So the norms get, unless all their weights become zero.
    """
    generator = torch.Generator().manual_seed(0)
    for module in {part for layer in layers for part in layer.modules()}:
        for name, parameter in module.named_parameters(recurse=False):
            sizes = 10 ** (6 * torch.rand(len(parameter), generator=generator) - 3)
            sizes[torch.rand(len(parameter), generator=generator) < 0.1] = 0
            if parameter.ndim > 1:
                parameter *= sizes.reshape(-1, *[1] * (parameter.ndim - 1))
            elif name == "bias":
                parameter += 100 * torch.randn(parameter.shape, generator=generator)
            elif "norm" in type(module).__name__.lower():
                parameter *= 0 if zero_norms else sizes


@pytest.mark.parametrize("model_type", families())
def test_layouts_do_not_depend_on_the_sizes_of_weights(model_type: str) -> None:
    try:
        decoder = text_decoder(tiny_model(model_type))
        expected = found(decoder)
    except (NotBuildable, NoRopeError, UnsupportedModelError) as error:
        pytest.skip(str(error))
    normed_after = model_type in NORM_AFTER_ROTATION
    as_trained([decoder.get_submodule(name) for name in expected], zero_norms=not normed_after)
    for dtype in DTYPES:
        decoder.to(dtype)
        if normed_after:
            with pytest.raises(UnsupportedModelError, match="does not rotate pairs"):
                found(decoder)
            continue
        assert found(decoder) == expected, dtype
