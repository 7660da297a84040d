"""Runs the rotary classes of vLLM or SGLang out of their packages, without what they depend on.

``python rotary_of_servers.py ENGINE FOLDER < CASES > NUMBERS``: FOLDER holds the package vllm or
sglang, installed without dependencies. Only its folder of rotary embeddings is executed;
whatever that imports of the rest is replaced by an object that answers no to everything.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import sys
import types
from pathlib import Path

import torch

FOLDERS = {
    "vllm": "vllm.model_executor.layers.rotary_embedding",
    "sglang": "sglang.srt.layers.rotary_embedding",
}


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

    @classmethod
    def register(cls, *args, **kwargs):
        return lambda defined: defined

    @classmethod
    def enabled(cls) -> bool:
        return False


class Absent(types.ModuleType):
    """A module that is not executed."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return Operation if name in ("CustomOp", "BaseFusedOp", "PluggableLayer") else No()


class Finder:
    """Finds the rotary embeddings of a package, empty parents of them, and nothing else."""

    def __init__(self, engine: str, folder: Path) -> None:
        self.folder, self.wanted = folder, FOLDERS[engine]

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in FOLDERS or name.startswith(self.wanted):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = Absent(spec.name)
        module.__path__ = []
        if self.wanted.startswith(f"{spec.name}."):
            module.__path__ = [str(self.folder.joinpath(*spec.name.split(".")))]
        return module

    def exec_module(self, module) -> None:
        pass


def rotary(engine: str, case: dict) -> torch.nn.Module:
    """As the model files of the engine ask for it."""
    parameters, length = case["rope_parameters"], case["max_position_embeddings"]
    dim, neox = case["head_dim"], case["neox"]
    package = importlib.import_module(FOLDERS[engine])
    if engine == "vllm":
        long = importlib.import_module(f"{FOLDERS[engine]}.phi3_long_rope_scaled_rope")
        model = types.SimpleNamespace(max_model_len=length)
        long.get_current_vllm_config = lambda: types.SimpleNamespace(model_config=model)
        factor = {"mrope_positions_factor": case["positions_factor"]}
        return package.get_rope(dim, length, neox, parameters, torch.float32, **factor)
    torch.Tensor.cuda = lambda tensor: tensor  # where its tables are made
    variants = importlib.import_module(f"{FOLDERS[engine]}.rope_variant")
    variants.DeepseekScalingRotaryEmbedding.__init__.__kwdefaults__["device"] = "cpu"
    partial = case["share"] or parameters.get("partial_rotary_factor", 1.0)
    base = parameters["rope_theta"]
    return package.get_rope(dim, dim, length, base, neox, parameters, torch.float32, partial)


def main() -> None:
    engine, folder = sys.argv[1], Path(sys.argv[2])
    sys.meta_path.insert(0, Finder(engine, folder))
    sys.path.append(str(folder))
    answers = []
    for case in json.load(sys.stdin):
        made = rotary(engine, case)
        table = getattr(made, "cos_sin_cache", None)
        if table is None:  # two tables, one after the other; the second is in use
            table = made.long_short_cos_sin_cache
            table = table[made.original_max_position_embeddings :]
        rows = table[torch.tensor(case["positions"])]
        where = type(made)
        found = {"class": where.__name__, "module": where.__module__}
        answers.append({**found, "rows": rows.double().tolist()})
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
