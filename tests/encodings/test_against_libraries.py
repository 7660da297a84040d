"""Encodings against code that others wrote: transformers' models, and scipy's solver."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy.integrate import solve_ivp
from transformers import DebertaV2Config, SmolLM3Config, SmolLM3ForCausalLM, XLNetConfig
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.xlnet.modeling_xlnet import XLNetModel, XLNetRelativeAttention

import rope_ext
from rope_ext.attention import dispatch as attention
from rope_ext.attention.call import Call, Pairs, RotatedBand
from rope_ext.encodings.alibi import slopes
from rope_ext.encodings.base import sinusoid
from rope_ext.methods import Rope, build_method
from rope_ext.methods.geometry import Distance
from tests.helpers.models import LENGTH, tiny_llama
from tests.helpers.positions import EXACT, logits

ROPE = Rope.geometric(1e4, 16, LENGTH)


@pytest.mark.every
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 16, 20, 112])
def test_slopes_are_those_of_bloom(heads: int) -> None:
    """Of BLOOM and, in powers of two, of MPT, whose interpolation is another."""
    of_bloom = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(slopes(heads).float(), of_bloom)
    if heads & (heads - 1) == 0:
        of_mpt = -build_mpt_alibi_tensor(heads, 2)[:, 0, 0]
        torch.testing.assert_close(slopes(heads).float(), of_mpt)


@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (16, 64), (7, 20), (64, 5000)])
def test_buckets_are_those_of_t5(buckets: int, farthest: int) -> None:
    distance = torch.arange(20_000)
    of_t5 = T5Attention._relative_position_bucket(-distance, False, buckets, farthest)
    encoding = rope_ext.T5(num_buckets=buckets, max_distance=farthest)
    assert torch.equal(encoding.bucket(distance.double()), of_t5)
    assert bool((of_t5[farthest:] == buckets - 1).all())  # from where on it saturates


def test_sines_are_those_of_distilbert() -> None:
    of_distilbert = create_sinusoidal_embeddings(512, 48, torch.empty(512, 48))
    t = torch.arange(512, dtype=torch.float64)
    torch.testing.assert_close(sinusoid(t, 48, 10000.0), of_distilbert, atol=1e-6, rtol=0)


def test_nope_in_some_layers_of_llama_is_smollm3(ids) -> None:
    model = tiny_llama(num_hidden_layers=4)
    values = model.config.to_dict()
    kept = SmolLM3Config().to_dict().keys() - {"model_type", "layer_types", "no_rope_layers"}
    values = {name: value for name, value in values.items() if name in kept}
    smollm = SmolLM3ForCausalLM(SmolLM3Config(**values, no_rope_layer_interval=2)).eval()
    smollm.load_state_dict(model.state_dict())
    rope_ext.patch(model, "nope", layers="every 2nd")
    torch.testing.assert_close(logits(model, ids), logits(smollm, ids), **EXACT)


def test_the_path_of_floater_solves_its_differential_equation() -> None:
    """With an adaptive step; a smooth path, since no unit is bent."""
    generator = torch.Generator().manual_seed(0)
    encoding = build_method("floater", hidden=6)
    learned = {
        name: 0.3 * torch.randn(value.shape, generator=generator, dtype=torch.float64)
        for name, value in encoding.initial_inputs(4, 1.0, ROPE).items()
    }
    learned["first_bias"] += 9  # above 0 throughout
    w1, b1, w2, b2 = (learned[k].numpy() for k in list(learned)[1:])

    def f(tau: float, p):
        return w2 @ [*(w1 @ [*p, tau] + b1), tau] + b2

    t = torch.arange(30, dtype=torch.float64)
    found = encoding.p(t, 4, ROPE, learned)
    right = solve_ivp(f, (0, 3), learned["start"], t_eval=t * 0.1, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found, torch.from_numpy(right.y.T), atol=1e-4, rtol=1e-5)


def called(name: str, learned: dict[str, torch.Tensor], scale: float, **options: int) -> Call:
    call = Call([RotatedBand(Distance(0, None), None, None)], Pairs(slice(0), slice(0)), scale)
    return replace(call, scores=(build_method(name, **options), learned))


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
    qkv = [by_head(p(hidden)) for p in (module.query_proj, module.key_proj, module.value_proj)]
    found = attention.attend(*qkv, called("deberta", learned, columns**-0.5, clip=clip))
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
    sinusoids = XLNetModel(config).relative_positional_encoding(30, 30 + memories, bsz=2).double()
    of_distance = torch.einsum("ibh,hnd->ibnd", sinusoids, module.r)
    hidden = torch.ones(30, 50).double().triu(1 + memories)[:, :, None, None]
    right = module.rel_attn_core(query, keys, values, of_distance, attn_mask=hidden)
    learned = {"u": module.r_w_bias, "v": module.r_r_bias, "r": module.r.permute(1, 2, 0)}
    qkv = [x.permute(1, 2, 0, 3) for x in (query, keys, values)]
    found = attention.attend(*qkv, called("transformer_xl", learned, module.scale))
    # its sinusoid is of float32
    torch.testing.assert_close(found.permute(2, 0, 1, 3), right, atol=1e-4, rtol=0)
