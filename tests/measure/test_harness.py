"""lm-evaluation-harness on a patched model: its tasks in our report, and its own command line."""

from __future__ import annotations

import functools
import json
import os
import pickle
import re
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

import rope_ext
from rope_eval.data import templates
from rope_eval.folder import HEADER
from rope_eval.settings import Settings
from rope_eval.tasks.harness import Harness
from rope_eval.tasks.passkey import PasskeyPrompts
from rope_ext.cli import app
from rope_ext.errors import OptionError
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
    """A passkey at the start of 1500 tokens: a prompt that is cut on the left has lost it."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    prompts = PasskeyPrompts(tokenizer)
    case = prompts.case(1500, 0.05, seed=0)
    text = tokenizer.decode(case.ids, skip_special_tokens=True)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": text, "key": case.key}) + "\n")
    (tmp_path / "early_passkey.yaml").write_text(TASK.format(data=tmp_path / "rows.jsonl"))
    return tmp_path


def call(task: Path, *more: object) -> Result:
    words = ["eval", SHIPPED, "--tasks", "early_passkey", "--method", "yarn", "--factor", 4]
    words += ["--lengths", "1k,2k", "--include-path", task, "--output", task / "out", *more]
    return CliRunner().invoke(app, list(map(str, words)))


@pytest.mark.slow
def test_its_tasks_are_measured_in_the_window_of_the_patch(
    task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(task / "cache"))
    done = call(task, "--trials", 1, "--tasks", "passkey")
    assert done.exit_code == 0, done.output
    data = json.loads((task / "out" / "results.json").read_text())
    rows = {
        (row["system"], row["length"]): row["value"]
        for row in data["summary"]
        if row["task"] == "early_passkey"
    }
    # In a window that is shorter than the prompt, its beginning is lost, and the key with it.
    found = {("yarn", 2048): 1.0}
    assert rows == {
        (m, n): found.get((m, n), 0.0) for m in ("unpatched", "yarn") for n in (512, 1024, 2048)
    }
    assert "Mean of exact_match as lm-evaluation-harness" in " ".join(done.stdout.split())
    assert {row["task"] for row in data["summary"]} == {"passkey", "early_passkey"}
    again = call(task, "--trials", 1, "--tasks", "passkey", "--resume")
    assert again.exit_code == 0 and again.stdout == done.stdout


@pytest.mark.parametrize(
    ("words", "said"), [(["--metadata", "[1]"], "--metadata '[1]' is not a JSON object")]
)
def test_a_wrong_request_is_one_line(task: Path, words: list[str], said: str) -> None:
    pytest.importorskip("lm_eval")
    done = call(task, *words)
    assert done.exit_code == 2 and said in " ".join(done.stderr.split())


def test_a_server_cannot_answer_the_harness() -> None:
    given = Settings(models=("m",), methods=("none",), lengths=(9,), url="http://h/v1")
    with pytest.raises(OptionError, match="need the model in this process; leave them out with"):
        Harness(harness_tasks="arc_easy").parts(given)


def test_a_missing_harness_is_told(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    done = call(task)
    assert done.exit_code == 2
    assert 'need: pip install "rope-ext[harness]"' in done.stderr


@pytest.mark.slow
def test_the_harness_by_its_own_command_line_runs_a_method(task: Path) -> None:
    pytest.importorskip("lm_eval")
    page = SHIPPED.parents[1] / "docs" / "engines" / "beside.md"
    command = re.search(r"\$ python (-m rope_eval.lm_eval .*)", page.read_text(encoding="utf-8"))[1]
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
    from rope_eval.lm_eval import PatchedLM

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


LOOP = "{% for i in range(99999) %}" * 4 + "a" + "{% endfor %}" * 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process with limits needs fork")
def test_a_chat_template_in_the_harness_has_limits(
    lm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lm(str(save_checkpoint(tmp_path / "model")))
    model.tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if 'loop' in messages[0]['content'] %}" + LOOP + "{% endif %}"
    )
    chat = [{"role": "system", "content": "a"}, {"role": "user", "content": "\u00e9 |b"}]
    assert model.apply_chat_template(chat) == "<user>\u00e9 |b"  # as the harness retries
    monkeypatch.setattr(templates, "SECONDS", 0.5)
    with pytest.raises(OptionError, match="does not end within"):
        model.apply_chat_template([{"role": "user", "content": "loop"}])
    assert model.apply_chat_template(chat[1:], add_generation_prompt=False) == "<user>\u00e9 |b"


@pytest.mark.slow
def test_a_run_of_the_harness_with_an_endless_template_is_one_line(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template behaves in the evaluator's own probe."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(task / "cache"))
    monkeypatch.setattr(templates, "SECONDS", 2.0)
    folder = shutil.copytree(SHIPPED, tmp_path / "model")
    content = "{{ messages[0]['content'] }}"
    (folder / "chat_template.jinja").write_text(
        f"{{% if 'CONTENT' in messages[0]['content'] %}}{content}{{% else %}}{LOOP}{{% endif %}}"
    )
    words = ["eval", folder, "--tasks", "early_passkey", "--method", "none", "--lengths", "512"]
    words += ["--chat", "yes", "--include-path", task, "--output", task / "out"]
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == 2 and "does not end within 2 seconds" in " ".join(done.stderr.split())
    assert "Traceback" not in done.output


class Hostile:
    """Leaves a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (Path.touch, (self.file,))


@pytest.mark.slow
def test_answers_in_a_folder_from_elsewhere_execute_nothing(
    task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(task / "cache"))
    assert call(task, "--method", "none").exit_code == 0
    files = list((task / "out" / ".rope-ext" / "harness").glob("*.db"))
    assert files
    for file in files:
        with sqlite3.connect(file) as answers:
            blob = pickle.dumps(Hostile(task / "executed"))
            changed = answers.execute("UPDATE unnamed SET value = ?", (sqlite3.Binary(blob),))
            assert changed.rowcount > 0
    done = call(task, "--method", "none", "--resume")
    assert not (task / "executed").exists()
    assert done.exit_code == 2 and "give --overwrite" in " ".join(done.stderr.split())


@pytest.mark.slow
def test_a_query_without_end_in_a_folder_from_elsewhere_is_not_run(
    task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(task / "cache"))
    assert call(task, "--method", "none").exit_code == 0
    (task / "out" / "cases.jsonl").write_bytes(HEADER)
    endless = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
        "SELECT 'k' || i AS key, i AS value FROM n"
    )
    for file in (task / "out" / ".rope-ext" / "harness").glob("*.db"):
        with sqlite3.connect(file) as answers:
            answers.execute("DROP TABLE unnamed")
            answers.execute(f"CREATE VIEW unnamed AS {endless}")
    done = call(task, "--method", "none", "--resume")
    assert done.exit_code == 2 and "give --overwrite" in " ".join(done.stderr.split())
