"""llama.cpp and mlx-lm, run on small files, give the log-probabilities of the patched model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import rope_ext
from rope_eval.engines import verifying
from rope_eval.engines.gguf_miniature import write_model
from rope_ext.cli import app
from rope_ext.engines import llama_cpp
from rope_ext.patching import current_patch
from tests.families.zoo import tiny_model
from tests.helpers.engines import FLAGS, TABLES, TOLERANCE, VOCABULARY, built, expected, prompts
from tests.helpers.models import LENGTH

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")
pytestmark = pytest.mark.slow
CASES = FLAGS | TABLES


def patched(case: str) -> Any:
    name, options = CASES[case]
    return rope_ext.patch(built("llama"), name, **{"factor": 4, **options})


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_the_printed_commands_serve_what_was_patched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Of llama.cpp, by flags or with a table in the file; of Ollama, whose file says it all."""
    monkeypatch.chdir(tmp_path)
    write_model(built("llama"), "MODEL.gguf")
    model = patched(case)
    length = current_patch(model).target_length
    for engine in ("llama.cpp", "ollama"):
        try:
            made = rope_ext.export(model, engine)
        except rope_ext.ExportError as error:
            assert "flags of llama.cpp" in str(error) and case == "yarn hotter"
            continue
        made.files and made.write(tmp_path)
        *writing, serving = (shlex.split(part)[1:] for part in made.command.split(" && "))
        for words in writing:
            result = CliRunner().invoke(app, words)
            assert result.exit_code == 0, result.output
        if engine == "ollama":
            source, parameter = Path("Modelfile").read_text("utf-8").splitlines()
            serving = ["--model", source.removeprefix("FROM ./")]
            serving += ["--ctx-size", parameter.split()[-1]]
        close(verifying.llama_cpp(serving, prompts(length), VOCABULARY), expected(model, length))


def test_without_its_length_the_server_takes_no_longer_prompt(tmp_path: Path) -> None:
    write_model(built("llama"), tmp_path / "a.gguf")
    made = rope_ext.export(patched("pi"), "llama.cpp").command
    words = shlex.split(made.replace("MODEL.gguf", str(tmp_path / "a.gguf")))[1:]
    at = words.index("--override-kv")
    assert words[at + 1] == f"llama.context_length=int:{4 * LENGTH}"
    given = prompts(4 * LENGTH), VOCABULARY
    with pytest.raises(rope_ext.ExportError, match="exceeds the available context size"):
        verifying.llama_cpp(words[:at] + words[at + 2 :], *given)
    with pytest.raises(rope_ext.ExportError, match="did not start"):
        verifying.llama_cpp([*words, "--no-such-flag"], *given)


@pytest.mark.parametrize("case", CASES)
def test_mlx_reads_the_written_file(tmp_path: Path, case: str) -> None:
    pytest.importorskip("mlx_lm")
    model = patched(case)
    model.save_pretrained(tmp_path)
    rope_ext.export(model, "mlx").write(tmp_path)
    close(verifying.mlx(tmp_path, prompts(4 * LENGTH)), expected(model, 4 * LENGTH))
    if case in ("yarn", "pi", "ntk", "llama3"):  # the older names are enough
        rope_ext.export(model, "transformers", legacy=True).write(tmp_path)
        close(verifying.mlx(tmp_path, prompts(4 * LENGTH)), expected(model, 4 * LENGTH))


@pytest.mark.parametrize("method", ["ntk", "yarn", "resonance"])
def test_mlx_runs_a_family_of_several_kinds_of_layers(tmp_path: Path, method: str) -> None:
    pytest.importorskip("mlx_lm")
    model = tiny_model("gemma3_text", sliding_window_pattern=2)
    rope_ext.patch(model, method, factor=4)
    model.save_pretrained(tmp_path)
    rope_ext.export(model, "mlx").write(tmp_path)
    given = [[token % 110 + 4 for token in prompt] for prompt in prompts(4 * LENGTH)]
    wanted = [model(torch.tensor([ids])).logits[0, -1].log_softmax(-1) for ids in given]
    close(verifying.mlx(tmp_path, given), torch.stack(wanted).detach())


@pytest.mark.parametrize("method", ["yarn hotter", "ntk", "resonance", "dynamic_yarn"])
def test_the_server_gives_the_trainers_numbers(tmp_path: Path, method: str) -> None:
    """Fine-tuned, merged, converted and served."""
    base = patched(method)
    length = current_patch(base).target_length
    before = expected(base, length)
    torch.manual_seed(0)
    layers = ["q_proj", "k_proj", "v_proj", "down_proj"]
    trainer = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=layers)).train()
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-2)
    row = torch.randint(4, VOCABULARY, (1, length // 2)).repeat(1, 2)  # it comes round again
    for _ in range(8):
        trainer(row, labels=row).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    want = expected(trainer.eval(), length)
    assert (want - before).abs().max() > 0.5  # it has learned something
    trainer.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    close(expected(merged, length), want)
    write_model(merged, tmp_path / "MODEL.gguf")  # without its scaling
    made = llama_cpp.following(merged, tmp_path / "MODEL.gguf", tmp_path / "MODEL-long.gguf")
    words = ["--model", str(tmp_path / "MODEL-long.gguf"), *made.in_file]
    close(verifying.llama_cpp(words, prompts(length), VOCABULARY), want)
