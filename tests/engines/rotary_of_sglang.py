"""Runs the rotary classes of SGLang out of its package, without what they depend on.

``python rotary_of_sglang.py FOLDER < CASES > NUMBERS``: FOLDER holds the package sglang, installed
without dependencies. Only its folder of rotary embeddings is executed; whatever that imports of
the rest is replaced by an object that answers no to everything.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import sys
import types
from pathlib import Path

import torch

ROTARY = "sglang.srt.layers.rotary_embedding"


class No:
    """Is false, has every attribute, and leaves a decorated class as it is."""

    device_type = "cpu"

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return No()

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) else No()


class Operation(torch.nn.Module):
    """Stands for the base class of operations with several kernels."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__()


class Absent(types.ModuleType):
    """A module that is not executed."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return Operation if name in ("BaseFusedOp", "PluggableLayer") else No()


class Finder:
    """Finds the rotary embeddings of the package, empty parents of them, and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in ("sglang", "vllm") or name.startswith(ROTARY):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = Absent(spec.name)
        module.__path__ = []
        if ROTARY.startswith(f"{spec.name}."):
            module.__path__ = [str(self.folder.joinpath(*spec.name.split(".")))]
        return module

    def exec_module(self, module) -> None:
        pass


def rotary(case: dict) -> torch.nn.Module:
    """As the model files of SGLang ask for it."""
    parameters, length = case["rope_parameters"], case["max_position_embeddings"]
    dim, partial = case["head_dim"], case["share"] or parameters.get("partial_rotary_factor", 1.0)
    torch.Tensor.cuda = lambda tensor: tensor  # where its tables are made
    package, variants = (importlib.import_module(f"{ROTARY}{n}") for n in ("", ".rope_variant"))
    variants.DeepseekScalingRotaryEmbedding.__init__.__kwdefaults__["device"] = "cpu"
    given = (dim, dim, length, parameters["rope_theta"], case["neox"], parameters)
    return package.get_rope(*given, torch.float32, partial)


if __name__ == "__main__":
    sys.meta_path.insert(0, Finder(Path(sys.argv[1])))
    sys.path.append(sys.argv[1])
    answers = []
    for case in json.load(sys.stdin):
        made = rotary(case)
        table = getattr(made, "cos_sin_cache", None)
        if table is None:  # two tables, one after the other; the second is in use
            table = made.long_short_cos_sin_cache
            table = table[made.original_max_position_embeddings :]
        answers.append(table[torch.tensor(case["positions"])].double().tolist())
    print(json.dumps(answers))
