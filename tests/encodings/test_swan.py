"""SWAN: layers without positions beside layers that rotate as trained, in a window."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
)

import rope_ext
from rope_ext.methods import Rope
from tests.families.checks import changed, snapshot
from tests.helpers.models import LENGTH, attending, tiny_llama
from tests.helpers.positions import CACHES, EXACT, FAMILIES, NEW, logits
from tests.helpers.promises import (
    checkpointing_changes_nothing,
    decodes_as_it_reads,
    documents_are_apart,
    generates_as_it_recomputes,
    pieces_of_rows_are_as_alone,
    rows_are_as_alone,
    sees_nothing_later,
)

WINDOW = 7
GIVEN = {"every": 2, "window": WINDOW, "factor": 4}


def swan(**options: object) -> nn.Module:
    model = tiny_llama(num_hidden_layers=4)
    return rope_ext.patch(model, "swan", **{**GIVEN, **options})


# --- the definition, dense and in float64, in a model that is not patched --------------------


def _dense(module: nn.Module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Every second layer rotates back to nothing, the others see a window."""
    groups = query.shape[1] // key.shape[1]
    q, k, v = (x.double() for x in (query, key, value))
    t = torch.arange(q.shape[2])
    apart = t[:, None] - t
    visible = apart >= 0
    scale = torch.tensor(scaling, dtype=torch.float64)
    if module.layer_idx % 2 == 0:
        q, k = (_back(x, module.swan_inv_freq) for x in (q, k))
        scale = scale * ((t + 1).double().log() / torch.tensor(64.0).double().log()).clamp(min=1)
        scale = scale[:, None]
    else:
        visible = visible & (apart < WINDOW)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    weights = (q @ k.mT * scale).masked_fill(~visible, -torch.inf).softmax(-1)
    return (weights @ v).transpose(1, 2).to(query.dtype).contiguous(), None


def _back(x: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """``x`` before it was rotated to positions 0, 1, 2, ..."""
    angle = torch.arange(x.shape[2]).double()[:, None] * inv_freq.double()
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() + b * angle.sin(), b * angle.cos() - a * angle.sin()), -1)


AttentionInterface.register("swan_dense", _dense)
AttentionMaskInterface.register("swan_dense", lambda **arguments: None)


@contextmanager
def dense(model: nn.Module) -> Iterator[nn.Module]:
    inv_freq = next(b for n, b in model.named_buffers() if n.endswith("inv_freq")).clone()
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.swan_inv_freq = inv_freq
    with attending(model, "swan_dense"):
        yield model


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_logits_and_gradients_are_those_of_the_definition(kind: str) -> None:
    ids = torch.randint(3, 128, (2, 300), generator=torch.Generator().manual_seed(2))
    model, plain = FAMILIES[kind].model(), FAMILIES[kind].model()
    rope_ext.patch(model, "swan", **GIVEN, original_max_position_embeddings=64)
    found = []
    for one in (model, plain):
        with dense(one) if one is plain else torch.enable_grad():
            said = one(ids).logits
            said.sin().sum().backward()
        found.append((said.detach(), [p.grad for n, p in one.named_parameters() if "proj" in n]))
    torch.testing.assert_close(found[0][0], found[1][0], **EXACT)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=1e-3)
    assert (found[0][0] - logits(FAMILIES[kind].model(), ids)).abs().max() > 0.01


def test_within_the_window_the_other_layers_are_as_trained(ids) -> None:
    """And every layer without positions is that of ``nope``, bit for bit."""
    model, other = swan(window=LENGTH, temperature=1), tiny_llama(num_hidden_layers=4)
    rope_ext.patch(other, "nope", layers=[0, 2], factor=4)
    few = ids[:, :LENGTH]
    torch.testing.assert_close(logits(model, few), logits(other, few), **EXACT)
    assert (logits(model, ids) - logits(other, ids)).abs().max() > 0.01  # longer than the window


@pytest.mark.parametrize("cache", CACHES)
def test_pieces_through_a_cache_are_the_whole(cache: str) -> None:
    ids = torch.randint(3, 128, (2, 90), generator=torch.Generator().manual_seed(3))
    for start in (0, 1):
        decodes_as_it_reads(swan(start=start), cache, ids, (3, 1, 2, 1, 1, 1, 30, 1, 1, 40, 1, 8))


