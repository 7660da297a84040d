"""`rope-ext verify` against engines made to misbehave."""

from __future__ import annotations

import copy
import json
import math
import shlex
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)
from typer.testing import CliRunner

import rope_ext
from rope_ext.cli import app
from rope_ext.engines import verifying
from rope_ext.engines.verifying import Miniature
from rope_ext.methods import Rope

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


SLOW = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A model whose weights are not there."""
    config().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def run(*words: Any) -> Any:
    given = "--factor" in words or "--method" not in words
    return CliRunner().invoke(
        app, ["verify", *map(str, words), *([] if given else ["--factor", "4"])]
    )


def small_enough(model: Any) -> bool:
    return sum(p.numel() for p in model.parameters()) * 4 < 4e6  # bytes


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_a_miniature_has_the_models_own_rotary_embedding(kind: type) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5}
    small = Miniature.from_config(kind(**CONFIG, rope_parameters=rope), "yarn", factor=8)
    full = kind(**CONFIG, rope_parameters=rope)
    dim = getattr(full, "head_dim", None) or 64
    theta = 5e5 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    rotary = small.plain.model.rotary_emb
    torch.testing.assert_close(rotary.inv_freq.double(), theta, rtol=1e-6, atol=0)
    want = rope_ext.YaRN(factor=8).inv_freq(small.scaling.rope)
    torch.testing.assert_close(
        small.model.model.rotary_emb.inv_freq.double(), want, rtol=1e-6, atol=0
    )
    assert small_enough(small.model) and small.lengths() == (63, 255, 383, 511)


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
    small = Miniature.from_config(scaled)
    torch.testing.assert_close(
        small.scaling.inv_freq, small.scaling.rope.inv_freq / 2, rtol=1e-6, atol=0
    )
    assert small.scaling.rope.length == 64 and small.scaling.scaling > 1
    with pytest.raises(rope_ext.ExportError, match="nothing to verify: there is none; patch it"):
        Miniature.from_config(config())
    with pytest.raises(rope_ext.ExportError, match="chooses them for each"):
        Miniature.from_config(config(), "dynamic_ntk", factor=4)
    with pytest.raises(rope_ext.ExportError, match="cannot verify the family 'gpt2'"):
        other = config()
        other.model_type = "gpt2"
        Miniature.from_config(other, "yarn", factor=4)


def rotated(
    model: Any, inv_freq: torch.Tensor, scaling: float, dtype: torch.dtype = torch.float32
) -> Any:
    """A copy that computes with these frequencies."""
    model = copy.deepcopy(model).to(dtype)
    model.model.rotary_emb.inv_freq = inv_freq.float()
    model.model.rotary_emb.attention_scaling = scaling
    return model


def engine(plain: Any, inv_freq: torch.Tensor, scaling: float) -> verifying.Run:
    model = rotated(plain, inv_freq, scaling)
    return lambda prompts: verifying.log_probs_of(model, prompts)


@pytest.mark.parametrize(
    ("method", "verdict", "error"),
    [
        ("yarn", "as patched", lambda h, theta, a: (h, a)),
        pytest.param("ntk_by_parts", "as patched", lambda h, theta, a: (h, a), marks=SLOW),
        ("yarn", "unextended", lambda h, theta, a: (theta, 1.0)),
        ("yarn", "temperature missing", lambda h, theta, a: (h, 1.0)),
        pytest.param("yarn", "temperature applied twice", lambda h, t, a: (h, a * a), marks=SLOW),
        ("yarn", "wrong factor (1 % more)", lambda h, theta, a: yarn(theta, 4.04)),
        pytest.param(
            "ntk", "wrong factor (1 % less)", lambda h, t, a: (ntk(t, 4 / 1.01), 1.0), marks=SLOW
        ),
        ("yarn", "wrong base (10000)", lambda h, theta, a: (at(1e4), 1.0)),
        pytest.param(
            "yarn", "wrong base (1e+06, scaled)", lambda h, t, a: (h / t * at(1e6), a), marks=SLOW
        ),
        pytest.param(
            "yarn", "other (all frequencies / 4)", lambda h, t, a: (t / 4, 1.0), marks=SLOW
        ),
        ("yarn", "other", lambda h, theta, a: (h**1.1, a)),
    ],
)
def test_what_an_engine_does_is_named(
    method: str, verdict: str, error: Any, short: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    if method == "yarn":
        small = short.remembered(monkeypatch)
    else:
        small = Miniature.from_config(config(), method, factor=4)
    made = small.scaling
    wrong = error(made.inv_freq, made.rope.inv_freq, made.scaling)
    found = verifying.verify(small, engine(small.plain, *wrong), "an engine")
    assert f"an engine: {verdict};" in str(found)
    assert found.passed == (verdict == "as patched")
    assert json.loads(found.to_json())["passed"] == found.passed
    assert min(found.differences.values()) <= 1e-4 or verdict == "other"


def trained(theta: torch.Tensor) -> Rope:
    return Rope.geometric(float(theta[1] ** -32), 64, 64)


def yarn(theta: torch.Tensor, factor: float) -> tuple[torch.Tensor, float]:
    method = rope_ext.YaRN(factor=factor)
    return method.inv_freq(trained(theta)), method.attention_scaling(trained(theta))


def ntk(theta: torch.Tensor, factor: float) -> torch.Tensor:
    return rope_ext.NTK(factor=factor).inv_freq(trained(theta))


def at(base: float) -> torch.Tensor:
    return base ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)


def test_a_short_table_is_named() -> None:
    tables = {"long_factor": [4.0] * 32, "short_factor": [1.5] * 32, "length": 256}
    with pytest.raises(rope_ext.ExportError, match="nothing to verify"):
        Miniature.from_config(
            config(), "longrope", factor=4, long_factor=[4.0] * 32, short_factor=[1.5] * 32
        )
    small = Miniature.from_config(config(), "longrope", factor=4, **tables)
    made = small.scaling
    short = engine(small.plain, made.rope.inv_freq / 1.5, made.scaling)
    found = verifying.verify(small, short, "an engine")
    assert found.verdict == "short table" and not found.passed


class Answers(BaseHTTPRequestHandler):
    """An OpenAI-compatible server, as vLLM answers: the most probable tokens, by id."""

    answer: Callable[[list[int]], torch.Tensor]
    most = 20  # log-probabilities that it returns
    raw: bytes | None = None  # what it returns instead

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/completions" and body["max_tokens"] == 1
        data = self.raw
        if data is None:
            row = type(self).answer(body["prompt"])
            best = row.topk(min(self.most, len(row)))
            top = {f"token_id:{i}": float(v) for v, i in zip(*best, strict=True)}
            data = json.dumps({"choices": [{"logprobs": {"top_logprobs": [top]}}]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def serving(**attributes: Any) -> Iterator[str]:
    handler = type("Handler", (Answers,), attributes)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def endpoint(model: Any, prompts: list[list[int]] | None = None, most: int = 20) -> Any:
    """The server of a model, which has computed its answers to the prompts already."""
    if prompts is None:
        return serving(answer=lambda p: verifying.log_probs_of(model, [p])[0], most=most)
    made = verifying.log_probs_of(model, prompts)
    rows = {tuple(p): row for p, row in zip(prompts, made, strict=True)}
    return serving(answer=lambda p: rows[tuple(p)], most=most)


def test_an_endpoint_is_asked(folder: str, tmp_path: Path, short: Checked) -> None:
    small = short.small
    report = tmp_path / "report.json"
    words = [folder, "--method", "yarn", "--json", report, "--url"]
    with endpoint(small.model, short.prompts) as url:
        result = run(*words, url)
    assert result.exit_code == 0, result.output
    assert f"{url}: as patched" in result.stdout and json.loads(report.read_text())["passed"]
    with endpoint(small.plain, short.prompts) as url:
        result = run(*words, url)
    assert result.exit_code == 1 and f"{url}: unextended" in result.stdout
    assert json.loads(report.read_text())["verdict"] == "unextended"
    result = run(*words, url)  # it has ended
    assert result.exit_code == 2 and "is the server running?" in result.stderr


SERVERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "right": ("as patched", lambda h, theta, a, other: (h, a)),
    "ignored": ("unextended", lambda h, theta, a, other: (theta, 1.0)),
    "cold": ("temperature missing", lambda h, theta, a, other: (h, 1.0)),
    "doubled": ("wrong factor", lambda h, theta, a, other: other(2)),
    "1 % off": ("wrong factor", lambda h, theta, a, other: other(1.01)),
}


class Checked:
    """A miniature and what its servers answer, computed once."""

    def __init__(self, config: Any, factor: float) -> None:
        self.small = Miniature.from_config(config, "yarn", factor=factor)
        self.factor, self.prompts = factor, self.small.prompts()
        self.rows = self.small.expected(self.prompts)
        self.rounding = self.small.rounding(self.prompts, self.rows["as patched"])

    def server(self, name: str, dtype: torch.dtype) -> Any:
        made, rope = self.small.scaling, self.small.scaling.rope

        def other(ratio: float) -> tuple[torch.Tensor, float]:
            method = rope_ext.YaRN(factor=self.factor * ratio)
            return method.inv_freq(rope), method.attention_scaling(rope)

        numbers = SERVERS[name][1](made.inv_freq, rope.inv_freq, made.scaling, other)
        return rotated(self.small.plain, *numbers, dtype)

    def remembered(self, monkeypatch: pytest.MonkeyPatch) -> Miniature:
        """The miniature, of which nothing is computed again."""
        monkeypatch.setattr(Miniature, "expected", lambda *_: self.rows)
        monkeypatch.setattr(Miniature, "rounding", lambda *_: self.rounding)
        return self.small

    def verdicts(
        self, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> dict[int, verifying.Verification]:
        """What is found of a server, by how many log-probabilities it returns."""
        self.remembered(monkeypatch)
        model, found = self.server(name, dtype), {}
        for most in (128, 20, 1):
            with endpoint(model, self.prompts, most) as url:
                asked = verifying.endpoint(url)
                found[most] = verifying.verify(self.small, asked, url, tolerance=None)
            assert found[most].returned == most
        return found


@pytest.fixture(scope="module")
def short() -> Checked:
    return Checked(config(), 4)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in ("right", "ignored", "1 % off")),
        pytest.param("cold", torch.float32, marks=SLOW),
        pytest.param("doubled", torch.float32, marks=SLOW),
        ("right", torch.bfloat16),
        *(pytest.param(name, torch.bfloat16, marks=SLOW) for name in list(SERVERS)[1:]),
    ],
    ids=str,
)
def test_no_server_is_judged_wrong(
    short: Checked, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for found in short.verdicts(name, dtype, monkeypatch).values():
        expect(found, SERVERS[name][0], dtype == torch.bfloat16 and name in ("right", "1 % off"))


def expect(found: verifying.Verification, truth: str, undecided: bool) -> None:
    if found.verdict == "cannot tell":
        assert undecided, found
        assert {"as patched"} < set(found.candidates) <= {
            "as patched", "wrong factor (1 % more)", "wrong factor (1 % less)"
        }  # fmt: skip
        assert found.exit_code == 3 and "cannot tell these apart: " in str(found)
    else:
        assert found.verdict == truth, found
        assert found.exit_code == (truth != "as patched")


def rows_of(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers])


@pytest.mark.parametrize(
    ("got", "rounding", "verdict", "candidates"),
    [
        # Nearest to the right one, and far from both others.
        ((0.0, 0.01, 0.0), 0.05, "as patched", ("as patched",)),
        # Within any tolerance of the right one, but it is the other one.
        ((0.0, 0.03, 0.0), 0.05, "unextended", ("unextended",)),
        # Half-way between: either may be rounded.
        ((0.0, 0.015, 0.0), 0.05, "cannot tell", ("as patched", "unextended")),
        # As far from every one of them: none.
        ((0.0, 0.5, 0.5), 0.05, "other", ()),
        # Two names of one verdict are no doubt.
        ((0.0, 0.0, 1.001), 0.05, "wrong base", ("wrong base (1)", "wrong base (2)")),
        # What tells them apart was not returned.
        ((0.0, math.nan, 0.0), 0.05, "cannot tell", ("as patched", "unextended")),
        ((math.nan, math.nan, 1.0), 0.05, "wrong base", ("wrong base (1)", "wrong base (2)")),
    ],
)
def test_the_nearest_hypothesis_holds_if_its_rivals_are_far(
    got: tuple[float, ...], rounding: float, verdict: str, candidates: tuple[str, ...]
) -> None:
    expected = {
        "as patched": rows_of(0.0, 0.0, 0.0),
        "unextended": rows_of(0.0, 0.03, 0.0),
        "wrong base (1)": rows_of(0.0, 0.0, 1.0),
        "wrong base (2)": rows_of(0.0, 0.0, 1.0001),
    }
    found = verifying.judge(rows_of(*got), expected, rounding)
    assert found.verdict == verdict and set(found.candidates) == set(candidates)


def test_what_cannot_be_told_apart_has_an_exit_code_of_its_own(folder: str, short: Checked) -> None:
    model = short.server("right", torch.bfloat16)
    words = [folder, "--method", "yarn", "--factor-error", "0.0001", "--url"]
    with endpoint(model, short.prompts) as url:
        result = run(*words, url)
    assert result.exit_code == 3, result.output
    assert "cannot tell these apart: " in result.stdout and "(0.01 % more)" in result.stdout
    assert "--dtype float32" in result.stderr and "--factor-error" in result.stderr
    with endpoint(short.server("right", torch.float32), short.prompts) as url:
        assert run(*words, url, "--factor-error", "0.05").exit_code == 0
    for wrong in (["--factor-error", "2"], ["--tolerance", "0"]):
        result = run(folder, "--method", "yarn", *wrong)
        assert result.exit_code == 2 and f"{wrong[0]} {wrong[1]} must be" in result.stderr


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"<html><body>Not here</body></html>", "something that is not JSON ('<html><body>Not"),
        (b'{"error": {"message": "max_logprobs is 5"}}', "an error: max_logprobs is 5"),
        (b'{"error": "no such model"}', "an error: no such model"),
        (b'{"object": "error", "message": "too long"}', "an error: too long"),
        (b'{"error": {"message": "out of memory"}, "choices": []}', "an error: out of memory"),
        (b"[1, 2]", "returns log-probabilities without token IDs"),
    ],
)
def test_what_a_server_says_instead_is_shown(folder: str, raw: bytes, message: str) -> None:
    with serving(raw=raw) as url:
        result = run(folder, "--method", "yarn", "--url", url)
    assert result.exit_code == 2 and message in result.stderr


def test_all_wrong_options_are_reported_at_once(folder: str, tmp_path: Path) -> None:
    words = ["--url", "localhost:8000", "--write", str(tmp_path / "out"), "--flags", "'unclosed"]
    result = run(folder, "--method", "yarn", *words)
    assert result.exit_code == 2
    told = " ".join(result.stderr.split())
    assert "--url 'localhost:8000' is not a valid URL; use http://HOST:PORT" in told
    assert "--write and --url cannot be combined" in told
    assert "cannot be parsed: No closing quotation" in told
    assert not (tmp_path / "out").exists()
    result = run(folder, "--method", "yarn", "--url", "")
    assert result.exit_code == 2 and "--url '' is not a valid URL" in result.stderr


def test_the_command_says_what_is_missing(folder: str) -> None:
    result = run(folder, "--engine", "vllm", "--method", "yarn")
    assert result.exit_code == 2 and "--write FOLDER, serve that folder" in result.stderr
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
def test_what_mlx_does_is_named(folder: str) -> None:
    pytest.importorskip("mlx_lm")
    words = [folder, "--method", "yarn", "--engine", "mlx"]
    assert run(*words).stdout.startswith("mlx: as patched;")
    assert run(*words, "--as-saved").stdout.startswith("mlx: as patched;")
    stopped = run(folder, "--method", "resonance", "--engine", "mlx", "--as-saved")
    assert stopped.exit_code != 0 and "as patched" not in stopped.stdout
    assert "mlx-lm cannot run this folder" in stopped.output


def test_a_written_miniature_is_unpatched(folder: str, tmp_path: Path, short: Checked) -> None:
    """An engine that is given no settings, or ignores them, must not compute the patch."""
    small = tmp_path / "small"
    result = run(folder, "--method", "yarn", "--write", small)
    assert result.exit_code == 0, result.output
    commands = {line.split()[0]: line for line in result.stdout.splitlines()}
    words = shlex.split(commands["vllm"])
    assert words[:3] == ["vllm", "serve", str(small)]
    overrides = json.loads(words[words.index("--hf-overrides") + 1])
    words = shlex.split(commands["python"])
    assert words[:5] == [*("python", "-m", "sglang.launch_server", "--model-path"), str(small)]
    assert "--json-model-override-args" in words
    tokenizer = AutoTokenizer.from_pretrained(small)
    assert tokenizer("t17 t127").input_ids == [17, 127] and tokenizer.decode([17]) == "t17"
    ignoring = AutoModelForCausalLM.from_pretrained(small)
    with endpoint(ignoring, short.prompts) as url:
        wrong = run(folder, "--method", "yarn", "--url", url)
    assert wrong.exit_code == 1 and f"{url}: unextended" in wrong.stdout
    changed = AutoConfig.from_pretrained(small)
    for name, value in overrides.items():
        setattr(changed, name, value)
    obeying = AutoModelForCausalLM.from_pretrained(small, config=changed)
    with endpoint(obeying, short.prompts) as url:
        assert run(folder, "--method", "yarn", "--url", url).exit_code == 0
    before = (small / "config.json").read_bytes()
    again = run(folder, "--method", "pi", "--write", small)
    assert again.exit_code == 2 and "give --write a new directory" in again.stderr
    assert (small / "config.json").read_bytes() == before


def test_a_written_miniature_of_a_saved_patch_says_it_itself(
    tmp_path: Path, short: Checked
) -> None:
    saved = Miniature.from_config(config(), "yarn", factor=4).model
    saved.save_pretrained(tmp_path / "saved")
    result = run(tmp_path / "saved", "--write", tmp_path / "small")
    assert f"vllm serve {tmp_path / 'small'}\n" in result.stdout
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    with endpoint(served, short.prompts) as url:
        assert run(tmp_path / "saved", "--url", url).exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["yarn", "resonance"])
def test_a_written_miniature_is_served(
    folder: str, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xllamacpp")
    from rope_ext.engines import running

    words = [folder, "--method", method]
    result = run(*words, "--write", tmp_path / "small")
    assert result.exit_code == 0, result.output
    enter, *before, serve = result.stdout.splitlines()[0].split(" && ")
    assert enter == f"cd {tmp_path / 'small'}"
    monkeypatch.chdir(tmp_path / "small")
    for line in before:
        done = CliRunner().invoke(app, shlex.split(line)[1:])
        assert done.exit_code == 0, done.output
    program, *flags = shlex.split(serve)
    assert program == "llama-server"
    with running.serving([*flags, *running.EXACT, "--parallel", "1", "--threads", "1"]) as url:
        assert run(*words, "--url", url, "--tolerance", "0.002").exit_code == 0
        wrong = run(folder, "--method", "pi", "--url", url)
    assert wrong.exit_code == 1
