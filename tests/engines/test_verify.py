"""`rope-ext verify` against engines made to misbehave."""

from __future__ import annotations

import copy
import json
import math
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GptOssConfig,
    LlamaConfig,
    Qwen3Config,
)
from typer.testing import CliRunner

import rope_ext
from rope_eval.engines import verifying
from rope_eval.engines.verifying import Miniature
from rope_ext.cli import app
from tests.helpers import openai_server

CONFIG = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 12,
    "vocab_size": 32000,
    "max_position_embeddings": 64,
    "head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}
YARN = "--ctx-size 256 --rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 64"
LONG = "--ctx-size 256 --override-kv llama.context_length=int:256"
COLD = "--override-kv llama.rope.scaling.attn_factor=float:0.8782346"
THETA = 5e5 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
Numbers = tuple[torch.Tensor, float]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A model whose weights are not there."""
    LlamaConfig(**CONFIG).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture(scope="module")
def small() -> Miniature:
    return Miniature.from_config(LlamaConfig(**CONFIG), "yarn", factor=4)


def run(*words: Any) -> Any:
    given = "--factor" in words or "--method" not in words
    return CliRunner().invoke(
        app, ["verify", *map(str, words), *([] if given else ["--factor", "4"])]
    )


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_a_miniature_has_the_models_own_rotary_embedding(kind: type) -> None:
    found = Miniature.from_config(kind(**CONFIG), "yarn", factor=8)
    plain, model = (one.model.rotary_emb.inv_freq.double() for one in (found.plain, found.model))
    torch.testing.assert_close(plain, THETA, rtol=1e-6, atol=0)
    want = rope_ext.YaRN(factor=8).inv_freq(found.scaling.rope)
    torch.testing.assert_close(model, want, rtol=1e-6, atol=0)
    assert sum(p.numel() for p in found.model.parameters()) < 1e6
    lengths = [len(one) for one in found.prompts()]
    assert lengths[7::8] == [63, 255, 383, 511] and len(lengths) == 32


def test_a_checkpoint_that_scales_by_itself_is_taken_as_it_is() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 5e5, "short_factor": [2.0] * 32}
    rope |= {"long_factor": [2.0] * 32, "factor": 4.0, "original_max_position_embeddings": 64}
    longer = {"max_position_embeddings": 256, "rope_parameters": rope}
    scaling = Miniature.from_config(LlamaConfig(**CONFIG | longer)).scaling
    torch.testing.assert_close(scaling.inv_freq, THETA / 2, rtol=1e-6, atol=0)
    assert (scaling.rope.length, scaling.target) == (64, 256) and scaling.scaling > 1
    with pytest.raises(rope_ext.ExportError, match="nothing to verify: there is no patch"):
        Miniature.from_config(LlamaConfig(**CONFIG))
    with pytest.raises(rope_ext.ExportError, match="length of each request"):
        Miniature.from_config(LlamaConfig(**CONFIG), "dynamic_ntk", factor=4)
    other = LlamaConfig(**CONFIG)
    other.model_type = "gpt2"
    with pytest.raises(rope_ext.ExportError, match="cannot verify the family 'gpt2'"):
        Miniature.from_config(other, "yarn", factor=4)


def rotated(plain: Any, numbers: Numbers, dtype: torch.dtype = torch.float32) -> Any:
    """A copy that computes with these frequencies and this scaling."""
    model = copy.deepcopy(plain).to(dtype)
    model.model.rotary_emb.inv_freq = numbers[0].float()
    model.model.rotary_emb.attention_scaling = numbers[1]
    return model


def engine(model: Any, most: int = 128) -> verifying.Run:
    """Returns the most probable tokens only, as servers do."""

    def answer(prompts: Any) -> torch.Tensor:
        rows = verifying.log_probs_of(model, prompts)
        return rows.where(rows >= rows.topk(most).values[:, -1:], torch.nan)

    return answer


def yarn(small: Miniature, factor: float) -> Numbers:
    method = rope_ext.YaRN(factor=factor)
    return method.inv_freq(small.scaling.rope), method.attention_scaling(small.scaling.rope)


def base(number: float) -> torch.Tensor:
    return number ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)


WRONG: dict[str, Callable[[Miniature, torch.Tensor, float], Numbers]] = {
    "as patched": lambda small, h, a: (h, a),
    "unextended": lambda small, h, a: (THETA, 1.0),
    "temperature missing": lambda small, h, a: (h, 1.0),
    "temperature applied twice": lambda small, h, a: (h, a * a),
    "wrong factor (twice)": lambda small, h, a: yarn(small, 8),
    "wrong factor (1 % more)": lambda small, h, a: yarn(small, 4.04),
    "wrong base (10000)": lambda small, h, a: (base(1e4), 1.0),
    "wrong base (1e+06, scaled)": lambda small, h, a: (h / THETA * base(1e6), a),
    "other (all frequencies / 4)": lambda small, h, a: (THETA / 4, 1.0),
    "other": lambda small, h, a: (h**1.1, a),
}


@pytest.fixture(scope="module")
def rows(small: Miniature) -> dict[str, torch.Tensor]:
    return small.expected(small.prompts())


@pytest.mark.parametrize("verdict", WRONG)
def test_what_an_engine_does_is_named(
    small: Miniature, rows: Any, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Miniature, "expected", lambda *_: rows)
    numbers = WRONG[verdict](small, small.scaling.inv_freq, small.scaling.scaling)
    found = verifying.verify(small, engine(rotated(small.plain, numbers)), "an engine")
    assert f"an engine: {verdict};" in str(found)
    assert json.loads(found.to_json())["passed"] == (verdict == "as patched")
    assert min(found.differences.values()) <= 1e-4 or verdict == "other"


def test_a_short_table_is_named() -> None:
    tables = {"long_factor": [4.0] * 32, "short_factor": [1.5] * 32, "length": 256}
    found = Miniature.from_config(LlamaConfig(**CONFIG), "longrope", factor=4, **tables)
    short = rotated(found.plain, (found.scaling.rope.inv_freq / 1.5, found.scaling.scaling))
    assert verifying.verify(found, engine(short), "an engine").verdict == "short table"


def test_mistakes_under_a_position_method_are_known() -> None:
    found = Miniature.from_config(LlamaConfig(**CONFIG), "self_extend", factor=2)
    names = {"as patched", "unextended", "wrong factor (twice)", "temperature missing"}
    assert set(found.expected(found.prompts())) == names


def test_a_position_method_is_written_for_the_servers_that_have_a_plugin(tmp_path: Path) -> None:
    LlamaConfig(**CONFIG).save_pretrained(tmp_path / "model")
    words = ["verify", str(tmp_path / "model"), "--method", "self_extend", "--factor", "4"]
    words += ["--engine", "sglang", "--write", str(tmp_path / "small")]
    made = CliRunner().invoke(app, words)
    vllm, sglang = (x for x in made.stdout.splitlines() if x.startswith("python -m "))
    assert "vllm.entrypoints" in vllm and "--attention-backend rope_ext" in sglang
    assert "--engine sglang --url http://localhost:30000" in " ".join(made.stderr.split())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["as patched", "unextended", "wrong factor (1 % more)"])
def test_no_server_is_judged_wrong(
    small: Miniature, rows: Any, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it rounds, and however few tokens it returns: else it is said to be undecided."""
    monkeypatch.setattr(Miniature, "expected", lambda *_: rows)
    numbers = WRONG[name](small, small.scaling.inv_freq, small.scaling.scaling)
    answers = engine(rotated(small.plain, numbers, dtype))(small.prompts())
    for most in (128, 20, 1):
        returned = answers.where(answers >= answers.topk(most).values[:, -1:], torch.nan)
        found = verifying.verify(small, lambda _, a=returned: a, "a server", tolerance=None)
        if found.verdict == "cannot tell":
            assert dtype == torch.bfloat16 and found.exit_code == 3, found
            names = {"as patched", "wrong factor (1 % more)", "wrong factor (1 % less)"}
            assert {"as patched"} < set(found.candidates) <= names
        else:
            assert found.verdict == name.partition(" (")[0], found
            assert found.exit_code == (name != "as patched")


