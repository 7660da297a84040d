"""The probe that finds out how each attention layer turns its queries and keys."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

import rope_ext
from tests.families.checks import changed, snapshot
from tests.families.zoo import tiny_config, tiny_model
from tests.helpers.models import tiny_llama


def turned_pairs(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, first: list[int], second: list[int]
) -> torch.Tensor:
    cos, sin = cos[:, None, :, : len(first)], sin[:, None, :, : len(first)]
    out = x.clone()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def rotation(first: list[int], second: list[int]) -> Callable[..., torch.Tensor]:
    return functools.partial(turned_pairs, first=first, second=second)


def use(monkeypatch: pytest.MonkeyPatch, of_query: Callable, of_key: Callable) -> None:
    def apply(q, k, cos, sin, unsqueeze_dim=1):
        return of_query(q, cos, sin), of_key(k, cos, sin)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", apply)


@pytest.mark.parametrize("kind", ["other way", "reversed pairs"])
def test_unusual_rotations_are_read_off(monkeypatch, ids, kind: str) -> None:
    first, second = {
        "other way": ([*range(8, 16)], [*range(8)]),
        "reversed pairs": ([*range(7, -1, -1)], [*range(15, 7, -1)]),
    }[kind]
    turn = rotation(first, second)
    use(monkeypatch, turn, turn)
    model = tiny_llama()
    told = {"original_max_position_embeddings": 1000}
    with torch.no_grad():
        plain = model(ids).logits
        with rope_ext.patched(
            model, "leaky_rerope", factor=4, window=999, k=3, log_n=False, **told
        ):
            torch.testing.assert_close(model(ids).logits, plain, atol=1e-4, rtol=0)


def _still(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x


half = rotation([*range(8)], [*range(8, 16)])
neighbours = rotation([*range(0, 16, 2)], [*range(1, 16, 2)])
WRONG = {
    "differently": (half, neighbours),
    "only keys": (_still, half),
    "twice the angle": (lambda x, cos, sin: half(half(x, cos, sin), cos, sin),) * 2,
    "another curve": (lambda x, cos, sin: half(x, cos, sin * sin.abs()),) * 2,
    "added": (lambda x, cos, sin: half(x, cos, sin) + 0.5 * sin[:, None],) * 2,
    "normed after": (lambda x, cos, sin: half(x, cos, sin) * torch.linspace(0.5, 2, 16),) * 2,
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_rotation_is_refused_and_left_alone(monkeypatch, kind: str, dtype) -> None:
    use(monkeypatch, *WRONG[kind])
    model = tiny_llama().to(dtype)
    for layer in model.model.layers:  # a column as large as some of trained models
        layer.self_attn.q_proj.weight.data[3] *= 1000
        layer.self_attn.k_proj.weight.data[3] *= 1000
    before = snapshot(model)
    with pytest.raises(rope_ext.UnsupportedModelError, match=r"LlamaModel: .*such as 'yarn'"):
        rope_ext.patch(model, "rerope", factor=4)
    assert changed(before, snapshot(model)) == set()


def test_norms_after_the_rotation_that_part_pairs_are_refused() -> None:
    model = tiny_model("hunyuan_v1_dense")
    model.model.layers[1].self_attn.query_layernorm.weight.data = 1 + torch.arange(16) / 9
    with pytest.raises(rope_ext.UnsupportedModelError, match=r"1\.self_attn rotates"):
        rope_ext.patch(model, "rerope", factor=4)


def test_positions_outside_of_attention_are_seen_beside_massive_hidden_states() -> None:
    model = tiny_llama()
    model.model.embed_tokens.weight.data[:, 0] = 1e4  # trained models have such columns

    def add(module: nn.Module, args: tuple, kwargs: dict, output: torch.Tensor) -> torch.Tensor:
        return output + 0.1 * kwargs["position_embeddings"][1].mean(-1, keepdim=True)

    model.model.layers[0].register_forward_hook(add, with_kwargs=True)
    with pytest.raises(rope_ext.UnsupportedModelError, match=r"LlamaModel: .*outside"):
        rope_ext.patch(model, "rerope", factor=4)


def test_a_model_on_the_meta_device_is_refused_with_the_cure() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    with pytest.raises(rope_ext.UnsupportedModelError, match="load them first"):
        rope_ext.patch(model, "rerope", factor=4)


@pytest.mark.parametrize("kind", ["memory", "some on disk", "whole layers"])
def test_offloaded_weights_are_probed_and_stay_offloaded(kind: str, ids, tmp_path) -> None:
    from accelerate import cpu_offload, dispatch_model

    with torch.no_grad():
        right = rope_ext.patch(tiny_llama(), "rerope", factor=4, window=5)(ids).logits
        plain = tiny_llama()(ids).logits
    model = tiny_llama()
    if kind == "memory":
        cpu_offload(model, execution_device="cpu")
    elif kind == "some on disk":
        places = {"model.layers.1": "disk", "lm_head": "disk"}
        rest = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb")
        places |= dict.fromkeys(rest, "cpu")
        model = dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path)
    else:
        whole = type(model.model.layers[0]).__name__
        cpu_offload(model, execution_device="cpu", preload_module_classes=[whole])
    away = [parameter.is_meta for parameter in model.parameters()]
    assert any(away)
    rope_ext.patch(model, "rerope", factor=4, window=5)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, right)
        assert torch.equal(rope_ext.unpatch(model)(ids).logits, plain)
    assert [parameter.is_meta for parameter in model.parameters()] == away


@pytest.mark.parametrize("bias", ["t5", "kerple_log", "fire"])
def test_a_patched_model_with_a_bias_is_offloaded(bias: str, ids) -> None:
    """Accelerate moves the arguments of each module to its device, modules among them."""
    from accelerate import cpu_offload

    torch.manual_seed(0)
    model = rope_ext.patch(tiny_llama(), "yarn", factor=4, bias=bias)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)  # also a bias that begins with zeros
        right = model(ids).logits
        cpu_offload(model, execution_device="cpu")
        assert torch.equal(model(ids).logits, right)


def test_positions_by_pair_need_as_many_pairs_in_every_patched_embedding() -> None:
    model = tiny_model("gemma4_text")  # full layers have other heads than sliding ones
    with pytest.raises(rope_ext.UnsupportedModelError, match=r"dpe needs .* 'self_extend'"):
        rope_ext.patch(model, "dpe", factor=4, sliding_layers="scale")
    rope_ext.patch(model, "dpe", factor=4)
