"""Ctrl-C, SIGTERM and SIGHUP: every command that can be resumed says how, and tells the signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rope_ext.command.terminal import stoppable
from tests.helpers.checkpoint import TRAINED, save_checkpoint, written

ROOT = Path(__file__).parents[2]
STATUS = {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143}
RESUME = "stopped; run the same command with --resume to continue\n"
AGAIN = "stopped; run the same command to continue\n"


@pytest.fixture
def unhandled() -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals arrive in the main thread only")
    before = {name: signal.getsignal(getattr(signal, name)) for name in STATUS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for name, handler in before.items():
        signal.signal(getattr(signal, name), handler)


@pytest.mark.usefixtures("unhandled")
@pytest.mark.parametrize("name", STATUS)
def test_a_signal_ends_a_block_in_one_line(name: str, capfd: pytest.CaptureFixture) -> None:
    number, closed = getattr(signal, name), []
    with pytest.raises(SystemExit) as ended, stoppable("do this"):
        try:
            os.kill(os.getpid(), number)
        finally:
            closed.append(True)
    assert ended.value.code == 128 + number == STATUS[name] and closed
    assert capfd.readouterr().err == "stopped; do this\n"
    default = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
    assert signal.getsignal(number) == default


@pytest.mark.usefixtures("unhandled")
def test_an_error_that_a_signal_brought_about_is_not_shown(capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended, stoppable():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            raise OSError("the other process of the group is gone") from None
    assert ended.value.code == 143 and capfd.readouterr().err == RESUME
    with pytest.raises(OSError, match="disk"), stoppable():
        raise OSError("disk")


@pytest.mark.slow
def test_every_command_that_measures_says_how_to_go_on(tmp_path: Path) -> None:
    model = str(save_checkpoint(tmp_path / "tiny"))
    text = tmp_path / "text.txt"
    text.write_text(written(20_000, 0))
    far, text = str(2 * TRAINED), str(text)
    asked = ["--lengths", far, "--windows", "2", "--text", text]
    compare = ["compare", "--model", model, "--methods", "yarn", *asked]
    evaluate = ["eval", "perplexity", "--model", model, "--method", "yarn", *asked]
    search = ["search", model, "--length", far, "--text", text]
    calibrate = ["calibrate", "--model", model, "--length", far, "--text", text]
    commands = {
        "compare": ("rope-ext", compare, RESUME),
        "eval": ("rope-ext", evaluate, RESUME),
        "search": ("rope-ext", [*search, "--samples", "2"], AGAIN),
        "calibrate": ("rope-ext", [*calibrate, "--samples", "4"], RESUME),
    }
    runs, expected = [], []
    for name, (module, words, sentence) in commands.items():
        for number, status in STATUS.items():
            if number != "SIGTERM" and name != "compare":
                continue
            output = str(tmp_path / f"{name}-{number}") + ".json" * (name == "search")
            runs.append((module, [*words, "--output", output], [number], []))
            expected.append((name, number, status, sentence))
    nohup = [*compare, "--output", str(tmp_path / "nohup")]
    runs.append(("rope-ext", nohup, ["SIGHUP", "SIGTERM"], ["SIGHUP"]))
    expected.append(("nohup", "SIGTERM", 143, RESUME))
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    helper = [sys.executable, "-m", "tests.helpers.stopped", str(tmp_path / "runs.json")]
    done = subprocess.run(helper, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for case, (status, said) in zip(expected, json.loads(done.stdout), strict=True):
        assert (status, said.endswith(case[3])) == (case[2], True), (case, status, said)
        assert "Traceback" not in said
