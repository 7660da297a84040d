"""Every method takes an attention_factor and a temperature, and does with them what is written."""

from __future__ import annotations

import copy
import json
import math
import pickle
import sys
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, DynamicCache, StaticCache
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

import rope_ext
from rope_ext.methods import Method, Rope, all_methods, build_method, register
from rope_ext.position.attend import watched
from rope_ext.rotary.sites import text_decoder
from rope_ext.saving.configuration import without_rope_ext
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
def test_a_temperature_can_be_given_as_the_json_that_is_kept_of_it(name: str) -> None:
    made = rope_ext.NTK(factor=4, temperature=name).temperature
    assert rope_ext.NTK(factor=4, temperature=json.loads(json.dumps(made.to_json()))) == (
        rope_ext.NTK(factor=4, temperature=name)
    )


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


def test_attention_factor_is_in_the_buffers_and_calls_nothing(ids) -> None:
    model = tiny_llama()
    rope_ext.patch(model, "ntk", factor=4, attention_factor=1.2)
    assert model.model.rotary_emb.attention_scaling == 1.2
    assert not any(m._forward_hooks for m in model.modules())
    assert model.model.layers[0].self_attn.config is model.config
    position = torch.arange(90)[None]
    cos, _ = model.model.rotary_emb(torch.zeros(1, 90, 16), position)
    assert cos[0, 0].tolist() == pytest.approx([1.2] * 16)


@pytest.mark.parametrize("name", ["ntk", "yarn", "dynamic_ntk", "self_extend", "dual_chunk"])
@pytest.mark.parametrize("cache", [DynamicCache, StaticCache], ids=["dynamic", "static"])
def test_cached_steps_equal_recomputation(ids, name: str, cache: type) -> None:
    model = tiny_llama()
    fixed = {"length": 256} if name == "dynamic_ntk" else {}
    rope_ext.patch(model, name, factor=4, temperature="log_n", attention_factor=1.1, **fixed)
    held = cache(config=model.config, **({"max_cache_len": 96} if cache is StaticCache else {}))
    whole = logits(model, ids)
    with torch.no_grad():
        parts = [
            model(piece, past_key_values=held).logits for piece in ids.split([70, 1, 18, 1], 1)
        ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, **EXACT)


@pytest.mark.parametrize("name", ["ntk", "dynamic_ntk", "rerope"])
def test_positions_count_from_the_first_token_of_a_row_and_of_a_document(ids, name: str) -> None:
    model = tiny_llama()
    rope_ext.patch(model, name, factor=4, temperature=rope_ext.LogN(length=8))
    alone = logits(model, ids[:, :20])
    padded = torch.cat((torch.zeros(1, 5, dtype=torch.long), ids[:, :20]), 1)
    rows, mask = torch.cat((padded, ids[:, :25])), torch.ones(2, 25, dtype=torch.long)
    mask[0, :5] = 0
    if name != "dynamic_ntk":  # whose rows have frequencies by their lengths
        found = logits(model, rows, attention_mask=mask)
        torch.testing.assert_close(found[:1, 5:], alone, **EXACT)
        torch.testing.assert_close(found[1:], logits(model, ids[:, :25]), **EXACT)
    packed = torch.cat((ids[:, 30:60], ids[:, :20]), 1)
    position_ids = torch.cat((torch.arange(30), torch.arange(20)))[None]
    found = logits(model, packed, position_ids=position_ids)
    torch.testing.assert_close(found[:, 30:], alone, **EXACT)


def test_drafts_of_an_assistant_change_nothing(ids) -> None:
    model, assistant = tiny_llama(), tiny_llama(num_hidden_layers=1)
    for each in (model, assistant):
        rope_ext.patch(each, "ntk", factor=4, temperature=rope_ext.LogN(length=8, scale=3))
    new = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    alone = model.generate(ids[:, :30], **new)
    assert torch.equal(model.generate(ids[:, :30], assistant_model=assistant, **new), alone)


