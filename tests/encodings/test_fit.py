"""``fit``: encodings begin with the attention of the original model."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import PhiConfig, PhiForCausalLM

import rope_ext
from tests.families.zoo import tiny_model, tiny_of
from tests.helpers.encodings import parameters
from tests.helpers.models import LENGTH
from tests.helpers.positions import logits

HEADS, PAIRS = 4, 4


@pytest.fixture
def text() -> torch.Tensor:
    """Four rows of the trained length."""
    return torch.randint(3, 128, (4, LENGTH), generator=torch.Generator().manual_seed(1))


def rotates_constants(layers: int = 1) -> PhiForCausalLM:
    """A model whose rotated columns hold constants, so that RoPE only adds a bias by distance."""
    torch.manual_seed(0)
    config = PhiConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
        initializer_range=0.15,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 100.0,
            "partial_rotary_factor": 2 * PAIRS / 16,
        },
    )
    model = PhiForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                weight, constant = linear.weight.view(HEADS, 16, 64), linear.bias.view(HEADS, 16)
                weight[:, : 2 * PAIRS] = 0
                constant[:, : 2 * PAIRS] = torch.randn(HEADS, 2 * PAIRS)
    return model


@pytest.mark.parametrize("family", ["eurobert", "mistral"])
def test_layers_that_see_otherwise_are_refused(text, family: str) -> None:
    """Both directions, or a window: with all queries at one position, a fit would make it worse."""
    if family == "eurobert":
        model: torch.nn.Module = tiny_of(transformers.EuroBertModel)
    else:
        model = tiny_model(family, sliding_window=32)
    rope_ext.patch(model, "shaw", sliding_layers="scale")
    before = {name: value.clone() for name, value in model.named_parameters()}
    with pytest.raises(rope_ext.OptionError, match="all earlier tokens and no later ones"):
        rope_ext.fit(model, text)
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


def test_a_temperature_of_the_patch_is_fitted_to(text) -> None:
    """As close with it as the best of a grid of larger and smaller tables."""
    model = rotates_constants()
    original = logits(model, text)
    rope_ext.patch(model, "t5", buckets="offsets", max_distance=LENGTH, temperature=2.0)
    rope_ext.fit(model, text)
    (table,) = parameters(model).values()
    off = {}
    for factor in (0.7, 1.0, 1.4):
        with torch.no_grad():
            table.mul_(factor)
        off[factor] = float((logits(model, text) - original).square().mean())
        with torch.no_grad():
            table.div_(factor)
    assert min(off, key=lambda factor: off[factor]) == 1.0, off
    other = rope_ext.patch(rotates_constants(), "t5", attention_factor=1.5)
    with pytest.raises(rope_ext.OptionError, match=r"patch with temperature=2.25 instead"):
        rope_ext.fit(other, text)


def test_a_model_begins_closer_to_the_original(text) -> None:
    """Every layer gets its own parameters, and nothing else of the model changes."""
    model = rotates_constants(layers=2)
    original = logits(model, text)
    rope_ext.patch(model, "shaw", clip=LENGTH)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    off = (logits(model, text) - original).abs().mean()
    rope_ext.fit(model, text)
    assert (logits(model, text) - original).abs().mean() < 0.1 * off
    for name, value in model.named_parameters():
        if "rope_ext_bias" in name:
            assert bool((value == 0).all()) == name.endswith("value")
            assert value.requires_grad and not torch.equal(value, before[name])
        else:
            assert torch.equal(value, before[name])
    keys = [value for name, value in parameters(model).items() if name.endswith("key")]
    assert len(keys) == 2 and not torch.equal(*keys)
