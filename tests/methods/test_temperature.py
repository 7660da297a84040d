"""Every method takes an attention_factor and a temperature, and does with them what is written."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

import rope_ext
from rope_ext.methods import DynamicMethod, Method, Rope, all_methods, build_method
from rope_ext.methods.kinds import Tempered
from rope_ext.methods.temperature import as_temperature
from tests.helpers import methods
from tests.helpers.models import LENGTH, tiny_llama
from tests.helpers.positions import EXACT, FAMILIES, METHODS, logits

ROPE = Rope.geometric(base=1e4, dim=16, length=LENGTH)
T = torch.arange(300, dtype=torch.float64)


def example(name: str) -> Method:
    """A method at factor 4, with the options of its formula in ``tests/helpers``."""
    for make in methods.VARIANTS.values():
        method = make(4, ROPE)
        if method.name == name:
            return method
    return build_method(name, factor=4, **METHODS.get(name, {}))


EXAMPLES = {cls.name: example(cls.name) for cls in all_methods()}


def log_n(i: int, length: int = LENGTH) -> float:
    return max(1.0, math.log(i + 1) / math.log(length))


FORMULAS = {
    "log_n": log_n,
    "llama4": lambda i: 1 + 0.1 * math.log(1 + i // LENGTH),
    "yarn": lambda i: (0.1 * math.log(4) + 1) ** 2,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_temperature_is_its_formula_at_every_position(name: str) -> None:
    found = rope_ext.NTK(factor=4, temperature=name).query_scaling(T, ROPE)
    assert found.tolist() == pytest.approx([FORMULAS[name](i) for i in range(300)], rel=1e-12)


def test_llama4_is_what_transformers_computes_in_ministral3() -> None:
    theirs = get_llama_4_attn_scale(T[None].long(), 0.1, LENGTH).flatten()
    torch.testing.assert_close(rope_ext.Llama4(length=LENGTH).at(T).float(), theirs)


def test_a_temperature_comes_back_from_json() -> None:
    made = (rope_ext.LogN(scale=0.5, length=40), rope_ext.Llama4(beta=0.3), rope_ext.SSMax(scale=2))
    for one in (*made, *map(as_temperature, (1.25, "yarn"))):
        assert as_temperature(json.loads(json.dumps(one.to_json()))) == one


def takes_both(method: Method) -> None:
    """Assert that the two options replace what a method has by default."""
    given = replace(method, attention_factor=1.25, temperature=1.5)
    assert given.attention_scaling(ROPE) == 1.25
    assert (given.query_scaling(T, ROPE) == 1.5).all()
    if isinstance(given, DynamicMethod):
        assert (given.attention_scaling_at(ROPE, T[1:] + LENGTH) == 1.25).all()
    cold = replace(method, attention_factor=1, temperature=1)
    assert cold.attention_scaling(ROPE) == 1 and cold.query_scaling(T, ROPE) is None


def has_its_defaults(method: Method) -> None:
    """Assert that scaling and temperature are those in ``DEFAULTS``, or else 1."""
    expected = methods.defaults(method.name)
    scaling = expected.scaling(method.factor, LENGTH)
    missing = f"write the defaults of {method.name} into DEFAULTS in tests/helpers/methods.py"
    assert method.attention_scaling(ROPE) == pytest.approx(scaling, rel=1e-12), missing
    found = method.query_scaling(T, ROPE)
    assert (found is None) == (expected.temperature is None), missing
    if expected.temperature is not None:
        torch.testing.assert_close(found, expected.temperature(T, LENGTH), msg=missing)


@pytest.mark.every
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_method_takes_both_and_they_replace_its_own(name: str) -> None:
    takes_both(EXAMPLES[name])


@pytest.mark.every
@pytest.mark.parametrize("name", EXAMPLES)
def test_without_them_each_method_has_its_published_defaults(name: str) -> None:
    has_its_defaults(EXAMPLES[name])


@pytest.mark.parametrize(
    "name", [name for name, method in EXAMPLES.items() if isinstance(method, Tempered)]
)
def test_as_published_it_has_no_temperature(name: str) -> None:
    assert EXAMPLES[name].query_scaling(T, ROPE) is not None
    assert replace(EXAMPLES[name], published=True).query_scaling(T, ROPE) is None


def test_under_a_position_method_both_numbers_on_cosine_and_sine_hold(ids) -> None:
    model = tiny_llama()

    def of(own: float, under: float) -> torch.Tensor:
        below = rope_ext.NTK(factor=2, attention_factor=under)
        with rope_ext.patched(
            model, "self_extend", factor=2, frequency=below, attention_factor=own
        ):
            assert rope_ext.describe(model).sites[0].attention_scaling == pytest.approx(own * under)
            return logits(model, ids)

    torch.testing.assert_close(of(1.1, 1.2), of(1.32, 1), **EXACT)
    torch.testing.assert_close(of(1.1, 1.2), of(1, 1.32), **EXACT)
    assert (of(1.1, 1.2) - of(1, 1)).abs().max() > 0.1


@pytest.mark.parametrize(
    "kind", ["llama", "gemma2 scaled", "gpt_oss scaled", "gpt_neox", "smollm3"]
)
@pytest.mark.parametrize("given", [1.5, "yarn"])
def test_a_constant_is_in_the_softmax_scale_of_the_layers_that_rotate(kind, given, ids) -> None:
    family = FAMILIES[kind]
    model, found = family.model(), []
    scales = [getattr(module, "scaling", None) for module in model.modules()]
    for layers in (None, family.mapped or range(2)):  # with these, queries are multiplied
        options = {"factor": 4, "temperature": given, "layers": layers, **family.options}
        with rope_ext.patched(model, "pi", **options):
            assert (model.config._attn_implementation == "rope_ext") == (layers is not None)
            found.append(logits(model, ids))
    torch.testing.assert_close(*found, **EXACT)
    assert scales == [getattr(module, "scaling", None) for module in model.modules()]


def test_a_constant_leaves_the_layers_with_a_window_alone() -> None:
    model = FAMILIES["gemma2 scaled"].model()  # the first layer has a window
    before = [layer.self_attn.scaling for layer in model.model.layers]
    for sliding, factors in (("auto", [1, 1.5]), ("scale", [1.5, 1.5])):
        with rope_ext.patched(model, "yarn", factor=4, temperature=1.5, sliding_layers=sliding):
            scales = [layer.self_attn.scaling for layer in model.model.layers]
        assert scales == pytest.approx([x * y for x, y in zip(before, factors, strict=True)])


def test_on_top_of_a_scaled_checkpoint_both_numbers_hold_too() -> None:
    scaled = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
    scaled["original_max_position_embeddings"] = 32
    model = tiny_llama(rope_parameters=scaled)
    rope_ext.patch(model, "ntk", factor=2, compose=True, attention_factor=1.2)
    number = 1.2 * (0.1 * math.log(2) + 1)
    assert model.model.rotary_emb.attention_scaling == pytest.approx(number, rel=1e-6)


@pytest.mark.parametrize("name", ["ntk", "pi", "llama3", "yarn", "ntk_by_parts", "p_rope"])
def test_plain_transformers_builds_an_attention_factor(ids, name: str, tmp_path) -> None:
    model = rope_ext.patch(tiny_llama(), name, factor=4, attention_factor=1.2)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path), ids), logits(model, ids))


def test_a_record_from_before_the_released_numbers_stays_what_it_was() -> None:
    model = rope_ext.patch(tiny_llama(), "dual_chunk", factor=4)
    data = copy.deepcopy(rope_ext.patching.current_patch(model).record.to_json())
    for part in ("method", "resolved"):
        del data[part]["attention_factor"], data[part]["temperature"]
    data["version"] = 1
    old = rope_ext.config.record.Record.from_json(data, "a folder")
    assert old.method.attention_scaling(ROPE) == 1


# --- a number for every head, which is part of the model -----------------------------------------

MADE: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 4},
    "dynamic_yarn": {"factor": 4, "length": 4 * LENGTH},
    "self_extend": {"factor": 4, **METHODS["self_extend"]},
    "rerope": {"factor": 4, **METHODS["rerope"]},
    "rope": {"bias": "alibi"},
    "nope": {},
}


@pytest.mark.parametrize("scale", [0.0, 1.0, 2.5])
def test_ssmax_begins_with_its_formula(scale: float) -> None:
    made = rope_ext.SSMax(length=LENGTH, scale=scale)
    right = [1 + scale * (log_n(i) - 1) for i in range(300)]
    assert made.at(T).tolist() == pytest.approx(right, rel=1e-12)
    assert (1 + scale * made.growth(T)).tolist() == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize("name", MADE)
def test_a_new_ssmax_is_log_n_and_leaves_the_trained_length_alone(name: str, ids) -> None:
    model, options = tiny_llama(), MADE[name]
    with rope_ext.patched(model, name, temperature="log_n", **options):
        right = logits(model, ids)
    with rope_ext.patched(model, name, temperature=1.0, **options):
        none = logits(model, ids)
    with rope_ext.patched(model, name, temperature="ssmax", **options):
        torch.testing.assert_close(logits(model, ids), right, **EXACT)
    with rope_ext.patched(model, name, temperature=rope_ext.SSMax(scale=0), **options):
        torch.testing.assert_close(logits(model, ids), none, **EXACT)
    # Whatever is learned, a text of the trained length is read as without it.
    learned = rope_ext.patched(model, name, temperature=rope_ext.SSMax(scale=3), **options)
    with learned:
        short = logits(model, ids[:, :LENGTH])
    torch.testing.assert_close(short, none[:, :LENGTH], **EXACT)
