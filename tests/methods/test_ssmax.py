"""``temperature="ssmax"``: a number for every head, which is part of the model and can be trained.

The oracle is attention in float64 with dense logits, each multiplied by the formula of its head.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch._dynamo.utils import counters
from transformers import AttentionInterface, AutoModelForCausalLM

import rope_ext
from tests.helpers.graphs import graphs, static, whole
from tests.helpers.models import LENGTH, tiny_llama
from tests.helpers.positions import (
    CACHES,
    EXACT,
    FAMILIES,
    METHODS,
    NEW,
    by_formula,
    logits,
    padded,
)
from tests.helpers.promises import (
    an_adapter_trains_it_along,
    checkpointing_changes_nothing,
    decodes_as_it_reads,
    documents_are_apart,
    generates_as_it_recomputes,
    learns,
    pieces_of_rows_are_as_alone,
    rows_are_as_alone,
    sees_nothing_later,
)

NAME = "rope_ext_temperature"
MADE: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 4},
    "dynamic_yarn": {"factor": 4, "length": 4 * LENGTH},
    "self_extend": {"factor": 4, **METHODS["self_extend"]},
    "rerope": {"factor": 4, **METHODS["rerope"]},
    "rope": {"bias": "alibi"},
    "nope": {},
}
"""A frequency method, one that follows sequences, two position methods and two encodings."""


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if f".{NAME}." in n}


def randomized(model: nn.Module, seed: int = 5) -> nn.Module:
    """Under a patch whose scales are all different, and some below 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in parameters(model).values():
            value.copy_(torch.rand(value.shape, generator=generator) * 4 - 1)
    return model


def patch(
    model: nn.Module, name: str = "yarn", length: int | None = None, **more: Any
) -> nn.Module:
    """``length``: of the temperature, not of the method; None: the trained length."""
    temperature = rope_ext.SSMax(length=length)
    return randomized(rope_ext.patch(model, name, temperature=temperature, **MADE[name], **more))


def tau(i: int, s: float, length: int = LENGTH) -> float:
    return 1 + s * max(0.0, math.log(i + 1) / math.log(length) - 1)


def factors(model: nn.Module, tokens: int) -> list[torch.Tensor]:
    """Of every layer: float64, ``[heads, tokens]``."""
    return [
        torch.tensor([[tau(i, s) for i in range(tokens)] for s in value.tolist()]).double()
        for value in parameters(model).values()
    ]


# --- the formula ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, 1.0, 2.5])
def test_the_initial_temperature_is_its_formula(scale: float) -> None:
    t = torch.arange(300, dtype=torch.float64)
    made = rope_ext.SSMax(length=LENGTH, scale=scale)
    assert made.at(t).tolist() == pytest.approx([tau(i, scale) for i in range(300)], rel=1e-12)
    assert (1 + scale * made.growth(t)).tolist() == pytest.approx(made.at(t).tolist(), rel=1e-12)


def test_beyond_the_trained_length_it_is_scalable_softmax() -> None:
    """Of 2501.19399: ``n ** (s z)``, and with a bias ``exp((s ln n + b) z)``."""
    for scale in (1.0, 1.7):
        s, b = scale / math.log(LENGTH), 1 - scale
        for n in (LENGTH, 100, 1000):
            assert tau(n - 1, scale) == pytest.approx(s * math.log(n) + b)
    z, n = 0.3, 200
    assert math.exp(tau(n - 1, 1.0) * z) == pytest.approx(n ** (z / math.log(LENGTH)))


