"""Whole models under an encoding beside the rotation: the papers' biases, exactly."""

from __future__ import annotations

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

import rope_ext
from rope_ext.encodings.alibi import slopes
from tests.helpers.biases import FORMULAS, LEARNED, dense, parameters, patch
from tests.helpers.models import tiny_llama
from tests.helpers.positions import EXACT, FAMILIES, logits
from tests.helpers.promises import (
    documents_are_apart,
    generates_as_it_recomputes,
)

KINDS = ["llama", "qwen3", "mistral", "gemma2 scaled", "gpt_neox", "gpt_oss"]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 16, 20, 112])
def test_slopes_are_those_of_bloom(heads: int) -> None:
    """Of BLOOM and, in powers of two, of MPT, whose interpolation is another."""
    of_bloom = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(slopes(heads).float(), of_bloom)
    if heads & (heads - 1) == 0:
        of_mpt = -build_mpt_alibi_tensor(heads, 2)[:, 0, 0]
        torch.testing.assert_close(slopes(heads).float(), of_mpt)


@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (16, 64), (7, 20), (64, 5000)])
def test_buckets_are_those_of_t5(buckets: int, farthest: int) -> None:
    distance = torch.arange(20_000)
    of_t5 = T5Attention._relative_position_bucket(-distance, False, buckets, farthest)
    encoding = rope_ext.T5(num_buckets=buckets, max_distance=farthest)
    assert torch.equal(encoding.bucket(distance.double()), of_t5)
    assert bool((of_t5[farthest:] == buckets - 1).all())  # from where on it saturates_at


# Every formula in one family, and one formula in every family; the rest are slow.
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=[] if kind == KINDS[0] or name == "t5" else pytest.mark.slow)
        for kind in KINDS
        for name in FORMULAS
    ],
)
def test_logits_and_gradients_are_those_of_the_dense_bias(kind: str, name: str, ids) -> None:
    family = FAMILIES[kind]
    model, plain = family.model(), family.model()
    patch(model, name, **family.options)
    learned = parameters(model)
    assert bool(learned) == (name in LEARNED)
    with dense(plain, family, name, torch.arange(90)[None], learned):
        right = plain(ids).logits
    found = model(ids).logits
    torch.testing.assert_close(found, right, **EXACT)
    if learned:
        of_both = [
            torch.autograd.grad(x.sin().sum(), list(learned.values())) for x in (found, right)
        ]
        for one, other in zip(*of_both, strict=True):  # sums over 16,000 pairs
            torch.testing.assert_close(one, other, atol=2e-3, rtol=1e-3)
    assert (found - logits(plain, ids)).abs().max() > 0.01


@pytest.mark.parametrize("name", ["alibi", "kerple_power"])
def test_packed_documents_and_gaps_in_positions(name: str, ids) -> None:
    """Documents are kept apart; positions with gaps are taken as they are."""
    model = patch(tiny_llama(), name)
    row = ids[:1, :70]
    documents_are_apart(model, row, (30, 40))
    gaps = torch.cat((torch.arange(30), torch.arange(500, 540)))[None]
    plain = tiny_llama()
    with dense(plain, FAMILIES["llama"], name, gaps, parameters(model)):
        right = logits(plain, row, position_ids=gaps, attention_mask=torch.ones_like(row))
    found = logits(model, row, position_ids=gaps, attention_mask=torch.ones_like(row))
    torch.testing.assert_close(found, right, **EXACT)


@pytest.mark.parametrize("more", [{}, {"num_beams": 3}, {"cache_implementation": "static"}])
def test_generation_is_that_of_recomputation(more: dict, ids) -> None:
    model = patch(tiny_llama(), "alibi", factor=4)
    generates_as_it_recomputes(model, ids[:, :70], **more)
