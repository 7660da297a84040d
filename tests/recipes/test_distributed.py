"""Training on several devices: launch configurations, their limits, and two gloo processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands import launch
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils import launch as prepare
from torch.distributed.tensor.experimental._context_parallel import _HeadTailLoadBalancer

import rope_ext
from recipes.parallel import check_parallelism, context_parallel_size
from rope_ext.methods import Rope
from tests.helpers.methods import VARIANTS
from tests.helpers.models import tiny_llama

ROOT = Path(__file__).parents[2]
LAUNCHES = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))


# --- launch configurations, by accelerate's own code ----------------------------------------


def environment(
    name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[str, dict[str, str]]:
    """Which launcher ``accelerate launch`` takes for a configuration, and what it sets for it."""
    found: list[tuple[str, dict[str, str]]] = []

    def simple(args: Any) -> None:
        found.append(("simple", prepare.prepare_simple_launcher_cmd_env(args)[1]))

    def several(args: Any) -> None:
        found.append(("several", prepare.prepare_multi_gpu_env(args)))

    def deepspeed(args: Any) -> None:
        found.append(("deepspeed", prepare.prepare_deepspeed_cmd_env(args)[1]))

    monkeypatch.setattr(launch, "simple_launcher", simple)
    monkeypatch.setattr(launch, "multi_gpu_launcher", several)
    monkeypatch.setattr(launch, "deepspeed_launcher", deepspeed)
    config = str(ROOT / "recipes" / "accelerate" / f"{name}.yaml")
    command = ["--config_file", config, "--main_process_port", "0", *arguments, "finetune.py"]
    launch.launch_command(launch.launch_command_parser().parse_args(command))
    ((launcher, values),) = found
    return launcher, {key: value for key, value in values.items() if key not in os.environ}


@pytest.mark.parametrize("name", ["fsdp2", "context_parallel"])
def test_the_sharding_accelerate_builds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, values = environment(name, monkeypatch)
    assert launcher == "several"
    assert values["ACCELERATE_USE_FSDP"] == "true"
    for key, value in values.items():
        monkeypatch.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()  # as Accelerator reads it
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.cpu_ram_efficient_loading is True
    assert plugin.activation_checkpointing is False  # with the recipe's, Trainer would refuse
    assert "FULL_STATE_DICT" in str(plugin.state_dict_type)  # Trainer saves no adapter otherwise
    plugin.set_auto_wrap_policy(tiny_llama())
    assert {cls.__name__ for cls in plugin.auto_wrap_policy.keywords["transformer_layer_cls"]} == {
        "LlamaDecoderLayer"
    }
    assert context_parallel_size() == (8 if name == "context_parallel" else 1)


# --- shards of positions --------------------------------------------------------------------


def shards(length: int, ranks: int) -> list[torch.Tensor]:
    """Positions of each rank: contiguous, and head-tail as torch's context_parallel cuts them."""
    positions = torch.arange(length)
    zigzag = positions[_HeadTailLoadBalancer(length, ranks, "cpu")._generate_indices()[0].long()]
    return [*positions.chunk(ranks), *zigzag.chunk(ranks)]


def rotation(model: torch.nn.Module, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return model.model.rotary_emb(torch.zeros(1, len(positions), 64), positions[None])


@pytest.mark.parametrize("variant", ["yarn", "llama3", "resonance", "longrope-fixed"])
@pytest.mark.parametrize("precise", [False, True])
def test_a_shard_of_positions_gets_its_part_of_the_rotation(variant: str, precise: bool) -> None:
    """rope(positions[shard]) == rope(positions)[shard], to the bit."""
    model = tiny_llama()
    unpatched = rotation(model, torch.arange(256))
    method = VARIANTS[variant](4, Rope.geometric(1e4, 16, 64))
    check_parallelism(method, model.config, cp_size=4, length=256)
    rope_ext.patch(model, method, precise=precise)
    whole = rotation(model, torch.arange(256))
    assert not torch.equal(whole[0], unpatched[0])
    for shard in shards(256, 4):
        for part, of in zip(rotation(model, shard), whole, strict=True):
            assert torch.equal(part[0], of[0, shard])


# --- two processes --------------------------------------------------------------------------


def torchrun(script: Path, *arguments: object) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_port", str(port), str(script), *map(str, arguments)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
def test_two_processes_get_the_gradients_of_one() -> None:
    """FSDP2 and loading; what is compared stands in distributed_worker.py."""
    torchrun(ROOT / "tests" / "helpers" / "distributed_worker.py")
