"""Position methods end to end: whole models, every cache, every way to generate and to train."""

from __future__ import annotations

import copy
import gc
import io
import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from conftest import LENGTH, several_axes, tiny_llama
from test_position_methods import formula
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    StaticCache,
)
from transformers.masking_utils import sdpa_mask

import rope_ext
from tests.families.checks import changed, snapshot
from tests.families.zoo import tiny_model

METHODS: dict[str, dict[str, Any]] = {  # small enough that every band matters within 90 tokens
    "rerope": {"window": 5},
    "leaky_rerope": {"window": 5, "k": 3.0},
    "self_extend": {"window": 7, "group": 3},
    "dual_chunk": {"chunk": 20, "local": 7},
    "string": {"shift": 11, "window": 3},
    "lm_infinite": {"window": 9, "sinks": 3},
}
WIDE: dict[str, dict[str, Any]] = {  # nothing is far, so nothing changes, if trained on TOLD
    "rerope": {"window": 999, "log_n": False},
    "leaky_rerope": {"window": 999, "k": 3.0, "log_n": False},
    "self_extend": {"window": 999, "group": 3},
    "dual_chunk": {"chunk": 999, "local": 7},
    "string": {"shift": 999, "window": 3},
    "lm_infinite": {"window": 999},
}
TOLD = {"original_max_position_embeddings": 1999}
GEOMETRIES = ["rerope", "self_extend", "dual_chunk"]  # constant, callable, by chunk
EXACT = {"atol": 1e-4, "rtol": 0}  # float32 sums in another order; logits are of size 5
SCALE = {"sliding_layers": "scale"}


@dataclass(frozen=True)
class Family:
    """A tiny model and how its layers rotate, as read in transformers' own code.

    ``mapped``: layers whose positions change, None for all; ``neighbours``: pairs are next to
    each other, not half a rotation apart.
    """

    model_type: str
    overrides: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    mapped: tuple[int, ...] | None = None
    neighbours: bool = False

    def model(self) -> nn.Module:
        return tiny_model(self.model_type, **self.overrides)


FAMILIES = {
    "llama": Family("llama"),
    "mistral": Family("mistral", {"sliding_window": None}),
    "mistral windowed": Family("mistral", {}, SCALE),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "gemma2": Family("gemma2", mapped=(1,)),  # logits are capped
    "gemma2 scaled": Family("gemma2", {}, SCALE),
    "gemma3_text": Family("gemma3_text", mapped=(1,)),
    "gemma3_text scaled": Family("gemma3_text", {}, SCALE),
    "phi3": Family("phi3"),
    "olmo2": Family("olmo2"),
    "glm4": Family("glm4", neighbours=True),
    "cohere": Family("cohere", neighbours=True),
    "cohere2": Family("cohere2", {}, SCALE, mapped=(0,), neighbours=True),
    "gpt_oss": Family("gpt_oss", mapped=(1,)),  # a sink in every head
    "gpt_oss scaled": Family("gpt_oss", {}, SCALE),
    "smollm3": Family("smollm3", mapped=(0,)),
    "stablelm": Family("stablelm"),
    "gpt_neox": Family("gpt_neox"),
    "granite": Family("granite"),
}
KINDS = ["llama", "gemma2 scaled", "gpt_oss", "smollm3", "mistral windowed"]
PACKED = [kind for kind in KINDS if kind != "gpt_oss"]  # whose code does not tell documents apart


def patch(model: nn.Module, name: str = "self_extend", **options: Any) -> nn.Module:
    return rope_ext.patch(model, name, **{"factor": 4, **METHODS[name], **options})


def logits(model: nn.Module, ids: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **kwargs).logits


def decoded(
    model: nn.Module, ids: torch.Tensor, steps: list[int], cache: Cache | None = None
) -> torch.Tensor:
    """Logits of ``ids`` fed in pieces of those sizes through one cache."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    pieces = ids.split(steps, dim=1)
    return torch.cat([logits(model, piece, past_key_values=cache) for piece in pieces], 1)


def padded(rows: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, attention mask, and positions counted from each row's first token."""
    mask = pad_sequence([torch.ones_like(row) for row in rows], True, padding_side=side)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return pad_sequence(rows, True, padding_side=side), mask, positions


@pytest.fixture
def ids() -> torch.Tensor:
    """Two rows of 90 tokens, ids 3 and up."""
    return torch.randint(3, 128, (2, 90), generator=torch.Generator().manual_seed(1))


# --- the paper's distances, put into an unpatched model ------------------------------------------