@pytest.mark.parametrize(
    ("got", "verdict", "candidates"),
    [
        # Nearest to the right one, and far from both others.
        ((0.0, 0.01, 0.0), "as patched", ("as patched",)),
        # Within any tolerance of the right one, but it is the other one.
        ((0.0, 0.03, 0.0), "unextended", ("unextended",)),
        # Half-way between: either may be rounded.
        ((0.0, 0.015, 0.0), "cannot tell", ("as patched", "unextended")),
        # As far from every one of them: none.
        ((0.0, 0.5, 0.5), "other", ()),
        # Two names of one verdict are no doubt.
        ((0.0, 0.0, 1.001), "wrong base", ("wrong base (1)", "wrong base (2)")),
        # What tells them apart was not returned.
        ((0.0, math.nan, 0.0), "cannot tell", ("as patched", "unextended")),
    ],
)
def test_the_nearest_hypothesis_holds_if_its_rivals_are_far(
    got: tuple[float, ...], verdict: str, candidates: tuple[str, ...]
) -> None:
    expected = {
        "as patched": torch.tensor([[0.0, 0.0, 0.0]]),
        "unextended": torch.tensor([[0.0, 0.03, 0.0]]),
        "wrong base (1)": torch.tensor([[0.0, 0.0, 1.0]]),
        "wrong base (2)": torch.tensor([[0.0, 0.0, 1.0001]]),
    }
    found, possible, _ = verifying.judge(torch.tensor([got]), expected, 0.05)
    assert found == verdict and set(possible) == set(candidates)


