"""Models whose attention another package has replaced, as Unsloth does."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama as llama

import rope_ext
from tests.helpers.models import LENGTH, tiny_llama

METHODS = [("yarn", {}), ("yarn", {"temperature": "log_n"}), ("dynamic_ntk", {}), ("rerope", {})]
PATH = "tests.patching.test_third_party"


def projected(layer: Any, x: torch.Tensor) -> list[torch.Tensor]:
    heads = (*x.shape[:-1], -1, layer.head_dim)
    return [p(x).view(heads).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj)]


def attended(layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple:
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return layer.o_proj(out.transpose(1, 2).flatten(2)), None


def by_a_table(layer: Any, hidden_states: torch.Tensor, **kwargs: Any) -> tuple:
    """Attention with a rotation of its own, whatever it is told."""
    q, k, v = projected(layer, hidden_states)
    inv_freq = 1e4 ** -(torch.arange(0, layer.head_dim, 2) / layer.head_dim)
    angles = torch.arange(q.shape[2]).unsqueeze(-1) * inv_freq.repeat(2)
    return attended(layer, *llama.apply_rotary_pos_emb(q, k, angles.cos(), angles.sin(), 0), v)


def as_told(layer: Any, hidden_states: torch.Tensor, position_embeddings: Any, **kw: Any) -> tuple:
    """Attention of its own that turns by what the rotary module returned."""
    q, k, v = projected(layer, hidden_states)
    return attended(layer, *llama.apply_rotary_pos_emb(q, k, *position_embeddings), v)


class Table(nn.Module):
    """A rotary module that looks its cosine and sine up."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.config, self.attention_scaling = module.config, 1.0
        self.register_buffer("inv_freq", module.inv_freq, persistent=False)
        angles = torch.arange(8 * LENGTH).unsqueeze(-1) * module.inv_freq.repeat(2)
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple:
        return self.cos[position_ids], self.sin[position_ids]


def on_the_class(function: Callable) -> Callable:
    def put(model: Any, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setattr(llama.LlamaAttention, "forward", function)
        return f"{PATH}.{function.__name__} in place of LlamaAttention.forward"

    return put


def on_every_layer(model: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    for layer in model.model.layers:
        layer.self_attn.forward = types.MethodType(by_a_table, layer.self_attn)
    return f"{PATH}.by_a_table in place of LlamaAttention.forward"


def the_rotary_module(model: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    model.model.rotary_emb = Table(model.model.rotary_emb)
    return f"{PATH}.Table in place of the rotary embedding"


def the_decoder(model: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    rotary, plain = model.model.rotary_emb, llama.LlamaRotaryEmbedding(model.config)

    def fast_forward(decoder: Any, *args: Any, **kwargs: Any) -> Any:
        decoder.rotary_emb = plain
        try:
            return forward(decoder, *args, **kwargs)
        finally:
            decoder.rotary_emb = rotary

    forward = llama.LlamaModel.forward
    monkeypatch.setattr(llama.LlamaModel, "forward", fast_forward)
    return "fast_forward in place of LlamaModel.forward"


def around_the_decoder(model: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """As a decorator that passes for what it is around."""
    name = the_decoder(model, monkeypatch)
    wrapper: Any = llama.LlamaModel.forward
    functools.update_wrapper(wrapper, inspect.getclosurevars(wrapper).nonlocals["forward"])
    return name


@pytest.mark.parametrize(("method", "options"), METHODS)
@pytest.mark.parametrize(
    "put",
    [on_the_class(by_a_table), on_every_layer, the_rotary_module, the_decoder, around_the_decoder],
    ids=["class", "layers", "rotary", "decoder", "decorator"],
)
def test_a_rotation_of_another_package_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, put: Callable, method: str, options: dict[str, Any]
) -> None:
    model = tiny_llama()
    name = put(model, monkeypatch)
    config = model.config.to_dict()
    with pytest.raises(rope_ext.UnsupportedModelError) as refusal:
        rope_ext.patch(model, method, factor=4, **options)
    assert name in str(refusal.value)
    assert model.config.to_dict() == config


def test_attention_of_another_package_that_turns_as_it_is_told_is_scaled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = torch.randint(4, 128, (1, 3 * LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = rope_ext.patch(tiny_llama(), "yarn", factor=4)(ids).logits
        monkeypatch.setattr(llama.LlamaAttention, "forward", as_told)
        got = rope_ext.patch(tiny_llama(), "yarn", factor=4)(ids).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    for method, options in (("rerope", {}), ("yarn", {"temperature": 1.2})):
        with pytest.raises(rope_ext.UnsupportedModelError, match=f"{PATH}.as_told in place of"):
            rope_ext.patch(tiny_llama(), method, factor=4, **options)
