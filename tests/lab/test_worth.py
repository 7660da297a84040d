"""lab/worth.py: the commands that it runs are those of the recipes and of rope-ext eval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab import worth, worth_table
from recipes import settings
from rope_eval.cases import Outcome
from tests.helpers.checkpoint import save_checkpoint


def test_its_runs_are_valid_and_have_as_many_tokens(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model")
    study = worth.Study(
        model=str(tmp_path / "model"),
        output=tmp_path / "runs",
        trained=128,
        row=64,
        tokens=4096,
        step_tokens=512,
    )
    tokens = []
    for arm in worth.ARMS:
        _, program, *words = study.training(4, arm, 42)
        assert program == "recipes/finetune.py"
        recipe, args = settings.parse(words)
        settings.check_together(recipe, args)
        assert recipe.factor == 4
        rows = args.max_steps * args.gradient_accumulation_steps
        tokens.append(rows * args.per_device_train_batch_size * recipe.length)
    assert tokens == [4096, 4096]


def test_what_is_done_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    run: list[list[str]] = []

    def ran(words: list[str], **options: Any) -> None:
        run.append(words)
        if "--output_dir" in words:
            (Path(words[words.index("--output_dir") + 1]) / "rope_ext.json").touch()

    monkeypatch.setattr(worth.subprocess, "run", ran)
    words = ["--model", "MODEL", "--output", str(tmp_path), "--factors", "8", "--seeds", "42"]
    worth.main([*words, "--minutes", "0"])
    assert not run and "run the same command again" in capsys.readouterr().out
    worth.main(words)
    assert len(run) == 9  # four measurements before and after one training
    worth.main(words)
    assert len(run) == 9


def test_two_processes_share_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = worth.Study(model="MODEL", output=tmp_path)
    every = [*worth.commands(study, [4], ["pose"], seeds=[42, 43])]
    training, other, untrained, trained, *_ = every
    first = worth.take(every)
    second = worth.take(every)
    third = worth.take(every)
    assert first and second and third
    assert [one[0] for one in (first, second, third)] == [training, other, untrained]
    training.done.touch()
    first[1].release()
    untrained.done.touch()
    third[1].release()
    fourth = worth.take(every)
    assert fourth and fourth[0] == trained


def test_an_adapter_begins_with_what_is_known_of_the_unpatched_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worth.subprocess, "run", lambda words, **options: None)
    study = worth.Study(model="MODEL", output=tmp_path)
    _, untrained, trained, *_ = worth.commands(study, [4], ["pose"], seeds=[42])
    assert untrained.report and trained.report
    untrained.report.mkdir(parents=True)
    (untrained.report / "cases.jsonl").write_text("known\n")
    assert worth.take([trained]) is None  # it waits for the unpatched model
    trained.run()
    log = trained.report / "cases.jsonl"
    assert log.read_text() == "known\n"
    log.write_text("known, and more\n")
    trained.run()
    assert log.read_text() == "known, and more\n"


def test_the_table_pairs_documents_and_averages_seeds(tmp_path: Path) -> None:
    def write(folder: str, system: str, more: float, report: str = "inside") -> None:
        place = tmp_path / folder / f"report-{report}" / "cases.jsonl"
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("a", encoding="utf-8") as log:
            for number in range(8):
                one = Outcome(
                    key=f"{system}{number} at byte {log.tell()}",  # no two are equal
                    system=system,
                    task="perplexity",
                    length=worth.Study.trained,
                    bin=None,
                    depth=None,
                    seed=0,
                    prompt=f"{number}",
                    answers=(),
                    group=number,
                    value=2 + number / 10 + more * (1 + number / 100),
                    tokens=256,
                )
                log.write(one.to_line().decode())

    write("untrained-4x", "unpatched", 0.0)
    write("untrained-4x", "yarn", 0.2)
    write("untrained-4x", "unpatched", 0.0)  # twice in one log
    write("pose-4x-42", "unpatched", 0.0)  # what it begins with
    write("pose-4x-42", "yarn", 0.2)
    write("pose-4x-42", "adapter", 0.05)
    write("pose-4x-43", "adapter", 0.15)
    write("pose-4x-43", "adapter", 9.0, report="twice")  # measured beside a longer one
    lines = [*worth_table.table(tmp_path, 4, "pose")]
    rows = {line.split(" | ")[0].strip("| "): line for line in lines}
    assert "8 documents" in lines[0] and len(lines) == 3 + 5
    assert "| **+23.0" in rows["yarn, untrained"] and "| **-14.4" in rows["trained, seed 42"]
    between = rows["trained, mean of the seeds"]
    assert "| **+10.9" in between and "| **-9.8" in between
    log = tmp_path / "pose-4x-43" / "report-inside" / "cases.jsonl"
    log.write_text("".join(log.read_text("utf-8").splitlines(keepends=True)[:5]))
    lines = [*worth_table.table(tmp_path, 4, "pose")]
    assert not any("mean" in line or "seed 43" in line for line in lines)  # not complete


@pytest.mark.parametrize("factor", [4, 8])
def test_the_page_has_the_tables_of_the_shipped_logs(factor: int) -> None:
    page = (worth.ROOT / "docs" / "fine-tune.md").read_text(encoding="utf-8")
    lines = [*worth_table.table(worth.ROOT / "docs" / "evidence" / "worth", factor, "pose")]
    assert len(lines) > 5
    assert "\n".join(lines) in page
