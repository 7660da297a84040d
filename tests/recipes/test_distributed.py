"""Training on several devices: what shards of sequences cannot have, and two gloo processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import TrainingArguments

from recipes.parallel import check_parallelism
from rope_ext import OptionError
from rope_ext.methods import build_method
from tests.helpers.models import tiny_llama

ROOT = Path(__file__).parents[2]


def test_methods_that_need_the_whole_sequence_are_refused_in_shards() -> None:
    for name, said in (("rerope", "its own attention"), ("dynamic_ntk", "length=TOKENS")):
        with pytest.raises(OptionError, match=f"{name}.*{said}"):
            check_parallelism(build_method(name, factor=4), tiny_llama().config, cp_size=4)
    check_parallelism(build_method("yarn", factor=4), tiny_llama().config, cp_size=4, length=256)


def test_one_process_on_several_gpus_is_refused(
    refused: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer would take more rows in a step than the recipe says."""
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    refused("2 GPUs are visible.*CUDA_VISIBLE_DEVICES=0.*ddp.yaml", use_cpu=False)


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
