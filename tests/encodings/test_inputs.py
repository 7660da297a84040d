"""Absolute encodings and other rotations: the papers' formulas, exactly, on whole models."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy.integrate import solve_ivp
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings

import rope_ext
from rope_ext.encodings.inputs import sinusoid
from rope_ext.methods import Rope, build_method
from tests.helpers.inputs import (
    CHOSEN,
    FAMILIES,
    VARIANTS,
    by_hand,
    family,
    first_of,
    parameters,
    patch,
    recursion,
    scale_of,
)
from tests.helpers.models import LENGTH, tiny_llama
from tests.helpers.positions import EXACT, logits

ROPE = Rope.geometric(1e4, 16, LENGTH)
FAST = {  # every family once
    ("llama", "multiplicative"),
    ("llama", "3d_rpe"),
    ("llama", "discrete"),
    ("qwen3", "learned"),
    ("mistral", "hierarchical"),
    ("gemma", "sinusoidal"),
    ("gpt_neox", "xpos"),
    ("learned", "static"),
    ("xpos", "dynamic"),
    ("discrete", "dynamic"),
    ("learned", "left"),
    ("discrete", "left"),
    ("xpos", "left"),
}


def grid(*values: object) -> list:
    return [
        pytest.param(*pair, marks=[] if pair in FAST else [pytest.mark.slow])
        for pair in itertools.product(*values)
    ]


@pytest.mark.parametrize(("kind", "name"), grid(FAMILIES, [*CHOSEN, *VARIANTS]))
def test_logits_and_gradients_are_those_of_the_paper(kind: str, name: str, ids) -> None:
    model, plain = family(kind), family(kind)
    patch(model, name)
    learned = parameters(model)
    with by_hand(plain, name, torch.arange(90), learned, scale_of(model)):
        right = plain(ids).logits
    found = model(ids).logits
    torch.testing.assert_close(found, right, **EXACT)
    inner = list(model.parameters())[1], list(plain.parameters())[1]  # of the first layer
    of_both = [
        torch.autograd.grad(x.sin().sum(), [*learned.values(), weight])
        for x, weight in zip((found, right), inner, strict=True)
    ]
    for one, other in zip(*of_both, strict=True):  # sums over some 10,000 values
        torch.testing.assert_close(one, other, atol=2e-3, rtol=1e-3)
    assert (found - logits(plain, ids)).abs().max() > 0.01


def test_sines_are_those_of_a_model_of_transformers() -> None:
    of_distilbert = create_sinusoidal_embeddings(512, 48, torch.empty(512, 48))
    t = torch.arange(512, dtype=torch.float64)
    torch.testing.assert_close(sinusoid(t, 48, 10000.0), of_distilbert, atol=1e-6, rtol=0)
    assert sinusoid(t, 7, 10000.0).shape == (512, 7)


def test_a_model_with_learned_positions_is_gpt2(ids) -> None:
    """GPT-NeoX without a rotation and without parallel residuals has GPT-2's layers."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "layer_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2}
    theirs = GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=90, initializer_range=0.2, **sizes)
    ).eval()
    ours = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            hidden_size=32,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=90,
            use_parallel_residual=False,
            hidden_act="gelu_new",
            **sizes,
        )
    ).eval()
    rope_ext.patch(ours, "learned")
    here, there = ours.gpt_neox, theirs.transformer
    with torch.no_grad():
        here.rope_ext_input.table.copy_(there.wpe.weight)
        here.embed_in.weight.copy_(there.wte.weight)
        ours.lm_head.weight.copy_(there.wte.weight)
        here.final_layer_norm.load_state_dict(there.ln_f.state_dict())
        for layer, block in zip(here.layers, there.h, strict=True):
            layer.input_layernorm.load_state_dict(block.ln_1.state_dict())
            layer.post_attention_layernorm.load_state_dict(block.ln_2.state_dict())
            by_head = [part.unflatten(-1, (4, 8)) for part in block.attn.c_attn.weight.split(32, 1)]
            layer.attention.query_key_value.weight.copy_(torch.stack(by_head, 2).flatten(1).mT)
            by_head = [part.unflatten(-1, (4, 8)) for part in block.attn.c_attn.bias.split(32)]
            layer.attention.query_key_value.bias.copy_(torch.stack(by_head, 1).flatten())
            for one, other in (
                (layer.attention.dense, block.attn.c_proj),
                (layer.mlp.dense_h_to_4h, block.mlp.c_fc),
                (layer.mlp.dense_4h_to_h, block.mlp.c_proj),
            ):
                one.weight.copy_(other.weight.mT)
                one.bias.copy_(other.bias)
    torch.testing.assert_close(logits(ours, ids), logits(theirs, ids), **EXACT)


def test_the_path_solves_its_differential_equation() -> None:
    """Against scipy's solver with an adaptive step; a smooth path, since no unit is bent."""
    generator = torch.Generator().manual_seed(0)
    encoding = build_method("floater", hidden=6)
    values = encoding.initial_inputs(4, 1.0, ROPE)
    learned = {
        name: 0.3 * torch.randn(value.shape, generator=generator, dtype=torch.float64)
        for name, value in values.items()
    }
    learned["first_bias"] += 9  # above 0 throughout
    w1, b1, w2, b2 = (learned[k].numpy() for k in list(learned)[1:])

    def f(tau: float, p):
        return w2 @ [*(w1 @ [*p, tau] + b1), tau] + b2

    t = torch.arange(30, dtype=torch.float64)
    found = encoding.p(t, 4, ROPE, learned)
    right = solve_ivp(f, (0, 3), learned["start"], t_eval=t * 0.1, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found, torch.from_numpy(right.y.T), atol=1e-4, rtol=1e-5)