@contextmanager
def serving(model: Any, prompts: Any = (), raw: str | None = None) -> Iterator[str]:
    """An OpenAI-compatible server, as vLLM answers: the most probable tokens, by id."""
    answers = verifying.log_probs_of(model, prompts) if prompts else ()
    known = {tuple(p): row for p, row in zip(prompts, answers, strict=True)}

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        assert body["max_tokens"] == 1
        if raw is not None:
            return 200, raw
        best = known[tuple(body["prompt"])].topk(20)
        top = {f"token_id:{i}": float(v) for v, i in zip(*best, strict=True)}
        return 200, {"choices": [{"logprobs": {"top_logprobs": [top]}}]}

    with openai_server.serving(SimpleNamespace(answer=answer)) as url:
        yield url.removesuffix("/v1")


def test_an_endpoint_is_asked(folder: str, tmp_path: Path, small: Miniature) -> None:
    report, prompts = tmp_path / "report.json", small.prompts()
    words = [folder, "--method", "yarn", "--json", report, "--url"]
    with serving(small.model, prompts) as url:
        result = run(*words, url)
    assert result.exit_code == 0, result.output
    assert f"{url}: as patched" in result.stdout and json.loads(report.read_text())["passed"]
    with serving(small.plain, prompts) as url:
        result = run(*words, url)
    assert result.exit_code == 1 and f"{url}: unextended" in result.stdout
    result = run(*words, url)  # it has ended
    assert result.exit_code == 2 and "is the server running?" in result.stderr
    numbers = small.scaling.inv_freq, small.scaling.scaling
    with serving(rotated(small.plain, numbers, torch.bfloat16), prompts) as url:
        result = run(*words, url, "--factor-error", "0.0001")
    assert result.exit_code == 3, result.output
    assert "cannot tell these apart: " in result.stdout and "(0.01 % more)" in result.stdout
    assert "--dtype float32" in result.stderr and "--factor-error" in result.stderr


def test_a_model_that_cannot_be_run_is_no_verdict(tmp_path: Path) -> None:
    """Exit code 1 says that the engine does not apply the patch."""
    config = GptOssConfig(**{**CONFIG, "num_hidden_layers": 2}, num_local_experts=0)
    config.save_pretrained(tmp_path)
    result = run(tmp_path, "--method", "yarn", "--factor", "2", "--engine", "transformers")
    assert result.exit_code == 2 and "cannot be built and run" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("raw", ["<html>Not here</html>", '{"error": "Not here"}', "[1]"])
