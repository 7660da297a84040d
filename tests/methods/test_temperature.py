"""Every method takes an attention_factor and a temperature, and does with them what is written."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

import rope_ext
from rope_ext.methods import Method, Rope, all_methods, build_method
from rope_ext.position.attend import watched
from rope_ext.rotary.sites import text_decoder
from tests.families.zoo import tiny_model
from tests.helpers.models import LENGTH, attending, tiny_llama

ROPE = Rope.geometric(base=1e4, dim=16, length=LENGTH)
T = torch.arange(300, dtype=torch.float64)
TABLE = {"longrope": {"long_factor": [4.0] * 8}, "string": {"factor": 1.5}}
GIVEN = {cls.name: {"factor": 4, **TABLE.get(cls.name, {})} for cls in all_methods()}
EXACT = {"atol": 1e-4, "rtol": 0}  # float32 sums in another order; logits are of size 10


def log_n(i: int, length: int = LENGTH) -> float:
    return max(1.0, math.log(i + 1) / math.log(length))


FORMULAS = {
    "log_n": log_n,
    "llama4": lambda i: 1 + 0.1 * math.log(1 + i // LENGTH),
    "yarn": lambda i: (0.1 * math.log(4) + 1) ** 2,
}


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 128, (1, 90), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, ids: torch.Tensor, **given: Any) -> torch.Tensor:
    return model(ids, use_cache=False, **given).logits


# --- the numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMULAS)
def test_a_temperature_is_its_formula_at_every_position(name: str) -> None:
    found = rope_ext.NTK(factor=4, temperature=name).query_scaling(T, ROPE)
    assert found.tolist() == pytest.approx([FORMULAS[name](i) for i in range(300)], rel=1e-12)


@pytest.mark.parametrize("name", ["log_n", "llama4"])
def test_a_temperature_that_grows_is_one_within_the_trained_length(name: str) -> None:
    found = rope_ext.NTK(factor=4, temperature=name).query_scaling(T, ROPE)
    assert (found[:LENGTH] == 1).all() and (found[LENGTH:] > 1).all()


def test_llama4_is_what_transformers_computes_in_ministral3() -> None:
    theirs = get_llama_4_attn_scale(T[None].long(), 0.1, LENGTH).flatten()
    torch.testing.assert_close(rope_ext.Llama4(length=LENGTH).at(T).float(), theirs)


def test_yarn_as_a_temperature_is_the_square_of_its_attention_factor() -> None:
    published = rope_ext.YaRN(factor=4).attention_scaling(ROPE)
    found = rope_ext.PI(factor=4, temperature="yarn").query_scaling(T, ROPE)
    assert (found == published**2).all()


def test_the_share_of_the_growth_can_be_chosen() -> None:
    half = rope_ext.LogN(scale=0.5, length=8).at(T)
    assert half.tolist() == pytest.approx([1 + (log_n(i, 8) - 1) / 2 for i in range(300)])


@pytest.mark.parametrize("name", GIVEN)
def test_every_method_takes_both_and_they_replace_its_own(name: str) -> None:
    made = _build(name, attention_factor=1.25, temperature=1.5)
    assert made.attention_scaling(ROPE) == 1.25
    assert (made.query_scaling(T, ROPE) == 1.5).all()
    if hasattr(made, "attention_scaling_at"):
        assert (made.attention_scaling_at(ROPE, T[1:] + LENGTH) == 1.25).all()
    cold = _build(name, attention_factor=1, temperature=1)
    assert cold.attention_scaling(ROPE) == 1 and cold.query_scaling(T, ROPE) is None


def _build(name: str, **options: Any) -> Method:
    return build_method(name, **GIVEN[name], **options)


PUBLISHED = {  # what multiplies cosine and sine where no attention_factor is given, factor 4
    "yarn": 1 + 0.1 * math.log(4),
    "dynamic_yarn": 1 + 0.1 * math.log(4),
    "resonance": 1 + 0.1 * math.log(4),  # of the YaRN that it rounds
    "mrrope": 1 + 0.1 * math.log(4),
    "longrope": math.sqrt(1 + math.log(4) / math.log(LENGTH)),
    "longrope2": math.sqrt(1 + math.log(4) / math.log(LENGTH)),
    "lampe": 1 + 0.1 * math.log(2),  # by the released code, at any factor
    "dual_chunk": 1 + 0.05 * math.log(4),  # by the released code
    "string": 1 + 0.1 * math.log(2),  # likewise, at any factor
}


@pytest.mark.parametrize("name", GIVEN)
def test_without_them_each_method_has_what_was_released_with_it(name: str) -> None:
    method = _build(name, **({"published": True} if name in ("self_extend", "dpe") else {}))
    expected = PUBLISHED.get(name, 1.0)
    assert method.attention_scaling(ROPE) == pytest.approx(expected, rel=1e-12)
    grows = "rerope" in name
    assert (method.query_scaling(T, ROPE) is not None) == grows


def test_the_released_number_of_dual_chunk_by_hand() -> None:
    """One query of size 1 on one key of size 1 in one pair, in turns by hand.

    The released code multiplies the cosines and sines of queries and of keys, so that a logit is
    multiplied by (0.05 ln s + 1) ** 2 = 1.1434 for s = 4.
    """
    m = rope_ext.DualChunk(factor=4).attention_scaling(ROPE)
    angle_of_query, angle_of_key = 3 * 0.5, 1 * 0.5
    query = (m * math.cos(angle_of_query), m * math.sin(angle_of_query))
    key = (m * math.cos(angle_of_key), m * math.sin(angle_of_key))
    logit = query[0] * key[0] + query[1] * key[1]
    assert logit == pytest.approx(1.1434340 * math.cos(1.0), rel=1e-6)


# --- in a model ----------------------------------------------------------------------------------


class Dense:
    """Llama's attention in float64, with every query multiplied by ``tau`` of its position."""

    def __init__(self, tau: torch.Tensor) -> None:
        self.tau = tau  # [rows or 1, tokens]

    def __call__(self, module, query, key, value, attention_mask, scaling, **kwargs):
        groups = query.shape[1] // key.shape[1]
        q, k, v = (x.double() for x in (query, key, value))
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        tokens = q.shape[2]
        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        weights = (q * self.tau[:, None, :, None] @ k.mT * scaling).masked_fill(hidden, -1e30)
        out = weights.softmax(-1) @ v
        return out.transpose(1, 2).to(value.dtype), None


