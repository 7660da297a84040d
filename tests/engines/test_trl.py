"""TRL's SFTTrainer on a patched model trains what it trains on a natively scaled one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import rope_ext
from tests.helpers.engines import VOCABULARY, built, expected

pytest.importorskip("trl")
LENGTH = 256


def trained(model: Any, folder: Path) -> tuple[list[float], Any]:
    """Losses of three steps beyond the trained length, and the model."""
    from trl import SFTConfig, SFTTrainer

    words = {f"t{i}": i for i in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="t0")), pad_token="t0", eos_token="t2"
    )
    rows = torch.randint(4, VOCABULARY, (8, 100), generator=torch.Generator().manual_seed(3))
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(folder),
            max_steps=3,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            max_length=None,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
        ),
        train_dataset=Dataset.from_dict({"input_ids": rows.repeat(1, 2).tolist()}),
        processing_class=tokenizer,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["yarn", "resonance"])
def test_sft_of_a_patched_model_is_that_of_a_natively_scaled_one(tmp_path, method: str) -> None:
    model = rope_ext.patch(built("llama"), method, factor=4)
    model.save_pretrained(tmp_path / "native")
    ours, model = trained(model, tmp_path / "a")
    native = AutoModelForCausalLM.from_pretrained(tmp_path / "native")
    theirs, native = trained(native, tmp_path / "b")
    unextended, _ = trained(built("llama"), tmp_path / "c")
    # The same numbers, of which a table is rounded once more.
    assert ours == pytest.approx(theirs, abs=1e-3)
    assert ours != pytest.approx(unextended, abs=5e-3)
    got, want = expected(model, LENGTH), expected(native, LENGTH)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-2)
    assert rope_ext.describe(model).method == method