def test_a_cache_keeps_the_window_of_layers_that_have_one(ids) -> None:
    model = swan()
    for cache in (DynamicCache(config=model.config), DynamicCache(), None):
        with torch.no_grad():
            cache = model(ids, past_key_values=cache).past_key_values
        kept = [layer.keys.shape[2] for layer in cache.layers]
        assert kept == [90, WINDOW - 1, 90, WINDOW - 1]
        assert cache.get_seq_length() == 90
        cache.reset()  # and what is empty may be used without the patch
        if cache.get_seq_length():  # transformers 5.17 fills it with zeros instead
            continue
        rope_ext.unpatch(model)
        with torch.no_grad():
            model(ids, past_key_values=cache)
        assert [layer.keys.shape[2] for layer in cache.layers] == [90] * 4
        rope_ext.patch(model, "swan", **GIVEN)


def test_memory_of_what_left_the_window_is_free(ids) -> None:
    model = swan()
    with torch.no_grad():
        cache = model(ids).past_key_values
    held = [layer.keys.untyped_storage().nbytes() for layer in cache.layers]
    assert held[1] * 90 == held[0] * (WINDOW - 1)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_row_of_a_batch_is_as_alone(side: str, ids) -> None:
    rows_are_as_alone(swan(), side, ids)


@pytest.mark.parametrize("cache", CACHES)
def test_padded_rows_in_pieces_are_as_alone(cache: str, ids) -> None:
    model = swan()
    rows = [ids[0], ids[1, :61], ids[0, 3:9]]
    cache = CACHES[cache](model.config)
    pieces_of_rows_are_as_alone(model, rows, "left", (50, 1, 1, 30, 1, 7), cache)


def test_documents_are_apart_and_nothing_sees_the_future(ids) -> None:
    documents_are_apart(swan(), ids[:1, :70], (30, 40))
    sees_nothing_later(swan(), ids)


def test_a_mask_of_all_pairs_is_kept_within_the_window(ids) -> None:
    model = swan()
    mask = torch.ones(90, 90, dtype=torch.bool).tril()[None, None].expand(2, -1, -1, -1)
    torch.testing.assert_close(logits(model, ids, attention_mask=mask), logits(model, ids), **EXACT)
    apart = mask.clone()
    apart[..., 40:, :40] = False  # two documents
    positions = torch.cat((torch.arange(40), torch.arange(50)))[None]
    found = logits(model, ids, attention_mask=apart, position_ids=positions)
    alone = [logits(model, part) for part in ids.split([40, 50], 1)]
    torch.testing.assert_close(found, torch.cat(alone, 1), **EXACT)


@pytest.mark.parametrize("more", [{}, {"num_beams": 3}, {"cache_implementation": "static"}])
def test_generation_is_that_of_recomputation(more: dict, ids) -> None:
    generates_as_it_recomputes(swan(), ids[:, :70], **more)


def test_drafts_that_are_taken_back_leave_no_trace(ids) -> None:
    model, prompt = swan(), ids[:1, :70]
    right = model.generate(prompt, **NEW, use_cache=False)
    assert torch.equal(model.generate(prompt, **NEW, prompt_lookup_num_tokens=3), right)
    for assistant in (swan(), tiny_llama()):  # right drafts, and wrong ones that are taken back
        assert torch.equal(model.generate(prompt, **NEW, assistant_model=assistant), right)


def test_tokens_cannot_be_taken_back_from_a_window(ids) -> None:
    model, few = swan(), ids[:, :60]
    cache = DynamicCache(config=model.config)
    logits(model, few, past_key_values=cache)
    with pytest.raises(rope_ext.CacheError, match=r"activate_past_recording\(\)"):
        cache.crop(-3)
    assert [layer.get_seq_length() for layer in cache.layers] == [60] * 4  # none is cut alone
    found = logits(model, ids[:, 60:], past_key_values=cache)
    torch.testing.assert_close(found, logits(model, ids)[:, 60:], **EXACT)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    logits(model, ids, past_key_values=cache)
    cache.crop(-30)
    found = logits(model, ids[:, 60:], past_key_values=cache)
    torch.testing.assert_close(found, logits(model, ids)[:, 60:], **EXACT)


