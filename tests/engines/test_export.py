"""Exported settings give the patched model's numbers, and what cannot be exported is refused.

The engines themselves are run by the slow tests beside this file.
"""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from typer.testing import CliRunner

import rope_ext
from rope_ext.cli import app
from rope_ext.engine_names import ENGINES
from rope_ext.patching import current_patch
from tests.families.zoo import tiny_model, tiny_of
from tests.helpers.checkpoint import save_checkpoint
from tests.helpers.draft_folders import FOLDERS, WITHIN, model_part, write_draft
from tests.helpers.engines import TABLE, built
from tests.helpers.models import LENGTH, tiny_llama

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


def patched(case: str, model: Any = None, **more: Any) -> Any:
    name, options = FIXED[case]
    return rope_ext.patch(model or tiny_llama(), name, **{"factor": 4, **options, **more})


def of(engine: str, made: rope_ext.Export) -> dict[str, Any]:
    return made.settings[{"vllm": "hf_overrides"}.get(engine, "json_model_override_args")]


@pytest.mark.parametrize("case", FIXED)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_servers_are_given_the_patch(engine: str, case: str) -> None:
    """Plain transformers reads the same fields."""
    model = patched(case)
    made = rope_ext.export(model, engine)
    config = AutoConfig.for_model(**model.config.to_dict() | of(engine, made))
    rotary = AutoModelForCausalLM.from_config(config).model.rotary_emb
    assert torch.equal(rotary.inv_freq, model.model.rotary_emb.inv_freq)
    assert rotary.attention_scaling == model.model.rotary_emb.attention_scaling
    length = current_patch(model).target_length
    assert length == config.max_position_embeddings
    words = shlex.split(made.command)
    flag = {"vllm": "--hf-overrides", "sglang": "--json-model-override-args"}[engine]
    assert json.loads(words[words.index(flag) + 1]) == of(engine, made)
    assert words[-2:] == [{"vllm": "--max-model-len"}.get(engine, "--context-length"), str(length)]


def test_numbers_of_their_own_have_the_names_of_the_servers() -> None:
    hotter, table = patched("yarn hotter"), patched("dynamic_yarn")
    for engine in ("vllm", "sglang"):
        found = of(engine, rope_ext.export(hotter, engine))["rope_parameters"]
        assert found["attention_factor"] == 1.3  # of newer vLLM; the others multiply
        assert found["attn_factor"] * (1 + 0.1 * math.log(4)) == pytest.approx(1.3, rel=1e-12)
        found = of(engine, rope_ext.export(table, engine))["rope_parameters"]
        number = table.model.rotary_emb.attention_scaling
        assert (found["short_mscale"], found["long_mscale"]) == (number, number)


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


def test_a_window_that_was_removed_stays_removed(tmp_path: Path) -> None:
    """The engine reads the file of the checkpoint, which has it."""
    tiny_model("mistral", sliding_window=32).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.sliding_window = None
    model = AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    rope_ext.patch(model, "yarn", factor=4)
    for engine, fields in (("vllm", "hf_overrides"), ("sglang", "json_model_override_args")):
        assert rope_ext.export(model, engine).settings[fields]["sliding_window"] is None
    rope_ext.patch(model, "rerope", factor=4, replace=True)
    assert rope_ext.export(model, "vllm").settings["hf_overrides"]["sliding_window"] is None


