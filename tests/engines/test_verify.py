"""`rope-ext verify` against engines made to misbehave."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from typer.testing import CliRunner

import rope_ext
from rope_ext.cli import app
from rope_ext.engines import verifying
from rope_ext.engines.verifying import Miniature

CONFIG = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 12,
    "vocab_size": 32000,
    "max_position_embeddings": 64,
}
YARN = "--ctx-size 256 --rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 64"
LONG = "--ctx-size 256 --override-kv llama.context_length=int:256"
COLD = "--override-kv llama.rope.scaling.attn_factor=float:0.8782346"


def config(base: float = 5e5) -> Any:
    return LlamaConfig(
        **CONFIG, head_dim=64, rope_parameters={"rope_type": "default", "rope_theta": base}
    )


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A model whose weights are not there."""
    config().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def run(*words: Any) -> Any:
    return CliRunner().invoke(app, ["verify", *map(str, words)])


def small_enough(model: Any) -> bool:
    return sum(p.numel() for p in model.parameters()) * 4 < 4e6  # bytes


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_a_miniature_has_the_models_own_rotary_embedding(kind: type) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5}
    small = Miniature.of(kind(**CONFIG, rope_parameters=rope), "yarn", factor=8)
    full = kind(**CONFIG, rope_parameters=rope)
    dim = getattr(full, "head_dim", None) or 64
    theta = 5e5 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    rotary = small.plain.model.rotary_emb
    torch.testing.assert_close(rotary.inv_freq.double(), theta, rtol=1e-6, atol=0)
    want = rope_ext.YaRN(factor=8).inv_freq(small.scaling.rope)
    torch.testing.assert_close(
        small.model.model.rotary_emb.inv_freq.double(), want, rtol=1e-6, atol=0
    )
    assert small_enough(small.model) and small.lengths() == (63, 255, 511)


def test_a_checkpoint_that_scales_by_itself_is_taken_as_it_is() -> None:
    scaled = config()
    scaled.max_position_embeddings = 256
    scaled.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 5e5,
        "short_factor": [2.0] * 32,
        "long_factor": [2.0] * 32,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    small = Miniature.of(scaled)
    torch.testing.assert_close(
        small.scaling.inv_freq, small.scaling.rope.inv_freq / 2, rtol=1e-6, atol=0
    )
    assert small.scaling.rope.length == 64 and small.scaling.scaling > 1
    with pytest.raises(rope_ext.ExportError, match="nothing to verify: there is none; patch it"):
        Miniature.of(config())
    with pytest.raises(rope_ext.ExportError, match="chooses them for each"):
        Miniature.of(config(), "dynamic_ntk", factor=4)
    with pytest.raises(rope_ext.ExportError, match="no miniature of 'gpt2'"):
        other = config()
        other.model_type = "gpt2"
        Miniature.of(other, "yarn", factor=4)


def engine(inv_freq: Any, scaling: float) -> verifying.Run:
    """An engine that computes with these frequencies."""
    model = Miniature.of(config(), "yarn", factor=4).plain
    model.model.rotary_emb.inv_freq = inv_freq.float()
    model.model.rotary_emb.attention_scaling = scaling
    return lambda prompts: verifying.of_transformers(model, prompts)


@pytest.mark.parametrize(
    ("method", "verdict", "error"),
    [
        ("yarn", "as patched", lambda h, theta, a: (h, a)),
        ("ntk_by_parts", "as patched", lambda h, theta, a: (h, a)),
        ("yarn", "unextended", lambda h, theta, a: (theta, 1.0)),
        ("yarn", "temperature missing", lambda h, theta, a: (h, 1.0)),
        ("pi", "unextended", lambda h, theta, a: (theta, 1.0)),
        ("yarn", "wrong base (10000)", lambda h, theta, a: (at(1e4), 1.0)),
        ("yarn", "wrong base (1e+06, scaled)", lambda h, theta, a: (h / theta * at(1e6), a)),
        ("yarn", "other (all frequencies / 4)", lambda h, theta, a: (theta / 4, 1.0)),
        ("yarn", "other", lambda h, theta, a: (h**1.1, a)),
    ],
)
def test_what_an_engine_does_is_named(method: str, verdict: str, error: Any) -> None:
    small = Miniature.of(config(), method, factor=4)
    made = small.scaling
    wrong = error(made.inv_freq, made.rope.inv_freq, made.scaling)
    found = verifying.verify(small, engine(*wrong), "an engine")
    assert f"an engine: {verdict};" in str(found)
    assert found.passed == (verdict == "as patched")
    assert json.loads(found.to_json())["passed"] == found.passed
    assert min(found.differences.values()) <= 1e-4 or verdict == "other"


def at(base: float) -> torch.Tensor:
    return base ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)


def test_a_short_table_is_named() -> None:
    tables = {"long_factor": [4.0] * 32, "short_factor": [1.5] * 32, "length": 256}
    with pytest.raises(rope_ext.ExportError, match="nothing to verify"):
        Miniature.of(
            config(), "longrope", factor=4, long_factor=[4.0] * 32, short_factor=[1.5] * 32
        )
    small = Miniature.of(config(), "longrope", factor=4, **tables)
    made = small.scaling
    short = engine(made.rope.inv_freq / 1.5, made.scaling)
    found = verifying.verify(small, short, "an engine")
    assert found.verdict == "short table" and not found.passed


