"""What is read off the mask functions of transformers, as the installed version makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import masking_utils

import rope_ext
from rope_ext.position.masks import documents_of, is_plain
from tests.families.images import kinds, with_image
from tests.families.zoo import TEXT_VOCAB, tiny_model
from tests.helpers.models import tiny_llama
from tests.helpers.positions import CACHES, EXACT, METHODS, TOLD, WIDE, logits, patch

DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2]])


def test_a_mask_function_of_another_shape_is_not_taken_for_a_plain_one() -> None:
    def packed_sequence_mask_function(documents: torch.Tensor) -> object:  # of the same name
        return lambda row, head, query, key: documents[row, query] == documents[row, key]

    own = packed_sequence_mask_function(DOCUMENTS)
    own.__qualname__ = "packed_sequence_mask_function.<locals>.inner_mask"
    both = masking_utils.and_masks(masking_utils.causal_mask_function, own)
    either = masking_utils.or_masks(
        masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(DOCUMENTS)
    )
    for function in (own, both, either, masking_utils.bidirectional_mask_function):
        assert not is_plain(function) and documents_of(function) is None


def prefix(tokens: int, length: int) -> torch.Tensor:
    """A causal mask whose first tokens see each other, ``[1, 1, tokens, tokens]``."""
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    mask[:length, :length] = True
    return mask[None, None]


@pytest.mark.parametrize("name", sorted(set(WIDE) - {"dual_chunk"}))
def test_tokens_that_see_later_ones(name: str, ids) -> None:
    """Near tokens after a query are as far away as in the unpatched model."""
    model = tiny_llama()
    mask = prefix(ids.shape[1], 40)
    before = logits(model, ids, attention_mask=mask)
    assert (logits(model, ids) - before).abs().max() > 0.1
    patch(model, name, **WIDE[name], **TOLD)
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    for given in (mask, additive):
        torch.testing.assert_close(logits(model, ids, attention_mask=given), before, **EXACT)


def test_packed_documents_whose_first_tokens_see_each_other(ids) -> None:
    """The last query sees neither of the earlier document's tokens, which are no padding."""
    mask = prefix(90, 20)
    mask[:, :, 45:, :45] = False
    positions = torch.arange(45).repeat(2)[None]
    given = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
    model = tiny_llama()
    before = logits(model, ids, **given)
    patch(model, "rerope", window=50, **TOLD)
    torch.testing.assert_close(logits(model, ids, **given), before, **EXACT)


@pytest.mark.parametrize("name", ["rerope", "dual_chunk", "alibi", "xpos"])
def test_tokens_that_see_further_than_a_method_can_express(name: str, ids) -> None:
    options = {"rerope": {"window": 39}, "dual_chunk": {"chunk": 50, "local": 7}}
    model = rope_ext.patch(tiny_llama(), name, factor=4, **options.get(name, {}))
    seen = rf"39 tokens after it.*{name} can express {38 if name == 'rerope' else 0}"
    with pytest.raises(rope_ext.UnsupportedModelError, match=seen):
        logits(model, ids, attention_mask=prefix(ids.shape[1], 40))
    if name == "rerope":
        logits(model, ids, attention_mask=prefix(ids.shape[1], 39))


def test_a_bias_is_what_cannot_express_tokens_that_see_later_ones(ids) -> None:
    model = rope_ext.patch(tiny_llama(), "yarn", factor=4, bias="alibi")
    said = r"yarn with bias= can express 0 here; patch with 'yarn' without bias="
    with pytest.raises(rope_ext.UnsupportedModelError, match=said):
        logits(model, ids, attention_mask=prefix(ids.shape[1], 40))


