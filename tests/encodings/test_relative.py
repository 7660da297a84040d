"""Encodings whose logits depend on content and distance together: the papers' formulas, exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import DebertaV2Config, XLNetConfig
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention
from transformers.models.xlnet.modeling_xlnet import XLNetModel, XLNetRelativeAttention

import rope_ext
from rope_ext.attention import dispatch as attention
from rope_ext.attention.call import Call, Pairs, RotatedBand
from rope_ext.methods import Rope, build_method
from rope_ext.methods.geometry import Distance
from tests.helpers.biases import parameters
from tests.helpers.models import tiny_llama
from tests.helpers.positions import EXACT, FAMILIES, logits
from tests.helpers.promises import (
    an_adapter_trains_it_along,
)
from tests.helpers.relative import SIZES, attend, dense, patch

SLOW = [pytest.mark.slow]
KINDS = ["llama", "qwen3", "mistral", "mistral windowed", "gpt_neox", "gemma2 scaled"]
KINDS = [pytest.param(k, marks=SLOW if k != "llama" else []) for k in [*KINDS, "gpt_oss scaled"]]
ONE = [pytest.param(name, marks=SLOW if name != "shaw" else []) for name in SIZES]
ROPE = Rope.geometric(1e4, 16, 64)


def called(name: str, learned: dict[str, torch.Tensor], last: int | None = None, **more) -> Call:
    scores = build_method(name, **SIZES[name]).scores(4, ROPE, learned)
    band = RotatedBand(Distance(0, last), None, None)
    return Call([band], Pairs(slice(0, 0), slice(0, 0)), 0.25, scores=scores, **more)


def drawn(name: str, queries: int, keys: int, kv_heads: int = 2) -> tuple[list, dict]:
    """Query, key and value of two rows, and what is learned, all to be differentiated."""
    heads = rope_ext.encodings.Heads(4, 16, 12)
    learned = build_method(name, **SIZES[name]).initial(heads, ROPE)
    sizes = [(2, 4, queries, 16), (2, kv_heads, keys, 16), (2, kv_heads, keys, 12)]
    sizes += [x.shape for x in learned.values()]
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    made = [x.requires_grad_() for x in made]
    return made[:3], dict(zip(learned, made[3:], strict=True))


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    ("queries", "keys", "last"),
    [
        (150, 150, None),
        (1, 50, None),
        (20, 90, 30),
        *(
            pytest.param(*case, marks=SLOW)
            for case in ((70, 150, None), (1, 3, None), (80, 80, 4), (1, 90, 30))
        ),
    ],
)
def test_the_kernel_is_the_paper(name: str, queries: int, keys: int, last: int | None) -> None:
    """Values, and gradients of everything that has one, sinks and temperature among them."""
    qkv, learned = drawn(name, queries, keys)
    sinks, warmth = torch.randn(4).double().requires_grad_(), torch.linspace(1, 2, queries).double()
    inputs = [*qkv, *learned.values(), sinks]
    found = attention.attend(*qkv, called(name, learned, last, sinks=sinks, temperature=warmth))
    apart = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    visible = (apart >= 0) & (apart < (last or keys))
    query = qkv[0] * warmth[:, None]
    apart = apart.clamp(min=0)[None]
    right = attend(name, learned, query, *qkv[1:], apart, visible, 0.25, sinks=sinks)
    torch.testing.assert_close(found, right)
    of_both = [torch.autograd.grad(x.sin().sum(), inputs) for x in (found, right)]
    for one, other in zip(*of_both, strict=True):
        torch.testing.assert_close(one, other)


def test_deberta_is_that_of_transformers() -> None:
    """Of its own module, with a causal mask; tables are what it projects its embedding to."""
    torch.manual_seed(0)
    clip, heads, columns = 9, 4, 8
    config = DebertaV2Config(
        hidden_size=32,
        num_attention_heads=heads,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        max_relative_positions=clip,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    module = DisentangledSelfAttention(config).double()
    hidden, embedding = torch.randn(2, 40, 32).double(), torch.randn(2 * clip, 32).double()
    causal = torch.ones(40, 40, dtype=torch.bool).tril()[None, None]
    right, _ = module(hidden, causal, rel_embeddings=embedding)

    def by_head(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (heads, columns)).transpose(-2, -3)

    projections = {"key": module.pos_key_proj, "query": module.pos_query_proj}
    learned = {name: by_head(p(embedding))[:, clip:] for name, p in projections.items()}
    call = replace(called("deberta", learned), scale=columns**-0.5)
    qkv = [by_head(project(hidden)) for project in (module.query_proj, module.key_proj)]
    found = attention.attend(*qkv, by_head(module.value_proj(hidden)), call)
    torch.testing.assert_close(found.transpose(1, 2).flatten(2), right, atol=1e-6, rtol=0)
    # its square roots are of float32


def test_transformer_xl_is_that_of_xlnet() -> None:
    """Of transformers' attention with memories and a causal mask, and with its own sinusoid."""
    torch.manual_seed(0)
    config = XLNetConfig(d_model=32, n_head=4, d_inner=8, n_layer=1, vocab_size=8, dropout=0.0)
    module = XLNetRelativeAttention(config).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    memories = 20
    query, keys = torch.randn(30, 2, 4, 8).double(), torch.randn(30 + memories, 2, 4, 8).double()
    values = torch.randn_like(keys)
    sinusoid = XLNetModel(config).relative_positional_encoding(30, 30 + memories, bsz=2).double()
    of_distance = torch.einsum("ibh,hnd->ibnd", sinusoid, module.r)
    hidden = torch.ones(30, 50).double().triu(1 + memories)[:, :, None, None]
    right = module.rel_attn_core(query, keys, values, of_distance, attn_mask=hidden)
    learned = {"u": module.r_w_bias, "v": module.r_r_bias, "r": module.r.permute(1, 2, 0)}
    call = replace(called("transformer_xl", learned), scale=module.scale)
    found = attention.attend(*(x.permute(1, 2, 0, 3) for x in (query, keys, values)), call)
    # its sinusoid is of float32
    torch.testing.assert_close(found.permute(2, 0, 1, 3), right, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_the_paper(kind: str, name: str, ids) -> None:
    family = FAMILIES[kind]
    model, plain = family.model(), family.model()
    patch(model, name, **family.options)
    learned = parameters(model)
    with dense(plain, name, torch.arange(90)[None], learned):
        right = plain(ids).logits
    found = model(ids).logits
    torch.testing.assert_close(found, right, **EXACT)
    of_both = [torch.autograd.grad(x.sin().sum(), list(learned.values())) for x in (found, right)]
    for one, other in zip(*of_both, strict=True):  # sums over 16,000 pairs
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3)
    assert (found - logits(plain, ids)).abs().max() > 0.01


