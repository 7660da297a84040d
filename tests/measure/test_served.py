"""Evaluation of a server: the prompts and answers of a model in this process, and what fails."""

from __future__ import annotations

import csv
import importlib.util
import json
import random
import re
import shlex
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import rope_ext
from rope_eval.cases import Case, Outcome, Questions
from rope_eval.data.prompts import Frame
from rope_eval.run.plan import prepare
from rope_eval.run.runner import run
from rope_eval.settings import Settings
from rope_eval.tasks.base import Kind, Task, build
from rope_eval.tasks.passkey import Passkey
from rope_eval.tasks.perplexity import Perplexity
from rope_ext.cli import app
from rope_ext.errors import MeasureError
from tests.helpers import openai_server, transformers_serve
from tests.helpers.openai_server import Fake, serving
from tests.helpers.servers import running

BOOK = [" ".join(f"word{i * k % 97}" for i in range(400)) + "." for k in (3, 5)]
KEYS = Passkey(trials=3, depths=2)


def fake_of(folder: Path, **options: Any) -> Fake:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    return Fake(model, AutoTokenizer.from_pretrained(folder), **options)


def local(folder: Path, output: Path, **options: Any) -> Settings:
    given = {"lengths": (256, 128), "chat": "auto", **options}
    return Settings(models=(str(folder),), methods=("none",), output=output, **given)


def served(folder: Path, output: Path, url: str, **options: Any) -> Settings:
    return local(
        folder, output, url=url, served_model_name="tiny", tokenizer=str(folder), **options
    )


def values(outcomes: list[Outcome] | None) -> list[tuple]:
    assert outcomes is not None
    return [(o.task, o.length, o.seed, o.prompt, o.value, o.written) for o in outcomes]


def measured(settings: Settings, *tasks: Any) -> list[tuple]:
    return values(run(prepare(settings, tasks)))


@pytest.mark.parametrize("api", ["completions", "text"])
@pytest.mark.parametrize("task", ["passkey", "ruler"])
def test_a_server_gets_the_prompts_of_a_local_model_and_answers_alike(
    checkpoint: Path, tmp_path: Path, api: str, task: str
) -> None:
    made = {
        "passkey": [KEYS],
        "ruler": build(["needle"], {"trials": 1}),
    }[task]
    lengths = (512,) if task == "ruler" else (256, 128)
    want = measured(local(checkpoint, tmp_path / "here", lengths=lengths), *made)
    fake = fake_of(checkpoint)
    with serving(fake) as url:
        got = measured(served(checkpoint, tmp_path / "there", url, api=api, lengths=lengths), *made)
    assert got == want
    plan = prepare(local(checkpoint, tmp_path / "plan", lengths=lengths), made)
    cases = list(plan.cases(plan.systems[0]))
    prompts = [list(case.ids) for case in cases]
    assert sorted(fake.prompts) == sorted(prompts)
    assert all(body["temperature"] == 0 for body in fake.asked)
    # vLLM would take a penalty from the model's generation_config.json otherwise.
    assert all(body["repetition_penalty"] == 1 for body in fake.asked)


