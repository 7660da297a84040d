"""Every family that the tables claim is run in the real engine, beyond its trained length."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rope_ext
from rope_eval.engines import verifying
from rope_eval.engines.gguf_miniature import write_model
from rope_eval.engines.verifying import Miniature, in_process, verify
from rope_ext.engines import llama_cpp
from rope_ext.engines.base import ENGINES, miniatures
from tests.engines import record
from tests.engines.record import ran, unproved
from tests.engines.table import page
from tests.families.zoo import LENGTH, tiny_config

METHODS = {"default": "ntk", "linear": "pi", "yarn": "yarn", "llama3": "llama3"}
METHODS["longrope"] = "resonance"
MORE: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen3_moe": {"norm_topk_prob": True},  # as in every released one; llama.cpp reads no such key
    "smollm3": {"no_rope_layers": [1, 1]},  # llama.cpp leaves every fourth layer unrotated
    "hunyuan_v1_dense": {"head_dim": 16},
}
# They normalize after the rotation, so that no number on cosine and sine does anything.
NO_TEMPERATURE = ("hunyuan_v1_dense", "hunyuan_v1_moe", "nanochat")

SHIPPED = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": LENGTH}
SHIPPED |= {"mscale": 1.0, "mscale_all_dim": 1.0}
"""Scaling as in the configurations of DeepSeek and Ministral."""


def config_of(family: str) -> Any:
    config = tiny_config(family, **MORE.get(family, {}))
    config.max_position_embeddings = LENGTH
    return config


def claimed(engine: str) -> Iterator[Any]:
    """Each family with YaRN and another kind in turn, or with all where it has no YaRN."""
    for index, (name, family) in enumerate(ENGINES[engine].items()):
        kinds, others = family.kinds, [kind for kind in family.kinds if kind != "yarn"]
        if others and "yarn" in kinds:
            kinds = ("yarn", others[index % len(others)])
        if name in miniatures() and family.alone:  # tests/real runs Gemma 3, test_nested the whole
            yield from [pytest.param(name, kind, id=f"{name}-{kind}") for kind in kinds]


def check(engine: str, family: str, kind: str, folder: Path) -> None:
    miniature = Miniature.from_config(config_of(family), METHODS[kind], factor=4)
    found = verify(miniature, in_process(miniature, engine, folder), engine)
    assert found.passed or family in NO_TEMPERATURE, str(found)
    assert found.candidates[0] == "as patched", str(found)
    assert max(found.lengths) > 3 * LENGTH
    if engine in ENGINES:
        ran(engine, family, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), claimed("llama.cpp"))
def test_llama_cpp_runs_what_is_claimed(tmp_path: Path, family: str, kind: str) -> None:
    pytest.importorskip("xllamacpp")
    check("llama.cpp", family, kind, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "ministral3"])
def test_llama_cpp_runs_a_file_with_keys_of_its_own(tmp_path: Path, family: str) -> None:
    """These need more keys than others; as flags, they are run above."""
    pytest.importorskip("xllamacpp")
    miniature = Miniature.from_config(config_of(family), "yarn", factor=4)
    old, new = tmp_path / "old.gguf", tmp_path / "new.gguf"
    write_model(miniature.plain, old)
    words = ["--model", str(new), *llama_cpp.following(miniature.model, old, new).in_file]
    found = verify(miniature, lambda prompts: verifying.llama_cpp(words, prompts, 128), "llama.cpp")
    assert found.passed, str(found)


@pytest.mark.slow
@pytest.mark.parametrize("mscale", [1.0, 0.7])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "ministral3"])
def test_llama_cpp_runs_a_factor_raised_above_the_shipped_one(
    tmp_path: Path, family: str, mscale: float
) -> None:
    """The converted file has the shipped scaling; flags or new keys replace all of it."""
    pytest.importorskip("xllamacpp")
    config = config_of(family)
    config.max_position_embeddings = 2 * LENGTH
    config.rope_parameters = config.rope_parameters | SHIPPED | {"mscale": mscale}
    raised = Miniature.from_config(config, "yarn", factor=8, compose="raise")
    for miniature in (raised, Miniature.from_config(config)):
        found = verify(miniature, in_process(miniature, "llama.cpp", tmp_path), "llama.cpp")
        assert found.passed, str(found)
        new = tmp_path / f"{miniature.as_saved}.gguf"
        plan = llama_cpp.following(miniature.model, tmp_path / "MODEL.gguf", new)
        words = ["--model", str(new), *plan.in_file]
        found = verify(miniature, lambda ids, x=words: verifying.llama_cpp(x, ids, 128), "file")
        assert found.passed, str(found)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), claimed("mlx"))
def test_mlx_runs_what_is_claimed(tmp_path: Path, family: str, kind: str) -> None:
    pytest.importorskip("mlx_lm")
    check("mlx", family, kind, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", miniatures())
def test_every_miniature_tells_a_patch_from_known_mistakes(tmp_path: Path, family: str) -> None:
    """Whatever serves it: here plain transformers, from the saved folder."""
    check("transformers", family, "yarn", tmp_path)


@pytest.mark.parametrize(
    "family", [n for n, f in ENGINES["mlx"].items() if [*f.kinds] == ["default"]]
)
def test_what_mlx_would_ignore_is_refused(family: str) -> None:
    miniature = Miniature.from_config(config_of(family), "yarn", factor=4)
    with pytest.raises(rope_ext.ExportError, match=r"mlx cannot run yarn: .*models/"):
        rope_ext.export(miniature.model, "mlx")


def test_every_claim_was_run_in_its_engine() -> None:
    """A claim added to the table fails until ``tests.engines.record`` has a run of it."""
    assert unproved() == []


def test_the_record_names_the_version_of_every_engine() -> None:
    """Those that this repository installs; the page names them, too."""
    root = Path(__file__).parents[2]
    pins = "".join((root / name).read_text("utf-8") for name in ("Makefile", "constraints.txt"))
    assert record.VERSIONS.keys() == record.RAN.keys() == record.PACKAGES.keys()
    for engine, version in record.VERSIONS.items():
        assert f"{record.PACKAGES[engine]}=={version}" in pins


def test_a_run_in_another_version_forgets_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ran.json"
    file.write_text(record.FILE.read_text("utf-8"), encoding="utf-8")
    monkeypatch.setattr(record, "FILE", file)
    monkeypatch.setenv("ROPE_EXT_RECORD", "1")
    packages = tmp_path / "xllamacpp-2027.1.dist-info"
    packages.mkdir()
    (packages / "METADATA").write_text("Metadata-Version: 2.1\nName: xllamacpp\nVersion: 2027.1\n")
    ran("llama.cpp", "llama", "yarn", place=tmp_path)
    found = json.loads(file.read_text("utf-8"))
    assert found["versions"] == {**record.VERSIONS, "llama.cpp": "2027.1"}
    assert [*found["llama.cpp"]] == ["llama"]
    assert found["mlx"] == record.RAN["mlx"]


def test_the_page_of_families_is_that_of_the_table() -> None:
    written = (Path(__file__).parents[2] / "docs/engines/families.md").read_text(encoding="utf-8")
    assert written == "\n".join(page()) + "\n"


PLUGINS = ("vllm_plugin", "vllm_cpu", "vllm_paged", "sglang_plugin")


@pytest.mark.parametrize("plugin", PLUGINS)
def test_what_a_plugin_imports_is_there(plugin: str) -> None:
    """It is imported in the environment of its engine only."""
    file = Path(rope_ext.__file__).parent / "engines" / f"{plugin}.py"
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        name = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        if name.startswith("rope_ext") and not name.endswith(PLUGINS):
            module = importlib.import_module(name)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    try:
                        importlib.import_module(f"{name}.{alias.name}")
                    except ModuleNotFoundError as error:
                        assert error.name == "numba"  # which vLLM installs