def expected(model, ids: torch.Tensor, tau: list[float]) -> torch.Tensor:
    """Logits of ``model``, patched without a temperature, with ``tau``."""
    AttentionInterface.register("dense_by_hand", Dense(torch.tensor([tau], dtype=torch.float64)))
    with attending(model, "dense_by_hand"):
        return logits(model, ids)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_temperature_multiplies_queries_whatever_attends(ids, implementation: str) -> None:
    model = tiny_llama()
    model.set_attn_implementation(implementation)
    with rope_ext.patched(model, "ntk", factor=4):
        plain = logits(model, ids)
        dense = expected(model, ids, [log_n(i) for i in range(90)])
    with rope_ext.patched(model, "ntk", factor=4, temperature="log_n"):
        found = logits(model, ids)
    assert torch.equal(found[:, :LENGTH], plain[:, :LENGTH])  # it starts at 1
    torch.testing.assert_close(found, dense, **EXACT)
    assert (found - plain)[:, LENGTH:].abs().max() > 0.1


def test_a_constant_in_the_buffers_a_constant_on_queries_and_yarns_own_are_one(ids) -> None:
    model, results = tiny_llama(), []
    number = 0.1 * math.log(4) + 1
    for given in ({}, {"attention_factor": number}, {"attention_factor": 1, "temperature": "yarn"}):
        with rope_ext.patched(model, "yarn", factor=4, **given):
            results.append(logits(model, ids))
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(results[2], results[0], **EXACT)


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