def test_a_limit_of_sentence_transformers_is_refused(tmp_path: Path) -> None:
    model = tiny_model("gemma3_text", use_bidirectional_attention=True).model
    model.save_pretrained(tmp_path / "plain")
    (tmp_path / "plain/sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    loaded = AutoModel.from_pretrained(tmp_path / "plain")
    rope_ext.patch(loaded, "yarn", factor=4, sliding_layers="scale").save_pretrained(
        tmp_path / "long"
    )
    with pytest.raises(
        rope_ext.ExportError, match=r"sentence_bert_config\.json limits texts to 64"
    ):
        rope_ext.export(loaded, "vllm")
    assert "vllm serve" in rope_ext.export(tmp_path / "long", "vllm").command


def test_a_folder_of_a_patched_model_is_not_called_the_unpatched_one(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    rope_ext.patch(model, "yarn", factor=4, precise=True).save_pretrained(tmp_path / "long")
    assert f"unpatched {tmp_path / 'plain'}" in str(rope_ext.export(model, "llama.cpp"))
    again = rope_ext.from_pretrained(tmp_path / "long")
    assert "unpatched MODEL" in str(rope_ext.export(again, "llama.cpp"))


def test_the_factor_of_llama_cpp_is_raised_by_rounding_alone() -> None:
    for length, factor in ((64, 7), (101, 1.3)):
        model = rope_ext.patch(tiny_llama(max_position_embeddings=length), "yarn", factor=factor)
        flags = rope_ext.export(model, "llama.cpp").settings["flags"]
        assert flags["--rope-scale"] == pytest.approx(factor, rel=1e-6)
        inverse = torch.tensor(1.0) / torch.tensor(flags["--rope-scale"], dtype=torch.float32)
        assert int(length / inverse) >= int(length * factor)


def test_the_tensor_divides_the_frequencies() -> None:
    model = patched("llama3")
    table = rope_ext.export(model, "llama.cpp").settings["tensors"]["rope_freqs.weight"]
    theta = torch.tensor([10000.0 ** (-2 * i / 16) for i in range(8)], dtype=torch.float64)
    found = theta / torch.tensor(table, dtype=torch.float64)
    torch.testing.assert_close(found, model.model.rotary_emb.inv_freq.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", FIXED)
def test_ollama_runs_what_a_file_can_say(case: str) -> None:
    made = rope_ext.export(patched(case), "ollama")
    reached = 4 * LENGTH if "length" not in FIXED[case][1] else FIXED[case][1]["length"]
    assert made.files["Modelfile"] == f"FROM ./MODEL-long.gguf\nPARAMETER num_ctx {reached}\n"
    assert "rope-ext gguf MODEL.gguf --method" in made.command
    assert ("tensors" in made.settings) == (case not in BY_FLAGS or case == "yarn hotter")


@pytest.mark.parametrize("case", FIXED)
@pytest.mark.parametrize("engine", ["mlx", "legacy"])
def test_transformers_reads_the_older_names_to_the_same_bits(tmp_path, engine, case: str) -> None:
    model = patched(case)
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).model.rotary_emb
    options = {"legacy": True} if engine == "legacy" else {}
    rope_ext.export(model, "mlx" if engine == "mlx" else "transformers", **options).write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert config["rope_theta"] == model.config.rope_parameters["rope_theta"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path).model.rotary_emb
    # mlx-lm always rounds the ends of YaRN's ramp, so that it gets a table, rounded to float32.
    rtol = 1e-6 if (engine, case) == ("mlx", "yarn smooth") else 0
    torch.testing.assert_close(again.inv_freq, plain.inv_freq, rtol=rtol, atol=0)
    assert again.attention_scaling == plain.attention_scaling
    ours = rope_ext.from_pretrained(str(tmp_path)).model.rotary_emb
    torch.testing.assert_close(ours.inv_freq, model.model.rotary_emb.inv_freq, rtol=rtol, atol=0)


@pytest.mark.parametrize(
    ("engine", "method", "options", "message"),
    [
        ("vllm", "lm_infinite", {}, "plugin serves .*no supported engine can"),
        ("vllm", "alibi", {}, "no encodings"),
        ("sglang", "lm_infinite", {}, "plugin serves .*no supported engine can"),
        ("sglang", "rerope", {"bias": "alibi"}, "bias="),
        ("mlx", "rerope", {}, "no setting that changes the positions.*'vllm' and 'sglang' can"),
        ("vllm", "rerope", {"bias": "alibi"}, "bias=.*no supported engine can"),
        ("vllm", "rerope", {"temperature": "ssmax"}, "learned temperatures"),
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


def test_a_position_method_is_exported_to_vllm_for_the_plugin_of_rope_ext(tmp_path) -> None:
    """For a saved folder, and for a model and a method by name, whose record the plugin reads."""
    serve = "python -m vllm.entrypoints.openai.api_server --model"
    save_checkpoint(tmp_path / "base")
    asked = [str(tmp_path / "base"), "--method", "self_extend", "--factor", "4"]
    made = CliRunner().invoke(app, ["export", *asked, "--engine", "vllm"])
    command, note, *_ = made.stdout.splitlines()
    assert command.startswith(f"{serve} {tmp_path / 'base'} --hf-overrides ")
    assert "rope_ext in its environment" in note
    assert "rope-ext verify" in made.output and "--engine vllm" in made.output
    words = shlex.split(command)
    fields = json.loads(words[words.index("--hf-overrides") + 1])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    rope_ext.patch(model, "self_extend", factor=4).save_pretrained(tmp_path / "patched")
    written = json.loads((tmp_path / "patched" / "config.json").read_text("utf-8"))
    assert {"rope_ext", "rope_parameters", "max_position_embeddings"} == fields.keys()
    alike = ("method", "resolved", "trained_length", "target_length")
    assert [fields["rope_ext"][x] for x in alike] == [written["rope_ext"][x] for x in alike]
    for name in ("rope_parameters", "max_position_embeddings"):
        assert fields[name] == written[name]
    assert words[-2:] == ["--max-model-len", str(fields["max_position_embeddings"])]
    saved = rope_ext.export(tmp_path / "patched", "vllm")
    assert saved.command == f"{serve} {tmp_path / 'patched'}"
    loaded = rope_ext.export(model, "vllm").settings["hf_overrides"]
    assert loaded["rope_ext"] == written["rope_ext"]
    with pytest.raises(rope_ext.ExportError, match="no setting that changes the positions"):
        rope_ext.export(model, "vllm", plugin=False)
    granite = rope_ext.patch(tiny_model("granite"), "rerope", factor=4)
    with pytest.raises(rope_ext.ExportError, match="not granite"):
        rope_ext.export(granite, "vllm")
    config = {"sliding_window": 32, "layer_types": ["full_attention", "sliding_attention"]}
    sliding = tiny_model("qwen2", use_sliding_window=True, **config)
    rope_ext.patch(sliding, "rerope", factor=4, sliding_layers="scale")
    with pytest.raises(rope_ext.ExportError, match="no sliding windows"):
        rope_ext.export(sliding, "vllm")
    # Its override would be of the whole model, whose text model vLLM configures below it.
    images = rope_ext.patch(tiny_model("llava"), "rerope", factor=4)
    with pytest.raises(rope_ext.ExportError, match="not llava"):
        rope_ext.export(images, "vllm")


def test_windows_beside_a_position_method_are_exported_where_they_rotate_by_themselves() -> None:
    model = rope_ext.patch(tiny_model("gemma3_text"), "self_extend", factor=4)
    fields = rope_ext.export(model, "vllm").settings["hf_overrides"]
    assert fields["rope_parameters"]["sliding_attention"]["rope_type"] == "default"
    scaled = tiny_model("gemma3_text")
    rope_ext.patch(scaled, "self_extend", factor=4, sliding_layers="scale")
    with pytest.raises(rope_ext.ExportError, match="sliding_layers"):
        rope_ext.export(scaled, "vllm")


def test_a_position_method_is_exported_to_sglang_for_the_plugin_of_rope_ext(tmp_path) -> None:
    """It says that nobody has run it."""
    serve = "python -m sglang.launch_server --model-path"
    save_checkpoint(tmp_path / "base")
    asked = [str(tmp_path / "base"), "--method", "self_extend", "--factor", "4"]
    made = CliRunner().invoke(app, ["export", *asked, "--engine", "sglang"])
    command, note, *_ = made.stdout.splitlines()
    assert "rope_ext in its environment" in note and "not run" in note
    assert command.startswith(f"{serve} {tmp_path / 'base'} --attention-backend rope_ext ")
    words = shlex.split(command)
    fields = json.loads(words[words.index("--json-model-override-args") + 1])
    assert {"rope_ext", "rope_parameters", "max_position_embeddings"} == fields.keys()
    assert words[-2:] == ["--context-length", str(fields["max_position_embeddings"])]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    rope_ext.patch(model, "self_extend", factor=4).save_pretrained(tmp_path / "patched")
    saved = rope_ext.export(tmp_path / "patched", "sglang")
    assert saved.command == f"{serve} {tmp_path / 'patched'} --attention-backend rope_ext"
    with pytest.raises(rope_ext.ExportError, match="no setting that changes the positions"):
        rope_ext.export(model, "sglang", plugin=False)


def test_an_encoder_is_served_by_vllm_as_a_pooling_model(tmp_path: Path) -> None:
    model = rope_ext.patch(tiny_of(transformers.ModernBertModel), "yarn", factor=4)
    made = rope_ext.export(model, "vllm")
    assert made.settings["runner"] == "pooling" and "--convert embed" in made.command
    entry = made.settings["hf_overrides"]["rope_parameters"]["full_attention"]
    assert entry["rope_type"] == "yarn"
    model.save_pretrained(tmp_path)
    saved = rope_ext.export(tmp_path, "vllm")
    assert saved.command == f"vllm serve {tmp_path} --runner pooling --convert embed"
    for engine in ("sglang", "llama.cpp", "mlx"):
        with pytest.raises(rope_ext.ExportError, match="both directions"):
            rope_ext.export(model, engine)
    assert rope_ext.export(model, "transformers").files


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("ModernBertModel", "rerope", "no setting that changes the positions"),
        ("ModernBertForSequenceClassification", "yarn", "heads"),
        ("NomicBertModel", "yarn", "first code"),
        ("EuroBertModel", "yarn", "have not been tested with the family 'eurobert'"),
    ],
)
def test_what_vllm_cannot_embed_is_refused(name: str, method: str, message: str) -> None:
    model = rope_ext.patch(tiny_of(getattr(transformers, name)), method, factor=4)
    with pytest.raises(rope_ext.ExportError, match=message):
        rope_ext.export(model, "vllm")


def test_a_decoder_read_in_both_directions_is_not_served_causally() -> None:
    model = tiny_model("llama").model
    model.config.is_causal = False
    rope_ext.patch(model, "yarn", factor=4)
    assert rope_ext.export(model, "vllm").settings["runner"] == "pooling"
    with pytest.raises(rope_ext.ExportError, match="both directions"):
        rope_ext.export(model, "llama.cpp")
    with pytest.raises(rope_ext.ExportError, match="NTK of its own"):
        rope_ext.export(model, "text-embeddings-inference")


@pytest.mark.parametrize("engine", ENGINES)
def test_every_named_engine_answers(engine: str) -> None:
    model = rope_ext.patch(tiny_llama(), "yarn", factor=4)
    assert rope_ext.export(model, engine).settings


def test_families_and_names_that_were_not_checked_are_refused() -> None:
    model = rope_ext.patch(built("qwen2"), "llama3", factor=4)
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
    parameters = of("vllm", rope_ext.export(model, "vllm"))["rope_parameters"]
    assert parameters["rope_type"] == "longrope" and parameters["long_mscale"] == 1
    made = rope_ext.export(model, "llama.cpp")
    assert made.command.startswith("rope-ext gguf FOLDER MODEL.gguf --output MODEL-long.gguf && ")
    assert f"vllm serve {tmp_path} " in rope_ext.export(model, "vllm").command
    rope_ext.patch(built("qwen2"), "pi", factor=2).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    rope_ext.patch(model, "pi", factor=4, compose=True).save_pretrained(tmp_path)
    flags = rope_ext.export(tmp_path, "llama.cpp").settings["flags"]
    assert flags["--rope-scale"] == 8  # saved as a table of equal factors


@pytest.mark.parametrize("family", ["deepseek_v3", "ministral3"])
def test_a_folder_is_exported_like_the_model_in_memory(tmp_path: Path, family: str) -> None:
    """Shipped with YaRN and mscale, or saved with a larger factor of it."""
    own = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "mscale": 1.0}
    own |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 32}
    model = tiny_model(family, rope_parameters=dict(own), max_position_embeddings=64)
    for length, factor in ((64, 2), (256, 8)):
        if factor == 8:
            rope_ext.patch(model, "yarn", factor=8, compose="raise")
        model.save_pretrained(tmp_path)
        described = rope_ext.describe(tmp_path)
        assert (described.length, described.target_length) == (32, length)
        assert described.sites[0].attention_scaling == 1
        made = rope_ext.export(tmp_path, "vllm")
        assert str(tmp_path) in made.command
        loaded = made.settings.get("hf_overrides", {}).get("rope_parameters", {"factor": factor})
        assert loaded["factor"] == factor
        assert rope_ext.export(tmp_path, "sglang").settings == {"context_length": length}
        keys = rope_ext.export(tmp_path, "llama.cpp").settings["gguf"]
        assert keys == rope_ext.export(model, "llama.cpp").settings["gguf"]
        assert rope_ext.export(tmp_path, "mlx").settings == rope_ext.export(model, "mlx").settings


