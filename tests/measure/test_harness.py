"""lm-evaluation-harness on a patched model: the window is the patched one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from eval import harness
from rope_ext.errors import MeasureError
from rope_ext.measure.tasks.passkey import PasskeyPrompts

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
    for seed in range(4):
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


@pytest.mark.slow
def test_harness_mistakes(task: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("lm_eval")
    for more, message in (
        (["--tasks", "no_such_task"], "unknown task 'no_such_task'"),
        (["--metadata", "[1]"], "is not a JSON object"),
        (["--method", "yran"], "unknown method 'yran'"),
    ):
        with pytest.raises(SystemExit):
            call(task, *more)
        assert message in capsys.readouterr().err


def test_a_missing_harness_is_told(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    words = ["--model", str(SHIPPED), "--method", "yarn", "--tasks", "early_passkey"]
    with pytest.raises(MeasureError, match="lm-evaluation-harness is not installed"):
        harness.evaluate(harness.parser().parse_args(words))
