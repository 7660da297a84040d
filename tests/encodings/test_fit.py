"""``fit``: encodings begin with the attention of the original model."""

from __future__ import annotations

import pytest
import torch
from transformers import PhiConfig, PhiForCausalLM

import rope_ext
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


def by_hand(model: PhiForCausalLM) -> torch.Tensor:
    """What the rotation of :func:`rotates_constants` adds by distance: ``[heads, distances]``."""
    attention = model.model.layers[0].self_attn
    q, k = (
        linear.bias.detach().double().view(HEADS, 16)[:, : 2 * PAIRS]
        for linear in (attention.q_proj, attention.k_proj)
    )
    q, k = (torch.complex(x[:, :PAIRS], x[:, PAIRS:]) for x in (q, k))
    angles = torch.arange(LENGTH)[:, None] * 100.0 ** -(torch.arange(PAIRS).double() / PAIRS)
    added = (q * k.conj())[:, None] * torch.exp(1j * angles)
    return added.real.sum(-1) / 16**0.5


def test_t5_gets_the_bias_that_the_rotation_was(text) -> None:
    model = rotates_constants()
    right, expected = logits(model, text), by_hand(model)
    rope_ext.patch(model, "t5", buckets="offsets", max_distance=LENGTH)
    off = (logits(model, text) - right).abs().max()
    assert rope_ext.fit(model, text, steps=600, learning_rate=0.1) is model
    beta = model.model.rope_ext_bias.beta
    near = beta.detach().double()[:, :33]  # rare distances have few pairs
    found, expected = near - near[:, :1], (expected - expected[:, :1])[:, :33]
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)
    assert (logits(model, text) - right).abs().max() < 0.01 * off


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
    own = parameters(model)
    keys = [value for name, value in own.items() if name.endswith("key")]
    assert len(keys) == 2 and not torch.equal(*keys)