def test_prompts_that_tell_nothing_are_pointed_out() -> None:
    small = Miniature.of(config(), "yarn", factor=4)
    made = small.scaling
    right = engine(made.inv_freq, made.scaling)
    found = verifying.verify(small, right, "an engine", longest=48)
    assert any("no prompt is longer than the trained 64" in note for note in found.notes)
    assert not verifying.verify(small, right, "an engine").notes


class Answers(BaseHTTPRequestHandler):
    """An OpenAI-compatible server, as vLLM answers: the 20 most probable, by id."""

    model: Any = None

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/completions" and body["max_tokens"] == 1
        row = verifying.of_transformers(self.model, [body["prompt"]])[0]
        best = row.topk(body["logprobs"])
        top = {f"token_id:{i}": float(v) for v, i in zip(*best, strict=True)}
        data = json.dumps({"choices": [{"logprobs": {"top_logprobs": [top]}}]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def endpoint(model: Any) -> Iterator[str]:
    handler = type("Handler", (Answers,), {"model": model})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_an_endpoint_is_asked(folder: str, tmp_path: Path) -> None:
    small = Miniature.of(config(), "yarn", factor=4)
    report = tmp_path / "report.json"
    words = [folder, "--method", "yarn", "--json", report, "--url"]
    with endpoint(small.model) as url:
        result = run(*words, url)
    assert result.exit_code == 0, result.output
    assert f"{url}: as patched" in result.stdout and json.loads(report.read_text())["passed"]
    with endpoint(small.plain) as url:
        result = run(*words, url)
    assert result.exit_code == 1 and f"{url}: unextended" in result.stdout
    assert json.loads(report.read_text())["verdict"] == "unextended"
    result = run(*words, url)  # it has ended
    assert result.exit_code == 2 and "is the server running?" in result.stderr


def test_the_command_says_what_is_missing(folder: str) -> None:
    result = run(folder, "--engine", "vllm", "--method", "yarn")
    assert result.exit_code == 2 and "--write FOLDER, serve that, and --url" in result.stderr
    result = run(folder)
    assert result.exit_code == 2 and "nothing to verify" in result.stderr
    result = run(folder, "--method", "yarn", "--engine", "transformers")
    assert result.exit_code == 0 and "transformers: as patched" in result.stdout, result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "verdict"),
    [
        (None, "as patched"),
        (YARN, "as patched"),
        (LONG, "unextended"),
        (f"{YARN} {COLD}", "temperature missing"),
        (f"{LONG} --rope-freq-base 10000", "wrong base (10000)"),
        (f"{YARN} --rope-freq-base 10000", "other"),
        (f"{LONG} --rope-scaling linear --rope-scale 4", "other (all frequencies / 4)"),
    ],
)
def test_what_llama_cpp_does_is_named(folder: str, flags: str | None, verdict: str) -> None:
    pytest.importorskip("xllamacpp")
    given = [] if flags is None else ["--flags", flags]
    result = run(folder, "--method", "yarn", *given)
    assert result.stdout.startswith(f"llama.cpp: {verdict};"), result.output
    assert result.exit_code == (verdict != "as patched")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ntk", "resonance", "llama3", "pi", "p_rope"])
def test_llama_cpp_computes_what_export_prints(folder: str, method: str) -> None:
    pytest.importorskip("xllamacpp")
    result = run(folder, "--method", method, "--engine", "llama.cpp")
    assert result.exit_code == 0 and "llama.cpp: as patched" in result.stdout, result.output


@pytest.mark.slow
def test_what_mlx_does_is_named(folder: str) -> None:
    pytest.importorskip("mlx_lm")
    words = [folder, "--method", "yarn", "--engine", "mlx"]
    assert run(*words).stdout.startswith("mlx: as patched;")
    wrong = run(*words, "--as-saved")  # mlx-lm reads neither its base nor its scaling
    assert wrong.exit_code == 1 and wrong.stdout.startswith("mlx: wrong base (10000);")


@pytest.mark.slow
def test_a_miniature_is_written_for_others_where_llama_cpp_has_no_way(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    Qwen2Config(**CONFIG).save_pretrained(tmp_path / "model")  # which takes no table
    words = [tmp_path / "model", "--method", "resonance", "--write", tmp_path / "small"]
    result = run(*words)
    assert result.exit_code == 0 and not result.stdout, result.output
    assert {"config.json", "model.safetensors", "MODEL.gguf"} <= {
        path.name for path in (tmp_path / "small").iterdir()
    }


@pytest.mark.slow
def test_a_written_miniature_is_served(folder: str, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    from rope_ext.engines import running

    words = [folder, "--method", "resonance"]
    result = run(*words, "--write", tmp_path / "small")
    assert result.exit_code == 0, result.output
    program, *flags = result.stdout.split()
    assert program == "llama-server"
    with running.serving([*flags, *running.EXACT, "--parallel", "1", "--threads", "1"]) as url:
        assert run(*words, "--url", url, "--tolerance", "0.002").exit_code == 0
        wrong = run(folder, "--method", "pi", "--url", url)
    assert wrong.exit_code == 1