@dataclass(frozen=True)
class ByFormula:
    """Attention over the effective distance of every single pair, dense, in float64.

    Args:
        family: how its layers rotate.
        distance: ``[rows or 1, tokens, tokens]``; infinite where nothing is seen.
        positions: under which the model itself rotates, ``[rows or 1, tokens]``.
        temperature: of every query, ``[tokens]``.
    """

    family: Family
    distance: torch.Tensor
    positions: torch.Tensor
    temperature: torch.Tensor

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        groups = query.shape[1] // key.shape[1]
        q, k, v = query.double(), key.double(), value.double()
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        logits, visible = q @ k.mT, attention_mask
        mapped = self.family.mapped is None or module.layer_idx in self.family.mapped
        if mapped:
            native = self.positions[:, :, None] - self.positions[:, None]
            by = (self.distance - native).masked_fill(self.distance.isinf(), 0)
            logits = self._turned(module, q, k, by) * self.temperature[:, None]
            visible = visible & self.distance.isfinite()[:, None]
        logits = logits * (q.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            logits = softcap * (logits / softcap).tanh()
        weights = logits.masked_fill(~visible, -1e30).exp()
        total = weights.sum(-1, keepdim=True)
        if s_aux is not None:
            total = total + s_aux.double().exp()[:, None, None]
        weights = weights / total
        return (weights @ v).transpose(1, 2).to(value.dtype), weights

    def _turned(self, module: nn.Module, q, k, by: torch.Tensor) -> torch.Tensor:
        theta = module.by_formula_inv_freq.double()
        pairs, columns = len(theta), q.shape[-1]
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
        if self.family.neighbours:
            first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        rest = slice(2 * pairs, columns)
        angle = by[:, None, :, :, None] * theta
        a, b = q[..., None, first], q[..., None, second]
        turned = torch.cat(
            (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1
        )
        keys = torch.cat((k[..., first], k[..., second]), -1)
        turned = (turned * keys[:, :, None]).sum(-1)
        return turned + q[..., rest] @ k[..., rest].mT


_by_formula: list[ByFormula] = []
AttentionInterface.register("by_formula", lambda *args, **kwargs: _by_formula[-1](*args, **kwargs))
AttentionMaskInterface.register(
    "by_formula", lambda **arguments: sdpa_mask(**{**arguments, "allow_is_causal_skip": False})
)


@contextmanager
def by_formula(
    model: nn.Module,
    family: Family,
    name: str,
    tokens: torch.Tensor,
    *,
    log_n: int | None = LENGTH,
    **constants: Any,
) -> Iterator[nn.Module]:
    """``model``, not under a position method, with the attention of the paper.

    ``tokens``: positions, ``[rows, tokens]``; ``log_n``: the trained length.
    """
    buffers = dict(model.named_buffers())
    kinds = getattr(model.config, "layer_types", None)
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            own = f"{kinds[module.layer_idx]}_inv_freq" if kinds else "inv_freq"
            found = [b for n, b in buffers.items() if n.split(".")[-1] in (own, "inv_freq")]
            module.by_formula_inv_freq = found[0].clone()
    t = tokens - tokens[:, :1]
    temperature = torch.ones(t.shape[1], dtype=torch.float64)
    if log_n is not None and name in ("rerope", "leaky_rerope"):
        temperature = ((t[0] + 1).double().log() / math.log(log_n)).clamp(min=1)
    distance = torch.stack([formula(name, row, **constants) for row in t])
    _by_formula.append(ByFormula(family, distance, t, temperature))
    before = model.config._attn_implementation
    model.set_attn_implementation("by_formula")
    try:
        yield model
    finally:
        model.set_attn_implementation(before)
        _by_formula.pop()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_are_those_of_the_papers_distances(kind: str, name: str, ids) -> None:
    family = FAMILIES[kind]
    model = family.model()
    with by_formula(model, family, name, torch.arange(90)[None], **METHODS[name]):
        right = logits(model, ids)
    plain = logits(model, ids)
    patch(model, name, **family.options)
    assert (right - plain).abs().max() > 0.03  # cohere's logits are of size 0.3
    torch.testing.assert_close(logits(model, ids), right, **EXACT)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_nothing_changes_where_nothing_is_far(kind: str, name: str, ids) -> None:
    family = FAMILIES[kind]
    model = family.model()
    if kind.startswith("gemma2"):  # sdpa of older transformers forgets to cap the logits
        model.set_attn_implementation("eager")
    plain = logits(model, ids)
    patch(model, name, **{**WIDE[name], **TOLD, **family.options})
    # Self-Extend and Leaky ReRoPE keep keys under another angle and turn them back, in float32;
    # granite, whose attention is scaled by 1 and not by 1/4, then loses one more digit.
    turned_back = name in ("self_extend", "leaky_rerope")
    tolerance = 1e-4 if turned_back and kind == "granite" else 3e-5 if turned_back else 1e-5
    torch.testing.assert_close(logits(model, ids), plain, atol=tolerance, rtol=0)


# --- caches --------------------------------------------------------------------------------------

CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),  # sliding layers keep their window
    "dynamic, all kept": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=100),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("steps", [[84, *[1] * 6], [40, 30, 13, *[1] * 7], [*[1] * 20, 70]])
def test_cached_decoding_equals_recomputation(name: str, cache: str, steps, ids) -> None:
    model = patch(tiny_llama(), name)
    cached = decoded(model, ids, steps, CACHES[cache](model.config))
    torch.testing.assert_close(cached, logits(model, ids), **EXACT)


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "llama"])
def test_cached_decoding_of_every_family(kind: str, name: str, cache: str, ids) -> None:
    family = FAMILIES[kind]
    model = patch(family.model(), name, **family.options)
    cached = decoded(model, ids, [10, 40, 35, *[1] * 5], CACHES[cache](model.config))
    torch.testing.assert_close(cached, logits(model, ids), **EXACT)