@pytest.mark.parametrize(
    ("kind", "compiled"),
    [("gemma3", False), ("paligemma", False), pytest.param("gemma3", True, marks=pytest.mark.slow)],
)
def test_the_tokens_of_an_image_see_each_other(kind: str, compiled: bool) -> None:
    """The mask is made around the decoder, which transformers then asks for its own."""
    model = tiny_model(kind)
    ids = torch.randint(3, TEXT_VOCAB, (1, 90), generator=torch.Generator().manual_seed(3))
    ids, pixels = with_image(model, ids)
    given = {**pixels, **kinds(model, ids)}
    before = logits(model, ids, **given)
    assert (logits(model, ids, **pixels) - before).abs().max() > 0.1
    patch(model, "rerope", **WIDE["rerope"], **TOLD)
    run = torch.compile(model, backend="eager") if compiled else model
    torch.testing.assert_close(logits(run, ids, **given), before, **EXACT)


@pytest.mark.parametrize("name", ["rerope", "self_extend"])
def test_a_given_mask_goes_by_positions_not_by_slots(name: str, ids) -> None:
    """The suffix comes before the prefix, as models that fill in the middle are prompted."""
    positions = torch.cat((torch.arange(50, 70), torch.arange(50), torch.arange(70, 90)))[None]
    given = {"attention_mask": prefix(90, 0), "position_ids": positions, "use_cache": False}
    model = tiny_llama()
    before = logits(model, ids, **given)
    patch(model, name, **WIDE[name], **TOLD)
    torch.testing.assert_close(logits(model, ids, **given), before, **EXACT)


def test_weights_behind_padding_on_the_right_are_those_of_each_row(ids) -> None:
    model = rope_ext.patch(tiny_llama(), "rerope", factor=4, window=20)
    mask = torch.ones_like(ids)
    mask[1, 50:] = 0
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    given = {"attention_mask": mask, "position_ids": positions, "output_attentions": True}
    torch.testing.assert_close(
        logits(model, ids, **given)[1, :50], logits(model, ids[1:, :50])[0], **EXACT
    )


@pytest.mark.parametrize(
    "compiled",
    [
        pytest.param(False, id="eager"),
        pytest.param(True, id="compiled", marks=pytest.mark.slow),
    ],
)
def test_packed_documents_whose_mask_is_made_around_the_decoder(compiled: bool, ids) -> None:
    """They begin anywhere, and are known before the first layer rotates."""
    positions = torch.cat((torch.arange(7, 57), torch.arange(40)))[None]
    given = {"position_ids": positions, "use_cache": False}
    model = tiny_model("gemma3")
    before = logits(model, ids[:1], **given)
    patch(model, "self_extend", **WIDE["self_extend"], **TOLD)
    run = torch.compile(model, backend="eager") if compiled else model
    torch.testing.assert_close(logits(run, ids[:1], **given), before, **EXACT)


PADDED = {"rerope": {}, "self_extend": {}, "dual_chunk": {}, "alibi": {}, "dynamic_ntk": {}}
STEPS = (35, 55, 56, 57)
"""Ends of a prompt of two chunks, and of two tokens that are decoded after it."""


def four_axes(kind: str, padding: torch.Tensor, begin: int, slots: int) -> torch.Tensor:
    """The causal mask behind padding ``[rows, tokens]``, ``[rows, 1, tokens, slots]``.

    ``kind`` is what a padding token sees: nothing, itself, or all; or nothing in an additive mask.
    """
    rows, tokens = padding.shape
    keys = torch.zeros(rows, 1, 1, slots, dtype=torch.bool)
    keys[..., :tokens] = padding.bool()[:, None, None]
    query, key = torch.arange(begin, tokens)[:, None], torch.arange(slots)
    mask = keys & (key <= query)
    if kind == "itself":
        mask = mask | (key == query)
    elif kind == "all":
        mask = mask | ~padding.bool()[:, None, begin:, None]
    elif kind == "additive":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    return mask