def test_what_a_server_says_instead_is_shown(folder: str, raw: str) -> None:
    with serving(None, raw=raw) as url:
        result = run(folder, "--method", "yarn", "--url", url)
    assert result.exit_code == 2 and "does not answer as an engine" in result.stderr
    assert "Not here" in result.stderr or raw == "[1]"


def returned(**changed: Any) -> str:
    return json.dumps({"choices": [{"logprobs": changed}]})


@pytest.mark.parametrize(
    "raw",
    [
        "[" * 100_000,
        returned(top_logprobs=[{"token_id:128": -1.0}]),
        returned(top_logprobs=[{"token_id:" + "9" * 5000: -1.0}]),
        returned(top_logprobs=[{"t5": "-1.0"}]),
        returned(top_logprobs=[{"t5": None}]),
        returned(top_logprobs=[{"t5": 1.5}]),
        returned(top_logprobs=[{"t5": math.nan}]),
        returned(top_logprobs=[{"t5": -(10**400)}]),
        returned(top_logprobs=[{"\ud800": -1.0}]),
        returned(top_logprobs=["t5"]),
        returned(content=[{"top_logprobs": [{"id": -5, "logprob": -1.0}]}]),
        returned(content=[{"top_logprobs": [{"id": 2**70, "logprob": -1.0}]}]),
        returned(content=[{"top_logprobs": [{"id": {}, "logprob": -1.0}]}]),
        returned(content=[{"top_logprobs": [{"token": ["t5"], "logprob": -1.0}]}]),
        returned(content=5),
        json.dumps({"model": {}, **json.loads(returned(top_logprobs=[{"t5": -1.0}]))}),
        json.dumps(
            {
                "usage": {"prompt_tokens": 9999},
                **json.loads(returned(top_logprobs=[{"t5": -1.0}])),
            }
        ),
    ],
)
@pytest.mark.every
def test_no_answer_that_cannot_be_read_is_a_verdict(raw: str) -> None:
    """Exit code 1 says that an engine does not apply the patch."""
    with (
        serving(None, raw=raw) as url,
        pytest.raises(rope_ext.ExportError, match="does not answer as an engine"),
    ):
        verifying.completed(url, [5, 6], 128)


@pytest.mark.parametrize("send", [openai_server.endless, openai_server.slow])
def test_an_answer_without_an_end_is_no_verdict(send: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "_SECONDS", 1.0)
    with openai_server.sending(send) as url, pytest.raises(rope_ext.ExportError):
        verifying.completed(url, [5, 6], 128)


