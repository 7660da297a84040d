"""TRL's trainers on patched models: what is trained, generated for it, and compared with."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import rope_ext
from tests.helpers.checkpoint import save_checkpoint
from tests.helpers.engines import VOCABULARY, built, expected
from tests.helpers.models import LENGTH as TRAINED

pytest.importorskip("trl")
pytestmark = pytest.mark.slow
LENGTH = 256
PAGED = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"num_blocks": 32, "max_batch_tokens": 512},
}
PROMPTS = (2 * TRAINED, 2 * TRAINED + 30)  # tokens
QUIET = {
    "max_steps": 1,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
}


def texts(*lengths: int) -> list[str]:
    """Random texts of so many tokens each."""
    chosen = torch.Generator().manual_seed(5)
    rows = [torch.randint(4, VOCABULARY, (n,), generator=chosen).tolist() for n in lengths]
    return [" ".join(f"t{i}" for i in row) for row in rows]


def words() -> PreTrainedTokenizerFast:
    """A tokenizer of ``t0 t1 t2``, and so on."""
    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0", eos_token="t2")


@pytest.mark.parametrize("method", ["yarn", "resonance"])
def test_sft_of_a_patched_model_is_that_of_a_natively_scaled_one(tmp_path, method: str) -> None:
    from trl import SFTConfig, SFTTrainer

    def losses(model: Any) -> list[float]:
        """Of three steps beyond the trained length."""
        settings = {**QUIET, "max_steps": 3, "learning_rate": 1e-2}
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(str(tmp_path), max_length=None, **settings),
            train_dataset=Dataset.from_dict({"input_ids": rows.repeat(1, 2).tolist()}),
            processing_class=words(),
        )
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    rows = torch.randint(4, VOCABULARY, (8, 100), generator=torch.Generator().manual_seed(3))
    model = rope_ext.patch(built("llama"), method, factor=4)
    model.save_pretrained(tmp_path / "native")
    native = AutoModelForCausalLM.from_pretrained(tmp_path / "native")
    ours = losses(model)
    assert ours == pytest.approx(losses(native), abs=1e-3)  # a table is rounded once more
    assert ours != pytest.approx(losses(built("llama")), abs=5e-3)
    got, want = expected(model, LENGTH), expected(native, LENGTH)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-2)


def test_the_examples_on_the_page_reload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all trainers, with all weights and adapters; what was trained is what comes back."""
    page = (Path(__file__).parents[2] / "docs" / "engines" / "beside.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page.split("## lm-evaluation")[0], re.DOTALL)
    save_checkpoint(tmp_path / "checkpoints" / "tiny-512")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    ids = torch.arange(3, 203)[None] % 100
    found = []
    for block in blocks:
        rate = "report_to=[], learning_rate=0.1, bf16=False, use_cpu=True"
        short = re.sub(r" \* [23]00", " * 30", block)  # for a model of 128 tokens
        exec(short.replace("report_to=[]", rate), names)
        assert names["trainer"].state.global_step == 2
        assert names["tokenizer"].model_max_length == 4 * 128
        with torch.no_grad():
            trained = names["trainer"].model.eval()(ids).logits
            found.append(names["model"].eval()(ids).logits)
        torch.testing.assert_close(found[-1], trained, rtol=0, atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained("checkpoints/tiny-512")
    with torch.no_grad():
        untrained = rope_ext.patch(base, "yarn", factor=4).eval()(ids).logits
    assert len(found) == 4
    for logits in found:
        assert (logits - untrained).abs().max() > 0.01  # it learned


def lengths_of(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def first_dpo_loss(model: Any, folder: Path, **kwargs: Any) -> float:
    """The loss before the first step, when the policy still is its reference."""
    from trl import DPOConfig, DPOTrainer

    rows = [texts(n, 30, 31) for n in PROMPTS]
    trainer = DPOTrainer(
        model=model,
        args=DPOConfig(str(folder), per_device_train_batch_size=2, max_length=None, **QUIET),
        train_dataset=Dataset.from_list(
            [{"prompt": f"{p} ", "chosen": one, "rejected": two} for p, one, two in rows]
        ),
        processing_class=words(),
        **kwargs,
    )
    trainer.train()
    return trainer.state.log_history[0]["loss"]


def patched(folder: Path, method: str) -> Any:
    built("llama").save_pretrained(folder / "model")
    return rope_ext.patch(AutoModelForCausalLM.from_pretrained(folder / "model"), method, factor=4)


@pytest.mark.parametrize("reference", ["a copy", "peft", "the folder"])
@pytest.mark.parametrize("method", ["yarn", "dynamic_yarn", "rerope"])
def test_dpo_begins_at_its_reference(method: str, reference: str, tmp_path: Path) -> None:
    model, more = patched(tmp_path, method), {}
    if reference == "a copy":
        more["ref_model"] = copy.deepcopy(model)
    elif reference == "peft":
        more["peft_config"] = LoraConfig(task_type="CAUSAL_LM")
    elif method == "yarn":
        model.save_pretrained(tmp_path / "long")
        model = str(tmp_path / "long")
    else:
        pytest.skip("plain transformers cannot load it")
    assert first_dpo_loss(model, tmp_path, **more) == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("method", ["yarn", "rerope"])
def test_grpo_begins_at_its_reference(method: str, tmp_path: Path) -> None:
    from trl import GRPOConfig, GRPOTrainer

    model = patched(tmp_path, method)
    if method == "yarn":
        model.save_pretrained(tmp_path / "long")
    trainer = GRPOTrainer(
        model=str(tmp_path / "long") if method == "yarn" else model,
        peft_config=None if method == "yarn" else LoraConfig(task_type="CAUSAL_LM"),
        reward_funcs=lengths_of,
        args=GRPOConfig(
            str(tmp_path / "grpo"),
            beta=0.1,
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=6,
            **QUIET,
        ),
        train_dataset=Dataset.from_dict({"prompt": texts(*PROMPTS)}),
        processing_class=words(),
    )
    trainer.train()
    assert trainer.state.log_history[0]["kl"] == pytest.approx(0, abs=1e-6)


def rollouts(
    name: str, model: Any, folder: Path, monkeypatch: Any, **options: Any
) -> tuple[Any, Any]:
    """What GRPO or RLOO generated for its first step, and the trainer."""
    import trl

    cls, config = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    found = []
    generate = cls._generate_and_score_completions

    def watched(trainer: Any, inputs: Any) -> Any:
        found.append(generate(trainer, inputs))
        return found[-1]

    monkeypatch.setattr(cls, "_generate_and_score_completions", watched)
    trainer = cls(
        model=model,
        reward_funcs=lengths_of,
        peft_config=LoraConfig(task_type="CAUSAL_LM"),
        args=config(
            str(folder / "run"),
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=12,
            top_k=1,  # greedy
            **options,
            **QUIET,
        ),
        train_dataset=Dataset.from_dict({"prompt": texts(*PROMPTS)}),
        processing_class=words(),
    )
    trainer.train()
    return found[0], trainer


@pytest.mark.parametrize(
    ("name", "method"), [("GRPO", "yarn"), ("GRPO", "self_extend"), ("RLOO", "yarn")]
)
def test_paged_rollouts_are_those_of_the_patched_model(
    name: str, method: str, tmp_path: Path, monkeypatch: Any
) -> None:
    model = patched(tmp_path, method)
    paged, trainer = rollouts(name, model, tmp_path, monkeypatch, **PAGED)
    assert trainer.state.global_step == 1
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    answers = {}
    for patch, other in (
        ("patched", rope_ext.patch(copy.deepcopy(base), method, factor=4)),
        ("unpatched", base),
    ):
        made = other.generate(
            paged["prompt_ids"],
            attention_mask=paged["prompt_mask"],
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=2,
            pad_token_id=0,
        )[:, paged["prompt_ids"].shape[1] :]
        answers[patch] = made.tolist()
    assert paged["completion_ids"].tolist() == answers["patched"]
    assert answers["patched"] != answers["unpatched"]


def test_paged_rollouts_that_cannot_be_right_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    model = patched(tmp_path, "dynamic_yarn")
    with pytest.raises(rope_ext.CacheError, match="continuous batching"):
        rollouts("GRPO", model, tmp_path, monkeypatch, **PAGED)


def test_references_that_a_trainer_loads_unpatched_are_refused(tmp_path: Path) -> None:
    with pytest.raises(rope_ext.AdapterError, match="reference model"):
        first_dpo_loss(patched(tmp_path, "yarn"), tmp_path)


def rollout_trainer(name: str, model: Any, folder: Path) -> Any:
    """A trainer of TRL that generates with vLLM, without vLLM: it is only compared."""
    import trl
    from trl.experimental import online_dpo

    module = online_dpo if name == "OnlineDPO" else trl
    options = {} if name == "OnlineDPO" else {"num_generations": 2, "max_completion_length": 6}
    made = getattr(module, f"{name}Trainer")(
        model=model,
        reward_funcs=[lengths_of] if name == "OnlineDPO" else lengths_of,
        peft_config=LoraConfig(task_type="CAUSAL_LM"),
        args=getattr(module, f"{name}Config")(
            str(folder / "run"), per_device_train_batch_size=2, **options, **QUIET
        ),
        train_dataset=Dataset.from_dict({"prompt": texts(*PROMPTS)}),
        processing_class=words(),
    )
    made.args.use_vllm = True
    return made


@pytest.mark.parametrize("name", ["GRPO", "RLOO", "OnlineDPO"])
def test_rollouts_with_vllm_of_an_unpatched_folder_are_refused(name: str, tmp_path: Path) -> None:
    """TRL gives vLLM the folder that the model was loaded from, here before its patch."""
    with pytest.raises(rope_ext.AdapterError, match="vLLM generates with"):
        rollout_trainer(name, patched(tmp_path, "yarn"), tmp_path).train()
