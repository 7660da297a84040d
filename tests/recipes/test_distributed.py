"""Training on several devices: shards of positions, and two gloo processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor.experimental._context_parallel import _HeadTailLoadBalancer

import rope_ext
from recipes.parallel import check_parallelism
from rope_ext.methods import Rope
from tests.helpers.methods import VARIANTS
from tests.helpers.models import tiny_llama

ROOT = Path(__file__).parents[2]


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