def test_a_discrete_path_is_its_recursion() -> None:
    encoding = build_method("floater", flow="discrete", hidden=6)
    generator = torch.Generator().manual_seed(0)
    learned = {
        name: 0.4 * torch.randn(value.shape, generator=generator, dtype=torch.float64)
        for name, value in encoding.initial_inputs(4, 1.0, ROPE).items()
    }
    found = encoding.p(torch.arange(30, dtype=torch.float64), 4, ROPE, learned)
    torch.testing.assert_close(found, recursion(learned, 30))


def test_positions_begin_as_the_pages_say(ids) -> None:
    plain = tiny_llama()
    bare = rope_ext.patch(tiny_llama(), "nope")
    for name in ("multiplicative", "floater"):  # which begin by doing nothing
        model = rope_ext.patch(tiny_llama(), name, factor=2)
        assert torch.equal(logits(model, ids), logits(bare, ids))
    torch.manual_seed(0)
    table = parameters(rope_ext.patch(tiny_llama(), "learned"))["table"]
    embeddings = plain.model.embed_tokens.weight
    assert table.shape == (64, 64)
    assert 0.9 < (table.std() / embeddings.std()).item() < 1.1


@pytest.mark.parametrize("kind", first_of("gemma", "llama"))
def test_the_scale_is_the_size_of_what_the_first_layer_gets(kind: str) -> None:
    model = family(kind)
    sample = model.get_input_embeddings().weight[torch.arange(64) * 2].double()
    size = sample.square().mean().sqrt() * (8 if kind == "gemma" else 1)  # sqrt of 64 columns
    rope_ext.patch(model, "sinusoidal")
    assert scale_of(model) == pytest.approx(float(size), rel=1e-3)


def test_embeddings_may_be_given_instead_of_tokens(ids) -> None:
    model = patch(family("gemma"), "learned")
    given = model.get_input_embeddings()(ids)
    torch.testing.assert_close(logits(model, None, inputs_embeds=given), logits(model, ids))


def test_a_fading_rotation_holds_at_any_distance_and_in_half_precision(ids) -> None:
    """Where the numbers of single queries and keys would be infinite."""
    model, plain = patch(tiny_llama(), "xpos"), tiny_llama()
    everything = {"attention_mask": torch.ones_like(ids)}
    far = torch.cat((torch.arange(50), torch.arange(3000, 3040)))
    given = {"position_ids": far[None].expand(2, -1), **everything}
    with by_hand(plain, "xpos", far, {}):
        right = logits(plain, ids, **given)
    # Angles of 3000 radians are good to 2e-4 in float32.
    torch.testing.assert_close(logits(model, ids, **given), right, atol=5e-3, rtol=0)
    farther = torch.cat((torch.arange(50), torch.arange(1_000_000, 1_000_040)))
    model(ids, position_ids=farther[None].expand(2, -1), **everything).logits.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    whole = logits(model, ids)
    half = logits(model.half(), ids)
    assert (half.float() - whole).abs().max() < 0.05  # of half precision itself


def test_logits_within_a_chunk_are_those_of_the_rotation(ids) -> None:
    model = rope_ext.patch(tiny_llama(), "3d_rpe")  # chunks of 48 tokens
    plain = tiny_llama()
    torch.testing.assert_close(logits(model, ids[:, :48]), logits(plain, ids[:, :48]), **EXACT)
    assert (logits(model, ids) - logits(plain, ids))[:, 48:].abs().max() > 0.01


def test_a_dropped_rotation_is_none_within_the_trained_length(ids) -> None:
    model, bare = patch(tiny_llama(), "drope"), patch(tiny_llama(), "nope")
    torch.testing.assert_close(logits(model, ids)[:, :64], logits(bare, ids)[:, :64], **EXACT)
    assert (logits(model, ids) - logits(bare, ids))[:, 70:].abs().max() > 1e-3
    assert torch.equal(logits(patch(tiny_llama(), "drope", c=0), ids), logits(bare, ids))


def test_beyond_the_table_there_is_an_error_that_names_the_cure(ids) -> None:
    model = patch(tiny_llama(), "learned", length=64)
    logits(model, ids[:, :64])
    said = r"a sequence of 90 tokens goes beyond its 64 positions; patch with factor=1.41 and ext"
    with pytest.raises(rope_ext.OptionError, match=said):
        logits(model, ids)
    for name, options, said in (
        ("learned", {"factor": 4, "length": 64}, "a sequence of 256 tokens goes beyond its 64"),
        ("learned", {"factor": 5, "length": 16, "extend": "hierarchical"}, "its 256 positions"),
        ("learned", {"extend": "linear"}, "extend='linear' is not valid; it must be 'hierarch"),
        ("multiplicative", {"factor": 2, "length": 64}, "patch with length=128"),
        ("multiplicative", {"table": "no"}, "must be 'learned' or 'sinusoidal'"),
        ("sinusoidal", {"scale": 0}, "scale=0 is not valid"),
        ("floater", {"into": "last"}, "into='last' is not valid; it must be 'every' or 'first'"),
        ("floater", {"flow": "none"}, "flow='none' is not valid; it must be 'continuous' or 'disc"),
        ("floater", {"flow": "discrete", "step": 0.2}, "step=0.2 is not valid; it must be left"),
        ("xpos", {"scale_base": 1}, "scale_base=1 is not valid"),
        ("3d_rpe", {"chunk": 0}, "chunk=0 is not valid"),
        ("drope", {"c": -1}, "c=-1 is not valid"),
    ):
        with pytest.raises(rope_ext.OptionError, match=said):
            rope_ext.patch(tiny_llama(), name, **options)
