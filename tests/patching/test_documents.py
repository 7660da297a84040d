"""Every sequence counts from its own first token: under padding, packed, and in caches."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, StaticCache

import rope_ext
from tests.helpers.models import several_axes, tiny_llama
from tests.helpers.positions import EXACT, padded

TABLE = [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 4.0, 4.0]
METHODS = {
    "dynamic_yarn": rope_ext.DynamicYaRN(factor=4),
    "two tables": rope_ext.LongRoPE(factor=4, long_factor=TABLE, short_factor=[1.0] * 8),
    "start tokens": rope_ext.LongRoPE(factor=4, long_factor=TABLE, start_tokens=20),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


@torch.no_grad()
def said(model, *args, **given) -> torch.Tensor:
    return model(*args, **{"use_cache": False, **given}).logits


def square(mask: torch.Tensor) -> torch.Tensor:
    """The causal mask of four axes under a mask of two; a padding query sees everything."""
    seen = mask.bool()[:, None, None, :] & torch.ones(2 * mask.shape[1:], dtype=torch.bool).tril()
    return seen | ~seen.any(-1, keepdim=True)


def blocks(lengths: list[int]) -> torch.Tensor:
    """The mask of four axes that keeps documents apart."""
    number = torch.repeat_interleave(torch.tensor(lengths))
    return ((number[:, None] == number) & torch.ones(2 * number.shape, dtype=torch.bool).tril())[
        None, None
    ]


@every_method
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["two axes", "four axes", "numbers"])
def test_padding_counts_for_nothing_in_a_plain_forward(ids, method, side: str, kind: str) -> None:
    model = rope_ext.patch(tiny_llama(), method)
    rows = [ids[0], ids[1, :70], ids[1, :40]]
    batch, mask, _ = padded(rows, side)
    given = mask if kind == "two axes" else square(mask)
    if kind == "numbers":
        given = torch.where(given, 0.0, torch.finfo(torch.float32).min)
    if kind != "two axes" and getattr(method, "start_tokens", 0):
        with pytest.raises(rope_ext.UnsupportedModelError, match="give position_ids, too"):
            said(model, batch, attention_mask=given)
        return
    embeds = model.get_input_embeddings()(batch).detach()
    for inputs in ({"input_ids": batch}, {"inputs_embeds": embeds}):
        together = said(model, attention_mask=given, **inputs)
        for row, real in enumerate(rows):
            alone = said(model, real[None])[0]
            torch.testing.assert_close(together[row][mask[row].bool()], alone, **EXACT)


@every_method
@pytest.mark.parametrize("how", ["positions", "blocks", "blocks alone"])
def test_packed_documents_are_turned_as_each_alone(ids, method, how: str) -> None:
    model = rope_ext.patch(tiny_llama(), method)
    lengths = [100, 40, 20]
    restarting = torch.cat([torch.arange(n) for n in lengths])[None]
    given = {"position_ids": restarting.expand(2, -1)}
    if how != "positions":
        given["attention_mask"] = blocks(lengths)
    if how == "blocks alone":
        if getattr(method, "start_tokens", 0):
            pytest.skip("refused: a mask does not tell where they begin")
        del given["position_ids"]
    packed = said(model, ids, **given)
    start = 0
    for length in lengths:
        document = slice(start, start := start + length)
        torch.testing.assert_close(packed[:, document], said(model, ids[:, document]), **EXACT)


def test_a_row_that_goes_on_with_a_document_is_packed_as_well(ids) -> None:
    model = rope_ext.patch(tiny_llama(), "dynamic_ntk", factor=4)
    positions = torch.cat((torch.arange(300, 330), torch.arange(100), torch.arange(30)))
    packed = said(model, ids, position_ids=positions[None])
    for document in (slice(0, 30), slice(30, 130), slice(130, 160)):
        # float32 angles at position 330 are good to 2e-5 rad
        alone = said(model, ids[:, document])
        torch.testing.assert_close(packed[:, document], alone, atol=1e-3, rtol=0)


def test_positions_that_skip_or_branch_are_of_one_document(ids) -> None:
    model = rope_ext.patch(tiny_llama(), "dynamic_ntk", factor=4)
    skipping = torch.cat((torch.arange(80), torch.arange(150, 230)))[None]
    branching = torch.cat((torch.arange(100), torch.arange(100, 130), torch.arange(100, 130)))
    tree = torch.ones(160, 160, dtype=torch.bool).tril()
    tree[130:, 100:130] = False
    asked = [
        (230, {"position_ids": skipping, "attention_mask": torch.ones_like(ids)}),
        (130, {"position_ids": branching[None], "attention_mask": tree[None, None]}),
    ]
    for length, given in asked:
        made = said(model, ids, **given)
        with rope_ext.patched(tiny_llama(), "dynamic_ntk", factor=4, length=length) as fixed:
            torch.testing.assert_close(made, said(fixed, ids, **given))


@every_method
@pytest.mark.parametrize("static", [False, True])
def test_a_row_may_begin_in_a_later_chunk(ids, method, static: bool) -> None:
    model = rope_ext.patch(tiny_llama(), method)
    rows = [ids[0], ids[1, :80]]
    batch, mask, _ = padded(rows, "left")

    def decoded(batch: torch.Tensor, mask: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        if static:
            cache = StaticCache(config=model.config, max_cache_len=160)
        pieces, end = [], 0
        for piece in batch.split(sizes, 1):
            end += piece.shape[1]
            given = {"past_key_values": cache, "use_cache": True, "attention_mask": mask[:, :end]}
            pieces.append(said(model, piece, **given))
        return torch.cat(pieces, 1)

    together = decoded(batch, mask, [75, 80, 1, 1, 3])
    for row, sizes in enumerate(([75, 80, 1, 1, 3], [75, 1, 1, 3])):
        alone = rows[row][None]
        right = decoded(alone, torch.ones_like(alone), sizes)[0]
        torch.testing.assert_close(together[row][mask[row].bool()], right, **EXACT)


@every_method
@pytest.mark.parametrize("how", [{}, {"prefill_chunk_size": 32}, {"num_beams": 2}])
def test_generate_pads_as_if_each_row_were_alone(ids, method, how: dict) -> None:
    model = rope_ext.patch(tiny_llama(), method)
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    rows = [ids[0, :100], ids[1, :50]]
    batch, mask, _ = padded(rows, "left")
    together = model.generate(batch, attention_mask=mask, **settings, **how)[:, 100:]
    for row, prompt in enumerate(rows):
        assert torch.equal(together[row], model.generate(prompt[None], **settings, **how)[0, -6:])


def test_padding_counts_for_nothing_on_several_axes(ids) -> None:
    model = several_axes()
    batch, mask, _ = padded([ids[0], ids[1, :70]], "left")
    places = torch.arange(160).expand(3, 2, 160)
    for method in METHODS.values():
        with rope_ext.patched(model, method), torch.no_grad():
            together = model(batch, attention_mask=mask, position_ids=places, use_cache=False)
            alone = model(ids[1:, :70], position_ids=places[:, :1, :70], use_cache=False)
        ours, right = together.last_hidden_state[1:, 90:], alone.last_hidden_state
        torch.testing.assert_close(ours, right, **EXACT)