def test_the_temperature_of_a_converted_deepseek_is_counted_once() -> None:
    """llama.cpp's converter writes mscale_all_dim, which then replaces YaRN's own temperature."""
    own = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "mscale": 0.7}
    own |= {"mscale_all_dim": 0.7, "original_max_position_embeddings": 32}
    model = tiny_model("deepseek_v3", rope_parameters=own, max_position_embeddings=64)
    rope_ext.patch(model, "yarn", factor=8, compose="raise")
    for engine in ("llama.cpp", "ollama"):
        keys = rope_ext.export(model, engine).settings["gguf"]
        assert keys["deepseek2.rope.scaling.yarn_log_multiplier"] == pytest.approx(0.07)
        assert "deepseek2.rope.scaling.attn_factor" not in keys
    (override,) = rope_ext.export(model, "llama.cpp").settings["flags"]["--override-kv"]
    assert override.startswith("deepseek2.rope.scaling.yarn_log_multiplier=float:0.07")


def test_command_line(tmp_path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    words = ["export", str(tmp_path), "--method", "yarn", "--factor", "4", "--engine"]
    result = CliRunner().invoke(app, [*words, "llama.cpp"])
    assert result.exit_code == 0, result.output
    assert "--rope-scaling yarn --rope-scale 4.0 --yarn-orig-ctx 64" in result.stdout
    result = CliRunner().invoke(app, [*words, "tgi"])
    assert result.exit_code == 2 and "'tgi' is not known; choose one of 'vllm'" in result.stderr
    result = CliRunner().invoke(app, [*words, "vllm", "--output", str(tmp_path)])
    assert result.exit_code == 2 and "its settings are in the command" in result.stderr
    result = CliRunner().invoke(app, [*words, "mlx", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "config.json").read_text("utf-8"))["rope_scaling"]["factor"] == 4


@pytest.mark.parametrize("engine", ["vllm", "llama.cpp", "transformers"])
def test_a_configuration_of_its_own_dynamic_scaling(tmp_path: Path, engine: str) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    tiny_llama(rope_parameters=rope).save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["export", str(tmp_path), "--engine", engine])
    if engine == "transformers":
        assert result.exit_code == 0 and f"hf upload USER/NAME {tmp_path}" in result.stdout
    else:
        assert result.exit_code == 2 and result.stderr.count("\n") == 1
        message = f"{engine} cannot run what this configuration says, rope_type 'dynamic'"
        assert message in result.stderr and "'transformers' can run this" in result.stderr


