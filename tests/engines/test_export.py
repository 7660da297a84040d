"""Exported settings, put into the engines' formulas, give the patched model's numbers.

The formulas are written down in float64 from vLLM 0.33.0, SGLang 0.5.23, llama.cpp at 0c1e57098
and its converter, and mlx-lm 0.32.2: each takes the settings and nothing of ours. The engines
themselves are run by the slow tests in ``engines``.
"""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner

import rope_ext
from rope_ext.cli import app
from rope_ext.patching import current_patch
from tests.helpers.models import LENGTH, tiny_llama

DIM = 16
TABLE = [1.0 + 0.5 * i for i in range(8)]
FIXED: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": ("yarn", {}),
    "yarn hotter": ("yarn", {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0}),
    "ntk": ("ntk", {}),
    "abf": ("abf", {"base": 5e5}),
    "pi": ("pi", {}),
    "dynamic_ntk": ("dynamic_ntk", {"length": 200}),
    "llama3": ("llama3", {}),
    "yarn smooth": ("yarn", {"truncate": False}),
    "yarn paper": ("yarn", {"ramp": "rotations"}),
    "mrrope": ("mrrope", {}),
    "ntk_by_parts": ("ntk_by_parts", {}),
    "dynamic_yarn": ("dynamic_yarn", {"length": 200}),
    "longrope": ("longrope", {"long_factor": TABLE}),
    "longrope2": ("longrope2", {}),
    "clipped": ("clipped", {}),
    "base_truncation": ("base_truncation", {}),
    "resonance": ("resonance", {}),
    "p_rope": ("p_rope", {"p": 0.5}),
}
BY_FLAGS = ["yarn", "yarn hotter", "ntk", "abf", "pi", "dynamic_ntk"]
"""What llama.cpp needs no table for."""
Numbers = tuple[torch.Tensor, float]


def patched(case: str, model: Any = None, **more: Any) -> Any:
    name, options = FIXED[case]
    return rope_ext.patch(model or tiny_llama(), name, **{"factor": 4, **options, **more})


def same(got: Numbers, model: Any) -> None:
    """1e-6 is the float32 of the buffers; a frequency of zero goes out as 1e-30 of its own."""
    rotary = model.model.rotary_emb
    torch.testing.assert_close(got[0], rotary.inv_freq.double(), rtol=1e-6, atol=1e-25)
    assert got[1] == pytest.approx(rotary.attention_scaling, rel=1e-6)


