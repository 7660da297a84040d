"""vLLM's and SGLang's own rotary classes give the numbers of the patched model.

The packages are looked for among those installed, or in the folder that ENGINE_SOURCES names
(``make engine-sources`` makes one). They are neither imported whole nor do they need a GPU; without
them these tests are left out.
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
from transformers import AutoConfig, AutoModelForCausalLM

import rope_ext
from rope_ext.engines.families import ENGINES
from rope_ext.patching import current_patch
from rope_ext.rotary.sites import text_decoder
from tests.families.zoo import tiny_model
from tests.helpers.engines import BUILD, FLAGS, TABLES, built
from tests.helpers.models import LENGTH, several_axes

CASES = FLAGS | TABLES
POSITIONS = [0, 1, 63, 64, 150, 255]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
AXES = {"mrope_section": [1, 1, 0]}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 32,
        "rope_parameters": {
            "sliding_attention": dict(PLAIN),
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        },
    },
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "rope_parameters": dict(PLAIN),
    },
    "qwen3_next": {
        "head_dim": 16,
        "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5},
        **EXPERTS,
        **MIXED,
    },
    "qwen3_5_text": {
        "head_dim": 16,
        "rope_parameters": PLAIN | AXES | {"partial_rotary_factor": 0.25},
        **MIXED,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 2,
        "rope_parameters": dict(PLAIN),
    },
}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": ("yarn", {}),
    "yarn hotter": ("yarn", {"attention_factor": 1.3}),
    "ntk": ("ntk", {}),
    "pi": ("pi", {}),
    "llama3": ("llama3", {}),
    "resonance": ("resonance", {}),
}
RUNS = {
    "vllm": {
        "gemma3_text": METHODS.keys(),
        "gpt_oss": {"yarn"},
        "qwen3_next": METHODS.keys(),
        "qwen3_5_text": {"yarn", "yarn hotter", "ntk"},
        "deepseek_v3": {"yarn", "yarn hotter"},
        "qwen2_vl_text": {"yarn", "yarn hotter", "ntk"},
    },
    "sglang": {
        "gemma3_text": {"ntk"},
        "gpt_oss": METHODS.keys(),
        "qwen3_next": (),
        "qwen3_5_text": {"yarn", "yarn hotter", "ntk"},
        "deepseek_v3": {"yarn", "yarn hotter", "ntk"},
        "qwen2_vl_text": {"yarn", "yarn hotter", "ntk"},
    },
}


def model_of(family: str) -> Any:
    if family in BUILD:
        return built(family)
    if family not in FAMILIES and family != "qwen2_vl_text":
        return tiny_model(family)
    if family == "qwen2_vl_text":
        return several_axes()
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    return AutoModelForCausalLM.from_config(config).eval()


def source(engine: str) -> Path:
    """The folder that holds the package."""
    given = os.environ.get("ENGINE_SOURCES")
    if given is not None:
        assert (Path(given) / engine).is_dir(), f"{engine} is not in {given}"
        return Path(given)
    spec = importlib.util.find_spec(engine)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{engine} is not there")
    return Path(spec.submodule_search_locations[0]).parent


def tables(engine: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of cosine and sine that the engine's own classes hold."""
    script = Path(__file__).with_name("rotary_of_servers.py")
    done = subprocess.run(
        [sys.executable, str(script), engine, str(source(engine))],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def asked(engine: str, family: str, model: Any) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """What the engine's model file asks for, for each rotary embedding, and the right rows."""
    made = rope_ext.export(model, engine).settings
    fields = made["hf_overrides" if engine == "vllm" else "json_model_override_args"]
    fields = json.loads(json.dumps(fields))
    decoder, result = text_decoder(model), []
    config = decoder.config
    dim = getattr(config, "qk_rope_head_dim", None) or getattr(config, "head_dim", None) or 16
    for site in current_patch(model).sites:
        parameters = fields["rope_parameters"]
        if site.layer_type is not None:
            parameters = parameters[site.layer_type]
        if family == "deepseek_v3" and parameters["rope_type"] != "default":
            assert parameters.get("attention_factor") != 1.0  # another class, then
            parameters = parameters | {"rope_type": "deepseek_yarn"}
        if (engine, family) == ("vllm", "gpt_oss"):
            names = ("rope_theta", "factor", "original_max_position_embeddings")
            names += ("beta_fast", "beta_slow")
            parameters = {"rope_type": "yarn"} | {name: parameters[name] for name in names}
        if (engine, family) == ("sglang", "gemma3_text"):
            parameters = {"rope_type": "default", "rope_theta": parameters["rope_theta"]}
        case = {
            "rope_parameters": parameters,
            "max_position_embeddings": fields["max_position_embeddings"],
            "head_dim": dim,
            "positions_factor": 4 if family == "qwen2_vl_text" else 1,
            "neox": family != "deepseek_v3",
            # Where SGLang reads it for this family: not in rope_parameters.
            "share": fields.get("partial_rotary_factor", 1.0 if family == "qwen3_5_text" else None),
            "positions": POSITIONS,
        }
        inv_freq = site.module._buffers[site.buffer].double()
        angles = torch.tensor(POSITIONS, dtype=torch.float64)[:, None] * inv_freq
        number = getattr(site.module, site.scaling_attribute)
        result.append((case, torch.cat((angles.cos(), angles.sin()), -1) * number))
    return result


def compare(engine: str, asked_for: list[tuple[dict[str, Any], torch.Tensor]]) -> None:
    """The angles are float32: 256 tokens times 6e-8, and the powers of the base."""
    answers = tables(engine, [case for case, _ in asked_for])
    assert all(engine in answer["module"] for answer in answers)
    for answer, (case, rows) in zip(answers, asked_for, strict=True):
        got = torch.tensor(answer["rows"], dtype=torch.float64)
        where = f"{answer['class']} of {case}"
        torch.testing.assert_close(got, rows, rtol=0, atol=2e-4, msg=lambda m, w=where: f"{w}: {m}")


def patched(family: str, method: str, options: dict[str, Any]) -> Any:
    return rope_ext.patch(model_of(family), method, **{"factor": 4, **options})


@pytest.mark.slow
@pytest.mark.parametrize("engine", RUNS)
def test_its_classes_compute_every_method(engine: str) -> None:
    models = [patched("llama", *case) for case in CASES.values()]
    compare(engine, [pair for model in models for pair in asked(engine, "llama", model)])


@pytest.mark.slow
@pytest.mark.parametrize("engine", RUNS)
def test_its_classes_compute_every_family(engine: str) -> None:
    cases = [
        (family, METHODS[name]) for family, names in RUNS[engine].items() for name in names
    ] + [(family, METHODS["yarn"]) for family in BUILD]
    models = [(family, patched(family, *case)) for family, case in cases]
    compare(engine, [pair for family, model in models for pair in asked(engine, family, model)])


def others(engine: str) -> list[str]:
    """Families that run neither in the engine itself nor in another test here."""
    table = ENGINES[engine]
    axes = ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text")
    seen = {*BUILD, *FAMILIES, *axes, "deepseek_v2", "kimi_k2"}  # which is deepseek_v3 by code
    names = [n for n, f in table.items() if f.kinds and n not in seen]
    return names if engine == "sglang" else [n for n in names if table[n].unrun]


@pytest.mark.slow
@pytest.mark.parametrize("engine", RUNS)
def test_its_classes_compute_all_that_is_claimed(engine: str) -> None:
    names = {"default": "ntk", "linear": "pi", "yarn": "yarn", "longrope": "resonance"}
    table = ENGINES[engine]
    cases = [
        (family, METHODS[names[kind]])
        for family in others(engine)
        for kind in table[family].kinds
        if kind in names
    ]
    models = [(family, patched(family, *case)) for family, case in cases]
    compare(engine, [pair for family, model in models for pair in asked(engine, family, model)])


@pytest.mark.slow
@pytest.mark.parametrize("engine", RUNS)
def test_a_wrong_number_is_seen(engine: str) -> None:
    ((case, rows),) = asked(engine, "llama", patched("llama", "yarn", {}))
    case["rope_parameters"]["factor"] = 8.0
    with pytest.raises(AssertionError, match="Mismatched elements"):
        compare(engine, [(case, rows)])


@pytest.mark.parametrize("engine", RUNS)
@pytest.mark.parametrize("family", RUNS["vllm"])
def test_what_a_family_cannot_be_given_is_refused(engine: str, family: str) -> None:
    for name, (method, options) in METHODS.items():
        model = patched(family, method, options)
        if name in RUNS[engine][family]:
            assert rope_ext.export(model, engine).settings
        else:
            with pytest.raises(rope_ext.ExportError, match=f"{engine} cannot run {method}: "):
                rope_ext.export(model, engine)


def test_a_checkpoint_that_scales_by_itself_is_a_table_beyond_some_families() -> None:
    model = model_of("deepseek_v3")
    config = model.config
    config.rope_parameters = {
        **PLAIN,
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    model = AutoModelForCausalLM.from_config(config)
    rope_ext.patch(model, "pi", factor=2, compose=True)
    with pytest.raises(rope_ext.ExportError, match=r"DeepSeek's YaRN \(rope_type 'longrope'\)"):
        rope_ext.export(model, "vllm")


def by_dual_chunk(given: dict[str, int], i: int, j: int) -> int:
    """The distance that vLLM 0.10 rotates query ``i`` and key ``j`` by."""
    chunk = given["chunk_size"] - given["local_size"]
    key, apart = j % chunk, i // chunk - j // chunk
    if apart == 0:
        return i % chunk - key
    if apart == 1:
        return min(i % chunk + chunk, given["chunk_size"]) - key
    return min(2 * chunk - 1, given["chunk_size"]) - key


def test_dual_chunk_is_exported_to_the_versions_that_run_it() -> None:
    model = rope_ext.patch(built("qwen2"), "dual_chunk", factor=4, attention_factor=1)
    made = rope_ext.export(model, "vllm", dual_chunk=True)
    given = made.settings["hf_overrides"]["dual_chunk_attention_config"]
    at = torch.arange(4 * LENGTH, dtype=torch.float64)
    bands = [b.distances(at[:, None], at)[..., 0] for b in current_patch(model).method.bands()]
    ours = torch.stack(bands).nan_to_num(0).sum(0)
    for i in range(0, 4 * LENGTH, 7):
        assert ours[i, : i + 1].tolist() == [by_dual_chunk(given, i, j) for j in range(i + 1)]
    assert made.command.startswith("VLLM_ATTENTION_BACKEND=DUAL_CHUNK_FLASH_ATTN ")


def test_dual_chunk_is_refused_where_it_is_not_run() -> None:
    model = rope_ext.patch(built("qwen2"), "dual_chunk", factor=4)
    with pytest.raises(rope_ext.ExportError, match="but has dropped the attention"):
        rope_ext.export(model, "vllm")
    rope_ext.patch(model, "dual_chunk", factor=4, chunk=48, local=32, replace=True)
    with pytest.raises(
        rope_ext.ExportError, match="queries for distant keys use position 31 instead of 48"
    ):
        rope_ext.export(model, "vllm", dual_chunk=True)
    rope_ext.patch(model, "dual_chunk", factor=4, replace=True)
    with pytest.raises(rope_ext.ExportError, match="patch with attention_factor=1"):
        rope_ext.export(model, "vllm", dual_chunk=True)
    model = rope_ext.patch(built("llama"), "dual_chunk", factor=4)
    with pytest.raises(rope_ext.ExportError, match="for qwen2, qwen3, not for llama"):
        rope_ext.export(model, "vllm", dual_chunk=True)
