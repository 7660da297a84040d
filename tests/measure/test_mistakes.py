"""Mistakes in what is typed: all of them at once, and in words of the command."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import rope_ext
from rope_eval.plots.attention import choose_windows
from rope_eval.tune.fitness import windows_of
from rope_ext.cli import app
from rope_ext.errors import Mistakes, OptionError, SeveralErrors
from rope_ext.methods import Rope
from rope_ext.saving import checkpoints as models
from tests.helpers.checkpoint import save_checkpoint
from tests.helpers.models import tiny_llama


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("tiny"))


WRONG = {
    "--text": ["missing.txt", "cannot read the text missing.txt"],
    "--trained-length": ["-1", "--trained-length '-1' is not a number of tokens"],
    "--dtype": ["int8", "dtype='int8' is not valid"],
    "--device": ["abacus", "device 'abacus' cannot be used here"],
    "--seed": ["-1", "seed=-1 is not valid"],
    "--lengths": ["2kb", "--lengths '2kb' is not a number of tokens"],
    "--batch-size": ["0", "batch_size=0 is not valid"],
    "--factor": ["1", "factor=1 would not extend anything"],
    "--option": ["beta", "--option 'beta' is not valid"],
    "--model": ["nowhere/at/all", "cannot load the configuration of 'nowhere/at/all'"],
}


@pytest.mark.parametrize(
    ("command", "more", "messages"),
    [
        (["eval", "perplexity", "passkey"], [], ["no method given"]),
        (
            ["eval", "perplexity", "passkey"],
            ["--method", "yran,longrope"],
            ["unknown method 'yran'"],
        ),
        (["compare"], ["--methods", "yran,rope"], ["unknown method 'yran'"]),
    ],
    ids=["no method", "unknown method", "compare"],
)
def test_all_mistakes_are_reported_at_once(
    command: list[str],
    more: list[str],
    messages: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "load_model", lambda *a, **k: pytest.fail("weights were read"))
    given = {name: value for name, (value, _) in WRONG.items()}
    told = [message for _, message in WRONG.values()]
    words = [word for pair in given.items() for word in (*pair, "--trials", "0")]
    result = CliRunner().invoke(app, [*command, *words, *more])
    assert result.exit_code == 2 and result.stdout == ""
    for message in (*messages, *told, "trials=0 is not valid"):
        assert result.stderr.count(message) == 1, (message, result.stderr)
    assert result.stderr.startswith(f"error: {result.stderr.count('  - ')} mistakes:\n")


def test_one_mistake_is_raised_as_it_is_and_none_twice() -> None:
    mistakes = Mistakes()
    mistakes.report()  # nothing to say
    one, other = OptionError("a; do b"), OptionError("c; do d")
    assert mistakes.check(int, "3") == 3
    mistakes.add(one)
    mistakes.add(OptionError("a; do b"))
    with pytest.raises(OptionError) as caught:
        mistakes.report()
    assert caught.value is one
    mistakes.add(SeveralErrors([one, other]))
    with pytest.raises(SeveralErrors, match="2 mistakes:\n  - a; do b\n  - c; do d") as several:
        mistakes.report()
    assert several.value.errors == (one, other)


def test_too_little_text_names_the_option_of_the_command(checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("A few words only.")
    tokenizer = models.load_tokenizer(str(checkpoint))
    calls = [
        lambda: choose_windows(tokenizer, [text], 4096, 1),
        lambda: windows_of(tokenizer, [text.read_text()], 4096, 1, 0, "so"),
    ]
    for call in calls:
        with pytest.raises(rope_ext.MeasureError, match=r"longer --text or a shorter --length$"):
            call()
    words = ["compare", "--model", checkpoint, "--methods", "yarn", "--lengths", "4096"]
    result = CliRunner().invoke(app, [*map(str, words), "--text", str(text)])
    assert "a longer --text or a shorter --lengths\n" in result.stderr


def test_abf_does_not_speak_of_a_base_that_nobody_gave() -> None:
    rope = Rope.geometric(10000, 16, 256)
    with pytest.raises(OptionError) as caught:
        rope_ext.ABF(factor=4).new_base(rope)  # 0.0424 * 1024 ** 1.628 = 3373.9
    assert str(caught.value) == (
        "abf: the trained base 10000 is already large enough for 1024 tokens (the smallest useful "
        "one there is 3373.92, arXiv 2405.14591); give base= a number above 10000"
    )
    with pytest.raises(OptionError, match="base 500 is smaller than the trained base 10000; give"):
        rope_ext.ABF(factor=4, base=500).new_base(rope)
    with pytest.raises(OptionError, match="already large enough for 256 tokens"):
        rope_ext.patch(tiny_llama(), "abf", factor=4)