@pytest.mark.parametrize("name", ONE)
def test_in_bfloat16_and_under_autocast(name: str, ids) -> None:
    """As near to float32 as the model is without it."""
    model = patch(tiny_llama(), name)
    right = logits(model, ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = model(ids, labels=ids)
    cast.loss.backward()
    assert all(p.grad.isfinite().all() for p in parameters(model).values())
    half = logits(model.to(torch.bfloat16), ids)
    for found in (cast.logits, half):
        assert (found.float() - right).abs().mean() < 0.05 * right.abs().mean()


@pytest.mark.parametrize("name", ONE)
def test_it_is_trained_saved_and_taken_out(name: str, ids, tmp_path) -> None:
    model = tiny_llama()
    before, plain = dict(model.state_dict()), logits(model, ids)
    patch(model, name, factor=2)
    layers = model.config.num_hidden_layers
    assert len(parameters(model)) == layers * {"transformer_xl": 3}.get(name, 2)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in parameters(model).values())
    want = logits(model, ids)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(rope_ext.from_pretrained(tmp_path), ids), want)
    rope_ext.unpatch(model)
    assert list(model.state_dict()) == list(before)
    assert torch.equal(logits(model, ids), plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_an_adapter_can_train_it_along(name: str, ids, tmp_path) -> None:
    def patch(base: torch.nn.Module) -> torch.nn.Module:
        return rope_ext.patch(base, name, **SIZES[name])

    an_adapter_trains_it_along(tiny_llama(), patch, ["rope_ext_bias"], ids, tmp_path)


def test_a_table_of_one_row_is_that_of_every_distance(ids) -> None:
    found = []
    for kernel in ("auto", "reference"):
        torch.manual_seed(0)
        model = rope_ext.patch(tiny_llama(), "deberta", clip=1, kernel=kernel)
        found.append(logits(model, ids))
    torch.testing.assert_close(*found, **EXACT)
