"""Patches models that are split over the heads of two processes, and compares them with whole ones.

Run by: torchrun --nproc-per-node 2 tests/helpers/tensor_parallel.py FOLDER OUTPUT, where FOLDER has
a model. The first process writes what it found to OUTPUT, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import AutoModelForCausalLM

import rope_ext

CASES = ("yarn", "dynamic_yarn", "rerope", "alibi")


@torch.no_grad()
def found(folder: str, method: str) -> list[float] | str:
    """The largest difference of logits, and what the patch changes; or why it is refused."""
    ids = torch.arange(3, 153)[None] % 100
    options: dict[str, Any] = {} if method == "alibi" else {"factor": 4}
    whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    before = whole(ids).logits
    after = rope_ext.patch(whole, method, **options)(ids).logits
    split = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    try:
        rope_ext.patch(split, method, **options)
    except rope_ext.RopeExtError as error:
        return str(error)
    logits = split(ids).logits
    return [float((logits - after).abs().max()), float((after - before).abs().max())]


if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    results = {method: found(sys.argv[1], method) for method in CASES}
    if distributed.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    distributed.barrier()
    distributed.destroy_process_group()