def test_only_a_prompt_beyond_the_trained_length_is_enough(folder: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = [folder, "--method", "yarn", "--engine", "transformers", "--json", report, "--length"]
    for length, passed in ((64, False), (72, True)):
        result = run(*words, length)
        assert result.exit_code == (0 if passed else 3), result.output
        assert json.loads(report.read_text())["passed"] is passed
        assert ("done: " in result.stderr) is passed
        assert ("as patched within 64 tokens only" in result.stdout) is not passed
        assert ("give --length 72" in result.stderr) is not passed
    result = run(*words[:3], "--write", tmp_path / "small", "--length", 72)
    assert "--url http://localhost:8080 --length 72" in result.stderr
    report.write_text('{"mine": 1}')
    result = run(*words, 72)
    assert result.exit_code == 2 and "give --json another file" in result.stderr
    assert report.read_text() == '{"mine": 1}'
    for trained, longest in ((64, 255), (8192, 9216), (32768, 2048)):
        config = LlamaConfig(**CONFIG | {"max_position_embeddings": trained})
        assert len(Miniature.from_config(config, "yarn", factor=4).prompts()[-1]) == longest


def test_wrong_options_are_refused(folder: str, tmp_path: Path) -> None:
    for words in (["--url", "localhost:8000"], ["--url", "http://a", "--write", tmp_path / "out"]):
        result = run(folder, "--method", "yarn", *words)
        assert result.exit_code == 2 and f"--url {words[1]!r} must be" in result.stderr
    for words in (["--factor-error", "2"], ["--tolerance", "0"]):
        result = run(folder, "--method", "yarn", *words)
        assert result.exit_code == 2 and f"Invalid value for '{words[0]}'" in result.stderr
    assert not (tmp_path / "out").exists()
    result = run(folder, "--engine", "vllm", "--method", "yarn")
    assert result.exit_code == 2 and "--write FOLDER, serve that folder" in result.stderr
    result = run(folder)
    assert result.exit_code == 2 and "nothing to verify" in result.stderr


def test_a_written_miniature_is_unpatched(folder: str, tmp_path: Path, small: Miniature) -> None:
    """An engine that is given no settings, or ignores them, must not compute the patch."""
    written = tmp_path / "small"
    result = run(folder, "--method", "yarn", "--write", written)
    assert result.exit_code == 0, result.output
    commands = {line.split()[0]: line for line in result.stdout.splitlines()}
    words = shlex.split(commands["vllm"])
    assert words[:3] == ["vllm", "serve", str(written)]
    overrides = json.loads(words[words.index("--hf-overrides") + 1])
    assert f"--model-path {written} --json-model-override-args" in commands["python"]
    tokenizer = AutoTokenizer.from_pretrained(written)
    assert tokenizer("t17 t127").input_ids == [17, 127] and tokenizer.decode([17]) == "t17"
    ignoring = AutoModelForCausalLM.from_pretrained(written)
    torch.testing.assert_close(ignoring.model.rotary_emb.inv_freq, THETA.float())
    changed = AutoConfig.from_pretrained(written)
    for name, value in overrides.items():
        setattr(changed, name, value)
    obeying = AutoModelForCausalLM.from_pretrained(written, config=changed)
    with serving(obeying, small.prompts()) as url:
        assert run(folder, "--method", "yarn", "--url", url).exit_code == 0
    again = run(folder, "--method", "pi", "--write", written)
    assert again.exit_code == 2 and "give --write a new directory" in again.stderr


def test_a_written_miniature_of_a_saved_patch_says_it_itself(
    tmp_path: Path, small: Miniature
) -> None:
    small.model.save_pretrained(tmp_path / "saved")
    result = run(tmp_path / "saved", "--write", tmp_path / "small")
    assert f"vllm serve {tmp_path / 'small'}\n" in result.stdout
    with serving(AutoModelForCausalLM.from_pretrained(tmp_path / "small"), small.prompts()) as url:
        assert run(tmp_path / "saved", "--url", url).exit_code == 0
    result = run(tmp_path / "saved", "--engine", "transformers")
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
    assert stopped.exit_code != 0 and "mlx-lm cannot run this folder" in stopped.output


@pytest.mark.slow
@pytest.mark.parametrize("method", ["yarn", "resonance", None])
def test_a_written_miniature_is_served(
    folder: str, tmp_path: Path, method: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By flags, by a table, and as the folder of a saved patch."""
    pytest.importorskip("xllamacpp")
    words = [folder, "--method", method]
    if method is None:
        found = Miniature.from_config(LlamaConfig(**CONFIG), "yarn", factor=4)
        found.model.save_pretrained(tmp_path / "saved")
        words = [tmp_path / "saved"]
    result = run(*words, "--write", tmp_path / "small")
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("cd "))
    enter, *before, serve = line.split(" && ")
    assert enter == f"cd {tmp_path / 'small'}"
    monkeypatch.chdir(tmp_path / "small")
    for line in before:
        done = CliRunner().invoke(app, shlex.split(line)[1:])
        assert done.exit_code == 0, done.output
    program, *flags = shlex.split(serve)
    assert program == "llama-server"
    with verifying.serving(flags) as url:
        assert run(*words, "--url", url, "--tolerance", "0.002").exit_code == 0
        wrong = run(folder, "--method", "pi", "--url", url)
    assert wrong.exit_code == 1