def test_on_top_of_a_scaled_checkpoint_both_numbers_hold_too() -> None:
    scaled = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
    scaled["original_max_position_embeddings"] = 32
    model = tiny_llama(rope_parameters=scaled)
    rope_ext.patch(model, "ntk", factor=2, compose=True, attention_factor=1.2)
    number = 1.2 * (0.1 * math.log(2) + 1)
    assert model.model.rotary_emb.attention_scaling == pytest.approx(number, rel=1e-6)


@pytest.mark.parametrize("name", ["rerope", "string", "lm_infinite"])
def test_a_position_method_scales_the_columns_that_rotate_and_no_others(ids, name: str) -> None:
    """Half of the columns rotate: those alone, of queries and of keys, are multiplied."""
    partial = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model = tiny_model("stablelm", max_position_embeddings=LENGTH, rope_parameters=partial)
    seen: dict[float, list[torch.Tensor]] = {}
    for number in (1.0, 1.5):
        options = {"factor": 1.5, "attention_factor": number}
        with rope_ext.patched(model, name, **options):
            captured: list[torch.Tensor] = []

            def look(module, dense, window, captured=captured):
                captured += [dense.query, dense.key]

            with watched(text_decoder(model), look):
                logits(model, ids[:, :30])
            seen[number] = captured[:2]  # of the first layer, whose input is the same
    for one, other in zip(seen[1.0], seen[1.5], strict=True):
        columns = one.shape[-1]
        half = columns // 2
        torch.testing.assert_close(other[..., :half], one[..., :half] * 1.5)
        torch.testing.assert_close(other[..., half:], one[..., half:])


# --- the way back, copies, saving ----------------------------------------------------------------


SAVED = {
    "log_n": ("ntk", {"temperature": "log_n"}),
    "object": ("rerope", {"temperature": rope_ext.LogN(scale=0.5, length=40)}),
    "number": ("pi", {"temperature": 1.25}),
    "step": ("dynamic_ntk", {"temperature": rope_ext.Llama4(beta=0.3)}),
    "yarn": ("string", {"factor": 1.5, "temperature": "yarn", "attention_factor": 1}),
}


@pytest.mark.parametrize("case", SAVED)
def test_a_saved_temperature_comes_back_to_the_bit_and_nobody_else_loads_it(
    ids, case: str, tmp_path
) -> None:
    name, options = SAVED[case]
    model = rope_ext.patch(tiny_llama(), name, **{"factor": 4, **options})
    model.save_pretrained(tmp_path)
    again = rope_ext.from_pretrained(tmp_path)
    assert torch.equal(logits(again, ids), logits(model, ids))
    assert rope_ext.describe(again).options == rope_ext.describe(model).options
    with pytest.raises(Exception, match=r"rope_ext\.from_pretrained"):
        type(model).from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["ntk", "pi", "llama3", "yarn", "ntk_by_parts", "p_rope"])
def test_plain_transformers_builds_an_attention_factor(ids, name: str, tmp_path) -> None:
    model = rope_ext.patch(tiny_llama(), name, factor=4, attention_factor=1.2)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(logits(again, ids), logits(model, ids))


def test_a_record_from_before_the_released_numbers_stays_what_it_was() -> None:
    model = rope_ext.patch(tiny_llama(), "dual_chunk", factor=4)
    data = copy.deepcopy(rope_ext.patching.current_patch(model).record.to_json())
    for part in ("method", "resolved"):
        del data[part]["attention_factor"], data[part]["temperature"]
    data["version"] = 1
    old = rope_ext.config.record.Record.from_json(data, "a folder")
    assert old.method.attention_scaling(ROPE) == 1


# --- bad input -----------------------------------------------------------------------------------


# --- training and compilation --------------------------------------------------------------------
