"""SGLang's own rotary classes, and rope_ext's plugin of it, give the numbers of the patched model.

The package is looked for among those installed, or in the folder that ENGINE_SOURCES names (``make
engine-sources`` makes one). It is neither imported whole nor needs a GPU. No SGLang process runs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rope_ext
from rope_ext.engines.base import ENGINES
from rope_ext.patching import current_patch
from rope_ext.rotary.sites import text_decoder
from tests.engines.record import SAME_CODE, ran
from tests.families.zoo import tiny_model
from tests.helpers.engines import BUILD, FLAGS, SERVED, TABLES, built
from tests.helpers.models import several_axes

Case = tuple[dict[str, Any], torch.Tensor]
POSITIONS = [0, 1, 63, 64, 150, 255]
OF_KIND: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("ntk", {}),
    "linear": ("pi", {}),
    "yarn": ("yarn", {}),
    "llama3": ("llama3", {}),
    "longrope": ("resonance", {}),
}
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")


def model_of(family: str) -> Any:
    if family == "qwen2_vl_text":
        return several_axes()
    return built(family) if family in BUILD else tiny_model(family)


def source() -> str:
    """The folder that holds the package."""
    if (given := os.environ.get("ENGINE_SOURCES")) is not None:
        return given
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("sglang is not there")
    return str(Path(spec.submodule_search_locations[0]).parent)


def asked(family: str, method: str, options: dict[str, Any]) -> list[Case]:
    """What SGLang's model file asks for, for each rotary embedding, and the right rows."""
    model = rope_ext.patch(model_of(family), method, **{"factor": 4, **options})
    made = rope_ext.export(model, "sglang").settings["json_model_override_args"]
    positions = [position for position in POSITIONS if position < made["max_position_embeddings"]]
    config, result = text_decoder(model).config, []
    names = ("qk_rope_head_dim", "head_dim")
    dim = next((d for d in (getattr(config, name, None) for name in names) if d), 16)
    for site in current_patch(model).sites:
        parameters = made["rope_parameters"]
        if site.layer_type is not None:
            parameters = parameters[site.layer_type]
        # models/glm4_moe_lite.py passes the parameters of an unscaled model, too.
        scaled = parameters["rope_type"] != "default" or family == "glm4_moe_lite"
        if family in LATENT and scaled:
            assert parameters.get("attention_factor") != 1.0  # another class, then
            parameters = parameters | {"rope_type": "deepseek_yarn"}
        if family == "gemma3_text":
            parameters = {"rope_type": "default", "rope_theta": parameters["rope_theta"]}
        case = {
            "rope_parameters": parameters,
            "max_position_embeddings": made["max_position_embeddings"],
            "head_dim": dim,
            "neox": family not in LATENT,
            # Where it reads it for this family: not in rope_parameters.
            "share": made.get(
                "partial_rotary_factor", 1.0 if ENGINES["sglang"][family].own_share else None
            ),
            "positions": positions,
        }
        inv_freq = site.module._buffers[site.buffer].double()
        angles = torch.tensor(positions, dtype=torch.float64)[:, None] * inv_freq
        number = getattr(site.module, site.scaling_attribute)
        result.append((case, torch.cat((angles.cos(), angles.sin()), -1) * number))
    return result


def compare(cases: list[Case]) -> None:
    """The angles are float32: 256 tokens times 6e-8, and the powers of the base."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("rotary_of_sglang.py")), source()],
        input=json.dumps([case for case, _ in cases]),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    for answer, (case, rows) in zip(answers, cases, strict=True):
        got = torch.tensor(answer, dtype=torch.float64)
        torch.testing.assert_close(got, rows, rtol=0, atol=2e-4, msg=lambda m, w=case: f"{w}: {m}")


@pytest.mark.slow
def test_its_classes_compute_every_method() -> None:
    compare([one for case in (FLAGS | TABLES).values() for one in asked("llama", *case)])


@pytest.mark.slow
def test_its_classes_compute_all_that_is_claimed() -> None:
    same = SAME_CODE["sglang"]
    claimed = [(n, k) for n, f in ENGINES["sglang"].items() if n not in same for k in f.kinds]
    cases = [(name, OF_KIND[kind]) for name, kind in claimed]
    cases.append(("deepseek_v3", ("yarn", {"attention_factor": 1.3})))
    compare([one for name, case in cases for one in asked(name, *case)])
    for name, kind in claimed:
        ran("sglang", name, kind, place=source())


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs the package triton, which torch for CPUs comes without",
)


class Worker:
    """A process that runs the plugin; see ``sglang_worker.py``."""

    def __init__(self, folder: str, log: Path) -> None:
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.engines.sglang_worker", folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                env={**os.environ, "TRITON_INTERPRET": "1"},
                cwd=Path(__file__).parents[2],
            )

    def answer(self, folder: Path, settings: dict[str, Any], **job: Any) -> Any:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        job = {"folder": str(folder), "settings": settings, "prompts": [], "steps": [], **job}
        print(json.dumps(job), file=stdin, flush=True)
        line = stdout.readline()
        assert line, self.log.read_text()[-3000:]
        return json.loads(line)


@pytest.fixture(scope="module")
def standing_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """The plugin with stand-ins for the classes of SGLang."""
    made = Worker("-", tmp_path_factory.mktemp("sglang") / "log")
    yield made
    made.process.communicate()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """The plugin with SGLang's own batches, pools, attention layers, hooks and backends."""
    made = Worker(source(), tmp_path_factory.mktemp("sglang") / "log")
    yield made
    made.process.communicate()


