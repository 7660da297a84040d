"""lm-evaluation-harness on a patched model: the window is the patched one."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_ext
from eval import harness
from rope_eval.tasks.passkey import PasskeyPrompts
from rope_ext.errors import MeasureError
from tests.helpers.checkpoint import TRAINED, save_checkpoint

SHIPPED = Path(__file__).parents[2] / "checkpoints" / "tiny-512"
TASK = """
task: early_passkey
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{key}}}}"
generation_kwargs:
  do_sample: false
  max_gen_toks: 8
  until: ["\\n", "."]
filter_list:
  - name: number
    filter:
      - function: regex
        regex_pattern: "([0-9]+)"
      - function: take_first
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """Passkeys at the start of 1500 tokens: a prompt that is cut on the left has lost them."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    prompts = PasskeyPrompts(tokenizer)
    rows = []
    for seed in range(1):
        case = prompts.case(1500, 0.05, seed)
        text = tokenizer.decode(case.ids[: -case.count], skip_special_tokens=True)
        rows.append(json.dumps({"prompt": text, "key": case.key}) + "\n")
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    (tmp_path / "early_passkey.yaml").write_text(TASK.format(data=tmp_path / "rows.jsonl"))
    return tmp_path


def call(task: Path, *more: object) -> dict:
    words = ["--model", SHIPPED, "--method", "yarn", "--factor", 4, "--tasks", "early_passkey"]
    words += ["--include-path", task, "--output", task / "out", *more]
    harness.main(list(map(str, words)))
    return json.loads((task / "out" / "harness.json").read_text())


@pytest.mark.slow
def test_the_harness_sees_the_whole_prompt(
    task: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(task / "cache"))
    data = call(task)
    found = {m: r["early_passkey"]["exact_match,number"] for m, r in data["results"].items()}
    assert data["max_length"] == 2048 and found == {"none": 0.0, "yarn": 1.0}
    assert "early_passkey" in capsys.readouterr().out
    # What a wrong window does: the key is cut off, silently.
    data = call(task, "--max-length", 1024)
    assert data["results"]["yarn"]["early_passkey"]["exact_match,number"] == 0.0


def test_a_missing_harness_is_told(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    words = ["--model", str(SHIPPED), "--method", "yarn", "--tasks", "early_passkey"]
    with pytest.raises(MeasureError, match="lm-evaluation-harness is not installed"):
        harness.evaluate(harness.parser().parse_args(words))


@pytest.mark.slow
def test_the_harness_by_its_own_command_line_runs_a_method(task: Path) -> None:
    pytest.importorskip("lm_eval")
    page = SHIPPED.parents[1] / "docs" / "engines" / "beside.md"
    command = re.search(r"\$ python (-m rope_ext.lm_eval .*)", page.read_text(encoding="utf-8"))[1]
    names = {"TASK": "early_passkey", "FOLDER": str(task)}
    words = [names.get(word, word) for word in command.split()]
    words += ["--limit", "1", "--device", "cpu", "--output_path", str(task / "out")]
    done = subprocess.run(
        [sys.executable, *words],
        env=os.environ | {"HF_DATASETS_CACHE": str(task / "cache")},
        cwd=SHIPPED.parents[1],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (written,) = (task / "out").rglob("results_*.json")
    data = json.loads(written.read_text())
    assert data["results"]["early_passkey"]["exact_match,number"] == 1.0
    assert data["config"]["model_args"]["method"] == "yarn"


@pytest.fixture(scope="module")
def lm() -> Any:
    pytest.importorskip("lm_eval")
    from rope_ext.lm_eval import PatchedLM

    return functools.partial(PatchedLM, device="cpu", dtype="float32")


@pytest.mark.slow
def test_the_harness_loads_what_a_patch_has_saved(lm: Any, tmp_path: Path) -> None:
    folder, adapter = save_checkpoint(tmp_path / "model"), tmp_path / "adapter"
    base = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(3 * TRAINED)[None] % 400
    plain = base(ids).logits
    rope_ext.patch(base, "rerope", factor=4, window=32)
    want = base(ids).logits
    base.save_pretrained(folder)
    saved = lm(str(folder))
    assert saved.max_length == 4 * TRAINED
    torch.testing.assert_close(saved.model(ids).logits, want)
    assert not torch.allclose(want, plain, atol=1e-2)

    save_checkpoint(folder)
    asked = lm(str(folder), method="rerope", factor=4, window=32)
    assert asked.max_length == 4 * TRAINED
    torch.testing.assert_close(asked.model(ids).logits, want)

    tuned = peft.get_peft_model(base, peft.LoraConfig(init_lora_weights=False))
    tuned.save_pretrained(adapter)
    rope_ext.save_sidecar(tuned, adapter)
    adapted = lm(str(folder), peft=str(adapter))
    assert adapted.max_length == 4 * TRAINED
    torch.testing.assert_close(adapted.model(ids).logits, tuned.eval()(ids).logits)
