"""Ctrl-C, SIGTERM and SIGHUP: every command that can be resumed says how, and tells the signal."""

from __future__ import annotations

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


def stopped(words: list[str], *signals: str, ignored: str = "") -> tuple[int, str]:
    """Return exit status and stderr of rope-ext, which gets the signals once it measures."""
    begun, beginning = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.stopped", str(beginning), *words],
        cwd=ROOT,
        pass_fds=[beginning],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: ignored and signal.signal(getattr(signal, ignored), signal.SIG_IGN),
    ) as process:
        os.close(beginning)
        if os.read(begun, 1):  # otherwise it has already ended
            for name in signals:
                process.send_signal(getattr(signal, name))
        said = process.communicate()[1]
    os.close(begun)
    return process.returncode, said


@pytest.mark.slow
def test_every_command_that_measures_says_how_to_go_on(tmp_path: Path) -> None:
    model = str(save_checkpoint(tmp_path / "tiny"))
    text = tmp_path / "text.txt"
    text.write_text(written(5_000, 0))
    far, text = str(2 * TRAINED), str(text)
    asked = ["--lengths", far, "--windows", "2", "--text", text]
    compare = ["compare", "--model", model, "--methods", "yarn", *asked]
    evaluate = ["eval", "perplexity", "--model", model, "--method", "yarn", *asked]
    search = ["search", model, "--length", far, "--text", text, "--samples", "2"]
    calibrate = ["calibrate", "--model", model, "--length", far, "--text", text, "--samples", "4"]
    for words, sentence in (
        ([*evaluate, "--output", str(tmp_path / "eval")], RESUME),
        ([*search, "--output", str(tmp_path / "search.json")], AGAIN),
        ([*calibrate, "--output", str(tmp_path / "calibrate")], RESUME),
    ):
        status, said = stopped(words, "SIGTERM")
        assert (status, said.endswith(sentence)) == (143, True), (words, status, said)
        assert "Traceback" not in said
    nohup = [*compare, "--output", str(tmp_path / "nohup")]
    status, said = stopped(nohup, "SIGHUP", "SIGTERM", ignored="SIGHUP")
    assert (status, said.endswith(RESUME)) == (143, True), (status, said)
