"""Prompts that are made up: requests alike, chains to follow, in long text."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from rope_eval.data.prompts import Frame, encode
from rope_eval.tasks import haystack
from rope_eval.tasks.story import FORMS, TOPICS, Chains, Conversation
from rope_ext.cli import app
from tests.helpers.checkpoint import save_checkpoint
from tests.helpers.published_rows import HELMET, HELMET_DEMOS, NOLIMA, write_rows

SHIPPED = Path(__file__).parents[2] / "checkpoints" / "tiny-512"
TEXT = tuple(f"Sentence {n} tells of nothing {'at all ' * (n % 9)}here." for n in range(60))
KINDS: dict[str, Conversation | Chains] = {
    "mrcr_2": Conversation("", 2, 1, text=TEXT, needles=2, words=12, roomy=True),
    "mrcr_4": Conversation("", 2, 60, text=TEXT, needles=4, words=12),
    "hops_1": Chains("", 2, 32, text=TEXT, hops=1, chains=4),
    "hops_3": Chains("", 2, 32, text=TEXT, hops=3, chains=3),
}


@pytest.fixture(scope="module")
def frame() -> Frame:
    return Frame.from_tokenizer(AutoTokenizer.from_pretrained(SHIPPED), "no")


@pytest.fixture(autouse=True)
def few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are drawn at once, instead of reading Python's library first."""

    def make(kind: str, rng: random.Random) -> str:
        letters = "".join(rng.choices("abcdefgh", k=9))
        return letters if kind == "words" else str(rng.randrange(10**6, 10**7))

    monkeypatch.setattr(haystack, "make", make)


@pytest.mark.parametrize("name", KINDS)
def test_prompts_fill_their_length_and_never_exceed_it(name: str, frame: Frame) -> None:
    task = KINDS[name]
    chat = Frame(frame.tokenizer, (), ("Q: ", "\nA: "))
    lengths = [1100, 1500]
    same = task.questions(frame, lengths, 0)
    for model, made in ((frame, same), (chat, task.questions(chat, lengths, 0))):
        assert [case.length for case in made.cases] == [1100, 1100, 1500, 1500]
        for case in made.cases:  # shorter by less than two requests, or sentences
            assert case.length - (160 if "mrcr" in name else 80) < case.tokens <= case.length
            text = model.tokenizer.decode(case.ids)
            assert model is frame or (text.startswith("Q: ") and text.endswith("\nA: "))
    again = task.questions(frame, lengths[1:], 0).cases
    other = task.questions(frame, lengths[1:], 1).cases
    prompts = [{case.prompt for case in cases} for cases in (same.cases, again, other)]
    assert prompts[0] > prompts[1] and not prompts[0] & prompts[2]


@pytest.mark.parametrize("needles", [2, 4])
def test_the_nth_of_the_requests_alike_got_the_answer(needles: int, frame: Frame) -> None:
    for case in KINDS[f"mrcr_{needles}"].questions(frame, [1500], 0).cases:
        prompt = frame.tokenizer.decode(case.ids[len(frame.head) :])
        *turns, end = prompt.split("\n\n")
        ask = re.fullmatch(
            r"User: Prepend (\w{10}) to the (\d)\w\w \(1 indexed\) (.*) about (\w+)\. Do not "
            r"include any other text in your response\.\nAssistant:",
            end,
        )
        prefix, number, form, topic = ask.groups()
        pairs = [re.fullmatch(r"User: (.*)\nAssistant: (.*)", turn).groups() for turn in turns]
        alike = [answer for asked, answer in pairs if asked == f"write a {form} about {topic}"]
        assert len(alike) == len(set(alike)) == needles
        assert case.key == prefix + alike[int(number) - 1]
        assert all(len(answer.split()) >= 12 for answer in alike)
        others = {asked for asked, _ in pairs} - {f"write a {form} about {topic}"}
        near = [asked for asked in others if form in asked or topic in asked]
        assert 0 < len(near) < len(others) and form in FORMS and topic in TOPICS
        assert case.judge(f" {case.key}") == 1 and case.judge(alike[0]) == 0
        wrong = next(answer for answer in alike if answer != alike[int(number) - 1])
        assert 0 < case.judge(prefix + wrong) < 1
        assert case.count == 60 or case.count >= len(encode(frame.tokenizer, case.key)) + 8