def test_weights_are_those_of_the_window(ids) -> None:
    model = swan()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        whole = model(ids, output_attentions=True).attentions
        model(ids[:, :80], past_key_values=cache)
        last = model(ids[:, 80:], past_key_values=cache, output_attentions=True).attentions
    assert [w.shape[-1] for w in last] == [90, WINDOW - 1 + 10] * 2
    for one, other in zip(whole, last, strict=True):
        torch.testing.assert_close(one[:, :, 80:, -other.shape[-1] :], other, atol=1e-5, rtol=0)
        assert torch.allclose(other.sum(-1), torch.ones(()))
    assert not whole[1][:, :, 80:, :70].any() and whole[0][:, :, 80:, :70].all()


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(reentrant: bool, ids) -> None:
    checkpointing_changes_nothing(swan, reentrant, ids)


def test_what_is_saved_is_loaded_and_plain_transformers_refuses_it(tmp_path, ids) -> None:
    model = swan()
    right = logits(model, ids)
    model.save_pretrained(tmp_path)
    again = rope_ext.from_pretrained(tmp_path)
    assert torch.equal(logits(again, ids), right)
    assert rope_ext.describe(again).notes[0].endswith("(plain transformers raises an error)")


def test_unpatching_restores_every_bit(ids) -> None:
    model = tiny_llama(num_hidden_layers=4)
    before, said = snapshot(model), logits(model, ids)
    rope_ext.patch(model, "swan", **GIVEN)
    logits(model, ids)
    twin = copy.deepcopy(model)
    rope_ext.unpatch(model)
    assert not changed(before, snapshot(model)) and torch.equal(logits(model, ids), said)
    torch.testing.assert_close(logits(twin, ids), logits(swan(), ids), atol=0, rtol=0)


def test_an_exported_program_takes_any_number_of_tokens(ids) -> None:
    model, free = swan(), {"input_ids": {1: torch.export.Dim("tokens", min=17)}, "use_cache": None}
    given = ids[:1, :40].clone(), {"use_cache": False}
    with torch.no_grad():
        program = torch.export.export(model, given[:1], given[1], dynamic_shapes=free, strict=False)
        found = program.module()(ids[:1].clone(), use_cache=False).logits
    torch.testing.assert_close(found, logits(model, ids[:1]), **EXACT)


def test_options_are_checked() -> None:
    for options, said in (
        ({"every": 1}, "every=1 is not valid; it must be a whole number of at least 2"),
        ({"every": 4, "start": 4}, "start=4 is not valid; it must be less than every=4"),
        ({"window": 1}, "window=1 is not valid"),
        ({"window": LENGTH + 1}, "window=65 is not valid; it must be at most the trained length"),
        ({"layers": [1]}, "swan chooses its layers itself"),
        (
            {"every": 9, "start": 8},
            "swan with every=9, start=8 .* none of its layers, .* in layers 0, 1, 2, 3; choose",
        ),
    ):
        with pytest.raises(rope_ext.OptionError, match=said):
            swan(**options)
    with pytest.raises(rope_ext.OptionError, match="none is left for the window"):
        rope_ext.patch(tiny_llama(num_hidden_layers=1), "swan")
    with pytest.raises(
        rope_ext.OptionError, match=r"every=2, start=1 .* layers 1, .* in layers 0;"
    ):
        rope_ext.patch(FAMILIES["smollm3"].model(), "swan", every=2, start=1)
    rope = Rope.geometric(1e4, 8, 8192)
    assert rope_ext.SWAN().resolved(rope).window == 512  # as published


@pytest.mark.parametrize("kind", ["mistral windowed", "gemma3_text", "gemma2 scaled"])
def test_models_with_windows_are_refused(kind: str) -> None:
    family = FAMILIES[kind]
    with pytest.raises(rope_ext.UnsupportedModelError, match="has layers with a window already"):
        rope_ext.patch(family.model(), "swan", every=2, **family.options)
