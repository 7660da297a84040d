"""Transformer-XL's positions through the model's own key projection."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import nn

import rope_ext
from tests.families.zoo import tiny_model
from tests.helpers.biases import parameters
from tests.helpers.models import tiny_llama
from tests.helpers.positions import CACHES, EXACT, logits
from tests.helpers.promises import decodes_as_it_reads, documents_are_apart, rows_are_as_alone
from tests.helpers.relative import Parts, dense, randomized

FUSED = {  # how the rows of the keys of each head are found in a fused weight
    "phi3": lambda w, heads, kv, size: w[heads * size : (heads + kv) * size],
    "gpt_neox": lambda w, heads, kv, size: w.unflatten(0, (heads, 3, size))[:, 1].flatten(0, 1),
}


def patched(model: nn.Module, **options: object) -> nn.Module:
    return randomized(rope_ext.patch(model, "transformer_xl", projection="key", **options))


def formula(learned, query, key, content, apart, scale) -> Parts:
    """``<u, k> + <q + v, W_K R_d>``, with the sinusoid of each distance projected like a token."""
    u, v, w = learned["u"], learned["v"], learned["w"]
    heads, width = query.shape[1], w.shape[1]
    angle = apart[..., None] / 10000 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    projected = torch.cat((angle.sin(), angle.cos()), -1) @ w.mT  # as k_proj does with a token
    keys = projected.unflatten(-1, (-1, query.shape[-1])).movedim(-2, 1)
    keys = keys.repeat_interleave(heads // keys.shape[1], 1)
    position = torch.einsum(
        "bhid,bhijd->bhij", query + v[:, None], keys.expand(len(query), *[-1] * 4)
    )
    return content + scale * (torch.einsum("hd,bhjd->bhj", u, key)[:, :, None] + position), None


def oracle(plain: nn.Module, model: nn.Module, weights: list[torch.Tensor], tokens: torch.Tensor):
    own = {f"model.layers.{index}.w": weight for index, weight in enumerate(weights)}
    return dense(plain, formula, tokens, {**parameters(model), **own})


def test_logits_and_gradients_are_those_of_the_formula(ids) -> None:
    """Also of the key projection, which has a gradient from both of its uses."""
    model, plain = patched(tiny_llama()), tiny_llama()
    weights = [layer.self_attn.k_proj.weight for layer in plain.model.layers]
    with oracle(plain, model, weights, torch.arange(90)[None]):
        right = plain(ids).logits
    found = model(ids).logits
    torch.testing.assert_close(found, right, **EXACT)
    learned = list(parameters(model).values())
    assert len(learned) == 4  # u and v of two layers
    own = [layer.self_attn.k_proj.weight for layer in model.model.layers]
    ours = torch.autograd.grad(found.sin().sum(), [*learned, *own])
    theirs = torch.autograd.grad(right.sin().sum(), [*learned, *weights])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("kind", ["phi3", "gpt_neox", "qwen2", "gemma"])
def test_it_is_found_in_fused_weights_and_beside_a_bias(kind: str, ids) -> None:
    model, plain = patched(tiny_model(kind)), tiny_model(kind)
    config, weights = plain.config, []
    heads = config.num_attention_heads
    kv = getattr(config, "num_key_value_heads", heads)
    for module in plain.modules():
        if hasattr(module, "k_proj"):
            weights.append(module.k_proj.weight)
        for name in ("qkv_proj", "query_key_value"):
            if hasattr(module, name):
                weight = getattr(module, name).weight
                size = len(weight) // (heads + 2 * kv)
                weights.append(FUSED[kind](weight, heads, kv, size))
    with oracle(plain, model, weights, torch.arange(90)[None]):
        right = logits(plain, ids)
    torch.testing.assert_close(logits(model, ids), right, **EXACT)


@pytest.mark.parametrize("cache", CACHES)
def test_cached_decoding_equals_recomputation(cache: str, ids) -> None:
    decodes_as_it_reads(patched(tiny_llama()), cache, ids, (40, 1, 1, 30, 1, 1, 1, 15))


def test_rows_documents_and_half_precision(ids) -> None:
    model = patched(tiny_llama())
    for side in ("left", "right"):
        rows_are_as_alone(model, side, ids)
    documents_are_apart(model, ids[:1], (15, 75))
    right = logits(model, ids)
    half = logits(model.to(torch.bfloat16), ids).float()
    assert (half - right).abs().mean() < 0.05 * right.abs().mean()


def test_a_trained_projection_is_followed_saved_and_reloaded(ids, tmp_path) -> None:
    model = patched(tiny_llama())
    before = logits(model, ids)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    want = logits(model, ids)
    assert not torch.equal(want, before)
    plain = tiny_llama()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "rope_ext" not in k})
    weights = [layer.self_attn.k_proj.weight for layer in plain.model.layers]
    with oracle(plain, model, weights, torch.arange(90)[None]):
        torch.testing.assert_close(want, logits(plain, ids), **EXACT)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(rope_ext.from_pretrained(tmp_path), ids), want)
    rope_ext.unpatch(model)
    assert list(model.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("first", ["patch", "adapter"])
def test_an_adapter_on_keys_changes_positions_too(first: str, ids) -> None:
    """As the merged weights do, whether it was there before the patch or came after."""
    config = peft.LoraConfig(r=2, target_modules=["k_proj"], task_type="CAUSAL_LM")
    model = tiny_llama()
    if first == "patch":
        model = peft.get_peft_model(patched(model), config)
    else:
        model = patched(peft.get_peft_model(model, config))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.normal_()
    model.eval()
    found = logits(model, ids)
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    grads = [p.grad for n, p in model.named_parameters() if "lora_A" in n]
    assert all(g is not None and g.abs().sum() > 0 for g in grads)
    merged = model.merge_and_unload()
    assert type(merged.model.layers[0].self_attn.k_proj) is nn.Linear
    torch.testing.assert_close(logits(merged, ids), found, **EXACT)


class Quantized(nn.Module):
    """A layer in 8 bits, which has no matrix of floating-point numbers."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = float(linear.weight.abs().max()) / 127
        self.register_buffer("codes", (linear.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.codes * self.scale).to(x).mT


def test_quantized_weights(ids) -> None:
    model, plain = tiny_llama(), tiny_llama()
    for layer, other in zip(model.model.layers, plain.model.layers, strict=True):
        layer.self_attn.k_proj = made = Quantized(layer.self_attn.k_proj)
        with torch.no_grad():
            other.self_attn.k_proj.weight.copy_(made.codes * made.scale)
    torch.testing.assert_close(logits(patched(model), ids), logits(patched(plain), ids), **EXACT)
