"""Runs recipes/finetune.py in processes that accelerate treats as having a GPU each.

On CPUs, accelerate runs every launch file as plain data parallelism. Here it follows the GPU code
path; only the presence of GPUs is simulated. A run that would keep unsharded gradients on every
device during accumulation raises an error. DeepSpeed gets the number of processes, and uses gloo.

Run by: accelerate launch --config_file FILE --num_processes 2 tests/helpers/launched.py RUNS,
where RUNS is a JSON file with the command lines of the runs.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import training_args

from recipes import finetune
from recipes.parallel import leave

_init = PartialState.__init__


@functools.wraps(_init)
def _with_gpus(self: PartialState, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    if self._shared_state["distributed_type"] == DistributedType.MULTI_CPU:
        self._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def _whole(self: Accelerator, model: Any) -> None:
    raise AssertionError("gradients are left unsharded")


def _gloo(self: PartialState, *args: Any) -> tuple[str, DistributedType]:
    return "gloo", DistributedType.MULTI_CPU


if __name__ == "__main__":
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        PartialState._prepare_backend = _gloo
        training_args.is_torch_bf16_gpu_available = lambda: True
    else:
        Accelerator.no_sync = _whole
        PartialState.__init__ = _with_gpus
    for words in json.loads(Path(sys.argv[1]).read_text()):
        finetune.main(words)
    leave()
