"""The loss of restoration: against two models, and in runs of recipes/finetune.py."""

from __future__ import annotations

import copy
from pathlib import Path

import peft
import pytest
import torch

import rope_ext
from recipes import finetune
from recipes.restoration import restoration_loss
from tests.helpers.models import tiny_llama
from tests.helpers.recipe_runs import arguments, history


def adapted(method: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """An original model, and the same patched and with an adapter that has learned something."""
    original = tiny_llama().double()
    model = rope_ext.patch(copy.deepcopy(original), method, factor=4)
    whole = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False)).double()
    return original, whole


@pytest.mark.parametrize("method", ["yarn", "rerope"])
def test_the_loss_is_one_minus_the_cosine_with_the_original(method: str, ids) -> None:
    original, whole = adapted(method)
    before = whole(ids).logits
    found = restoration_loss(whole, whole, ids)
    assert torch.equal(whole(ids).logits, before)
    theirs, ours = (m(ids, output_hidden_states=True).hidden_states for m in (original, whole))
    cosines = [
        (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))
        for a, b in zip(theirs[1:], ours[1:], strict=True)
    ]
    # States become float32 before the cosine.
    assert found.item() == pytest.approx(1 - torch.stack(cosines).mean().item(), abs=1e-6)
    assert found.item() > 1e-4
    found.backward()
    assert all(p.grad is not None for p in whole.parameters() if p.requires_grad)


def test_accumulated_rows_count_as_much_as_rows_of_one_batch(
    checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    losses = []
    for rows, accumulated in ((4, 1), (2, 2)):
        run = tmp_path / f"run{rows}"
        more = {"restoration": 50, "max_steps": 1}
        more |= {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulated}
        finetune.main(arguments(checkpoint, texts, run, **more))
        losses.append(history(run / "checkpoint-1")[0][1])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)  # float32, rounded when logged
    plain = tmp_path / "plain"
    more["restoration"] = 0
    finetune.main(arguments(checkpoint, texts, plain, **more))
    assert losses[0] > history(plain / "checkpoint-1")[0][1] + 0.01
