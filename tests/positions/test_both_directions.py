"""Attention in both directions: encoders, and decoders read as encoders, against dense formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rope_ext
from tests.families.zoo import tiny_model
from tests.helpers.both_directions import (
    CLOSE,
    FAMILIES,
    LOG_N,
    encoder,
    in_both_directions,
    states,
    tokens,
    whole,
)
from tests.helpers.models import LENGTH
from tests.helpers.positions import METHODS, TOLD, padded

BOTH = ["rerope", "leaky_rerope", "self_extend", "string", "dpe", "lm_infinite", "lampe"]
WIDE = {"window": 999, "log_n": False, **TOLD}  # changes no distance of these texts


def by_oracle(model: nn.Module, ids: torch.Tensor, name: str, **options: Any) -> torch.Tensor:
    places = torch.arange(ids.shape[1])[None]
    log_n = LENGTH if name in LOG_N else None
    with in_both_directions(model, name, places, 0 * places, log_n=log_n, **options):
        return states(model, ids)


def patched(model: nn.Module, name: str = "rerope", **options: Any) -> nn.Module:
    given = {"factor": 4, "attention_factor": 1, **(options or METHODS[name])}
    return rope_ext.patch(model, name, **given)


@pytest.mark.every
@pytest.mark.parametrize("name", BOTH)
def test_methods_equal_their_formula_with_negative_distances_ahead(name: str) -> None:
    model, ids = encoder().double(), tokens(90)[None]
    wanted = by_oracle(model, ids, name, **METHODS[name])
    torch.testing.assert_close(states(patched(model, name), ids), wanted, **CLOSE)


def test_a_window_has_as_many_first_tokens_as_it_is_long() -> None:
    model, ids, given = encoder().double(), tokens(30)[None], {"window": 4, "sinks": 4}
    wanted = by_oracle(model, ids, "lm_infinite", **given)
    torch.testing.assert_close(states(patched(model, "lm_infinite", **given), ids), wanted, **CLOSE)


def test_a_window_as_long_as_the_text_changes_nothing() -> None:
    model, ids = encoder(), tokens(60)[None]
    wanted = states(model, ids)
    torch.testing.assert_close(states(patched(model, **WIDE), ids), wanted, **CLOSE)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_text_is_the_text_alone(side: str) -> None:
    model = patched(encoder(), "self_extend")
    texts = [tokens(90), tokens(47, 1)]
    ids, mask, _ = padded(texts, side)
    found = states(model, ids, attention_mask=mask)
    for row, text in enumerate(texts):
        alone = states(model, text[None])[0]
        torch.testing.assert_close(found[row][mask[row] == 1], alone, **CLOSE)


@pytest.mark.parametrize("direct", [True, False])
def test_packed_texts_are_the_texts_alone(direct: bool) -> None:
    """By position ids that restart, or by the lengths that flash attention takes."""
    model = patched(encoder(), "self_extend")
    texts = [tokens(70), tokens(33, 1), tokens(1, 2), tokens(41, 3)]
    counts = torch.tensor([len(text) for text in texts])
    given = {"position_ids": torch.cat([torch.arange(n) for n in counts])[None]}
    if not direct:
        ends = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()))
        given = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    found = states(model, torch.cat(texts)[None], **given)[0]
    for text, part in zip(texts, found.split(counts.tolist()), strict=True):
        torch.testing.assert_close(part, states(model, text[None])[0], **CLOSE)


def test_packed_texts_with_padding_behind_are_the_texts_alone() -> None:
    model = patched(encoder())
    texts = [tokens(50), tokens(21, 1)]
    ids = torch.cat([*texts, torch.zeros(9, dtype=torch.long)])[None]
    positions = torch.cat([torch.arange(50), torch.arange(21), torch.zeros(9, dtype=torch.long)])
    mask = torch.cat((torch.ones(71), torch.zeros(9)))[None]
    found = states(model, ids, attention_mask=mask, position_ids=positions[None])[0]
    for text, part in zip(texts, found.split([50, 21, 9]), strict=False):
        torch.testing.assert_close(part, states(model, text[None])[0], **CLOSE)


@pytest.mark.parametrize("name", ["rerope", "self_extend"])
def test_a_mask_of_four_axes_hides_what_it_says(name: str) -> None:
    model = patched(encoder(), name)
    texts = [tokens(50), tokens(21, 1)]
    number = torch.tensor([0] * 50 + [1] * 21)
    positions = torch.cat([torch.arange(50), torch.arange(21)])[None]
    mask = (number[:, None] == number)[None, None]
    found = states(model, torch.cat(texts)[None], attention_mask=mask, position_ids=positions)[0]
    for text, part in zip(texts, found.split([50, 21]), strict=True):
        torch.testing.assert_close(part, states(model, text[None])[0], **CLOSE)


def test_position_ids_that_jump_are_the_positions() -> None:
    model = encoder().double()
    ids = tokens(40)[None]
    places = torch.cat((torch.arange(20), torch.arange(50, 70)))[None]
    options = METHODS["string"]
    with in_both_directions(model, "string", places, 0 * places, **options):
        wanted = states(model, ids)
    found = states(patched(model, "string"), ids, position_ids=places)
    torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_those_of_the_formula(checkpointing: bool) -> None:
    """By the fast kernel of the CPU, also where layers run again in the backward pass."""
    model, ids = encoder("EuroBertForMaskedLM").double(), tokens(90)[None]
    places, options = torch.arange(90)[None], METHODS["self_extend"]
    weights = [p for n, p in model.named_parameters() if "proj" in n]

    def gradients() -> list[torch.Tensor]:
        return list(torch.autograd.grad(model(ids, labels=ids).loss, weights))

    given = {"log_n": LENGTH, **options}
    with in_both_directions(model, "self_extend", places, 0 * places, **given):
        wanted = gradients()
    patched(model, "self_extend")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    for one, other in zip(gradients(), wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_bfloat16_stays_close_to_float32() -> None:
    model, ids = encoder(), tokens(90)[None]
    wanted = states(patched(model), ids)
    found = states(model.bfloat16(), ids).float()
    assert float((found - wanted).norm() / wanted.norm()) < 0.05


HEADS = (
    "ModernBertForSequenceClassification",
    "ModernBertForTokenClassification",
    "ModernBertForMaskedLM",
    "ModernBertForQuestionAnswering",
    "EuroBertForSequenceClassification",
    "EuroBertForTokenClassification",
    "NomicBertForMaskedLM",
    "GteForSequenceClassification",
    "JinaEmbeddingsV3ForQuestionAnswering",
    "LlamaForSequenceClassification",  # rewards and rerankers
    "Qwen3ForTokenClassification",
)


@pytest.mark.every
@pytest.mark.parametrize("name", HEADS)
def test_heads_of_padded_texts_equal_the_formula(name: str) -> None:
    model = encoder(name).double()
    model.config.is_causal = False
    texts = [tokens(90), tokens(47, 1)]
    ids, mask, _ = padded(texts, "right")
    model.config.pad_token_id = int(ids[1, -1])  # which of a text's tokens is the last
    options = METHODS["self_extend"]
    wanted = []
    for text in texts:
        places = torch.arange(len(text))[None]
        with (
            torch.no_grad(),
            in_both_directions(model, "self_extend", places, 0 * places, log_n=LENGTH, **options),
        ):
            wanted.append(model(text[None]))
    with torch.no_grad():
        found = patched(model, "self_extend")(ids, attention_mask=mask)
    parts = [part for part in ("logits", "start_logits", "end_logits") if part in found]
    assert parts
    for part in parts:
        for row, one in enumerate(wanted):
            of_row = found[part][row]
            of_row = of_row[: len(texts[row])] if len(of_row) == 90 else of_row
            torch.testing.assert_close(of_row, one[part][0], **CLOSE)


@pytest.mark.parametrize("method", BOTH)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_equal_the_formula(name: str, method: str) -> None:
    model, ids = whole(name).double(), tokens(90)[None]
    wanted = by_oracle(model, ids, method, **METHODS[method])
    given = {"original_max_position_embeddings": LENGTH, **METHODS[method]}
    found = states(patched(model, method, **given), ids)
    torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("kernel", ["flash", "flex", "reference"])
@pytest.mark.parametrize("method", BOTH)
def test_every_kernel_equals_the_formula_for_padded_texts(method: str, kernel: str) -> None:
    model, texts = encoder().double(), [tokens(90), tokens(47, 1)]
    ids, mask, _ = padded(texts, "left")
    wanted = [by_oracle(model, text[None], method, **METHODS[method])[0] for text in texts]
    found = states(
        patched(model, method, kernel=kernel, **METHODS[method]), ids, attention_mask=mask
    )
    for row, one in enumerate(wanted):
        torch.testing.assert_close(found[row][mask[row] == 1], one, **CLOSE)


@pytest.mark.parametrize("name", ["ModernBertModel", "gemma3_text"])
def test_layers_with_a_window_keep_it_where_positions_change(name: str) -> None:
    model, ids = whole(name).double(), tokens(90)[None]
    options, places = METHODS["rerope"], torch.arange(90)[None]
    given = {"log_n": LENGTH, "changed": lambda module: True, **options}
    with in_both_directions(model, "rerope", places, 0 * places, **given):
        wanted = states(model, ids)
    given = {"original_max_position_embeddings": LENGTH, "sliding_layers": "scale", **options}
    torch.testing.assert_close(states(patched(model, "rerope", **given), ids), wanted, **CLOSE)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_call_that_is_not_causal_reads_in_both_directions(side: str) -> None:
    model = patched(tiny_model("llama"))
    texts = [tokens(90), tokens(47, 1)]
    ids, mask, _ = padded(texts, side)
    causal = model(texts[0][None]).logits
    found = model(ids, attention_mask=mask, is_causal=False).logits
    torch.testing.assert_close(model(texts[0][None]).logits, causal, atol=0, rtol=0)
    model.config.is_causal = False
    for row, text in enumerate(texts):
        alone = model(text[None]).logits[0]
        torch.testing.assert_close(found[row][mask[row] == 1], alone, **CLOSE)
        assert not torch.allclose(alone, causal[0, : len(alone)], atol=0.1)


def test_attention_weights_are_those_of_both_directions() -> None:
    model, ids = patched(encoder()), tokens(30)[None]
    with torch.no_grad():
        found = model(ids, output_attentions=True)
    torch.testing.assert_close(found.last_hidden_state, states(model, ids), **CLOSE)
    weights = found.attentions[0]
    assert bool((weights > 0).all())
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


def test_a_hidden_token_within_a_text_is_not_seen() -> None:
    model, ids = encoder().double(), tokens(40)[None]
    places, texts = torch.arange(40)[None], torch.zeros(1, 40, dtype=torch.long)
    texts[0, 11] = -1
    options = METHODS["string"]
    with in_both_directions(model, "string", places, texts, **options):
        wanted = states(model, ids)
    mask = (texts >= 0).long()
    found = states(patched(model, "string"), ids, attention_mask=mask)
    torch.testing.assert_close(found[mask == 1], wanted[mask == 1], **CLOSE)


def test_a_patched_encoder_is_saved_and_loaded(tmp_path) -> None:
    model, ids = encoder("EuroBertForMaskedLM"), tokens(90)[None]
    rope_ext.patch(model, "rerope", factor=4, bias=rope_ext.T5(num_buckets=8, max_distance=20))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "rope_ext" in name:
                value.copy_(torch.randn(value.shape))
    model.save_pretrained(tmp_path)
    loaded = rope_ext.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    torch.testing.assert_close(states(loaded, ids), states(model, ids), atol=0, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["EuroBertModel", "ModernBertModel", "gemma3_text"])
@pytest.mark.parametrize("method", ["rerope", "self_extend", "lm_infinite", "t5"])
def test_a_compiled_encoder_gives_the_same(no_graphs, name: str, method: str) -> None:
    options = {"original_max_position_embeddings": LENGTH, **METHODS.get(method, {})}
    model, texts = whole(name), [tokens(90), tokens(47, 1)]
    rope_ext.patch(model, method, **({} if method == "t5" else {"factor": 4}), **options)
    ids, mask, _ = padded(texts, "right")
    wanted = states(model, ids, attention_mask=mask)
    found = states(torch.compile(model), ids, attention_mask=mask)
    torch.testing.assert_close(found[mask == 1], wanted[mask == 1], **CLOSE)
