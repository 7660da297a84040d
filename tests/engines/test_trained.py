"""The same rotary embedding in the trainer and in the server: fine-tuned, merged, served."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

import rope_ext
from rope_ext.engines import gguf_file, gguf_model, running
from tests.helpers.engines import TOLERANCE, VOCABULARY, built, expected, prompts

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")
LENGTH = 256
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("yarn", {"attention_factor": 1.25}),
    ("ntk", {}),
    ("resonance", {}),
    ("dynamic_yarn", {"length": LENGTH}),
]


def tuned(model: Any) -> Any:
    """A few steps of LoRA at the extended length, on a sequence that comes round again."""
    torch.manual_seed(0)
    layers = ["q_proj", "k_proj", "v_proj", "down_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=layers))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    row = torch.randint(4, VOCABULARY, (1, LENGTH // 2)).repeat(1, 2)
    losses = []
    for _ in range(8):
        loss = model(row, labels=row).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize(("method", "options"), METHODS, ids=[name for name, _ in METHODS])
def test_the_server_gives_the_trainers_numbers(
    tmp_path: Path, method: str, options: dict[str, Any]
) -> None:
    base = built("llama")
    before = expected(rope_ext.patch(base, method, factor=4, **options), LENGTH)
    trainer = tuned(base)
    want = expected(trainer, LENGTH)
    assert (want - before).abs().max() > 0.5  # it has learned something

    trainer.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(expected(merged, LENGTH), want, rtol=0, atol=TOLERANCE)
    gguf_model.write_model(merged, tmp_path / "MODEL.gguf")  # without its scaling

    made = gguf_file.following(merged, tmp_path / "MODEL.gguf", tmp_path / "MODEL-long.gguf")
    words = ["--model", str(tmp_path / "MODEL-long.gguf"), *made.in_file]
    got = running.llama_cpp(words, prompts(LENGTH), VOCABULARY)
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)

    if made.table is None:  # the flags of the training run, on the unscaled file
        program, _, _, *words = shlex.split(rope_ext.export(trainer, "llama.cpp").command)
        assert program == "llama-server"
        words = ["--model", str(tmp_path / "MODEL.gguf"), *words]
        got = running.llama_cpp(words, prompts(LENGTH), VOCABULARY)
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)