@pytest.mark.parametrize("name", METHODS)
def test_the_models_own_cache_can_be_continued(name: str, ids) -> None:
    model = patch(tiny_llama(), name)
    right = logits(model, ids)[:, 50:]
    with torch.no_grad():
        first = model(ids[:, :50], use_cache=True)
        as_tuple = model(ids[:, :50], use_cache=True, return_dict=False)
    for cache in (first.past_key_values, as_tuple[1]):
        torch.testing.assert_close(
            logits(model, ids[:, 50:], past_key_values=cache), right, **EXACT
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_is_prefilled_once_and_continued_often(kind: str, ids) -> None:
    family = FAMILIES[kind]
    model = patch(family.model(), **family.options)
    prefix = DynamicCache(config=model.config)
    logits(model, ids[:1, :50], past_key_values=prefix)
    for row in (0, 1):
        rest = ids[row : row + 1, 50:]
        cached = logits(model, rest, past_key_values=copy.deepcopy(prefix))
        right = logits(model, torch.cat((ids[:1, :50], rest), 1))[:, 50:]
        torch.testing.assert_close(cached, right, **EXACT)
    prefix.batch_repeat_interleave(2)
    cached = logits(model, ids[:, 50:], past_key_values=prefix)
    right = logits(model, torch.cat((ids[:1, :50].expand(2, -1), ids[:, 50:]), 1))[:, 50:]
    torch.testing.assert_close(cached, right, **EXACT)


def test_a_cropped_cache_goes_on_with_other_tokens(ids) -> None:
    model = patch(tiny_llama())
    cache = DynamicCache(config=model.config)
    logits(model, ids[:1], past_key_values=cache)
    cache.crop(-30)
    other = torch.cat((ids[:1, :60], ids[1:, 60:]), 1)
    cached = logits(model, other[:, 60:], past_key_values=cache)
    torch.testing.assert_close(cached, logits(model, other)[:, 60:], **EXACT)


@pytest.mark.parametrize("window", [39, 40, 41, 300])  # of a prompt of 40 tokens in 100 slots
@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_layers_that_stay_read_a_static_cache_from_its_beginning(kind: str, window, ids) -> None:
    """Capped or with sinks, they attend in our code, where others do in torch's."""
    model = tiny_model(FAMILIES[kind].model_type, sliding_window=window)
    model.set_attn_implementation("eager")
    plain = logits(model, ids[:, :48], use_cache=False)
    patch(model, "rerope", **WIDE["rerope"], **TOLD)
    for steps in ([40, *[1] * 8], [40, 3, 5]):
        cached = decoded(model, ids[:, :48], steps, CACHES["static"](model.config))
        torch.testing.assert_close(cached, plain, **EXACT)


# --- padding and batches -------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_a_batch_gives_what_it_gives_alone(kind: str, name: str, side: str, ids) -> None:
    family = FAMILIES[kind]
    model = patch(family.model(), name, **family.options)
    rows = [ids[0], ids[1, :61], ids[0, 3:4]]
    batch, mask, positions = padded(rows, side)
    for given in ({}, {"position_ids": positions}):  # by default, positions count the padding
        together = logits(model, batch, attention_mask=mask, **given)
        for row, real in enumerate(rows):
            alone = logits(model, real[None])[0]
            torch.testing.assert_close(together[row][mask[row].bool()], alone, **EXACT)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    ("kind", "side"),
    # A sliding window counts the padding on the right as tokens, unpatched too.
    [*((kind, "left") for kind in KINDS), ("llama", "right"), ("smollm3", "right")],
)
def test_padded_rows_decode_as_if_alone(kind: str, side: str, cache: str, ids) -> None:
    """Prefilled in chunks, the first of which holds nothing but padding for one of the rows."""
    family = FAMILIES[kind]
    model = patch(family.model(), **family.options)
    rows = [ids[0, :80], ids[1, :41]]
    batch, mask, positions = padded(rows, side)
    store, begin, said = CACHES[cache](model.config), 0, []
    for chunk in batch.split([30, 30, 20], 1):
        end = begin + chunk.shape[1]
        given = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
        said.append(logits(model, chunk, past_key_values=store, **given))
        begin = end
    for step in range(5):
        mask = torch.cat((mask, torch.ones(2, 1, dtype=torch.long)), 1)
        given = {"attention_mask": mask, "position_ids": torch.tensor([[80 + step], [41 + step]])}
        new = ids[:, 80 + step : 81 + step]
        said.append(logits(model, new, past_key_values=store, **given))
    for row, real in enumerate(rows):
        alone = logits(model, torch.cat((real, ids[row, 80:85]))[None])[0]
        torch.testing.assert_close(torch.cat(said, 1)[row][mask[row].bool()], alone, **EXACT)


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


def test_a_row_of_nothing_but_padding_disturbs_nobody(ids) -> None:
    model = patch(tiny_llama(), "rerope")
    batch, mask = torch.cat((ids, ids[:1])), torch.ones(3, 90, dtype=torch.long)
    mask[2] = 0
    said = logits(model, batch, attention_mask=mask)
    torch.testing.assert_close(said[:2], logits(model, ids), **EXACT)
    assert said.isfinite().all()


# --- generate ------------------------------------------------------------------------------------

NEW = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False}


HOW: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "several sequences": {"num_beams": 2, "num_return_sequences": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "chunked prefill": {"prefill_chunk_size": 13},
    "static cache": {"cache_implementation": "static"},
    "assistant": {},
    "patched assistant": {},
    "early exit": {"assistant_early_exit": 1},
}


@pytest.mark.parametrize(
    ("kind", "name", "how"),
    [
        *(("llama", name, how) for name in METHODS for how in HOW),
        *((kind, "self_extend", how) for kind in KINDS[1:] for how in HOW if how != "early exit"),
    ],
)
def test_generate_writes_what_it_writes_without_a_cache(
    kind: str, name: str, how: str, ids
) -> None:
    family = FAMILIES[kind]
    model = patch(family.model(), name, **family.options)
    prompt, settings = ids[:1, :60], {**NEW, **HOW[how]}
    beams = {key: value for key, value in settings.items() if key.startswith("num_")}
    right = model.generate(prompt, use_cache=False, **NEW, **beams)
    if "assistant" in how:
        settings["assistant_model"] = assistant = tiny_llama(num_hidden_layers=1)
        if how == "patched assistant":
            patch(assistant, "rerope")
    assert torch.equal(model.generate(prompt, **settings), right)


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("kind", KINDS)
def test_generate_serves_rows_of_different_lengths_as_if_alone(kind: str, how, ids) -> None:
    family = FAMILIES[kind]
    model = patch(family.model(), **family.options)
    rows = [ids[0, :70], ids[1, :20]]
    batch, mask, _ = padded(rows, "left")
    together = model.generate(batch, attention_mask=mask, **NEW, **how)[:, 70:]
    for row, prompt in enumerate(rows):
        alone = model.generate(prompt[None], **NEW, **how)[0, len(prompt) :]
        assert torch.equal(together[row], alone)


