"""One of two gloo processes of test_distributed.py; compares results with a single process.

Run by: torchrun --nproc_per_node 2 tests/helpers/distributed_worker.py
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM

import rope_ext
from recipes.parallel import leave
from tests.helpers.models import tiny_llama

METHODS = {
    "yarn": {"factor": 4},
    "yarn, ssmax": {"factor": 4, "temperature": "ssmax"},
    "rerope, ssmax": {"factor": 4, "window": 16, "temperature": "ssmax"},
}


def adapted(model: torch.nn.Module) -> torch.nn.Module:
    """Add LoRA with gradients for both matrices, and two kinds of fully trained modules."""
    torch.manual_seed(1)
    lora = LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        modules_to_save=["embed_tokens", "norm", "rope_ext_temperature"],
        init_lora_weights=False,
    )
    return get_peft_model(model, lora).train()


def patched(method: str, model: torch.nn.Module | None = None) -> torch.nn.Module:
    return rope_ext.patch(model or tiny_llama(), method.split(",")[0], **METHODS[method])


def rows(of: slice) -> torch.Tensor:
    """Return some of four rows of tokens, 2.5 times as long as the trained length."""
    return torch.randint(3, 128, (4, 160), generator=torch.Generator().manual_seed(2))[of]


def mine() -> torch.Tensor:
    return rows(slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2))


def gradients(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return full gradients of all trained parameters, by name without wrappers."""
    model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids)).loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            grad = parameter.grad
            whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            found[name.removeprefix("module.")] = whole.clone()
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    """Assert equality up to the order of float32 sums: 1e-5 of the largest value."""
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        error = (found[name] - value).abs().max() / value.abs().max()
        assert error < 1e-5, f"{what}: {name} is off by {error:.1e} of its largest gradient"


def rotary(model: torch.nn.Module) -> torch.Tensor:
    return next(b for name, b in model.named_buffers() if name.endswith("rotary_emb.inv_freq"))


def shard(model: torch.nn.Module) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for module in model.modules():
        if type(module).__name__ == "LlamaDecoderLayer":
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp2() -> None:
    """Check sharding before and after the patch, with and without gradient checkpointing."""
    for method in METHODS:
        whole = adapted(patched(method))
        expected = gradients(whole, rows(slice(4)))
        for order in ("patch first", "shard first", "checkpointing"):
            if order == "shard first":
                sharded = shard(adapted(tiny_llama()))
                if method != "yarn":  # the patch runs the model once
                    with pytest.raises(rope_ext.UnsupportedModelError, match="before fully_shard"):
                        patched(method, sharded)
                    continue
                model = patched(method, sharded)
            else:
                model = shard(adapted(patched(method)))
            if order == "checkpointing":
                model.gradient_checkpointing_enable({"use_reentrant": False})
            what = f"{method} under FSDP2, {order}"
            same(gradients(model, mine()), expected, what)
            assert torch.equal(rotary(model), rotary(whole)), what
            assert type(rotary(model)) is torch.Tensor, what


def meta() -> None:
    """Check patching and sharding on the meta device before loading weights."""
    whole = patched("yarn")
    with torch.device("meta"):
        model = LlamaForCausalLM(tiny_llama().config)
    model = shard(patched("yarn", model)).to_empty(device="cpu")
    weights = whole.state_dict() if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
    assert torch.equal(rotary(model), rotary(whole))
    assert not torch.equal(rotary(model), rotary(tiny_llama()))
    same(gradients(model, mine()), gradients(whole, rows(slice(4))), "meta")


def ulysses() -> None:
    """Check that fixed frequency methods are exact under Ulysses, and that others are not."""
    if importlib.util.find_spec("deepspeed") is None:
        return
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.init_distributed("gloo")
    ids, positions = rows(slice(1)), torch.arange(160).unsqueeze(0)
    mine = slice(80 * dist.get_rank(), 80 * dist.get_rank() + 80)
    methods = ("yarn", "pi", "ntk", "llama3", "dynamic_ntk", "rerope")

    def run(method: str, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        model = rope_ext.patch(tiny_llama(), method, factor=4).train()
        logits = model(ids[:, part], position_ids=positions[:, part]).logits
        logits.square().sum().backward()
        return logits, model.model.layers[0].self_attn.q_proj.weight.grad

    expected = {method: run(method, slice(None)) for method in methods}
    shared = {"core_attn_implementation": "sdpa", "sequence_parallel_size": 2}
    UlyssesSPAttentionHF.register_with_transformers(tiny_llama(), micro_batch_size=1, **shared)
    for method, (logits, gradient) in expected.items():
        found, part = run(method, mine)
        dist.all_reduce(part)
        exact = torch.allclose(found, logits[:, mine], atol=1e-4)
        fixed = method not in ("dynamic_ntk", "rerope")
        assert exact == fixed or dist.get_rank() == 0, f"{method} under Ulysses"
        if fixed:
            same({"q_proj": part}, {"q_proj": gradient}, f"{method} under Ulysses")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for check in (fsdp2, meta, ulysses):
        check()
        dist.barrier()
    leave()
