"""TRL's trainers on patched models: what is trained, and what is generated for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import rope_ext
from tests.helpers.checkpoint import save_checkpoint
from tests.helpers.engines import VOCABULARY, built, expected
from tests.helpers.models import LENGTH as TRAINED

pytest.importorskip("trl")
LENGTH = 256
PROMPTS = (2 * TRAINED, 2 * TRAINED + 30)  # tokens


def words() -> PreTrainedTokenizerFast:
    """A tokenizer of ``t0 t1 t2``, and so on."""
    vocabulary = {f"t{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0", eos_token="t2")


def trained(model: Any, folder: Path) -> tuple[list[float], Any]:
    """Losses of three steps beyond the trained length, and the model."""
    from trl import SFTConfig, SFTTrainer

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
        processing_class=words(),
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


@pytest.mark.slow
def test_the_example_on_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "engines" / "beside.md").read_text("utf-8")
    (block,) = re.findall(r"```python\n(import rope_ext\nfrom datasets.*?)```", page, re.DOTALL)
    save_checkpoint(tmp_path / "checkpoints" / "tiny-512")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(block.replace("report_to=[]", "report_to=[], bf16=False, use_cpu=True"), names)
    assert names["trainer"].state.global_step == 2
    assert names["tokenizer"].model_max_length == 4 * 128


def lengths_of(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward."""
    return [float(sum(ids) % 7) for ids in completion_ids]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "load"),
    [
        ("yarn", AutoModelForCausalLM.from_pretrained),
        ("dynamic_yarn", rope_ext.from_pretrained),
        ("rerope", rope_ext.from_pretrained),
    ],
)
def test_grpo_generates_what_the_model_does_by_itself(tmp_path: Path, method: str, load) -> None:
    from trl import GRPOConfig, GRPOTrainer

    model = rope_ext.patch(built("llama"), method, factor=4)
    inner, compared = model.generate, []

    def generate(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs |= {"return_dict_in_generate": True, "output_logits": True}
        model.save_pretrained(tmp_path / "now")  # its weights are others in every step
        state = torch.get_rng_state()
        found = inner(*args, **kwargs)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        alone = load(tmp_path / "now").train().generate(*args, **kwargs)
        torch.set_rng_state(after)
        compared.append((found, alone))
        return found.sequences

    model.generate = generate
    chosen = torch.Generator().manual_seed(5)
    rows = [torch.randint(4, VOCABULARY, (n,), generator=chosen).tolist() for n in PROMPTS]
    before = model.lm_head.weight.detach().clone()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lengths_of,
        args=GRPOConfig(
            output_dir=str(tmp_path / "grpo"),
            max_steps=2,
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=6,
            learning_rate=1e-2,
            save_strategy="no",
            report_to=[],
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
        ),
        train_dataset=Dataset.from_dict(
            {"prompt": [" ".join(f"t{i}" for i in row) for row in rows]}
        ),
        processing_class=words(),
    )
    trainer.train()
    assert len(compared) == 2 and not torch.equal(model.lm_head.weight, before)
    for found, alone in compared:
        assert found.sequences.shape[1] > 2 * TRAINED
        assert torch.equal(found.sequences, alone.sequences)
        # The same operations, on frequencies of which a reloaded table is rounded once more.
        torch.testing.assert_close(
            torch.stack(found.logits), torch.stack(alone.logits), rtol=0, atol=1e-3
        )