def prompts() -> list[list[int]]:
    ids = torch.randint(3, 100, (170,), generator=torch.Generator().manual_seed(0)).tolist()
    return [ids[:152], [*ids[:70], *ids[160:165]], ids[5:9]]


STEPS = [  # request, first and last token, and the request whose pages a new one shares
    [[0, 0, 90]],
    [[0, 90, 148], [2, 0, 1]],
    [[1, 70, 72, 0], [0, 148, 149]],
    [[0, 149, 150], [1, 72, 73], [2, 1, 2]],
    [[2, 2, 3], [0, 150, 151], [1, 73, 74]],
]
"""Chunks, decoding beside them, a shared prefix, and decoding from a graph that is replayed."""


def serve(worker: Worker, folder: Path, family: str, method: str) -> None:
    model = rope_ext.patch(model_of(family), method, factor=4, **SERVED_WITH.get(method, {}))
    model.save_pretrained(folder)
    found = worker.answer(folder, {}, prompts=prompts(), steps=STEPS)
    assert "rows" in found, found["error"]
    for prompt, row, computed in zip(prompts(), found["rows"], (151, 4, 3), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        wanted = logits.gather(-1, torch.tensor(prompt[1:])[:, None]).squeeze(-1)
        got = torch.tensor(row)
        there = ~got.isnan()
        assert int(there.sum()) == computed
        torch.testing.assert_close(got[there], wanted[there], rtol=0, atol=1e-4)


SERVED_WITH = {
    "dual_chunk": {"chunk": 48, "local": 9},
    "self_extend": {"window": 30, "group": 7},
    "string": {"shift": 48},
}


@pytest.mark.slow
@needs_triton
@pytest.mark.every
@pytest.mark.parametrize(("family", "method"), [("llama", "rerope"), ("qwen3", "jet_long")])
def test_the_plugin_serves_a_position_method(
    standing_in: Worker, tmp_path: Path, family: str, method: str
) -> None:
    serve(standing_in, tmp_path, family, method)


@pytest.mark.slow
@needs_triton
@pytest.mark.every
@pytest.mark.parametrize(("family", "method"), SERVED)
def test_the_plugin_serves_a_position_method_with_the_classes_of_sglang(
    real: Worker, tmp_path: Path, family: str, method: str
) -> None:
    serve(real, tmp_path, family, method)


@pytest.mark.slow
@needs_triton
def test_without_the_plugin_sglang_does_not_load_a_position_method(
    real: Worker, tmp_path: Path
) -> None:
    rope_ext.patch(built("llama"), "rerope", factor=4).save_pretrained(tmp_path)
    found = real.answer(tmp_path, {"without_plugin": True})
    assert "Unknown RoPE scaling type rope_ext" in found["error"]


REFUSED = [
    ({}, {"attention_backend": "fa3"}, "--attention-backend rope_ext, not with fa3"),
    ({}, {"decode": "flashinfer"}, "not with flashinfer"),
    ({}, {"draft": "EAGLE"}, "without --speculative-algorithm"),
    ({}, {"prefill_graph": "full"}, "without --cuda-graph-backend-prefill full"),
    ({}, {"dcp": 2}, "without context parallelism"),
    ({}, {"cuda": False}, "on NVIDIA GPUs"),
    ({}, {"window": 32}, "without windows"),
    ({}, {"pool": {"store_dtype": "uint8"}}, "without --kv-cache-dtype"),
    ({"method": "jet_long", "kept": "yarn"}, {}, "without kept="),
    ({"family": "granite"}, {}, "not granite"),
    ({"method": "alibi", "factor": None}, {}, "no encodings"),
]


@pytest.mark.every
@pytest.mark.parametrize(("patch", "settings", "reason"), REFUSED, ids=[x[2] for x in REFUSED])
def test_the_plugin_refuses_what_it_would_compute_otherwise(
    standing_in: Worker,
    tmp_path: Path,
    patch: dict[str, Any],
    settings: dict[str, Any],
    reason: str,
) -> None:
    options = {"family": "llama", "method": "rerope", "factor": 4, **patch}
    options = {name: value for name, value in options.items() if value is not None}
    model = model_of(options.pop("family"))
    rope_ext.patch(model, **options).save_pretrained(tmp_path)
    assert reason in standing_in.answer(tmp_path, settings)["error"]


def test_the_plugin_refuses_other_versions_and_leaves_other_models_alone(
    standing_in: Worker, tmp_path: Path
) -> None:
    model = built("llama")
    model.save_pretrained(tmp_path / "plain")
    found = standing_in.answer(tmp_path / "plain", {"plain": True})
    assert "rope_ext serves models that rope_ext patched" in found["error"]
    rope_ext.patch(model, "rerope", factor=4).save_pretrained(tmp_path / "patched")
    found = standing_in.answer(tmp_path / "patched", {}, version="0.6.0")
    assert "in SGLang 0.5.23, not in 0.6.0" in found["error"]
    assert standing_in.answer(tmp_path / "patched", {}, version="0.5.23.post1") == {"rows": []}
