"""SGLang's own rotary classes give the numbers of the patched model.

The package is looked for among those installed, or in the folder that ENGINE_SOURCES names (``make
engine-sources`` makes one). It is neither imported whole nor needs a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
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
from tests.helpers.engines import BUILD, FLAGS, TABLES, built
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
LATENT = ("deepseek_v2", "deepseek_v3")


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
    config, result = text_decoder(model).config, []
    names = ("qk_rope_head_dim", "head_dim")
    dim = next((d for d in (getattr(config, name, None) for name in names) if d), 16)
    for site in current_patch(model).sites:
        parameters = made["rope_parameters"]
        if site.layer_type is not None:
            parameters = parameters[site.layer_type]
        if family in LATENT and parameters["rope_type"] != "default":
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
            "positions": POSITIONS,
        }
        inv_freq = site.module._buffers[site.buffer].double()
        angles = torch.tensor(POSITIONS, dtype=torch.float64)[:, None] * inv_freq
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
        ran("sglang", name, kind)