@pytest.mark.parametrize("name", ["hops_1", "hops_3"])
def test_the_number_is_where_the_chain_ends(name: str, frame: Frame) -> None:
    task = KINDS[name]
    for case in task.questions(frame, [1100], 0).cases:
        prompt = frame.tokenizer.decode(case.ids[len(frame.head) :])
        leads = dict(re.findall(r"(\w+) leads to (?:the number )?(\w+)\.", prompt))
        assert len(leads) == task.hops * task.chains
        [at] = re.findall(r"\nStart at (\w+) and follow", prompt)
        assert prompt.endswith(f" Starting at {at}, the number is")
        for _ in range(task.hops):
            at = leads[at]
        assert at == case.key
        ends = [end for end in leads.values() if end.isdigit()]
        assert len(set(ends)) == task.chains
        assert [case.judge(f" {end}.") for end in ends] == [float(end == at) for end in ends]


def run(*words: object) -> dict:
    words = [str(word) for word in words]
    result = CliRunner().invoke(app, ["eval", *words])
    assert result.exit_code == 0, result.output
    return json.loads((Path(words[words.index("--output") + 1]) / "results.json").read_text())


@pytest.mark.slow
def test_the_shipped_checkpoint_is_asked_all_that_is_made_up(tmp_path: Path) -> None:
    data = run(
        *("mrcr", "hops", "--model", SHIPPED, "--method", "yarn", "--lengths", "1k"),
        *("--trials", 2, "--mrcr-needles", 2, "--new-tokens", 8, "--output", tmp_path / "out"),
        *("--hops", "1,2"),
    )
    assert {row["task"] for row in data["summary"]} == {"mrcr_2", "hops_1", "hops_2"}
    outcomes = [json.loads(line) for line in (tmp_path / "out/cases.jsonl").open()][1:]
    prompts = {name: {} for name in ("unpatched", "yarn")}
    for one in outcomes:
        prompts[one["system"]][one["task"], one["length"], one["seed"]] = one["prompt"]
    assert prompts["unpatched"] == prompts["yarn"]  # the very same questions
    assert len(prompts["yarn"]) == 3 * 2 * 2  # also at the 512 tokens that it was trained for
    assert all(0 <= one["value"] <= 1 for one in outcomes)


@pytest.mark.slow
def test_data_of_benchmarks_are_measured_from_the_command_line(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "model")
    (tmp_path / "book.txt").write_text("The mill stood by the river.\n" * 400, encoding="utf-8")
    data = run(
        *(checkpoint, "--tasks", "nolima,helmet"),
        *("--method", "yarn", "--factor", 16, "--lengths", "2k", "--trained-length", 1600),
        *("--samples", 1, "--new-tokens", 4, "--output", tmp_path / "out"),
        *("--nolima-needles", write_rows(tmp_path / "needle_set.json", NOLIMA)),
        *("--nolima-books", tmp_path / "book.txt", "--helmet-data"),
        f"kilt_nq={write_rows(tmp_path / 'nq.jsonl', HELMET['kilt_nq'])}",
        "--helmet-demos",
        f"kilt_nq={write_rows(tmp_path / 'nq_demos.jsonl', HELMET_DEMOS['kilt_nq'])}",
    )
    rows = {(row["task"], row["length"]): row["count"] for row in data["summary"]}
    names = ("nolima", "helmet_kilt_nq")
    assert rows == {(name, length): 1 for name in names for length in (1600, 2048)}