def test_a_server_without_repetition_penalty_is_asked_without(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Strict(Fake):
        def answer(self, body: dict[str, Any]) -> tuple[int, Any]:
            if "repetition_penalty" in body:
                return 400, {"error": {"message": "unknown field"}}
            return super().answer(body)

    want = measured(local(checkpoint, tmp_path / "here"), KEYS)
    fake = fake_of(checkpoint)
    with serving(Strict(fake.model, fake.tokenizer)) as url:
        assert measured(served(checkpoint, tmp_path / "there", url), KEYS) == want
    assert capsys.readouterr().err.count("takes no repetition_penalty") == 1


@pytest.mark.parametrize("protocol", ["ending", "start"])
def test_perplexity_from_log_probabilities_of_the_prompt(
    checkpoint: Path, tmp_path: Path, protocol: str
) -> None:
    task = Perplexity(BOOK, windows=2, protocol=protocol)
    want = measured(local(checkpoint, tmp_path / "here"), task)
    with serving(fake_of(checkpoint)) as url:
        got = measured(served(checkpoint, tmp_path / "there", url), task)
    # Batches and logits of other shapes round differently in float32.
    assert [one[4] for one in got] == pytest.approx([one[4] for one in want], rel=1e-5)
    assert [one[:4] for one in got] == [one[:4] for one in want]


def test_a_server_without_log_probabilities_is_named(checkpoint: Path, tmp_path: Path) -> None:
    with serving(fake_of(checkpoint, logprobs=False)) as url:
        settings = served(checkpoint, tmp_path / "there", url)
        with pytest.raises(MeasureError, match="does not return the log-probabilities"):
            measured(settings, Perplexity(BOOK, windows=2))


def choice(**changed: Any) -> Any:
    """A spoil that changes the choice of an answer."""
    return lambda answer: {**answer, "choices": [{**answer["choices"][0], **changed}]}


def logprobs(change: Any) -> Any:
    """A spoil that changes the log-probabilities of an answer."""

    def spoil(answer: dict[str, Any]) -> dict[str, Any]:
        found = answer["choices"][0]["logprobs"]["token_logprobs"]
        return choice(logprobs={"token_logprobs": change(found)})(answer)

    return spoil


def used(**changed: int) -> Any:
    return lambda answer: {**answer, "usage": {**answer["usage"], **changed}}


def one_token_fewer(answer: dict[str, Any]) -> Any:
    return used(prompt_tokens=answer["usage"]["prompt_tokens"] - 1)(answer)


TEXT, LOSS = KEYS, Perplexity(BOOK, windows=2)


@pytest.mark.parametrize(
    ("task", "spoil", "said"),
    [
        (TEXT, lambda answer: {"error": {"message": "full"}}, "full"),
        (TEXT, lambda answer: {**answer, "choices": []}, "has no choices"),
        (TEXT, lambda answer: "<html>502</html>", "<html>"),
        (TEXT, lambda answer: "[" * 100_000, "too deep"),
        (TEXT, lambda answer: "[{}" + ",{}" * 3_000_000 + "]", "too many"),
        (TEXT, lambda answer: {**answer, "model": {}}, "name of the model"),
        (TEXT, lambda answer: {**answer, "usage": [1]}, "counts of tokens"),
        (TEXT, lambda answer: [1], "has no choices"),
        (TEXT, choice(text=None), "has no text"),
        (TEXT, choice(text=["a"]), "has no text"),
        (TEXT, choice(text="\ud800"), "Unicode"),
        (TEXT, choice(text="a" * 1_000_000), "characters are too many"),
        (TEXT, used(prompt_tokens="100"), "prompt tokens is '100'"),
        (TEXT, choice(text="Mary had a little lamb. " * 50), "tokens are too many"),
        (TEXT, used(prompt_tokens=100), "says that it read 100 of"),
        (TEXT, one_token_fewer, "says that it read"),
        (LOSS, one_token_fewer, "says that it read"),
        (TEXT, used(completion_tokens=999), "wrote 999 of"),
        (LOSS, logprobs(lambda found: [None, 0.5, *found[2:]]), "prompt is 0.5"),
        (LOSS, logprobs(lambda found: [*found, -1.0]), "not those"),
        (LOSS, logprobs(lambda found: found[1:]), "not those"),
        (LOSS, logprobs(lambda found: [-1.0, *found[1:]]), "instead of null"),
        (LOSS, logprobs(lambda found: [None, "no", *found[2:]]), "prompt is 'no'"),
        (LOSS, logprobs(lambda found: [None, None, *found[2:]]), "prompt is None"),
        (LOSS, logprobs(lambda found: [None, float("nan"), *found[2:]]), "prompt is nan"),
        (LOSS, logprobs(lambda found: [None, -(10**400), *found[2:]]), "not JSON"),
        (LOSS, logprobs(lambda found: {"0": -1.0}), "no list"),
        (LOSS, choice(logprobs=[-1.0]), "no object"),
    ],
)
def test_an_answer_that_cannot_be_true_is_a_failed_request(
    checkpoint: Path, tmp_path: Path, task: Any, spoil: Any, said: str
) -> None:
    """The others go on, and --resume asks for this one again."""
    with serving(fake_of(checkpoint, spoils=[spoil])) as url:
        settings = served(checkpoint, tmp_path / "out", url, concurrency=1, lengths=(256,))
        with pytest.raises(MeasureError, match=r"^1 of \d+ requests failed") as error:
            measured(settings, task)
        assert said in str(error.value)
        again = measured(replace(settings, resume=True), task)
    assert len(again) >= 2


@pytest.mark.parametrize(
    ("send", "said"),
    [
        (openai_server.endless, "more than 64 MB"),
        (openai_server.slow, "within 1.5 seconds"),
        (openai_server.slow_headers, "within 1.5 seconds"),
        (openai_server.compressed, "compressed"),
        (openai_server.cut_off, "cut off"),
        (openai_server.no_http, "cut off"),
    ],
)
@pytest.mark.every
def test_an_answer_without_an_end_or_bound_is_a_failed_request(
    checkpoint: Path, tmp_path: Path, send: Any, said: str
) -> None:
    with openai_server.sending(send) as url:
        how = {"concurrency": 4, "lengths": (128,), "timeout": 1.5, "retries": 0}
        settings = served(checkpoint, tmp_path / "out", url, **how)
        start = time.monotonic()
        with pytest.raises(MeasureError, match=r"^\d of \d requests failed") as error:
            measured(settings, TEXT)
        assert time.monotonic() - start < 20
    assert said in str(error.value) and "\x1b" not in str(error.value)


def test_a_redirect_is_not_followed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and the key go to the given server only."""
    monkeypatch.setenv("OPENAI_API_KEY", "our-key")
    elsewhere: list[bytes] = []
    with openai_server.sending(openai_server.cut_off, elsewhere) as other:
        there = f"{other}/completions?token=secret".encode()

        def redirect(send: Any) -> None:
            send(b"HTTP/1.1 307 Moved\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % there)

        with openai_server.sending(redirect) as url:
            settings = served(checkpoint, tmp_path / "out", url, lengths=(128,))
            with pytest.raises(MeasureError, match="redirects to") as error:
                measured(settings, TEXT)
    assert not elsewhere and "secret" not in str(error.value)


def test_the_key_is_sent_and_never_shown(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "our-key\n")
    heard: list[bytes] = []

    def refuse(send: Any) -> None:
        send(b"HTTP/1.1 401 No\r\nContent-Length: 14\r\n\r\nwrong: our-key")

    with openai_server.sending(refuse, heard) as url:
        settings = served(checkpoint, tmp_path / "out", url, lengths=(128,))
        with pytest.raises(MeasureError, match="wrong: ") as error:
            measured(settings, TEXT)
    assert b"Authorization: Bearer our-key\r\n" in heard[-1] and "our-key" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://user:secret@host/v1",
        "user:secret@host",
        "http://host/v1?key=secret",
        "http://host/v1#secret",
        "ftp://user:secret/@host",
    ],
)
def test_no_key_in_a_url_is_shown(checkpoint: Path, tmp_path: Path, url: str) -> None:
    for words in (
        ["eval", "passkey", "--tokenizer", str(checkpoint), "--lengths", "128"],
        ["verify", str(checkpoint), "--method", "yarn"],
    ):
        name = ["--served-model-name", "tiny", "--url", url]
        result = CliRunner().invoke(app, [*words, *name])
        assert result.exit_code == 2 and "--url" in result.stderr, result.output
        assert "secret" not in result.output


@pytest.mark.parametrize("task", [TEXT, LOSS], ids=["text", "loss"])
def test_a_server_that_counts_one_token_more_is_noted(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], task: Any
) -> None:
    """It puts a beginning-of-sequence token first, which no failure is."""

    def add(answer: dict[str, Any]) -> dict[str, Any]:
        count = answer["usage"]["prompt_tokens"]
        found = answer["choices"][0]["logprobs"]
        if found is not None:
            first, *others = found["token_logprobs"]
            answer = choice(logprobs={"token_logprobs": [first, -7.0, *others]})(answer)
        return used(prompt_tokens=count + 1)(answer)

    want = measured(local(checkpoint, tmp_path / "here"), task)
    with serving(fake_of(checkpoint, spoils=[add] * 99)) as url:
        got = measured(served(checkpoint, tmp_path / "there", url), task)
    assert [one[4] for one in got] == pytest.approx([one[4] for one in want], rel=1e-5)
    told = " ".join(capsys.readouterr().err.split())
    assert told.count("counts 1 more tokens") == 1


def test_an_answer_that_repeats_its_prompt_is_not_one(checkpoint: Path, tmp_path: Path) -> None:
    """Of a server that echoes, every key would be found."""
    fake = fake_of(checkpoint)
    fake.spoils = [lambda answer: choice(text=fake.tokenizer.decode(fake.prompts[-1]))(answer)]
    with serving(fake) as url:
        settings = served(checkpoint, tmp_path / "out", url, concurrency=1, lengths=(256,))
        with pytest.raises(MeasureError, match="the answer repeats the prompt"):
            measured(settings, TEXT)


def test_what_a_server_says_of_itself_is_checked(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = fake_of(checkpoint, models=[{"id": "tiny", "max_model_len": 200}])
    with serving(fake) as url:
        settings = served(checkpoint, tmp_path / "out", url, lengths=(256,))
        with pytest.raises(MeasureError, match=r"takes 200 tokens, and a prompt has 2\d\d"):
            measured(settings, TEXT)
        assert not fake.asked
        fake.models, fake.spoils = [], [lambda answer: {**answer, "model": "another"}]
        measured(replace(settings, overwrite=True), TEXT)
    assert "answers as 'another', not as 'tiny'" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_every_request_would_meet_ends_the_run(
    checkpoint: Path, tmp_path: Path, status: int
) -> None:
    fake = fake_of(checkpoint, faults=[status] * 99)
    with serving(fake) as url:
        settings = served(checkpoint, tmp_path / "there", url, concurrency=1)
        with pytest.raises(MeasureError, match="check --url, --served-model-name"):
            measured(settings, KEYS)
    assert len(fake.asked) < 12


def test_a_server_that_is_not_there(checkpoint: Path, tmp_path: Path) -> None:
    with serving(fake_of(checkpoint)) as url:
        pass
    settings = served(checkpoint, tmp_path / "there", url, retries=0)
    with pytest.raises(MeasureError, match=f"{url} does not answer"):
        measured(settings, KEYS)


def test_the_command_and_its_report(checkpoint: Path, tmp_path: Path, capsys) -> None:
    with serving(fake_of(checkpoint)) as url:
        words = ["passkey", "--url", url, "--served-model-name", "our-model", "--lengths", "128"]
        words += ["--tokenizer", str(checkpoint), "--trials", "2", "--depths", "1"]
        app(["eval", *words, "--output", str(tmp_path / "results")], standalone_mode=False)
    table = (tmp_path / "results" / "table.md").read_text()
    assert "our-model" in table and f"our-model served at {url}" in table
    assert "dtype" not in table and "factor" not in table


def test_no_name_breaks_a_report_or_acts_in_it(checkpoint: Path, tmp_path: Path) -> None:
    """The name of a model is text: no markup, formula of a plot or sheet, HTML, or escape code."""
    name, output = (
        "=1+1 [/red] :bomb: $\\x$ | <img src=x> ![x](http://x) \x1b[31m",
        tmp_path / "out",
    )
    with serving(fake_of(checkpoint)) as url:
        words = ["passkey", "--url", url, "--served-model-name", name, "--lengths", "128"]
        words += ["--tokenizer", str(checkpoint), "--trials", "2", "--depths", "1"]
        done = CliRunner().invoke(app, ["eval", *words, "--output", str(output)])
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output and "[/red] :bomb:" in done.output
    table = (output / "table.md").read_text(encoding="utf-8")
    assert "\x1b" not in table and "<img" not in table and "](" not in table
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len({line.count("|") for line in rows}) == 1
    with (output / "cells.csv").open(encoding="utf-8", newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert not any(cell.startswith("=") for cell in cells)
    assert any(cell.startswith("'=1+1") for cell in cells)


def test_two_deployments_are_compared_on_the_same_prompts(checkpoint: Path, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text(" ".join(BOOK), encoding="utf-8")
    other = fake_of(checkpoint)
    rope_ext.patch(other.model, "yarn", factor=4)
    one, output = fake_of(checkpoint), tmp_path / "results"
    with serving(one) as first, serving(other) as second:
        words = [
            "--url",
            first,
            "--url",
            second,
            "--served-model-name",
            "plain,yarn",
            "--lengths",
            "256",
        ]
        words += ["--tokenizer", str(checkpoint), "--text", str(book), "--windows", "2"]
        words += ["--trials", "2", "--depths", "1", "--output", str(output)]
        app(["compare", *words], standalone_mode=False)
    assert one.prompts and sorted(one.prompts) == sorted(other.prompts)
    found = json.loads((output / "results.json").read_text())
    assert [system["name"] for system in found["systems"]] == ["plain", "yarn"]
    assert {(d["task"], d["system"], d["less"]) for d in found["differences"]} == {
        ("perplexity", "plain", "yarn"),
        ("passkey", "plain", "yarn"),
    }
    table = (output / "table.md").read_text()
    assert f"plain served at {first}" in table and f"yarn served at {second}" in table


@pytest.mark.slow
@pytest.mark.parametrize(("which", "method"), [(0, "yarn"), (1, "rerope")])
def test_transformers_serve_answers_as_its_model_does(
    which: int, method: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec("fastapi") is None:
        pytest.skip("what transformers serve needs is not there")
    folder = transformers_serve.saved(tmp_path / method, method, factor=4)
    options = {"lengths": (400, 256), "chat": "no"}
    here = local(folder, tmp_path / "here", **options)
    if method == "rerope":  # the saved folder alone would be measured without its patch
        plain = local(transformers_serve.saved(tmp_path / "plain", None), here.output, **options)
        here = replace(plain, methods=("rerope",), factor=4)
    want = measured(here, KEYS)
    words = transformers_serve.commands(folder)[which]
    with running(words, tmp_path / "log") as address:
        settings = served(folder, tmp_path / "there", f"{address}/v1", api="text", **options)
        got = measured(replace(settings, served_model_name=str(folder), concurrency=2), KEYS)
    assert got == want[-len(got) :]  # the unpatched model comes first
    assert len({one[5] for one in got}) > 1


@dataclass(frozen=True)
class Numbers(Task):
    """Made-up tokens, whose continuation is written down."""

    name: ClassVar[str] = "numbers"
    kind: ClassVar[Kind] = "rate"

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        del frame, seed
        draw = random.Random(1)
        cases = [
            Case(
                *("numbers", length, at, "write", 8),
                array("i", [draw.randrange(4, 128) for _ in range(length - 8)]),
                answers=("t5",),
            )
            for length in lengths
            for at in range(4)
        ]
        return Questions(cases, "share of fives")


@pytest.mark.slow
def test_llama_cpp_answers_as_its_model_does(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    pytest.importorskip("gguf")
    from rope_eval.engines import verifying
    from rope_eval.engines.gguf_miniature import write_model
    from tests.helpers.engines import built
    from tests.helpers.models import LENGTH

    model = rope_ext.patch(built("llama"), "yarn", factor=4)
    folder, file = tmp_path / "model", tmp_path / "model.gguf"
    model.save_pretrained(folder)
    verifying.tiny_tokenizer().save_pretrained(folder)  # tokens are called t0, t1 ... in both
    options = {"lengths": (4 * LENGTH, LENGTH), "chat": "no"}
    want = measured(local(folder, tmp_path / "here", **options), Numbers())
    printed = shlex.split(rope_ext.export(model, "llama.cpp").command)[1:]
    rope_ext.unpatch(model)
    write_model(model, file)
    words = [str(file) if word.endswith(".gguf") else word for word in printed]
    with verifying.serving(words) as address:
        got = measured(served(folder, tmp_path / "there", f"{address}/v1", **options), Numbers())
    # The file calls token 3 a line break, which has no number.
    numbers = [
        [[n for n in re.findall(r"\d+", one[5]) if n != "3"] for one in found]
        for found in (got, want)
    ]
    assert numbers[0] == numbers[1] and any(numbers[0])
    assert [one[:4] for one in got] == [one[:4] for one in want]