def test_a_new_patch_is_log_n_and_leaves_the_trained_length_alone(ids) -> None:
    for name, options in MADE.items():
        model = tiny_llama()
        with rope_ext.patched(model, name, temperature="log_n", **options):
            right = logits(model, ids)
        with rope_ext.patched(model, name, temperature=1.0, attention_factor=1, **options):
            none = logits(model, ids)
        with rope_ext.patched(model, name, temperature="ssmax", **options):
            torch.testing.assert_close(logits(model, ids), right, **EXACT)
        given = {"temperature": rope_ext.SSMax(scale=0), "attention_factor": 1}
        with rope_ext.patched(model, name, **given, **options):
            assert torch.equal(logits(model, ids), none)
        # Whatever is learned, a text of the trained length is read as without it.
        with rope_ext.patched(model, name, temperature=1.0, **options):
            short = logits(model, ids[:, :LENGTH])
        assert torch.equal(logits(patch(model, name), ids[:, :LENGTH]), short)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scale": -1}, "scale=-1 is not valid; it must be a finite number of at least 0"),
        ({"scale": 101}, "at most 100"),
        ({"length": 1}, "length=1 is not valid"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(rope_ext.OptionError, match=message):
        rope_ext.SSMax(**given)


def test_the_error_of_a_wrong_temperature_names_it() -> None:
    with pytest.raises(rope_ext.OptionError, match="'ssmax'"):
        rope_ext.YaRN(factor=4, temperature="ssmaxx")


# --- in a model ----------------------------------------------------------------------------------


class Dense:
    """Llama's attention in float64, with every query multiplied by the factor of its head."""

    def __init__(self, factors: list[torch.Tensor]) -> None:
        self.factors = factors

    def __call__(self, module, query, key, value, attention_mask, scaling, **kwargs):
        groups = query.shape[1] // key.shape[1]
        q, k, v = (x.double() for x in (query, key, value))
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        tokens = q.shape[2]
        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        logits = q @ k.mT * scaling * self.factors[module.layer_idx][..., None]
        out = logits.masked_fill(hidden, -1e30).softmax(-1) @ v
        return out.transpose(1, 2).to(value.dtype), None


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_frequency_method_multiplies_every_head_by_its_own(ids, implementation: str) -> None:
    model = tiny_llama()
    model.set_attn_implementation(implementation)
    patch(model)
    found, by_head = logits(model, ids), factors(model, ids.shape[1])
    rope_ext.patch(model, "yarn", factor=4, replace=True)
    AttentionInterface.register("dense_by_head", Dense(by_head))
    model.set_attn_implementation("dense_by_head")
    torch.testing.assert_close(found, logits(model, ids), **EXACT)


@pytest.mark.parametrize("kernel", ["flash", "reference"])
@pytest.mark.parametrize("kind", ["llama", "smollm3", "gpt_oss"])
def test_a_position_method_multiplies_every_head_by_its_own(kind: str, kernel: str, ids) -> None:
    family, name = FAMILIES[kind], "self_extend"
    model, ids = family.model(), ids[:, :90]
    told = {"original_max_position_embeddings": LENGTH, "attention_factor": 1, "kernel": kernel}
    found = logits(patch(model, name, **told, **family.options), ids)
    layers = range(model.config.num_hidden_layers) if family.mapped is None else family.mapped
    by_head = dict(zip(layers, factors(model, 90), strict=True))
    rope_ext.unpatch(model)

    def scores(module: nn.Module, query: Any, logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        return logits * by_head[module.layer_idx][..., None]

    positions = torch.arange(90)[None].expand(2, -1)
    with by_formula(model, family, name, positions, log_n=None, scores=scores, **METHODS[name]):
        torch.testing.assert_close(found, logits(model, ids), **EXACT)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", MADE)
def test_cached_steps_equal_recomputation(name: str, cache: str, ids) -> None:
    decodes_as_it_reads(patch(tiny_llama(), name), cache, ids[:, :90], (70, 1, 18, 1))


@pytest.mark.parametrize("name", ["yarn", "self_extend", "nope"])
def test_rows_documents_and_generation_count_from_their_own_beginning(name: str, ids) -> None:
    model = patch(tiny_llama(), name, length=8)
    for side in ("left", "right"):
        rows_are_as_alone(model, side, ids[:, :90], with_positions=True)
    documents_are_apart(model, ids[:1, :90], (60, 30))
    sees_nothing_later(model, ids[:, :90])
    generates_as_it_recomputes(model, ids[:, :30])


@pytest.mark.parametrize("name", ["self_extend", "nope", "rope"])
def test_what_a_graph_holds_is_what_the_eager_path_computes(name: str, ids, in_tensors) -> None:
    model = patch(tiny_llama(), name, length=8)
    rows = [ids[0, :75], ids[1, :64]]
    pieces_of_rows_are_as_alone(model, rows, "left", (40, 25, 5, *[1] * 5), static(model))


@pytest.mark.usefixtures("no_graphs")
@pytest.mark.parametrize("name", ["yarn", "self_extend"])
def test_generation_with_a_static_cache_is_compiled_whole(name: str, ids) -> None:
    model = patch(tiny_llama(num_hidden_layers=1), name, length=8)
    tokens, mask, _ = padded([ids[0, :80], ids[1, :50]], "left")
    given = {"attention_mask": mask, "pad_token_id": 0, **NEW}
    right = model.generate(tokens, **given)
    config = {"cache_implementation": "static", "compile_config": whole()}
    assert torch.equal(model.generate(tokens, **config, **given), right)
    assert graphs() >= 1 and not counters["graph_break"]


@pytest.mark.usefixtures("no_graphs")
@pytest.mark.parametrize("name", ["yarn", "self_extend"])
def test_a_compiled_forward_has_the_gradients_of_the_eager_one(name: str, ids) -> None:
    model, found = patch(tiny_llama(num_hidden_layers=1), name), []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        run(ids[:, :90], labels=ids[:, :90], use_cache=False).loss.backward()
        found.append([value.grad for value in parameters(model).values()])
    for one, other in zip(*found, strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(other, one, atol=1e-6, rtol=1e-4)


# --- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MADE)
def test_gradients_are_those_of_finite_differences(name: str, ids) -> None:
    model, ids = patch(tiny_llama(), name).double(), ids[:1, :90]
    step = 1e-2  # the norms of transformers are in float32

    def loss() -> torch.Tensor:  # that of transformers is in float32
        found = model(ids, use_cache=False).logits[0, :-1]
        return nn.functional.cross_entropy(found, ids[0, 1:])

    loss().backward()
    for value in parameters(model).values():
        assert value.grad.abs().max() > 1e-4
        for head in range(len(value)):
            moved = []
            for sign in (1, -1):
                with torch.no_grad():
                    value[head] += sign * step
                    moved.append(loss().item())
                    value[head] -= sign * step
            difference = (moved[0] - moved[1]) / (2 * step)
            assert value.grad[head].item() == pytest.approx(difference, rel=2e-3, abs=5e-6)


@pytest.mark.parametrize("name", ["yarn", "self_extend"])
def test_an_optimizer_trains_it(name: str, ids) -> None:
    model = patch(tiny_llama(), name, length=8)
    learns(model, parameters(model), ids, tokens=60, lr=0.5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["yarn", "self_extend"])
def test_gradient_checkpointing_changes_no_gradient(name: str, reentrant: bool, ids) -> None:
    def made() -> nn.Module:
        return patch(tiny_llama(), name, length=4)

    checkpointing_changes_nothing(made, reentrant, ids)


@pytest.mark.parametrize("name", ["yarn", "self_extend"])
def test_in_bfloat16_it_learns_too(name: str, ids) -> None:
    model = patch(tiny_llama().bfloat16(), name)
    assert all(value.dtype == torch.bfloat16 for value in parameters(model).values())
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert all(value.grad.abs().max() > 0 for value in parameters(model).values())


@pytest.mark.parametrize("name", ["yarn", "self_extend"])
def test_short_rows_give_a_gradient_of_zero(name: str, ids) -> None:
    """Data parallelism waits for one of every parameter."""
    model = patch(tiny_llama(), name)
    model(ids[:, :LENGTH], labels=ids[:, :LENGTH], use_cache=False).loss.backward()
    assert all(value.grad is not None for value in parameters(model).values())
    assert not any(value.grad.any() for value in parameters(model).values())


@pytest.mark.parametrize("name", ["yarn", "self_extend"])
def test_an_adapter_trains_it_along(name: str, ids, tmp_path) -> None:
    def patched(base: nn.Module) -> nn.Module:
        return rope_ext.patch(base, name, temperature="ssmax", **MADE[name])

    names = an_adapter_trains_it_along(tiny_llama(), patched, [NAME], ids, tmp_path)
    assert len(names) == tiny_llama().config.num_hidden_layers


# --- the way back, copies, saving ----------------------------------------------------------------


@pytest.mark.parametrize("name", MADE)
def test_unpatching_takes_it_out_bit_for_bit(name: str, ids) -> None:
    model = tiny_llama()
    before, plain = dict(model.state_dict()), logits(model, ids)
    patch(model, name)
    added = set(model.state_dict()) - set(before)
    assert added == set(parameters(model)) and len(added) == model.config.num_hidden_layers
    rope_ext.unpatch(model)
    assert list(model.state_dict()) == list(before)
    assert torch.equal(logits(model, ids), plain)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("name", ["yarn", "self_extend"])
def test_a_copy_has_its_own(name: str, copied: Callable, ids) -> None:
    model = patch(tiny_llama(), name)
    right, twin = logits(model, ids), copied(model)
    assert torch.equal(logits(twin, ids), right)
    randomized(twin, seed=6)
    assert torch.equal(logits(model, ids), right) and not torch.equal(logits(twin, ids), right)
    assert not parameters(rope_ext.unpatch(twin)) and parameters(model)


@pytest.mark.parametrize("name", MADE)
def test_reloaded_to_the_bit(name: str, ids, tmp_path: Path, capfd) -> None:
    model = patch(tiny_llama(), name)
    model.save_pretrained(tmp_path)
    again = rope_ext.from_pretrained(tmp_path)
    assert torch.equal(logits(again, ids), logits(model, ids))
    assert "unexpected" not in "".join(capfd.readouterr()).lower()
    with pytest.raises(Exception, match="unknown to plain transformers"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_weights_that_lack_it_are_refused(tmp_path: Path) -> None:
    patch(tiny_llama()).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    kept = {key: value for key, value in load_file(file).items() if NAME not in key}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(rope_ext.LoadError, match=rf"{NAME}\.scale, the learned parameters"):
        rope_ext.from_pretrained(tmp_path)


def test_another_patch_keeps_what_was_learned(ids) -> None:
    """The same objects, which optimizers hold, also where another method attends."""
    model = patch(tiny_llama())
    before, right = parameters(model), logits(model, ids)
    values = [value.tolist() for value in before.values()]
    for name in ("self_extend", "yarn"):
        rope_ext.patch(model, name, temperature="ssmax", replace=True, **MADE[name])
        after = parameters(model)
        assert [value.tolist() for value in after.values()] == values
        assert all(after[key] is before[key] for key in before)
    assert torch.equal(logits(model, ids), right)
    with rope_ext.patched(model, "pi", factor=4, replace=True):
        assert not parameters(model)
    with pytest.raises(rope_ext.OptionError):
        rope_ext.patch(model, "longrope", factor=4, long_factor=[1.0] * 8, replace=True)
    assert torch.equal(logits(model, ids), right)


def test_scales_of_another_length_are_refused(ids) -> None:
    model = patch(tiny_llama())
    right = logits(model, ids)
    other = rope_ext.SSMax(length=2 * LENGTH)
    message = r"ssmax with length=128 instead of 64 cannot continue .* another value of length\."
    with pytest.raises(rope_ext.OptionError, match=message):
        rope_ext.patch(model, "yarn", factor=4, temperature=other, replace=True)
    assert torch.equal(logits(model, ids), right)


def test_what_is_lost_is_said(caplog) -> None:
    model = patch(tiny_llama())
    rope_ext.patch(model, "pi", factor=4, replace=True)
    assert "pi replaces yarn; its learned parameters are no longer in the model" in caplog.text
    assert not parameters(model)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp", "mlx", "transformers"])
def test_engines_refuse_it_and_say_what_to_do(engine: str) -> None:
    message = "learned for every head.*rope_ext.from_pretrained.*temperature=1"
    with pytest.raises(rope_ext.ExportError, match=message):
        rope_ext.export(patch(tiny_llama()), engine)


def test_tensor_parallel_heads_are_refused(ids) -> None:
    model = patch(tiny_llama())
    (first, *_) = parameters(model).values()
    first.data = first.data[:1]
    with pytest.raises(rope_ext.UnsupportedModelError, match="a scale for each of 1 heads"):
        logits(model, ids)


def test_layers_choose_where_it_is() -> None:
    for name in ("yarn", "self_extend"):
        model = rope_ext.patch(tiny_llama(), name, factor=4, layers=[1], temperature="ssmax")
        assert [key.split(".")[2] for key in parameters(model)] == ["1"]


def test_describe_says_that_it_is_learned_and_reads_a_folder(tmp_path: Path) -> None:
    model = patch(tiny_llama())
    notes = rope_ext.describe(model).notes
    assert any("s learned for every head" in note for note in notes)
    model.save_pretrained(tmp_path)
    found = rope_ext.describe(tmp_path)
    assert found.options["temperature"] == rope_ext.SSMax()
    assert found.target_length == 4 * LENGTH