def test_left_padded_rows_generate_as_they_do_alone(ids) -> None:
    model = tiny_llama()
    rope_ext.patch(model, "ntk", factor=4, temperature=rope_ext.LogN(length=8, scale=3))
    short = ids[:, :12]
    rows = torch.cat((torch.cat((torch.zeros(1, 8, dtype=torch.long), short), 1), ids[:, 40:60]))
    mask = (rows != 0).long()
    new = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    alone = model.generate(short, **new)[:, 12:]
    together = model.generate(rows, attention_mask=mask, **new)[:1, 20:]
    beams = model.generate(rows, attention_mask=mask, num_beams=2, **new)[:1, 20:]
    assert torch.equal(together, alone)
    assert torch.equal(beams, model.generate(short, num_beams=2, **new)[:, 12:])


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


def test_a_fixed_map_runs_no_code_of_this_package(ids) -> None:
    def calls(**options: Any) -> int:
        model = rope_ext.patch(tiny_llama(num_hidden_layers=3), "ntk", factor=4, **options)
        cache = DynamicCache(config=model.config)
        count = 0

        def seen(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            name = frame.f_globals["__name__"]
            # Another test may have had caches watched, which they stay.
            ours = name.startswith("rope_ext.") and name != "rope_ext.caches"
            count += event == "call" and ours

        with torch.no_grad():
            model(ids, past_key_values=cache)
            sys.setprofile(seen)
            try:
                model(ids[:, :1], past_key_values=cache)
            finally:
                sys.setprofile(None)
        return count

    assert calls(attention_factor=1.2) == 0
    assert calls(temperature=1.2) > 0  # which the count would notice


# --- the way back, copies, saving ----------------------------------------------------------------


def test_unpatch_leaves_every_bit_and_every_configuration_as_it_was(ids) -> None:
    model = tiny_llama()
    before, config = logits(model, ids), model.config.to_dict()
    for given in ({"temperature": "log_n"}, {"temperature": 1.3}, {"attention_factor": 0.9}):
        rope_ext.patch(model, "yarn", factor=4, **given)
        rope_ext.patch(model, "ntk", factor=4, replace=True, **given)
        with rope_ext.patched(model, "pi", factor=2, replace=True, temperature=2):
            logits(model, ids)
        rope_ext.unpatch(model)
        assert torch.equal(logits(model, ids), before) and model.config.to_dict() == config
        assert all(layer.self_attn.config is model.config for layer in model.model.layers)
        assert not model.model._forward_hooks and not model.model._forward_pre_hooks


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_the_temperature_and_can_lose_it(ids, copied: Any) -> None:
    model = tiny_llama()
    plain = logits(model, ids)
    rope_ext.patch(model, "ntk", factor=4, temperature="log_n")
    warm, twin = logits(model, ids), copied(model)
    rope_ext.unpatch(model)
    assert torch.equal(logits(twin, ids), warm)
    assert torch.equal(logits(rope_ext.unpatch(twin), ids), plain)


def test_another_attention_implementation_after_the_patch_keeps_the_temperature(ids) -> None:
    model = tiny_llama()
    rope_ext.patch(model, "ntk", factor=4, temperature="log_n")
    before = logits(model, ids)
    model.set_attn_implementation("eager")
    after = logits(model, ids)
    torch.testing.assert_close(after, before, **EXACT)
    assert model(ids, output_attentions=True).attentions[0] is not None


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
    with without_rope_ext(), pytest.raises(Exception, match=r"rope_ext\.from_pretrained"):
        type(model).from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["ntk", "pi", "llama3", "yarn", "ntk_by_parts", "p_rope"])
def test_plain_transformers_builds_an_attention_factor(ids, name: str, tmp_path) -> None:
    model = rope_ext.patch(tiny_llama(), name, factor=4, attention_factor=1.2)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(logits(again, ids), logits(model, ids))


def test_what_follows_the_sequence_is_not_taken_for_transformers_own_with_another_number() -> None:
    model = rope_ext.patch(tiny_llama(), "dynamic_ntk", factor=4, attention_factor=1.2)
    assert not rope_ext.patching.current_patch(model).native


