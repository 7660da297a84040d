"""Runs transformers' ModelTesterMixin on models that are patched when they are built.

The mixin comes from the source distribution of the transformers that is installed, fetched once
from PyPI. It has no tests of generation and export, for which empty classes stand in.
"""

from __future__ import annotations

import copy
import functools
import importlib
import subprocess
import sys
import tarfile
import tempfile
import types
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

import rope_ext
from rope_ext.config.record import record_of

CACHE = Path(__file__).parents[2] / "runs" / "transformers"
PACKAGE = "tests_of_transformers"
FACTOR = 4

# Configuration, models, and configuration fields in addition to the sizes of Tester. A family
# whose layers all slide cannot be extended, so of gemma's two layers one does not.
FAMILIES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "llama": ("LlamaConfig", ("LlamaModel", "LlamaForCausalLM"), {}),
    "qwen3": ("Qwen3Config", ("Qwen3Model", "Qwen3ForCausalLM"), {}),
    "mistral": ("MistralConfig", ("MistralModel", "MistralForCausalLM"), {"sliding_window": None}),
    "gemma2": ("Gemma2Config", ("Gemma2Model", "Gemma2ForCausalLM"), {}),
}


class Tester:
    """The model tester required by the mixin: configuration and inputs."""

    is_training = True
    batch_size, seq_length = 3, 7
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads = 99, 32, 2, 2

    def __init__(self, family: str) -> None:
        self.family = family

    def get_config(self) -> Any:
        name, _, own = FAMILIES[self.family]
        return getattr(transformers, name)(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=32,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **own,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        ids = torch.randint(3, self.vocab_size, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def run(family: str, method: str | None) -> dict[str, str | None]:
    """Return the error of each test that was not skipped; None: it passed.

    Args:
        family: one of ``FAMILIES``.
        method: method for every model; None: no patch.
    """
    common, base = _mixin()
    models = tuple(getattr(transformers, name) for name in FAMILIES[family][1])

    class Case(*base, unittest.TestCase):
        all_model_classes = models

        def setUp(self) -> None:
            transformers.set_seed(0)
            common.global_rng.seed(0)
            self.model_tester = Tester(family)

    suite, result = unittest.TestLoader().loadTestsFromTestCase(Case), unittest.TestResult()
    names = {test._testMethodName for test in suite}
    with _extended(models, method):
        suite.run(result)
    raised = dict.fromkeys(names - {test._testMethodName for test, _ in result.skipped})
    for test, trace in [*result.failures, *result.errors]:
        raised[getattr(test, "test_case", test)._testMethodName] = trace  # of a sub-test
    return raised


@functools.cache
def _mixin() -> tuple[types.ModuleType, tuple[type, ...]]:
    """Import the model tests of the installed transformers; returns module and classes."""
    folder = CACHE / transformers.__version__
    if not folder.exists():
        _fetch(transformers.__version__, folder)
    _module(PACKAGE).__path__ = [str(folder)]
    generation = type("GenerationTesterMixin", (), {})
    _module(f"{PACKAGE}.generation")
    _module(f"{PACKAGE}.generation.test_utils").GenerationTesterMixin = generation
    _module(f"{PACKAGE}.exporters")
    _module(f"{PACKAGE}.exporters.test_export").ExportTesterMixin = type("Export", (), {})
    with pytest.MonkeyPatch.context() as context:
        context.setenv("TRANSFORMERS_TEST_DEVICE", "cpu")
        context.setattr(pytest.mark, "_config", None)  # hides warnings about undeclared marks
        common = importlib.import_module(f"{PACKAGE}.test_modeling_common")
    return common, (common.ModelTesterMixin, generation)


def _module(name: str) -> Any:
    sys.modules[name] = types.ModuleType(name)
    return sys.modules[name]


def _fetch(version: str, folder: Path) -> None:
    """Write the tests to ``folder`` atomically, since another worker may do the same."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as own:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", own]
        command += ["--no-binary", "transformers", f"transformers=={version}"]
        subprocess.run(command, check=True)
        prefix = f"transformers-{version}/tests/"
        with tarfile.open(Path(own) / f"transformers-{version}.tar.gz") as archive:
            for member in archive.getmembers():
                if member.isfile() and member.name.startswith(prefix):
                    member.name = member.name.removeprefix(prefix)
                    archive.extract(member, Path(own) / "tests", filter="data")
        try:
            (Path(own) / "tests").rename(folder)
        except OSError:
            if not folder.exists():
                raise


@contextmanager
def _extended(models: tuple[type[PreTrainedModel], ...], method: str | None) -> Iterator[None]:
    """Inside the block, models are patched when built, and reloaded with their patch."""
    if method is None:
        yield
        return
    building: list[Any] = []  # do not patch parts of models, or models being loaded

    def builder(build: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(build)
        def __init__(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
            if not building:  # models that share a configuration cannot be patched
                args, kwargs = copy.deepcopy((args, kwargs))
            building.append(self)
            try:
                build(self, *args, **kwargs)
            finally:
                building.pop()
            if not building:
                rope_ext.patch(self, method, factor=FACTOR)

        return __init__

    load = PreTrainedModel.from_pretrained.__func__

    def from_pretrained(
        cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Loading as the suite's own class; a folder saved under a patch gets it again."""
        path, record = pretrained_model_name_or_path, None
        if building:
            return load(cls, path, *args, **kwargs)
        if path is not None and "config" not in kwargs:
            config = AutoConfig.from_pretrained(path)
            record = record_of(config.get_text_config(decoder=True))
            if record is not None and not record.plain:
                kwargs["config"] = record.restored(config)
        building.append(path)
        try:
            loaded = load(cls, path, *args, **kwargs)
        finally:
            building.pop()
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if path is None:
            rope_ext.patch(model, method, factor=FACTOR)
        elif "config" in kwargs and record is not None:
            rope_ext.patch(model, record.method, **record.arguments)
        return loaded

    with pytest.MonkeyPatch.context() as context:
        context.setattr(PreTrainedModel, "from_pretrained", classmethod(from_pretrained))
        for model in models:
            context.setattr(model, "__init__", builder(model.__init__))
        yield
