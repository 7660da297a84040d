"""Invariants of all patched models, asserted for a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn
from transformers.cache_utils import Cache

import rope_ext
from tests.families.checks import changed, snapshot
from tests.helpers.positions import CACHES, EXACT, NEW, decoded, logits, padded


def decodes_as_it_reads(
    model: nn.Module, cache: str, ids: torch.Tensor, steps: tuple[int, ...]
) -> None:
    """Assert that pieces of these sizes through a cache of :data:`CACHES` give the full logits."""
    whole = logits(model, ids)
    found = decoded(model, ids, list(steps), CACHES[cache](model.config))
    torch.testing.assert_close(found, whole, **EXACT)


def rows_are_as_alone(
    model: nn.Module, side: str, ids: torch.Tensor, with_positions: bool = False
) -> None:
    """Assert that padded rows of 90, 61 and 1 tokens have the logits and gradients of each."""
    rows = [ids[0], ids[1, :61], ids[0, 3:4]]
    batch, mask, positions = padded(rows, side)
    given = {"position_ids": positions} if with_positions else {}
    together = logits(model, batch, attention_mask=mask, **given)
    for row, real in enumerate(rows):
        alone = logits(model, real[None])[0]
        torch.testing.assert_close(together[row][mask[row].bool()], alone, **EXACT)
    weight = model.get_input_embeddings().weight
    loss = model(batch, attention_mask=mask, **given).logits[mask.bool()].sin().sum()
    losses = sum(model(real[None]).logits.sin().sum() for real in rows)
    found, expected = (torch.autograd.grad(one, weight)[0] for one in (loss, losses))
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=2e-3)  # as in the test matrix


def pieces_of_rows_are_as_alone(
    model: nn.Module,
    rows: list[torch.Tensor],
    side: str,
    steps: Iterable[int],
    cache: Cache,
    with_positions: bool = True,
) -> None:
    """Assert that padded rows, in pieces through ``cache``, have the same logits as alone."""
    tokens, mask, positions = padded(rows, side)
    said, done = [], 0
    for step in steps:
        part = slice(done, done + step)
        done += step
        given = {"position_ids": positions[:, part]} if with_positions else {}
        given |= {"attention_mask": mask[:, :done], "past_key_values": cache}
        said.append(logits(model, tokens[:, part], **given))
    said = torch.cat(said, 1)
    for row, one in enumerate(rows):
        right = logits(model, one[None], use_cache=False)[0]
        torch.testing.assert_close(said[row][mask[row].bool()], right, **EXACT)


def documents_are_apart(model: nn.Module, row: torch.Tensor, sizes: tuple[int, ...]) -> None:
    """Assert that documents of these sizes in one row have the same logits as alone."""
    positions = torch.cat([torch.arange(size) for size in sizes])[None]
    packed = logits(model, row, position_ids=positions, use_cache=False)
    alone = [logits(model, part) for part in row.split(list(sizes), 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), **EXACT)


def sees_nothing_later(model: nn.Module, ids: torch.Tensor) -> None:
    """Assert that tokens from 60 on change no earlier logits."""
    other = ids.clone()
    other[:, 60:] = other[:, 60:].flip(1)
    both = [logits(model, given)[:, :60] for given in (ids, other)]
    torch.testing.assert_close(*both, **EXACT)


def generates_as_it_recomputes(model: nn.Module, prompt: torch.Tensor, **more: Any) -> None:
    """Assert that generation is the same with and without a cache."""
    cached = model.generate(prompt, **NEW | more)
    more.pop("cache_implementation", None)
    assert torch.equal(cached, model.generate(prompt, **NEW | more, use_cache=False))


def is_saved_and_taken_out(
    model: nn.Module, patch: Callable[[nn.Module], nn.Module], ids: torch.Tensor, folder: Path
) -> None:
    """Assert that saving and unpatching restore a model bit for bit."""
    model.save_pretrained(folder)  # which writes into the configuration
    before, plain = snapshot(model), logits(model, ids)
    want = logits(patch(model), ids)
    model.save_pretrained(folder)
    assert torch.equal(logits(rope_ext.from_pretrained(folder), ids), want)
    rope_ext.unpatch(model)
    assert changed(before, snapshot(model)) == set()
    assert torch.equal(logits(model, ids), plain)


def learns(model: nn.Module, learned: dict[str, nn.Parameter], ids: torch.Tensor) -> None:
    """Assert that three steps lower the loss and change all parameters, and update caches."""
    before = {key: value.clone() for key, value in learned.items()}
    first, losses = logits(model.eval(), ids), []
    optimizer = torch.optim.Adam(learned.values(), lr=1e-3)
    for _ in range(3):
        loss = model.train()(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    assert all(not torch.equal(before[key], value) for key, value in learned.items())
    assert not torch.equal(logits(model.eval(), ids), first)


def checkpointing_changes_nothing(make: Callable[[], nn.Module], ids: torch.Tensor) -> None:
    """Assert that gradients of a patched model are the same with gradient checkpointing."""
    found = []
    for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model = make().train()
        if options is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        model(ids, labels=ids, use_cache=False).loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for checkpointed in found[1:]:
        for one, other in zip(found[0], checkpointed, strict=True):
            torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5)


def an_adapter_trains_it_along(
    base: nn.Module,
    patch: Callable[[nn.Module], nn.Module],
    modules: list[str],
    ids: torch.Tensor,
    folder: Path,
) -> None:
    """Assert that an adapter saves and loads an encoding's parameters.

    Args:
        base: an unpatched model.
        patch: patches it.
        modules: of the encoding, which the adapter saves.
        ids: for the logits.
        folder: for the model and its adapter.
    """
    base.save_pretrained(folder / "base")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=modules, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(patch(base), config)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad and "rope_ext" in n}
    before = logits(model, ids)
    with torch.no_grad():
        for parameter in trained.values():
            parameter.normal_(std=0.3)
    want = logits(model, ids)
    assert trained and not torch.equal(want, before)
    model.save_pretrained(folder / "adapter")
    rope_ext.save_sidecar(model, folder / "adapter")
    again = rope_ext.from_pretrained(folder / "adapter", base=folder / "base")
    assert torch.equal(logits(again, ids), want)