def test_options_of_engines_are_checked() -> None:
    model = patched("yarn")
    with pytest.raises(rope_ext.ExportError, match="mlx has no option 'legacy'; it has none"):
        rope_ext.export(model, "mlx", legacy=True)
    with pytest.raises(rope_ext.ExportError, match="no option 'old'; its options are legacy"):
        rope_ext.export(model, "transformers", old=True)


def test_files_are_written_into_a_new_folder_and_over_nothing_else(tmp_path: Path) -> None:
    made = rope_ext.export(patched("yarn"), "transformers")
    for text in ("of somebody else", '{"model_type": "bert"}', "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(rope_ext.ExportError, match="exists and would be lost"):
            made.write(tmp_path)
        assert (tmp_path / "config.json").read_text() == text
    # A model that differs only in what is extended is another one; ours may be extended again.
    for other in ({"rope_theta": 5e5}, {"max_position_embeddings": 128}):
        (tmp_path / "config.json").unlink()
        tiny_llama(**other).config.save_pretrained(tmp_path)
        with pytest.raises(rope_ext.ExportError, match="exists and would be lost"):
            made.write(tmp_path)
    (tmp_path / "config.json").unlink()
    tiny_llama().config.save_pretrained(tmp_path)
    for method in ("yarn", "llama3", "yarn"):
        rope_ext.export(patched(method), "transformers").write(tmp_path)
    ollama = rope_ext.export(patched("yarn"), "ollama")
    assert ollama.write(tmp_path) == ollama.write(tmp_path)
    rope_ext.export(patched("pi"), "ollama").write(tmp_path)  # replaces a Modelfile of ours
    (tmp_path / "Modelfile").write_text("FROM other")
    with pytest.raises(rope_ext.ExportError, match="Modelfile exists and would be lost"):
        ollama.write(tmp_path)
    assert made.write(tmp_path / "new" / "folder") == [tmp_path / "new" / "folder" / "config.json"]
    written = AutoConfig.from_pretrained(tmp_path / "new" / "folder")
    assert written.rope_parameters == patched("yarn").config.rope_parameters


REFUSED = {
    "vllm": {"gpt_oss": ["ntk", "pi"], "deepseek_v3": ["ntk", "pi"], "qwen3_5_text": ["pi"]},
    "sglang": {"gemma3_text": ["yarn"], "qwen3_next": ["yarn"], "qwen3_5_text": ["pi"]},
    "mlx": {"mixtral": ["yarn"], "gpt_oss": ["ntk"]},
    "llama.cpp": {"gpt_oss": ["llama3"], "qwen3": ["resonance"], "llama4_text": ["yarn"]},
}


@pytest.mark.parametrize("engine", REFUSED)
def test_what_a_family_cannot_be_given_is_refused(engine: str) -> None:
    for family, methods in REFUSED[engine].items():
        for method in methods:
            model = rope_ext.patch(tiny_model(family), method, factor=4)
            with pytest.raises(rope_ext.ExportError, match=f"{engine} cannot run {method}: "):
                rope_ext.export(model, engine)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5_text", "llama"])
def test_the_draft_of_a_checkpoint_is_not_forgotten(family: str) -> None:
    model = rope_ext.patch(tiny_model(family), "yarn", factor=4)
    for engine in ("vllm", "sglang", "llama.cpp"):
        found = str(rope_ext.export(model, engine))
        if engine == "llama.cpp":
            assert ("MTP head" in found) == (family != "llama")
        else:  # any model may have a draft in a folder of its own
            assert "MTP head, EAGLE, DFlash" in found


def test_a_saved_folder_does_not_speak_for_the_draft_beside_it(tmp_path: Path) -> None:
    model = rope_ext.patch(tiny_model("llama"), "yarn", factor=4)
    model.save_pretrained(tmp_path / "yarn")
    for engine in ("vllm", "sglang"):
        assert "a draft in a folder of its own" in str(rope_ext.export(tmp_path / "yarn", engine))
    rope_ext.patch(model, "rerope", factor=4, replace=True).save_pretrained(tmp_path / "rerope")
    for engine, word in (("vllm", "without draft models"), ("sglang", "--speculative-algorithm")):
        assert word in str(rope_ext.export(tmp_path / "rerope", engine))


def exported_draft(folder: Path, *options: str) -> Any:
    asked = ["export", str(folder), "--method", "yarn", *options, "--engine", "transformers"]
    found = CliRunner().invoke(app, [*asked, "--output", f"{folder}-long"])
    assert found.exit_code == 0, found.output
    return json.loads((Path(f"{folder}-long") / "config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_draft_is_extended_in_its_own_format(tmp_path: Path, kind: str) -> None:
    """A copy of its folder with this file needs nothing else: other entries stay as they were."""
    written = exported_draft(write_draft(tmp_path / kind, kind), "--factor", "4")
    part = model_part(kind, written)
    wanted = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 2048}
    assert part["max_position_embeddings"] == 8192
    before = model_part(kind, FOLDERS[kind])
    wanted["rope_theta"] = before["rope_theta"]
    for name, value in wanted.items():
        assert part["rope_parameters"][name] == value
        if name != "rope_theta":  # its older place is beside rope_scaling
            assert part["rope_scaling"][name] == value
    changed = {"max_position_embeddings", "rope_scaling", "torch_dtype", "transformers_version"}
    for old, new in ((FOLDERS[kind], written), (before, part)):
        kept = {k: v for k, v in old.items() if k not in {*changed, WITHIN.get(kind)}}
        assert kept == {k: new[k] for k in kept}


@pytest.mark.parametrize("kind", ["eagle3", "speculators"])
def test_a_draft_has_a_trained_length_of_its_own(tmp_path: Path, kind: str) -> None:
    folder = write_draft(tmp_path / kind, kind)
    written = exported_draft(folder, "--factor", "16", "--trained-length", "512")
    part = model_part(kind, written)
    assert part["rope_parameters"]["original_max_position_embeddings"] == 512
    assert part["max_position_embeddings"] == 16 * 512
    assert rope_ext.describe(f"{folder}-long").target_length == 16 * 512


def test_a_draft_within_another_configuration_is_not_served_alone(tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "draft", "speculators")
    for engine in ("vllm", "sglang", "llama.cpp", "mlx"):
        asked = ["export", str(folder), "--method", "yarn", "--factor", "4", "--engine", engine]
        found = CliRunner().invoke(app, asked)
        assert found.exit_code == 2
        assert "beside its target" in " ".join(found.output.split())
    with pytest.raises(rope_ext.RopeExtError, match="model_type"):
        rope_ext.from_pretrained(folder)
