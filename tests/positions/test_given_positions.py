"""Positions that are not 0, 1, 2, ..., and masks of one's own."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import DynamicCache

import rope_ext
from tests.families.zoo import tiny_model
from tests.helpers.models import several_axes, tiny_llama
from tests.helpers.positions import (
    EXACT,
    FAMILIES,
    GEOMETRIES,
    METHODS,
    TOLD,
    WIDE,
    by_formula,
    logits,
    padded,
    patch,
)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_packed_documents_of_one_row_or_of_all(name: str, ids) -> None:
    model, lengths = patch(tiny_llama(), name), [[30, 47, 13], [90]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    together = logits(model, ids, position_ids=positions, use_cache=False)
    for row, parts in enumerate(lengths):
        alone = [logits(model, part[None])[0] for part in ids[row].split(parts)]
        torch.testing.assert_close(together[row], torch.cat(alone), **EXACT)
    one = logits(model, ids, position_ids=positions[:1], use_cache=False)  # the same in every row
    torch.testing.assert_close(one[0], together[0], **EXACT)


@pytest.mark.parametrize("name", METHODS)
def test_tokens_at_the_same_position_do_not_see_those_after_them(name: str, ids) -> None:
    model, positions = tiny_llama(), (torch.arange(90) // 3)[None]
    given = {"position_ids": positions, "attention_mask": torch.ones_like(ids[:1])}
    row, other = ids[:1], ids[:1].clone()
    other[0, 61:] = ids[1, 61:]  # the middle one of three
    patch(model, name)
    said = logits(model, row, **given)
    torch.testing.assert_close(logits(model, other, **given)[:, :61], said[:, :61], **EXACT)
    assert (logits(model, other, **given) - said)[:, 61:].abs().max() > 0.01


@pytest.mark.parametrize(
    ("kind", "name"), [*(("llama", name) for name in METHODS), ("glm4", "self_extend")]
)
def test_positions_that_jump_are_the_papers_distances(kind: str, name: str, ids) -> None:
    """PoSE: two chunks, the second far away, under a mask that keeps them in one sequence."""
    family = FAMILIES[kind]
    model = family.model()
    positions = torch.stack(
        (
            torch.cat((torch.arange(40), torch.arange(120, 170))),
            torch.cat((torch.arange(61), torch.arange(64, 93))),
        )
    )
    given = {"position_ids": positions, "attention_mask": torch.ones_like(ids)}
    with by_formula(model, family, name, positions, log_n=None, **METHODS[name]):
        right = logits(model, ids, **given)
    patch(model, name, temperature=1)
    torch.testing.assert_close(logits(model, ids, **given), right, **EXACT)


@pytest.mark.parametrize("step", [1, 40])
@pytest.mark.parametrize("gap", ["within the cache", "behind it"])
def test_a_cache_is_not_continued_with_positions_that_jump(gap: str, step: int, ids) -> None:
    """The positions of cached keys are those of their tokens in the mask."""
    model, positions = patch(tiny_llama()), torch.arange(90)[None]
    positions = positions + 30 * (positions >= (20 if gap == "within the cache" else 50))
    cache = DynamicCache(config=model.config)
    logits(model, ids[:, :50], position_ids=positions[:, :50], past_key_values=cache)
    given = {"position_ids": positions[:, 50 : 50 + step], "past_key_values": cache}
    with pytest.raises(rope_ext.RopeExtError, match="one by one"):
        logits(model, ids[:, 50 : 50 + step], **given)


@pytest.mark.parametrize("rejected", [2, 1])
def test_a_cache_is_continued_once_a_tree_of_drafts_is_cropped(rejected: int, ids) -> None:
    """Two drafts of the same token stand in one position; tokens before them count one by one."""
    model = patch(tiny_llama())
    right = logits(model, ids[:1])
    cache = DynamicCache(config=model.config)
    logits(model, ids[:1, :50], past_key_values=cache)
    tree = torch.ones(1, 1, 2, 52, dtype=torch.bool)
    tree[..., 0, 51] = False  # neither draft sees the other
    tree[..., 1, 50] = False
    drafts = {"attention_mask": tree, "position_ids": torch.tensor([[50, 50]])}
    logits(model, ids[:1, 50:52], past_key_values=cache, **drafts)
    cache.crop(-rejected)
    if rejected == 1:
        with pytest.raises(rope_ext.CacheError, match="one by one"):
            logits(model, ids[:1, 51:52], past_key_values=cache)
        return
    after = logits(model, ids[:1, 50:], past_key_values=cache)
    torch.testing.assert_close(after, right[:, 50:], **EXACT)


def test_positions_of_padding_do_not_count(ids) -> None:
    """Many programs give it position 1, which is above that of the first token."""
    model = patch(tiny_llama())
    batch, mask, positions = padded([ids[0, :12], ids[1, :5]], "left")
    given = {"attention_mask": mask, "position_ids": positions.masked_fill(mask == 0, 1)}
    alone = logits(model, ids[1:, :5])
    torch.testing.assert_close(logits(model, batch, **given)[1:, 7:], alone, **EXACT)


def test_padding_in_the_middle_counts_as_distance_unless_positions_say_otherwise(ids) -> None:
    model = tiny_llama()
    mask = torch.ones_like(ids)
    mask[1, 20:30] = 0
    real = mask.bool()
    plain = logits(model, ids, attention_mask=mask)[real]
    with rope_ext.patched(model, "rerope", factor=4, **WIDE["rerope"], **TOLD):
        torch.testing.assert_close(logits(model, ids, attention_mask=mask)[real], plain, **EXACT)
    patch(model)
    closed = logits(model, ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1))
    torch.testing.assert_close(closed[1][real[1]], logits(model, ids[1][real[1]][None])[0], **EXACT)


def test_masks_of_ones_own_are_followed(ids) -> None:
    model = patch(tiny_llama())
    right = logits(model, ids)
    causal = torch.ones(90, 90, dtype=torch.bool).tril()[None, None].expand(2, -1, -1, -1)
    added = torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)
    for mask in (causal, added):
        torch.testing.assert_close(logits(model, ids, attention_mask=mask), right, **EXACT)
    apart = causal.clone()
    apart[:, :, 40:, :40] = False
    said = logits(model, ids, attention_mask=apart)[:, 40:]
    # Self-Extend counts its groups from the first token of the sequence, which is still token 0.
    family, tokens = FAMILIES["llama"], torch.arange(90)[None]
    model = tiny_llama()
    with by_formula(model, family, "self_extend", tokens, **METHODS["self_extend"]):
        right = logits(model, ids, attention_mask=apart)[:, 40:]
    torch.testing.assert_close(said, right, **EXACT)


def test_masks_of_ones_own_are_followed_by_layers_that_stay(ids) -> None:
    model = tiny_model("gemma2", sliding_window=300)
    model.set_attn_implementation("eager")
    hidden = torch.ones(90, 90, dtype=torch.bool).triu(1)
    hidden[40:, :40] = True
    mask = torch.zeros(2, 1, 90, 90).masked_fill(hidden, torch.finfo(torch.float32).min)
    plain = logits(model, ids, attention_mask=mask)
    patch(model, "rerope", **WIDE["rerope"], **TOLD)
    for given in (mask, mask == 0):
        torch.testing.assert_close(logits(model, ids, attention_mask=given), plain, **EXACT)


@pytest.mark.parametrize(
    ("method", "options", "cure"),
    [
        ("yarn", {"layers": [0]}, "patch with 'yarn' without layers="),
        ("pi", {"bias": "alibi", "layers": [1]}, "patch with 'pi' without bias= and layers="),
        ("rerope", {"bias": "t5"}, "use a frequency method such as 'yarn' without bias="),
        ("rerope", {}, "use a frequency method such as 'yarn'"),
    ],
)
def test_images_are_refused_with_advice_that_works_and_announced(
    method: str, options: dict, cure: str, ids, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "rope_ext"):
        model = rope_ext.patch(several_axes(), method, factor=4, **options)
    assert "inputs with images or videos will be refused" in caplog.text and cure in caplog.text
    assert any(cure in note for note in rope_ext.describe(model).notes)
    axes = torch.arange(90).expand(3, 2, 90) // torch.tensor([1, 3, 5])[:, None, None]
    with pytest.raises(rope_ext.UnsupportedModelError, match=rf"one axis only; {cure}$") as error:
        model(ids, position_ids=axes)
    assert method in str(error.value)
    # What it advises does run.
    name = method if method in ("yarn", "pi") else "yarn"
    rope_ext.patch(model, name, factor=4, replace=True)(ids, position_ids=axes)