def test_generate_under_patched_and_after_it(ids) -> None:
    model = tiny_llama()
    plain = model.generate(ids[:1, :60], **NEW)
    with rope_ext.patched(model, "rerope", factor=4, window=5):
        long = model.generate(ids[:1, :60], **NEW)
    assert long.shape == plain.shape
    assert not torch.equal(long, plain)
    assert torch.equal(model.generate(ids[:1, :60], **NEW), plain)


def test_a_chat_goes_on_with_its_cache(ids) -> None:
    model = patch(tiny_llama())
    cache = DynamicCache(config=model.config)
    said = model.generate(ids[:1, :40], past_key_values=cache, **NEW)
    longer = torch.cat((said, ids[1:, :20]), 1)
    cached = model.generate(longer, past_key_values=cache, **NEW)
    assert torch.equal(cached, model.generate(longer, use_cache=False, **NEW))


# --- positions that are not 0, 1, 2, ... ---------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", PACKED)
def test_packed_documents_are_kept_apart(kind: str, name: str, ids) -> None:
    family = FAMILIES[kind]
    model = patch(family.model(), name, **family.options)
    lengths = [[30, 47, 13], [90]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    together = logits(model, ids, position_ids=positions, use_cache=False)
    for row, parts in enumerate(lengths):
        alone = [logits(model, part[None])[0] for part in ids[row].split(parts)]
        torch.testing.assert_close(together[row], torch.cat(alone), **EXACT)
    one = logits(model, ids, position_ids=positions[:1], use_cache=False)  # the same in every row
    torch.testing.assert_close(one[0], together[0], **EXACT)


@pytest.mark.parametrize("kind", ["llama", "smollm3"])
def test_packed_documents_beside_a_cache_are_as_unpatched_or_refused(kind: str, ids) -> None:
    """Documents are told apart only where there is no cache, and the model makes one itself."""
    model = FAMILIES[kind].model()
    positions = torch.cat((torch.arange(40), torch.arange(50)))[None]
    plain = logits(model, ids, position_ids=positions)
    patch(model, "rerope", **WIDE["rerope"], **TOLD)
    try:
        said = logits(model, ids, position_ids=positions)
    except rope_ext.UnsupportedModelError as error:
        assert "use_cache=False" in str(error)
        return
    torch.testing.assert_close(said, plain, **EXACT)


def test_packed_documents_under_a_mask_are_refused_with_the_cure(ids) -> None:
    model = patch(tiny_llama())
    positions = torch.cat((torch.arange(40), torch.arange(50)))[None]
    with pytest.raises(rope_ext.UnsupportedModelError, match="no attention mask"):
        logits(model, ids, position_ids=positions, attention_mask=torch.ones_like(ids))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", ["llama", "glm4"])
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
    patch(model, name, **({"log_n": False} if "rerope" in name else {}))
    torch.testing.assert_close(logits(model, ids, **given), right, **EXACT)
    cache = DynamicCache(config=model.config)  # and the same in two chunks
    parts = [
        logits(model, ids[:, at], position_ids=positions[:, at], past_key_values=cache)
        for at in (slice(0, 50), slice(50, 90))
    ]
    torch.testing.assert_close(torch.cat(parts, 1), right, **EXACT)


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


def test_a_bias_in_the_mask_is_added_or_refused(model, ids) -> None:
    hidden = torch.ones(90, 90, dtype=torch.bool).triu(1)
    bias = -0.02 * (torch.arange(90)[:, None] - torch.arange(90)).float()  # as ALiBi has it
    mask = bias.masked_fill(hidden, torch.finfo(torch.float32).min)[None, None]
    mask = mask.expand(2, -1, -1, -1)
    plain = logits(model, ids, attention_mask=mask)
    patch(model, "rerope", **WIDE["rerope"], **TOLD)
    try:
        said = logits(model, ids, attention_mask=mask)
    except rope_ext.RopeExtError as error:
        assert "mask" in str(error)
        return
    torch.testing.assert_close(said, plain, **EXACT)


def test_several_axes_of_positions_work_where_they_agree(ids) -> None:
    model = patch(several_axes())
    with torch.no_grad():
        right = model(ids).last_hidden_state
        axes = torch.arange(90).expand(3, 2, 90)
        torch.testing.assert_close(model(ids, position_ids=axes).last_hidden_state, right, **EXACT)
        with pytest.raises(rope_ext.UnsupportedModelError, match=r"several.*'yarn'"):
            model(ids, position_ids=axes // torch.tensor([1, 3, 5])[:, None, None])


# --- training ------------------------------------------------------------------------------------


def gradients(model: nn.Module, ids: torch.Tensor, **given: Any) -> list[torch.Tensor]:
    model.zero_grad()
    model(ids, labels=ids, **given).loss.backward()
    return [p.grad.clone() for n, p in model.named_parameters() if "proj" in n]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("mask", ["none", "left", "packed", "jump"])
def test_gradients_are_those_of_the_reference_and_survive_checkpointing(name, mask, ids) -> None:
    given: dict[str, Any] = {"use_cache": False}
    if mask == "left":
        given["attention_mask"] = torch.ones_like(ids)
        given["attention_mask"][1, :25] = 0
    elif mask == "packed":
        given["position_ids"] = torch.cat((torch.arange(33), torch.arange(57))).expand(2, -1)
    elif mask == "jump":
        given["position_ids"] = torch.cat((torch.arange(33), torch.arange(60, 117))).expand(2, -1)
        given["attention_mask"] = torch.ones_like(ids)
    right = gradients(patch(tiny_llama(), name, kernel="reference").double(), ids, **given)
    for checkpointing in (None, False, True):
        model = patch(tiny_llama(), name).train()
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            model.enable_input_require_grads()
        found = gradients(model, ids, **given)
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt_oss scaled", "gemma2"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_gradients_are_those_of_the_papers_distances(kind: str, name: str, ids) -> None:
    family = FAMILIES[kind]
    model = family.model()
    with by_formula(model, family, name, torch.arange(90)[None], **METHODS[name]):
        right = gradients(model, ids)
    for one, other in zip(gradients(patch(model, name, **family.options), ids), right, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_a_lora_adapter_trains_and_is_the_same_patched_before_or_after(ids) -> None:
    from peft import LoraConfig, get_peft_model

    losses, said = [], []
    for order in ("before", "after"):
        model = patch(tiny_llama()) if order == "before" else tiny_llama()
        torch.manual_seed(3)
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "k_proj"], r=4)).train()
        if order == "after":
            patch(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        said.append(logits(model.eval(), ids))
        plain = logits(rope_ext.unpatch(model), ids)
        assert (said[-1] - plain).abs().max() > 0.1
    assert losses[:3] == losses[3:] and losses[0] > losses[1] > losses[2]
    assert torch.equal(*said)


def test_attention_dropout_is_refused_in_training_only(ids) -> None:
    model = patch(tiny_llama(attention_dropout=0.1))
    logits(model, ids)
    with pytest.raises(rope_ext.OptionError, match="attention_dropout = 0"):
        model.train()(ids)


# --- dtypes, compilation, copies -----------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_bfloat16_is_as_close_to_float32_as_unpatched(name: str, ids) -> None:
    model, plain = patch(tiny_llama(), name), tiny_llama()
    right, plain_right = logits(model, ids), logits(plain, ids)
    lost = (logits(plain.to(torch.bfloat16), ids).float() - plain_right).pow(2).mean().sqrt()
    model.to(torch.bfloat16)
    for said in (logits(model, ids), decoded(model, ids, [40, 45, *[1] * 5])):
        assert said.dtype == torch.bfloat16
        assert (said.float() - right).pow(2).mean().sqrt() < 2 * lost


def test_float64_and_autocast(ids) -> None:
    model = patch(tiny_llama())
    right = logits(model, ids)
    with torch.autocast("cpu", torch.bfloat16):
        assert (logits(model, ids).float() - right).pow(2).mean().sqrt() < 0.2
    torch.testing.assert_close(logits(model.double(), ids).float(), right, **EXACT)


@pytest.mark.parametrize(
    ("name", "when"),
    [
        ("rerope", "before"),
        *(pytest.param(name, "after", marks=pytest.mark.slow) for name in METHODS),
    ],
)
def test_torch_compile_before_or_after(name: str, when: str, ids) -> None:
    torch.compiler.reset()
    plain, right = logits(tiny_llama(), ids), logits(patch(tiny_llama(), name), ids)
    model = tiny_llama()
    if when == "before":
        model = torch.compile(model, backend="eager")
        torch.testing.assert_close(logits(model, ids), plain, **EXACT)
        patch(model, name)
    else:
        model = torch.compile(patch(model, name), backend="eager")
    torch.testing.assert_close(logits(model, ids), right, **EXACT)
    torch.testing.assert_close(logits(model, ids[:, :70]), right[:, :70], **EXACT)  # another shape
    rope_ext.unpatch(model)
    torch.testing.assert_close(logits(model, ids), plain, **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_inductor_gives_the_same_logits_and_gradients(name: str, ids) -> None:
    torch.compiler.reset()
    model = patch(tiny_llama(), name)
    right, grads = logits(model, ids), gradients(model, ids, use_cache=False)
    compiled = torch.compile(model)
    torch.testing.assert_close(logits(compiled, ids), right, **EXACT)
    for one, other in zip(gradients(compiled, ids, use_cache=False), grads, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_copies_and_pickles_carry_the_patch(name: str, ids) -> None:
    model = patch(tiny_llama(), name)
    right, plain = logits(model, ids), logits(tiny_llama(), ids)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        rope_ext.patch(model, "pi", factor=2, replace=True)  # must not reach the copy
        assert torch.equal(logits(twin, ids), right)
        assert torch.equal(logits(rope_ext.unpatch(twin), ids), plain)
        assert torch.equal(logits(patch(twin, name), ids), right)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3_text"])
def test_a_saved_model_loads_with_its_patch_only(kind: str, tmp_path, ids) -> None:
    family = FAMILIES[kind]
    model = family.model()
    plain = logits(model, ids)
    right = logits(patch(model, "rerope", window=None), ids)
    model.save_pretrained(tmp_path)
    with pytest.raises(KeyError, match=r"rope_ext\.from_pretrained"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    again = rope_ext.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(again, ids), right, **EXACT)
    assert rope_ext.describe(again).options == rope_ext.describe(model).options
    torch.testing.assert_close(logits(rope_ext.unpatch(again), ids), plain, atol=1e-5, rtol=0)


def test_models_served_by_several_threads_do_not_disturb_each_other(ids) -> None:
    models = [patch(tiny_llama(), "rerope"), patch(tiny_llama(), "string")]
    models.append(models[0])  # one of them twice
    inputs = [ids, ids, ids[:, :50]]
    right = [logits(model, x) for model, x in zip(models, inputs, strict=True)]
    wrong = []

    def serve(i: int) -> None:
        for _ in range(15):
            try:
                if not torch.allclose(logits(models[i], inputs[i]), right[i], atol=1e-4):
                    wrong.append(i)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_saved_model_loads_onto_the_disk(kind: str, tmp_path, ids) -> None:
    model = patch(FAMILIES[kind].model())
    right = logits(model, ids)
    model.save_pretrained(tmp_path / "model")
    again = rope_ext.from_pretrained(
        tmp_path / "model", device_map={"": "disk"}, offload_folder=tmp_path / "offloaded"
    )
    assert all(parameter.is_meta for parameter in again.parameters())
    torch.testing.assert_close(logits(again, ids), right, **EXACT)


@pytest.mark.parametrize("kind", ["smollm3", "llama"])
def test_a_mask_follows_its_layers_to_another_device(kind: str, ids) -> None:
    """Layers from the second on lie on meta, where no tensor of another device can be used."""
    model = patch(FAMILIES[kind].model())
    rest = [*model.model.layers[1:], model.model.norm, model.lm_head]
    torch.nn.ModuleList(rest).to("meta")

    def move(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        def there(x: Any) -> Any:  # as accelerate does
            if isinstance(x, tuple):
                return tuple(map(there, x))
            return x.to("meta") if isinstance(x, torch.Tensor) else x

        return tuple(map(there, args)), {name: there(x) for name, x in kwargs.items()}

    for module in rest:
        module.register_forward_pre_hook(move, with_kwargs=True)
    given = {"attention_mask": torch.ones_like(ids)}
    given["attention_mask"][1, :25] = 0
    if kind == "llama":  # by dense logits, for the positions jump
        given["position_ids"] = torch.cat((torch.arange(33), torch.arange(60, 117))).expand(2, -1)
    assert logits(model, ids, **given, use_cache=False).is_meta


def test_accelerate_hooks_stay_in_place(ids) -> None:
    from accelerate import dispatch_model

    right = logits(patch(tiny_llama()), ids)
    model = dispatch_model(tiny_llama(), {"": "cpu"}, force_hooks=True)
    assert torch.equal(logits(patch(model), ids), right)


# --- over a frequency map ------------------------------------------------------------------------


@pytest.mark.parametrize("under", [rope_ext.NTK(factor=2), rope_ext.YaRN(factor=2)], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_neox"])
def test_a_position_map_goes_over_a_frequency_map(under, kind: str, ids) -> None:
    family = FAMILIES[kind]
    model = family.model()
    with rope_ext.patched(model, under):
        plain = logits(model, ids)
        tokens = torch.arange(90)[None]
        with by_formula(model, family, "rerope", tokens, log_n=2 * LENGTH, window=5):
            right = logits(model, ids)
    before = snapshot(model)
    wide = rope_ext.ReRoPE(factor=2, window=100, log_n=False)
    with rope_ext.patched(model, wide, frequency=under):
        # The frequencies of a frequency method by itself are transformers' own, in float32.
        torch.testing.assert_close(logits(model, ids), plain, atol=5e-5, rtol=0)
    with rope_ext.patched(model, rope_ext.ReRoPE(factor=2, window=5), frequency=under):
        torch.testing.assert_close(logits(model, ids), right, **EXACT)
        cached = decoded(model, ids, [40, 45, *[1] * 5])
        torch.testing.assert_close(cached, right, **EXACT)
    assert changed(before, snapshot(model)) == set()


def test_defaults_over_a_frequency_map_count_from_the_length_that_it_reaches(model) -> None:
    rope_ext.patch(model, "rerope", factor=4, frequency=rope_ext.NTK(factor=2))
    description = rope_ext.describe(model)
    assert description.options["window"] == 2 * LENGTH // 4
    assert description.target_length == 8 * LENGTH == model.config.max_position_embeddings
    assert description.sites[0].inv_freq_after != description.sites[0].inv_freq_before


# --- patch, unpatch, describe --------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3_text scaled", "gpt_oss", "phi3"])
def test_unpatch_restores_everything_bit_for_bit(kind: str, name: str, ids) -> None:
    family = FAMILIES[kind]
    model = family.model()
    said, before = logits(model, ids), snapshot(model)
    patch(model, name, **family.options)
    assert not torch.equal(logits(model, ids), said)
    model.generate(ids[:, :8], max_new_tokens=4, do_sample=False)
    rope_ext.unpatch(model)
    assert changed(before, snapshot(model)) == set()
    assert torch.equal(logits(model, ids), said)


def test_an_error_within_a_forward_leaves_the_model_as_it_was(model, ids) -> None:
    before = snapshot(model)
    with pytest.raises(KeyError), rope_ext.patched(model, "rerope", factor=4, window=5):
        right = logits(model, ids)

        def fail(*args: Any) -> None:
            raise KeyError

        handle = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(KeyError):
            logits(model, ids)
        handle.remove()
        torch.testing.assert_close(logits(model, ids), right)
        raise KeyError
    assert changed(before, snapshot(model)) == set()


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_a_forward_is_kept_when_it_is_over(model, ids, fails: bool) -> None:
    patch(model)
    cache = DynamicCache(config=model.config)
    gone = weakref.ref(cache)
    if fails:
        with pytest.raises(rope_ext.OptionError):
            model.model.layers[1].self_attn.attention_dropout = 0.1
            model.train()(ids, past_key_values=cache)
    else:
        model(ids, past_key_values=cache)
    del cache
    gc.collect()
    assert gone() is None


def test_a_refused_replacement_leaves_the_earlier_patch_in_force(ids) -> None:
    model = patch(tiny_llama(), "rerope")
    said = logits(model, ids)
    with pytest.raises(rope_ext.OptionError):
        rope_ext.patch(model, "string", factor=4, replace=True)
    assert rope_ext.describe(model).method == "rerope"
    assert torch.equal(logits(model, ids), said)
    with rope_ext.patched(model, "yarn", factor=4, replace=True):
        assert rope_ext.describe(model).method == "yarn"
    assert torch.equal(logits(model, ids), said)


@pytest.mark.parametrize(
    ("name", "factor", "shown"),
    [
        ("rerope", 4, "64 -> 256 tokens by rerope(factor=4, log_n=True, window=16)"),
        ("leaky_rerope", 4, f"log_n=True, window=8, k={248 / 56})"),
        ("self_extend", 8, "64 -> 512 tokens by self_extend(factor=8, window=16, group=19)"),
        ("dual_chunk", 4, "64 -> 256 tokens by dual_chunk(factor=4, chunk=48, local=8)"),
        ("string", 1.5, "64 -> 96 tokens by string(factor=1.5, shift=36, window=4)"),
        ("lm_infinite", 4, "lm_infinite(factor=4, window=64, sinks=10)"),
    ],
)
def test_describe_shows_what_was_chosen(model, name: str, factor: float, shown: str) -> None:
    rope_ext.patch(model, name, factor=factor)
    description = rope_ext.describe(model)
    assert shown in str(description)
    assert "positions: changed in 2 of 2 attention layers" in str(description)
    assert description.sites[0].status == "positions changed"
    assert model.config.max_position_embeddings == math.ceil(factor * LENGTH)


def test_describe_says_which_layers_stay() -> None:
    model = rope_ext.patch(tiny_model("gemma2"), "rerope", factor=4)
    assert "positions: changed in 1 of 2 attention layers" in str(rope_ext.describe(model))
    assert "sliding layers: 1 see a limited window and stay" in str(rope_ext.describe(model))


@pytest.mark.parametrize("kind", ["llama", "smollm3"])
def test_unusual_arguments_change_nothing(kind: str, ids) -> None:
    model = FAMILIES[kind].model()
    patch(model)
    right = logits(model, ids)
    with torch.no_grad():
        output = model(ids, output_hidden_states=True)
    assert len(output.hidden_states) == len(model.model.layers) + 1
    assert torch.equal(output.logits, right)
    embeds = model.get_input_embeddings()(ids)
    torch.testing.assert_close(logits(model, None, inputs_embeds=embeds), right, **EXACT)
    torch.testing.assert_close(logits(model, ids, logits_to_keep=3), right[:, -3:], **EXACT)
    from_seven = torch.arange(7, 97)[None]
    said = logits(model, ids, position_ids=from_seven, use_cache=False)
    torch.testing.assert_close(said, right, **EXACT)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, right, **EXACT)


# --- attention weights ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_weights_are_those_of_the_papers_distances(kind: str, name: str, ids) -> None:
    family = FAMILIES[kind]
    model = family.model()
    with by_formula(model, family, name, torch.arange(90)[None], **METHODS[name]):
        right = model(ids, output_attentions=True).attentions
    patch(model, name, **family.options)
    plain = logits(model, ids)
    with torch.no_grad():
        output = model(ids, output_attentions=True)
    assert torch.equal(output.logits, plain)
    assert len(output.attentions) == len(right) == len(model.model.layers)
    for weights, expected in zip(output.attentions, right, strict=True):
        torch.testing.assert_close(weights.double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "implementation"),
    [("llama", "sdpa"), ("llama", "eager"), ("smollm3", "sdpa"), ("gemma2", "eager")],
)
def test_attention_weights_of_padded_rows_and_of_caches(kind, implementation, ids) -> None:
    family = FAMILIES[kind]
    model = family.model()
    model.set_attn_implementation(implementation)
    patch(model, **family.options)
    batch, mask, positions = padded([ids[0], ids[1, :61]], "left")
    given = {"attention_mask": mask, "position_ids": positions}
    with torch.no_grad():
        alone = model(ids[1:, :61], output_attentions=True).attentions
        together = model(batch, **given, output_attentions=True).attentions
        assert len(alone) == len(model.model.layers)
        for make in CACHES.values():
            cache = make(model.config)
            model(ids[1:, :60], past_key_values=cache)
            last = model(ids[1:, 60:61], past_key_values=cache, output_attentions=True).attentions
            for one, other, right in zip(together, last, alone, strict=True):
                torch.testing.assert_close(one[1, :, 29:, 29:], right[0], **EXACT)
                keys = min(other.shape[-1], 61)  # a cache may hold the window only, or empty slots
                begin = 61 - keys if other.shape[-1] < 61 else 0
                torch.testing.assert_close(other[0, :, 0, :keys], right[0, :, 60, begin:], **EXACT)


def test_generate_returns_attention_weights(model, ids) -> None:
    patch(model)
    output = model.generate(
        ids[:1, :60], **NEW, output_attentions=True, return_dict_in_generate=True
    )
    right = model(output.sequences[:, :-1], output_attentions=True).attentions
    assert [len(layers) for layers in output.attentions] == [2] * 24
    for step, layers in enumerate(output.attentions):
        for weights, expected in zip(layers, right, strict=True):
            keys = 60 + step
            torch.testing.assert_close(weights[0, :, -1], expected[0, :, keys - 1, :keys], **EXACT)


def test_gradients_flow_through_attention_weights_and_survive_checkpointing(ids) -> None:
    found = []
    for checkpointing in (False, True):
        model = patch(tiny_model("smollm3")).train()  # of two layers the map changes one
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        output = model(ids, output_attentions=True, use_cache=False)
        sum(weights.square().sum() for weights in output.attentions).backward()
        found.append([p.grad for n, p in model.named_parameters() if "q_proj" in n])
    for one, other in zip(*found, strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(one, other)


def test_a_configuration_that_could_not_be_saved_is_refused_before_the_work(ids, tmp_path) -> None:
    model = tiny_llama()
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    before = snapshot(model)
    with pytest.raises(rope_ext.OptionError, match=r"set it to False and pass output_attentions"):
        patch(model)
    assert changed(before, snapshot(model)) == set()
    model.config.output_attentions = False
    patch(model)
    assert len(model(ids, output_attentions=True).attentions) == 2
    model.save_pretrained(tmp_path)


# --- guards --------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_another_attention_implementation_is_refused_with_the_cure(implementation, ids) -> None:
    model = patch(tiny_llama())
    right = logits(model, ids)
    model.set_attn_implementation(implementation)
    with pytest.raises(rope_ext.UnsupportedModelError, match=r"rope_ext\.unpatch.*replace=True"):
        logits(model, ids)
    patch(model, replace=True)
    torch.testing.assert_close(logits(model, ids), right, **EXACT)
    rope_ext.unpatch(model)
    assert model.config._attn_implementation == implementation
    torch.testing.assert_close(logits(model, ids), logits(tiny_llama(), ids), **EXACT)


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_a_cache_begun_unpatched_is_refused_with_the_cure(make, model, ids) -> None:
    cache = make(model.config)
    logits(model, ids[:, :50], past_key_values=cache)
    patch(model)
    with pytest.raises(rope_ext.CacheError, match=r"empty cache.*'yarn'"):
        logits(model, ids[:, 50:], past_key_values=cache)


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_a_cache_is_not_continued_under_another_patch_or_none(make, model, ids) -> None:
    patch(model)
    right = logits(model, ids)
    cache = make(model.config)
    logits(model, ids[:, :50], past_key_values=cache)
    rope_ext.unpatch(model)
    with pytest.raises(rope_ext.CacheError, match="empty cache"):
        logits(model, ids[:, 50:], past_key_values=cache)
    patch(model, group=4)
    with pytest.raises(rope_ext.CacheError, match="empty cache"):
        logits(model, ids[:, 50:], past_key_values=cache)
    rope_ext.patch(model, "yarn", factor=4, replace=True)
    with pytest.raises(rope_ext.CacheError, match="empty cache"):
        logits(model, ids[:, 50:], past_key_values=cache)
    patch(model, replace=True)
    cached = decoded(model, ids, [50, 40], make(model.config))
    torch.testing.assert_close(cached, right, **EXACT)


def test_a_cache_is_not_continued_with_other_sliding_layers(ids) -> None:
    model = patch(tiny_model("gemma2"))
    cache = DynamicCache(config=model.config)
    logits(model, ids[:, :50], past_key_values=cache)
    patch(model, replace=True, **SCALE)
    with pytest.raises(rope_ext.CacheError, match="empty cache"):
        logits(model, ids[:, 50:], past_key_values=cache)


def test_a_cache_is_not_continued_over_another_frequency_map(model, ids) -> None:
    patch(model, frequency=rope_ext.NTK(factor=2))
    cache = DynamicCache(config=model.config)
    logits(model, ids[:, :50], past_key_values=cache)
    patch(model, frequency=rope_ext.YaRN(factor=2), replace=True)
    with pytest.raises(rope_ext.CacheError, match="empty cache"):
        logits(model, ids[:, 50:], past_key_values=cache)


@pytest.mark.parametrize("what", ["fewer", "swapped", "repeated"])
def test_a_padded_cache_of_other_rows_is_right_or_refused(what: str, ids) -> None:
    model = patch(tiny_llama())
    rows = [ids[0, :80], ids[1, :41]]
    batch, mask, positions = padded(rows, "left")
    cache = DynamicCache(config=model.config)
    logits(model, batch, attention_mask=mask, position_ids=positions, past_key_values=cache)
    order = {"fewer": [1], "swapped": [1, 0], "repeated": [0, 0, 1, 1]}[what]
    if what == "fewer":
        cache.batch_select_indices(torch.tensor(order))
    elif what == "swapped":
        cache.reorder_cache(torch.tensor(order))
    else:
        cache.batch_repeat_interleave(2)
    given = {
        "attention_mask": torch.cat((mask[order], torch.ones(len(order), 1, dtype=torch.long)), 1),
        "position_ids": positions[order][:, -1:] + 1,
    }
    try:
        said = logits(model, ids[order, :1], past_key_values=cache, **given)
    except rope_ext.CacheError as error:
        assert "empty cache" in str(error)
        return
    for i, row in enumerate(order):
        alone = logits(model, torch.cat((rows[row], ids[row, :1]))[None])[0, -1]
        torch.testing.assert_close(said[i, -1], alone, **EXACT)


@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}, {"use_cache": False}])
def test_generation_behind_padding_on_the_right_is_refused_with_the_cure(how, ids) -> None:
    model = patch(tiny_llama())
    batch, mask, _ = padded([ids[0], ids[1, :61]], "right")
    with pytest.raises(rope_ext.UnsupportedModelError, match="padding_side='left'"):
        model.generate(batch, attention_mask=mask, **NEW, **how)


def test_continuous_batching_is_refused_with_the_cure(ids) -> None:
    model = patch(tiny_llama())
    with pytest.raises(rope_ext.CacheError, match=r"continuous batching.*DynamicCache.*'yarn'"):
        model(ids, cache=object())
    with pytest.raises(ValueError, match=r"continuous batching|rope_ext"):  # transformers' own
        model.generate_batch(inputs=[ids[0].tolist()], max_new_tokens=2)


def test_export_is_refused_with_the_cure(ids) -> None:
    model = patch(tiny_llama())
    with pytest.raises(rope_ext.UnsupportedModelError, match="'yarn'"):
        torch.export.export(model, (ids,), {"use_cache": False}, strict=False)


def test_prefix_tuning_is_refused_with_the_cure(ids) -> None:
    from peft import PrefixTuningConfig, get_peft_model

    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    for model in (
        get_peft_model(patch(tiny_llama()), config),
        patch(get_peft_model(tiny_llama(), config)),
    ):
        with pytest.raises(rope_ext.CacheError, match=r"prefix tuning.*'yarn'"):
            model(ids)


def test_a_layer_run_by_itself_is_refused(ids) -> None:
    model = patch(tiny_llama())
    x = torch.zeros(1, 4, 64)
    turn = torch.ones(1, 4, 16), torch.zeros(1, 4, 16)
    with pytest.raises(rope_ext.UnsupportedModelError, match="run the whole model"):
        model.model.layers[0](x, position_embeddings=turn)
