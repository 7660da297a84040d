"""Cached decoding equals recomputation, row by row, also where frequencies follow the length."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import DynamicCache, GenerationConfig, StaticCache

import rope_ext
from tests.families.zoo import tiny_model
from tests.helpers.graphs import graphs, whole
from tests.helpers.models import several_axes, tiny_llama
from tests.helpers.positions import EXACT, decoded, logits, padded

ROWS = ["dynamic_ntk", "dynamic_yarn"]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("steps", [[150] + [1] * 10, [100, 50] + [1] * 10, [160]])
def test_cached_decoding_equals_recomputation(model, ids, name: str, steps: list[int]) -> None:
    rope_ext.patch(model, name, factor=4)
    cached = decoded(model, ids, steps)
    rope_ext.patch(model, name, factor=4, replace=True, length=steps[0])
    torch.testing.assert_close(cached, logits(model, ids, use_cache=False), **EXACT)


def test_precise_angles_are_those_of_a_fixed_length(model, ids) -> None:
    places = torch.cat((torch.arange(80), 3_000_000 + torch.arange(80)))[None]
    rope_ext.patch(model, "dynamic_yarn", factor=4, precise=True)
    found = logits(model, ids, position_ids=places)
    fixed = {"length": 3_000_080, "precise": True}
    rope_ext.patch(model, "dynamic_yarn", factor=4, replace=True, **fixed)
    torch.testing.assert_close(found, logits(model, ids, position_ids=places), **EXACT)


def test_two_sets_of_a_rotary_module_have_frequencies_of_their_own(ids) -> None:
    model, given = tiny_model("gemma3_text"), {"factor": 4, "sliding_layers": "scale"}
    rope_ext.patch(model, "dynamic_yarn", **given)
    found = logits(model, ids)
    rope_ext.patch(model, "dynamic_yarn", length=160, replace=True, **given)
    torch.testing.assert_close(found, logits(model, ids), **EXACT)


def test_transformers_own_dynamic_scaling_is_not_consistent_and_growing_reproduces_it(ids) -> None:
    """The fault that the fixed mode mends is there, or this file tests nothing."""
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    native = tiny_llama(rope_parameters=parameters)
    steps = [60] + [1] * 100
    theirs = decoded(native, ids, steps)
    assert (theirs - logits(tiny_llama(rope_parameters=parameters), ids)).abs().max() > 0.1
    growing = rope_ext.patch(tiny_llama(), "dynamic_ntk", factor=4, mode="growing")
    assert torch.equal(decoded(growing, ids, steps), theirs)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}])
def test_generate_equals_stepwise_recomputation(ids, name: str, how: dict) -> None:
    """Every cached way to generate writes what generation without a cache writes."""
    prompt = ids[:1, :50]
    new = 40  # crosses the trained length
    settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, **how}
    model = rope_ext.patch(tiny_llama(), name, factor=4)
    cached = model.generate(prompt, **settings)
    settings.pop("prompt_lookup_num_tokens", None)  # which needs a cache, and changes nothing
    rope_ext.patch(model, name, factor=4, length=50 + new, replace=True)
    assert torch.equal(model.generate(prompt, use_cache=False, **settings), cached)


NEW = {"max_new_tokens": 40, "min_new_tokens": 40}


@pytest.mark.parametrize(
    "how", ["object", "position", "model", "length", "embeddings", "drafts", "early exit"]
)
def test_generate_counts_on_the_new_tokens_however_they_are_asked_for(ids, how: str) -> None:
    prompt = ids[:1, :50]
    fixed = rope_ext.patch(tiny_llama(), "dynamic_ntk", factor=4, length=90)
    right = fixed.generate(prompt, do_sample=False, use_cache=False, **NEW)
    model = rope_ext.patch(tiny_llama(), "dynamic_ntk", factor=4)
    config = GenerationConfig(do_sample=False, **NEW)
    if how == "object":
        said = model.generate(prompt, generation_config=config)
    elif how == "position":
        said = model.generate(prompt, config)
    elif how == "model":
        model.generation_config.update(**NEW)
        said = model.generate(prompt, generation_config=GenerationConfig(do_sample=False))
    elif how == "length":
        said = model.generate(prompt, do_sample=False, max_length=90, min_length=90)
    elif how == "embeddings":
        embeds = model.get_input_embeddings()(prompt)
        said = model.generate(inputs_embeds=embeds, do_sample=False, **NEW)
        right = right[:, 50:]
    elif how == "drafts":
        said = model.generate(prompt, assistant_model=model, do_sample=False, **NEW)
    else:
        said = model.generate(prompt, assistant_early_exit=1, do_sample=False, **NEW)
    assert torch.equal(said, right)


def test_a_chat_that_outgrows_its_frequencies_is_warned_about(model, ids, caplog) -> None:
    rope_ext.patch(model, "dynamic_ntk", factor=4)
    caplog.clear()
    cache = DynamicCache(config=model.config)
    said = model.generate(ids[:1, :50], past_key_values=cache, do_sample=False, **NEW)
    assert "keeps the frequencies" not in caplog.text
    longer = torch.cat([said, ids[:1, :20]], 1)
    model.generate(longer, past_key_values=cache, do_sample=False, **NEW)
    assert caplog.text.count("keeps the frequencies it started with, which are made for 90") == 1


def test_drafted_tokens_that_are_dropped_outgrow_nothing(model, caplog) -> None:
    rope_ext.patch(model, "dynamic_ntk", factor=4)
    caplog.clear()
    prompt = torch.arange(3, 33).repeat(5)[None]  # repeats, so that all drafts are long
    model.generate(prompt, prompt_lookup_num_tokens=6, do_sample=False, **NEW)
    assert "keeps the frequencies" not in caplog.text


def test_steps_within_the_trained_length_are_not_warned_about(model, ids, caplog) -> None:
    rope_ext.patch(model, "dynamic_ntk", factor=4)
    decoded(model, ids[:, :60], [5] + [1] * 55)
    assert "keeps the frequencies" not in caplog.text


def test_rows_of_several_position_axes_count_the_longest_axis(ids) -> None:
    model = several_axes()
    time = torch.arange(160)
    axes = torch.stack((time, time // 3, time // 5))[:, None].expand(3, 2, 160)
    results = []
    for length in (None, 160):
        with rope_ext.patched(model, "dynamic_ntk", factor=4, length=length), torch.no_grad():
            results.append(model(ids, position_ids=axes).last_hidden_state)
    torch.testing.assert_close(*results, **EXACT)


def test_what_cannot_follow_a_sequence_is_refused_with_the_cure(model, ids) -> None:
    rope_ext.patch(model, "dynamic_ntk", factor=4)
    with pytest.raises(rope_ext.UnsupportedModelError, match="length=TOKENS"):
        torch.export.export(model, (ids,), {"use_cache": False}, strict=False)
    with pytest.raises(rope_ext.CacheError, match="continuous batching"):
        model(ids, cache=object())


def test_a_cache_begun_before_the_patch_is_refused(model, ids) -> None:
    cache = DynamicCache(config=model.config)
    decoded(model, ids[:, :80], [80], cache)
    rope_ext.patch(model, "dynamic_ntk", factor=4)
    with pytest.raises(rope_ext.CacheError, match="empty cache"):
        decoded(model, ids[:, 80:], [80], cache)


def test_a_cache_continued_with_other_rows_is_refused(model, ids) -> None:
    rope_ext.patch(model, "dynamic_ntk", factor=4)
    cache = DynamicCache(config=model.config)
    mask = torch.ones_like(ids[:, :80])
    mask[0, :30] = 0
    with torch.no_grad():
        model(ids[:, :80], attention_mask=mask, past_key_values=cache)
    cache.batch_repeat_interleave(2)
    with pytest.raises(rope_ext.CacheError, match="2 rows"):
        decoded(model, ids[:, 80:].repeat(2, 1), [80], cache)


@pytest.mark.parametrize("cached", [True, False])
def test_a_forward_within_generate_has_its_own_length(ids, cached: bool) -> None:
    """As of a stopping criterion that scores a text, or of a streamer."""
    model = rope_ext.patch(tiny_llama(), "dynamic_yarn", factor=8)
    right, seen = model(ids[:1, :20]).logits, []
    how = {"max_new_tokens": 2, "output_logits": True, "return_dict_in_generate": True}
    written, first = model.generate(ids[:1, :20], **how).logits[0], []

    def look(tokens, _scores, **_more):
        seen.append(model(tokens[:, :20], use_cache=False).logits)
        first.append(model.generate(tokens[:, :20], **how).logits[0])
        return torch.zeros(len(tokens), dtype=torch.bool)

    model.generate(ids[:1], max_new_tokens=3, stopping_criteria=[look], use_cache=cached)
    assert all(torch.equal(one, right) for one in seen) and seen
    assert all(torch.equal(one, written) for one in first)


def test_both_branches_of_guidance_have_the_length_of_the_row_without_padding(ids) -> None:
    model = rope_ext.patch(tiny_llama(), "dynamic_ntk", factor=8)
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    how = {"guidance_scale": 2.0, "max_new_tokens": 8, "output_scores": True}
    how |= {"do_sample": False, "return_dict_in_generate": True}
    alone = model.generate(ids[1:2, 40:], **how).scores
    together = model.generate(ids, attention_mask=mask, **how).scores
    assert torch.allclose(together[-1][1:], alone[-1], atol=1e-3)


IN_GRAPHS = {
    "dynamic_yarn": {"temperature": 1.5},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_GRAPHS)
def test_decoding_in_a_static_cache_is_one_graph_and_a_prefill_another(
    name: str, ids, no_graphs
) -> None:
    options = IN_GRAPHS[name]
    model = rope_ext.patch(tiny_llama(num_hidden_layers=1), name, factor=4, **options)
    tokens, mask, _ = padded([ids[0, :80], ids[1, :50]], "left")
    given = {"attention_mask": mask, "pad_token_id": 0, "do_sample": False}
    given |= {"max_new_tokens": 12, "min_new_tokens": 12}
    right = model.generate(tokens, **given)
    for _ in range(2):  # the second request finds the graph of the first
        said = model.generate(
            tokens, cache_implementation="static", compile_config=whole(), **given
        )
        assert torch.equal(said, right)
    assert graphs() == 1 and not counters["graph_break"]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = []
    for part in (compiled, model):
        cache = StaticCache(config=model.config, max_cache_len=100)
        said = [decoded(part, ids[:, :81], [80, 1], cache)]  # and the eager path goes on
        found.append(torch.cat([*said, decoded(model, ids[:, 81:84], [3], cache)], 1))
    torch.testing.assert_close(*found, **EXACT)
    assert not counters["graph_break"]


def test_growing_keeps_the_longest_length_where_a_patch_returns(ids) -> None:
    """After a refused replacement, and after a block without the patch."""
    model = rope_ext.patch(tiny_llama(), "dynamic_ntk", factor=4, mode="growing")
    logits(model, ids)
    right = logits(model, ids[:, 10:80])  # by the frequencies of the longest length seen
    with pytest.raises(rope_ext.OptionError):
        rope_ext.patch(model, "yarn", factor=4, bias="alibi", layers=[99], replace=True)
    assert torch.equal(logits(model, ids[:, 10:80]), right)
    with rope_ext.unpatched(model):
        logits(model, ids[:, :20])
    assert torch.equal(logits(model, ids[:, 10:80]), right)


def test_a_graph_compiled_without_a_hook_is_not_run_with_it(model, ids, no_graphs) -> None:
    """Graphs are guarded by the class of a rotary module, and not by its hooks."""
    run = torch.compile(model, backend="eager")
    far = {"position_ids": 3_000_000 + torch.arange(ids.shape[1])[None]}
    rope_ext.patch(model, "yarn", factor=4)
    logits(run, ids, **far)
    rope_ext.patch(model, "yarn", factor=4, precise=True, replace=True)
    torch.testing.assert_close(logits(run, ids, **far), logits(model, ids, **far))