def theta(base: float) -> torch.Tensor:
    return torch.tensor([base ** (-2 * i / DIM) for i in range(DIM // 2)], dtype=torch.float64)


def ramped(base: float, s: float, length: int, fast: float, slow: float, whole: bool) -> Any:
    """YaRN by index, as all three engines have it: kept below ``low``, divided above ``high``."""
    low, high = (
        DIM * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (fast, slow)
    )
    if whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, DIM - 1)
    index = torch.arange(DIM // 2, dtype=torch.float64)
    away = ((index - low) / max(0.001, high - low)).clamp(0, 1)
    return theta(base) * (away / s + (1 - away))


def by_server(overrides: dict[str, Any], engine: str) -> Numbers:
    """What vLLM and SGLang make of the fields of a configuration."""
    p, scaling = overrides["rope_parameters"], 1.0
    base, kind, s = p["rope_theta"], p["rope_type"], p.get("factor")
    if kind == "default":
        return theta(base), 1.0
    if kind == "linear":
        return theta(base) / s, 1.0
    length = p["original_max_position_embeddings"]
    if kind == "longrope":
        grown = overrides["max_position_embeddings"] / length
        scaling = p.get("long_mscale", math.sqrt(1 + math.log(grown) / math.log(length)))
        assert p["short_factor"] == p["long_factor"] and p["short_mscale"] == scaling
        return theta(base) / torch.tensor(p["long_factor"], dtype=torch.float64), scaling
    if kind == "llama3":
        wave = 2 * math.pi / theta(base)
        low, high = p["low_freq_factor"], p["high_freq_factor"]
        smooth = (length / wave - low) / (high - low)
        mixed = (1 - smooth) * theta(base) / s + smooth * theta(base)
        slow = torch.where(wave > length / low, theta(base) / s, mixed)
        return torch.where(wave < length / high, theta(base), slow), 1.0
    assert kind == "yarn"
    scaling = 0.1 * math.log(s) + 1
    if engine == "vllm":  # attention_factor is the number itself
        scaling = p.get("attention_factor", scaling)
    else:  # SGLang knows attn_factor only, which is multiplied in
        scaling *= p.get("attn_factor", 1.0)
    whole = p.get("truncate", True)
    return ramped(base, s, length, p.get("beta_fast", 32), p.get("beta_slow", 1), whole), scaling


@pytest.mark.parametrize("case", FIXED)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_servers_compute_the_patch(engine: str, case: str) -> None:
    model = patched(case)
    made = rope_ext.export(model, engine)
    overrides, length = made.settings.values()
    same(by_server(overrides, engine), model)
    assert length == current_patch(model).target_length == overrides["max_position_embeddings"]
    words = shlex.split(made.command)
    flag = {"vllm": "--hf-overrides", "sglang": "--json-model-override-args"}[engine]
    assert json.loads(words[words.index(flag) + 1]) == overrides
    assert words[-2:] == [{"vllm": "--max-model-len"}.get(engine, "--context-length"), str(length)]


def test_flags_and_keys_of_llama_cpp_say_the_same() -> None:
    made = rope_ext.export(patched("yarn hotter"), "llama.cpp")
    multiplier = 1.3 / (1 + 0.1 * math.log(4))
    assert made.settings["gguf"] == {
        "llama.context_length": 256,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
        "llama.rope.scaling.attn_factor": pytest.approx(multiplier, rel=1e-12),
    }
    assert "beta_fast and beta_slow are flags only" in str(made)
    words = shlex.split(made.command)
    assert words[:3] == ["llama-server", "--model", "MODEL.gguf"]
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    assert flags == {
        "--ctx-size": "256",
        "--rope-scaling": "yarn",
        "--rope-scale": "4.0",
        "--yarn-orig-ctx": "64",
        "--yarn-beta-fast": "16.0",
        "--yarn-beta-slow": "2.0",
        "--override-kv": f"llama.rope.scaling.attn_factor=float:{multiplier!r}",
    }
    assert "--yarn-attn-factor" not in made.command  # without effect
    ntk = rope_ext.export(patched("ntk"), "llama.cpp").settings
    assert ntk["gguf"]["llama.rope.freq_base"] == pytest.approx(10000 * 4 ** (16 / 14))
    assert ntk["flags"]["--override-kv"] == ["llama.context_length=int:256"]


def test_the_factor_of_llama_cpp_is_raised_by_rounding_alone() -> None:
    for length, factor in ((64, 7), (101, 1.3), (4096, 3)):
        model = rope_ext.patch(tiny_llama(max_position_embeddings=length), "yarn", factor=factor)
        flags = rope_ext.export(model, "llama.cpp").settings["flags"]
        assert flags["--rope-scale"] == pytest.approx(factor, rel=1e-6)
        inverse = torch.tensor(1.0) / torch.tensor(flags["--rope-scale"], dtype=torch.float32)
        assert int(length / inverse) >= int(length * factor)


def test_the_tensor_is_the_one_that_the_converter_writes() -> None:
    factors = rope_ext.export(patched("llama3"), "llama.cpp").settings["tensors"]
    expected = []
    for frequency in theta(10000.0).tolist():  # factor 4, low 1, high 4, 64 tokens
        wave = 2 * math.pi / frequency
        smooth = (64 / wave - 1) / (4 - 1)
        between = 1 / ((1 - smooth) / 4 + smooth)
        expected.append(1.0 if wave < 16 else 4.0 if wave > 64 else between)
    assert factors["rope_freqs.weight"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("case", FIXED)
def test_ollama_runs_what_a_file_can_say(case: str) -> None:
    made = rope_ext.export(patched(case), "ollama")
    assert made.files["Modelfile"] == "FROM ./MODEL-long.gguf\nPARAMETER num_ctx 256\n"
    assert "rope-ext gguf MODEL.gguf --method" in made.command
    assert ("tensors" in made.settings) == (case not in BY_FLAGS or case == "yarn hotter")


@pytest.mark.parametrize("case", FIXED)
@pytest.mark.parametrize("engine", ["mlx", "legacy"])
def test_transformers_reads_the_older_names_to_the_same_bits(tmp_path, engine, case: str) -> None:
    model = patched(case)
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).model.rotary_emb
    options = {"legacy": True} if engine == "legacy" else {}
    name = "mlx" if engine == "mlx" else "transformers"
    rope_ext.export(model, name, **options).write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert config["rope_theta"] == model.config.rope_parameters["rope_theta"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path).model.rotary_emb
    # mlx-lm always rounds the ends of YaRN's ramp, so that it gets a table, rounded to float32.
    rtol = 1e-6 if (engine, case) == ("mlx", "yarn smooth") else 0
    torch.testing.assert_close(again.inv_freq, plain.inv_freq, rtol=rtol, atol=0)
    assert again.attention_scaling == plain.attention_scaling
    ours = rope_ext.from_pretrained(str(tmp_path)).model.rotary_emb
    torch.testing.assert_close(ours.inv_freq, model.model.rotary_emb.inv_freq, rtol=rtol, atol=0)


@pytest.mark.parametrize("case", FIXED)
def test_transformers_builds_the_patch_from_the_file(tmp_path, case: str) -> None:
    model = patched(case)
    files = rope_ext.export(model, "transformers").files
    (tmp_path / "config.json").write_text(files["config.json"])
    config = AutoConfig.from_pretrained(tmp_path)
    built = AutoModelForCausalLM.from_config(config).model.rotary_emb
    assert torch.equal(built.inv_freq, model.model.rotary_emb.inv_freq)
    assert built.attention_scaling == model.model.rotary_emb.attention_scaling


def qwen() -> Any:
    small = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": LENGTH}
    return Qwen2ForCausalLM(Qwen2Config(**small, **heads))


@pytest.mark.parametrize(
    ("engine", "method", "options", "message"),
    [
        ("vllm", "rerope", {}, "no setting that changes the positions.*no supported engine can"),
        ("llama.cpp", "self_extend", {}, "neighbors lose their exact distances"),
        ("sglang", "dynamic_ntk", {}, "length=TOKENS.*'transformers' can"),
        ("vllm", "dynamic_yarn", {}, "length of each request: .*length=TOKENS"),
        ("transformers", "dynamic_yarn", {}, "no rope_type"),
    ],
)
def test_what_an_engine_cannot_run_is_refused(engine, method, options, message) -> None:
    model = rope_ext.patch(tiny_llama(), method, factor=4, **options)
    with pytest.raises(rope_ext.ExportError, match=f"{engine} cannot run {method}: .*{message}"):
        rope_ext.export(model, engine)


def test_families_and_names_that_were_not_checked_are_refused() -> None:
    model = rope_ext.patch(qwen(), "llama3", factor=4)
    others = "'vllm' and 'sglang' and 'transformers' and 'mlx' can"
    message = f"for the architectures 'llama', .* only, and this is 'qwen2'.*{others}"
    with pytest.raises(rope_ext.ExportError, match=message):
        rope_ext.export(model, "llama.cpp")
    rope_ext.patch(model, "yarn", factor=4, beta_fast=16.0, replace=True)
    with pytest.raises(rope_ext.ExportError, match=r"ollama cannot run yarn: .*flags of llama"):
        rope_ext.export(model, "ollama")
    rope_ext.patch(model, "yarn", factor=4, replace=True)
    assert "qwen2.rope.scaling.type" in rope_ext.export(model, "llama.cpp").settings["gguf"]
    model.config.model_type = "other"
    with pytest.raises(rope_ext.ExportError, match=r"'other' has not been tested"):
        rope_ext.export(model, "vllm")
    with pytest.raises(rope_ext.ExportError, match="did you mean 'vllm'"):
        rope_ext.export(model, "vlm")
    with pytest.raises(rope_ext.NotPatchedError, match="nothing to export"):
        rope_ext.export(tiny_llama(), "vllm")


def test_a_checkpoint_that_scales_by_itself(tmp_path) -> None:
    rope_ext.patch(tiny_llama(), "llama3", factor=2).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    rope_ext.patch(model, "pi", factor=2, compose=True)
    same(by_server(rope_ext.export(model, "vllm").settings["hf_overrides"], "vllm"), model)
    made = rope_ext.export(model, "llama.cpp")
    assert made.command.startswith("rope-ext gguf FOLDER MODEL.gguf --output MODEL-long.gguf && ")
    assert f"vllm serve {tmp_path} " in rope_ext.export(model, "vllm").command


def test_command_line(tmp_path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    words = ["export", str(tmp_path), "--method", "yarn", "--factor", "4", "--engine"]
    result = CliRunner().invoke(app, [*words, "llama.cpp"])
    assert result.exit_code == 0, result.output
    assert "--rope-scaling yarn --rope-scale 4.0 --yarn-orig-ctx 64" in result.stdout
    result = CliRunner().invoke(app, [*words, "tgi"])
    assert result.exit_code == 2 and "choose one of 'vllm'" in result.stderr
    result = CliRunner().invoke(app, [*words, "vllm", "--output", str(tmp_path)])
    assert result.exit_code == 2 and "its settings are in the command" in result.stderr
    result = CliRunner().invoke(app, [*words, "mlx", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "config.json").read_text("utf-8"))["rope_scaling"]["factor"] == 4


def test_the_written_file_keeps_the_dtype_of_the_weights(tmp_path) -> None:
    tiny_llama().bfloat16().save_pretrained(tmp_path)
    words = ["export", str(tmp_path), "--method", "pi", "--factor", "4", "--engine", "transformers"]
    result = CliRunner().invoke(app, [*words, "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "config.json").read_text("utf-8"))["dtype"] == "bfloat16"


def test_options_of_engines_are_checked() -> None:
    model = patched("yarn")
    with pytest.raises(rope_ext.ExportError, match="sglang has no option 'legacy'; it has none"):
        rope_ext.export(model, "sglang", legacy=True)
    with pytest.raises(rope_ext.ExportError, match="no option 'old'; its options are legacy"):
        rope_ext.export(model, "transformers", old=True)


def test_files_are_written_into_a_new_folder(tmp_path: Path) -> None:
    made = rope_ext.export(patched("yarn"), "transformers")
    assert made.write(tmp_path / "new" / "folder") == [tmp_path / "new" / "folder" / "config.json"]
    assert json.loads((tmp_path / "new" / "folder" / "config.json").read_text())["rope_parameters"]
    (tmp_path / "file").write_text("")
    with pytest.raises(rope_ext.ExportError, match="is a file; give the name of a folder"):
        made.write(tmp_path / "file")