def test_a_record_from_before_the_released_numbers_stays_what_it_was() -> None:
    model = rope_ext.patch(tiny_llama(), "dual_chunk", factor=4)
    data = copy.deepcopy(rope_ext.patching.current_patch(model).record.to_json())
    for part in ("method", "resolved"):
        del data[part]["attention_factor"], data[part]["temperature"]
    data["version"] = 1
    old = rope_ext.record.Record.from_json(data, "a folder")
    assert old.method.attention_scaling(ROPE) == 1


# --- bad input -----------------------------------------------------------------------------------


BAD = [
    *[
        ({"attention_factor": x}, "attention_factor")
        for x in (0, -1, math.nan, math.inf, True, "2")
    ],
    *[({"temperature": x}, "temperature") for x in (0, -1, math.nan, math.inf, True, [1], "logn")],
    *[
        ({"temperature": x}, "temperature")
        for x in ("constant", 101, {"name": "log_n"}, {"temperature": "log_n", "x": 1})
    ],
]


@pytest.mark.parametrize("options, named", BAD, ids=str)
@pytest.mark.parametrize("name", ["ntk", "rerope", "dynamic_yarn"])
def test_a_value_that_is_none_is_named_with_the_valid_ones(name: str, options, named: str) -> None:
    with pytest.raises(rope_ext.OptionError, match=rf"{name}: {named}=.* not valid; it must be a?"):
        _build(name, **options)


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: rope_ext.LogN(length=1), r"log_n: length=1 .* at least 2"),
        (lambda: rope_ext.LogN(scale=0), r"log_n: scale=0 .* greater than 0"),
        (lambda: rope_ext.Llama4(beta=-1), r"llama4: beta=-1 "),
        (lambda: rope_ext.YaRNTemperature(factor=0.5), r"yarn: factor=0.5 .* at least 1"),
        (
            lambda: rope_ext.patch(
                tiny_llama(), "rerope", factor=4, frequency=rope_ext.NTK(factor=2, temperature=2)
            ),
            "give it to rerope",
        ),
        (
            lambda: rope_ext.DynamicNTK(factor=4, mode="growing", attention_factor=1.2),
            "None with mode='growing'",
        ),
        (
            lambda: rope_ext.export(
                rope_ext.patch(tiny_llama(), "ntk", factor=4, temperature="log_n"), "vllm"
            ),
            "no setting that multiplies queries",
        ),
    ],
)
def test_a_mistake_is_answered_with_the_cure(make, said: str) -> None:
    with pytest.raises(rope_ext.RopeExtError, match=said):
        make()


def test_a_method_of_ones_own_may_not_decide_what_the_options_decide() -> None:
    class Mine(rope_ext.FrequencyMethod):
        name = "mine"

        def attention_scaling(self, rope: Rope) -> float:
            return 2.0

    with pytest.raises(rope_ext.RopeExtError, match=r"override own_scaling"):
        register(Mine)
    assert Mine not in all_methods()


def test_an_attention_factor_that_a_later_norm_takes_back_is_refused() -> None:
    model = tiny_model("hunyuan_v1_dense")
    for name in ("ntk", "rerope"):
        with pytest.raises(rope_ext.UnsupportedModelError, match=r"give temperature="):
            rope_ext.patch(model, name, factor=4, attention_factor=1.2)
    rope_ext.patch(model, "ntk", factor=4, temperature=1.3)


# --- training and compilation --------------------------------------------------------------------


def test_gradients_flow_through_a_temperature(ids) -> None:
    model = tiny_llama().train()
    rope_ext.patch(model, "ntk", factor=4, temperature="log_n")

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return [p.grad.clone() for n, p in model.named_parameters() if "q_proj" in n]

    plain = gradients()
    model.gradient_checkpointing_enable()
    for one, other in zip(plain, gradients(), strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"attention_factor": 1.2}, {"temperature": 1.3}], ids=str)
def test_a_constant_compiles_without_a_break(ids, options: dict[str, Any]) -> None:
    model = tiny_llama()
    rope_ext.patch(model, "ntk", factor=4, **options)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled, ids), logits(model, ids), **EXACT)
