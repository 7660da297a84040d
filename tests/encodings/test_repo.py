"""Positions that layers compute from hidden states: by their definition, with every cache."""

from __future__ import annotations

import pytest
import torch

import rope_ext
from rope_ext.methods import build_method
from tests.helpers.models import tiny_llama
from tests.helpers.positions import CACHES, EXACT, FAMILIES, logits
from tests.helpers.promises import (
    an_adapter_trains_it_along,
    checkpointing_changes_nothing,
    decodes_as_it_reads,
    generates_as_it_recomputes,
    is_saved_and_taken_out,
    learns,
    pieces_of_rows_are_as_alone,
)
from tests.helpers.repo import dense, parameters, patch

SLOW = [pytest.mark.slow]
KINDS = ["llama", "qwen3", "olmo2", "stablelm", "gpt_neox", "gpt_oss scaled", "gemma2 scaled"]


@pytest.mark.parametrize("positions", ["learned", "shifted"])
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k in ("llama", "stablelm") else SLOW) for k in KINDS[:5]]
)
def test_logits_and_gradients_are_those_of_the_definition(kind: str, positions: str, ids) -> None:
    """Heads of queries share the positions of their keys; stablelm rotates a part of a head."""
    family, ids = FAMILIES[kind], ids[:, :14]
    model, plain = family.model(), family.model()
    patch(model, positions=positions)
    learned = parameters(model)
    with dense(plain, learned, torch.arange(14)[None], positions == "shifted"):
        right = plain(ids).logits
    found = model(ids).logits
    torch.testing.assert_close(found, right, **EXACT)
    of_both = [torch.autograd.grad(x.sin().sum(), list(learned.values())) for x in (found, right)]
    for one, other in zip(*of_both, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)  # sums over all pairs
    assert (found - logits(plain, ids)).abs().max() > 0.1


def test_the_first_layers_keep_their_rotation(ids) -> None:
    """The first 5 of 16, rounded down, unless ``layers`` chooses others."""
    ids = ids[:, :12]
    repo = build_method("repo")
    assert [repo.default_layers(n)[0] for n in (1, 3, 4, 16, 32)] == [0, 0, 1, 5, 10]
    model, plain = patch(tiny_llama(num_hidden_layers=4)), tiny_llama(num_hidden_layers=4)
    assert {int(name.split(".")[2]) for name in parameters(model)} == {1, 2, 3}
    assert "layers: 1, 2, 3; the others keep the rotation" in str(rope_ext.describe(model))
    with dense(plain, parameters(model), torch.arange(12)[None]):
        right = logits(plain, ids)
    torch.testing.assert_close(logits(model, ids), right, **EXACT)
    chosen = rope_ext.patch(tiny_llama(num_hidden_layers=4), "repo", layers=[0, 3])
    assert {int(name.split(".")[2]) for name in parameters(chosen)} == {0, 3}


def test_it_begins_as_published_or_with_the_model_itself(ids) -> None:
    """Truncated normal numbers, which make no position at first; or the model's own positions."""
    plain = logits(tiny_llama(), ids)
    torch.manual_seed(0)
    model = rope_ext.patch(tiny_llama(hidden_size=256), "repo")
    shapes = {name.split(".")[-1]: list(p.shape) for name, p in parameters(model).items()}
    assert shapes == {"gate": [32, 256], "content": [32, 256], "position": [2, 32]}
    drawn = next(iter(parameters(model).values()))
    assert drawn.abs().max() <= 0.06 and 0.019 < drawn.std() < 0.0205  # cut at three deviations
    nope = rope_ext.patch(tiny_llama(), "nope")
    model = rope_ext.patch(tiny_llama(), "repo")
    torch.testing.assert_close(logits(model, ids), logits(nope, ids), atol=0.05, rtol=0)
    model = rope_ext.patch(tiny_llama(), "repo", positions="shifted")
    torch.testing.assert_close(logits(model, ids), plain, **EXACT)
    model(ids).logits.sum().backward()
    moved = {n.split(".")[-1] for n, p in parameters(model).items() if p.grad.abs().max() > 0}
    assert moved == {"position"}  # the others follow from the second step on


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=SLOW) for kind in KINDS[1:]])
def test_families_decode_as_they_read(kind: str, ids) -> None:
    family = FAMILIES[kind]
    model = patch(family.model(), **family.options)
    decodes_as_it_reads(model, "dynamic", ids, (40, 1, 1, 30, 1, 1, 1, 15))


@pytest.mark.parametrize("cache", CACHES)
def test_padded_rows_in_pieces_are_as_alone(cache: str, ids) -> None:
    model = patch(tiny_llama())
    made = CACHES[cache](model.config)
    pieces_of_rows_are_as_alone(model, [ids[0, :75], ids[1, :64]], "left", (65, 1, 5, 1, 3), made)


def test_the_order_of_earlier_tokens_changes_nothing_in_one_layer(ids) -> None:
    """Numbers in the sequence act through the causal mask alone."""
    for positions, same in (("learned", True), ("shifted", False)):
        model = patch(tiny_llama(num_hidden_layers=1), positions=positions)
        swapped = torch.cat((ids[:, :40].flip(1), ids[:, 40:]), 1)
        apart = (logits(model, swapped)[:, 40:] - logits(model, ids)[:, 40:]).abs().max()
        assert bool(apart < 1e-4) == same


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"num_beams": 3}, marks=SLOW),
        pytest.param({"cache_implementation": "static"}, marks=SLOW),
    ],
)
def test_generation_is_that_of_recomputation(more: dict, ids) -> None:
    generates_as_it_recomputes(patch(tiny_llama(), factor=4), ids[:, :70], **more)


def test_it_is_trained_saved_reloaded_and_taken_out(ids, tmp_path) -> None:
    model = tiny_llama()
    before, plain = dict(model.state_dict()), logits(model, ids)
    patch(model)
    is_saved_and_taken_out(model, before, plain, ids, tmp_path)
    patch(model)
    learns(model, parameters(model), ids, 60, 0.003)


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=SLOW)])
def test_gradients_with_checkpointing(reentrant: bool, ids) -> None:
    checkpointing_changes_nothing(lambda: patch(tiny_llama()), reentrant, ids)


def test_an_adapter_can_train_it_along(ids, tmp_path) -> None:
    names = an_adapter_trains_it_along(
        tiny_llama(), patch, ["rope_ext_positions"], ids, tmp_path, std=0.3
    )
    assert len(names) == 6


def test_positions_are_not_rounded_in_half_precision(ids) -> None:
    """Numbers of bfloat16 are whole beyond 256."""
    model, t = patch(tiny_llama()), torch.arange(4)[None]
    module = model.model.layers[0].self_attn.rope_ext_positions
    x = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    want = module(x.float(), t)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x, t), want)
        found = model(ids).logits
    right = logits(model, ids)
    assert (found - right).abs().max() < 0.1 * right.abs().max()
    model.to(torch.bfloat16)
    assert module(x, t).dtype == torch.float32
    assert (logits(model, ids) - right).abs().mean() < 0.1 * right.abs().max()