def through_a_cache(model: nn.Module, ids: torch.Tensor, padding, cache: str, mask: Any, positions):
    """Logits of all chunks; ``mask`` makes that of a chunk from its padding, begin and slots."""
    made, begin, parts = CACHES[cache](model.config), 0, []
    for end in STEPS:
        seen = padding[:, :end]
        slots = 100 if cache == "static" else end
        given = {"past_key_values": made, "attention_mask": mask(seen, begin, slots)}
        if positions:
            given["position_ids"] = (seen.cumsum(-1) - 1).clamp(min=0)[:, begin:]
        parts.append(logits(model, ids[:, begin:end], **given))
        begin = end
    return torch.cat(parts, 1)


@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("kind", ["nothing", "itself", "all", "additive"])
def test_columns_that_a_mask_of_four_axes_hides_are_padding(name: str, kind: str, ids) -> None:
    """In prefill and decoding, and where a mask of two axes goes on."""
    model = rope_ext.patch(
        tiny_llama(num_hidden_layers=1),
        name,
        **({} if name == "alibi" else {"factor": 4}),
        **METHODS.get(name, {}),
    )
    # Row 1 begins in the first chunk and row 2 in the second one, in which row 0 has no padding.
    ids = torch.cat((ids, ids[:1].flip(1)))[:, : STEPS[-1]]
    rows = 3 if kind != "all" else 2  # nothing tells a chunk of padding that sees all from text
    ids, padding = ids[:rows], torch.ones_like(ids[:rows])
    for row, count in enumerate((0, 25, 41)[:rows]):
        padding[row, :count] = 0
    real = padding.bool()

    def in_two(seen: torch.Tensor, begin: int, slots: int) -> torch.Tensor:
        return seen

    def in_four(seen: torch.Tensor, begin: int, slots: int) -> torch.Tensor:
        return four_axes(kind, seen, begin, slots)

    def in_four_then_two(seen: torch.Tensor, begin: int, slots: int) -> torch.Tensor:
        return in_two(seen, begin, slots) if begin else in_four(seen, begin, slots)

    right = through_a_cache(model, ids, padding, "dynamic", in_two, positions=False)
    for cache in ("dynamic", "static"):
        for mask in (in_four, in_four_then_two):
            for positions in (False, True):
                said = through_a_cache(model, ids, padding, cache, mask, positions)
                torch.testing.assert_close(said[real], right[real], **EXACT)


@pytest.mark.parametrize("two_axes", [True, False])
def test_a_cache_is_not_continued_behind_other_padding(two_axes: bool, ids) -> None:
    model, cache = patch(tiny_llama()), CACHES["dynamic"](None)
    padding = torch.ones_like(ids[:, :41])
    padding[1, :10] = 0
    logits(model, ids[:, :40], attention_mask=padding[:, :40], past_key_values=cache)
    padding[1, :20] = 0
    other = padding if two_axes else four_axes("nothing", padding, 40, 41)
    with pytest.raises(rope_ext.CacheError, match="same padding"):
        logits(model, ids[:, 40:41], attention_mask=other, past_key_values=cache)


def test_a_window_of_ones_own_hides_tokens_that_still_count(ids) -> None:
    model, cache = patch(tiny_llama()), CACHES["dynamic"](None)
    query, key = torch.arange(90)[:, None], torch.arange(90)
    window = ((key <= query) & (key > query - 30))[None, None].expand(2, -1, -1, -1)
    right = logits(model, ids, attention_mask=window)
    begin, parts = 0, []
    for end in (50, 88, 89, 90):
        given = {"attention_mask": window[:, :, begin:end, :end], "past_key_values": cache}
        parts.append(logits(model, ids[:, begin:end], **given))
        begin = end
    torch.testing.assert_close(torch.cat(parts, 1), right, **EXACT)


def test_a_mask_of_too_few_keys_is_refused(ids) -> None:
    model, cache = patch(tiny_llama()), CACHES["dynamic"](None)
    logits(model, ids[:, :40], past_key_values=cache)
    narrow = torch.ones(2, 1, 10, 10, dtype=torch.bool).tril()
    with pytest.raises(rope_ext.UnsupportedModelError, match="10 keys"):
        logits(model, ids[:, 40:50], attention_mask=narrow, past_key_values=cache)
