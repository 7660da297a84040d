"""The evidence: cells are measured once, in order, and those that are there are kept."""

from __future__ import annotations

import json
import re
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedModel,
)

import rope_ext
from lab.evidence import pages, retrieval_page
from lab.evidence.measure import BUCKET, Measurement
from lab.evidence.questions import Questions
from lab.evidence.retrieval import FACTORS, Retrievals, found_in
from rope_eval.cases import Case
from rope_eval.embedder import Embedder, Recipe
from rope_eval.reports.intervals import MIN_DOCUMENTS
from rope_eval.reports.recommendation import Recommendation, Scores
from rope_ext.advice.evidence import ranked
from rope_ext.methods import method_class

ROOT = Path(__file__).parents[2]
TRAINED = 1024  # two buckets; the checkpoint need not agree


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(ROOT / "checkpoints" / "tiny-512").eval()


@pytest.fixture
def questions() -> Questions:
    rng = np.random.default_rng(0)
    documents = {name: rng.integers(5, 200, 2 * TRAINED).tolist() for name in "ab"}
    ids = array("i", rng.integers(5, 200, 60).tolist())
    prompts = {
        ("passkey", TRAINED * 2, part): [
            Case("passkey", TRAINED * 2, part, "write", 3, ids, answers=("7",), depth=0.5)
        ]
        for part in range(2)
    }
    return Questions(documents, prompts)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def measured(model: PreTrainedModel, questions: Questions, output: Path, seconds: float) -> bool:
    measurement = Measurement(
        name="tiny",
        model=model,
        tokenizer=AutoTokenizer.from_pretrained(ROOT / "checkpoints" / "tiny-512"),
        questions=questions,
        trained=TRAINED,
        output=output,
        until=time.monotonic() + seconds,
    )
    return measurement.run()


def test_every_cell_is_measured_once_and_resumed(
    model: PreTrainedModel, questions: Questions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "cells.jsonl"
    monkeypatch.setattr("lab.evidence.measure.VARIANTS", (("rerope", {"window": 0.25}),))
    chosen = [method_class(name) for name in ("yarn", "rerope", "dynamic_yarn")]
    monkeypatch.setattr("lab.evidence.measure.all_methods", lambda: chosen)
    assert not measured(model, questions, output, seconds=-1)
    assert lines(output) == []
    assert measured(model, questions, output, seconds=1e9)
    found = lines(output)
    fields = ("method", "options", "task", "length", "document", "part")
    keys = [tuple(str(line[name]) for name in fields) for line in found]
    assert len(set(keys)) == len(keys)
    assert not any("refused" in line for line in found)
    # The prompts of the front page come first, one part of every method before the next part.
    rounds = [(x["method"], x["part"]) for x in found if x["task"] == "passkey"]
    assert rounds[:3] == [("unpatched", 0), ("yarn", 0), ("dynamic_yarn", 0)]
    assert rounds[0] != rounds[5] == ("unpatched", 1)
    dynamic = {x["length"] for x in found if x["method"] == "dynamic_yarn" and x["document"]}
    assert dynamic == {TRAINED // 4, 1280, 1536, 2048}
    assert {"passkey"} == {x["task"] for x in found if x["document"] is None}
    # A run that was killed in the middle of a line goes on with that line.
    text = output.read_text()
    output.write_text(text[: text.rindex("{") + 20])
    assert measured(model, questions, output, seconds=1e9)
    assert [x["losses"] if x["document"] else x["right"] for x in lines(output)] == [
        x["losses"] if x["document"] else x["right"] for x in found
    ]
    # Other prompts are asked; losses on the same documents stay.
    [case] = questions.prompts["passkey", 2 * TRAINED, 0]
    case.ids[0] += 1
    vars(case).pop("prompt")  # the digest of its tokens
    assert measured(model, questions, output, seconds=1e9)
    assert {x["task"] for x in lines(output)[len(found) :]} == {"passkey"}


def test_losses_are_those_of_the_model_by_position(
    model: PreTrainedModel, questions: Questions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.evidence.measure.all_methods", lambda: [])
    monkeypatch.setattr("lab.evidence.measure.VARIANTS", ())
    output = tmp_path / "cells.jsonl"
    measured(model, questions, output, seconds=1e9)
    line = next(x for x in lines(output) if (x["document"], x["length"]) == ("b", 2 * TRAINED))
    ids = torch.tensor([questions.documents["b"]])
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(
            model(ids).logits[0, :-1].float(), ids[0, 1:], reduction="none"
        )
    expected = [float(losses[max(0, at - 1) : at + BUCKET - 1].mean()) for at in (0, 512, 1024)]
    assert line["losses"][:3] == pytest.approx(expected, abs=1e-3)


MADE = (
    *(pages.table, pages.written, pages.behind),
    *(pages.quadruple, pages.variants, pages.conditions),
)


def test_the_pages_and_recommend_have_the_shipped_numbers() -> None:
    shipped = pages.Evidence.read(ROOT / "docs" / "evidence" / "smollm2.jsonl")
    page = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    for path in (ROOT / "docs" / "evidence").glob("*.jsonl"):
        if retrieval_page.is_retrieval(path):
            embedder = retrieval_page.Retrieved.read(path)
            assert retrieval_page.conditions(embedder) in page
            assert all(retrieval_page.table(embedder, factor) in page for factor in FACTORS)
            continue
        for made in MADE:
            assert made(pages.Evidence.read(path)) in page, f"{made.__name__} of {path}"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert pages.short(shipped) in readme
    data = json.loads((ROOT / "rope_ext" / "advice" / "evidence.json").read_text("utf-8"))
    assert data[0] == pages.summary(shipped)
    embedders = [path for path in (ROOT / "docs" / "evidence").glob("*.jsonl")]
    embedders = [path for path in embedders if retrieval_page.is_retrieval(path)]
    made = [retrieval_page.summary(retrieval_page.Retrieved.read(path)) for path in embedders]
    assert [model for model in data if model.get("embeds")] == [x for x in made if x["methods"]]
    unpatched, self_extend = (data[0]["methods"][name] for name in ("unpatched", "self_extend"))
    unpatched, self_extend = (row["at"]["2"] for row in (unpatched, self_extend))
    claims = re.sub(r"\s+", " ", readme)
    assert f"its perplexity is {unpatched['perplexity']:,.0f}. After this line" in claims
    keys = "it answers {found} of {of} questions for a passkey".format(**self_extend["passkey"])
    assert f"its perplexity is {self_extend['perplexity']:.2f}, {keys} (before: none)" in claims
    assert unpatched["passkey"]["found"] == 0
    front = ("unpatched", "yarn", "dynamic_yarn", "self_extend", "rerope")
    # Only a passkey that was decoded may be on the front page.
    assert ("passkeys" in pages.short(shipped)) == shipped.decoded(front, "passkey", 2)


def test_what_was_written_is_compared_on_the_prompts_that_all_have() -> None:
    def line(method: str, part: int, right: list[int], **more: str) -> dict:
        options = {} if method == "unpatched" else {"factor": 2}
        common = {"model": "SmolLM2-135M-Instruct", "task": "multikey", "length": 16384}
        return {**common, "method": method, "options": options, "part": part, "right": right} | more

    lines = [line(name, 0, [0] * 10, written="") for name in pages.FRONT if name != "self_extend"]
    lines += [line("self_extend", 0, [1] * 10, written="")]
    lines += [line("rerope", 1, [1] * 10, written=""), line("yarn", 2, [1] * 10)]
    made = pages.written(pages.Evidence("SmolLM2-135M-Instruct", lines))
    assert "| `rerope` | 0/10" in made and "| `self_extend` | 10/10" in made
    assert "| `self_extend` | **+100.0" in made.partition("against yarn")[2]
    assert pages.written(pages.Evidence("SmolLM2-135M-Instruct", lines[1:])) == ""


def test_of_two_keys_only_the_one_asked_for_counts() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "checkpoints" / "tiny-512")
    text = "Some words of a manual, one after the other. " * 400
    made = Questions.made(tokenizer, (512,), trials=2, texts=[text] * 8)
    for part in range(2):
        for case in made.prompts["multikey", 512, part]:
            prompt = tokenizer.decode(case.ids)
            name = re.findall(r"What is the pass key of (\w+)\?", prompt)[0]
            keys = dict(re.findall(r"The pass key of (\w+) is ([0-9]{3})\.", prompt))
            asked = keys.pop(name)
            [other] = keys.values()
            assert case.judge is not None and case.answers == (asked,)
            assert case.judge(f"It is {asked}.") == 1
            assert case.judge(f"{other}, or {asked}") == case.judge("none") == 0


def test_intervals_are_paired_over_documents() -> None:
    documents = [f"d{n}" for n in range(6)]

    def line(method: str, options: dict, gap: float) -> list[dict]:
        common = {"model": "SmolLM2-135M-Instruct", "task": "loss", "length": 16384, "seconds": 1.0}
        return [
            {
                **common,
                "method": method,
                "options": options,
                "document": name,
                "losses": [n + gap] * 32,
            }
            for n, name in enumerate(documents)
        ]

    lines = line("unpatched", {}, 0.0) + line("yarn", {"factor": 2}, 0.1)
    made = pages.Evidence("SmolLM2-135M-Instruct", lines)
    # Documents differ by whole nats, the methods by 0.1 on each: e^0.1 - 1 without any width.
    assert made.cost("yarn") == "+10.5 % [+10.5, +10.5]"


SPANS = {"1x": 1, "1.5x": 1.5, "2x": 2}  # and times of the trained length
CONFIGS = {  # with what recommend reads of them
    "smollm2": LlamaConfig(num_hidden_layers=2, max_position_embeddings=8192),
    "gemma3": Gemma3TextConfig(num_hidden_layers=6, max_position_embeddings=32768),
}


def compared(evidence: pages.Evidence, first: str, others: Sequence[str]) -> dict[str, Scores]:
    """The shipped numbers as `compare` measures them, on the documents of the first method.

    A method that was measured on fewer is left out, and passkeys count where the first one has
    them.
    """
    places = {span: round(times * evidence.trained) for span, times in SPANS.items()}
    losses, passes = {}, {}
    for name in ("unpatched", first, *others):
        losses[name] = {at: evidence.losses(name, span) for span, at in places.items()}
        answers = {
            at: evidence.answers(name, "passkey", SPANS[span])[0] for span, at in places.items()
        }
        passes[name] = {at: right for at, right in answers.items() if right}
    known = {name: set.intersection(*map(set, found.values())) for name, found in losses.items()}
    documents, scores = sorted(known[first] & known["unpatched"]), {}
    asked = {*passes[first], evidence.trained}
    for name, found in losses.items():
        if known[name] >= {*documents}:
            rows = {at: [row[one] for one in documents] for at, row in found.items()}
            hits = {at: row for at, row in passes[name].items() if at in asked}
            hits = hits if {*hits, evidence.trained} == asked else {}
            scores[name] = Scores(rows, hits)
    return scores


def not_worse(scores: dict[str, Scores], trained: int) -> set[str] | None:
    """Methods that `compare` does not find worse than the best; None: it cannot tell."""
    documents = len(scores["unpatched"].losses_at([2 * trained]))
    if not documents:
        return None
    found = Recommendation(scores, trained)
    assert found.beyond is not None
    if documents < MIN_DOCUMENTS:
        assert str(found).startswith("Cannot tell whether any method helps")
        return None
    best = found.beyond.best.name
    assert str(found).startswith(f"Beyond {trained} tokens, {best} is best")
    return {best, *(rival.name for rival in found.beyond.rivals)}


@pytest.mark.parametrize("file", CONFIGS)
def test_what_recommend_names_first_is_not_worse_than_the_others_beyond_noise(file: str) -> None:
    shipped = pages.Evidence.read(ROOT / "docs" / "evidence" / f"{file}.jsonl")
    advice = rope_ext.recommend(CONFIGS[file], 2 * shipped.trained)
    assert advice.serve is not None
    others = [method.name for method, _ in advice.alternatives if method.name in ranked()]
    for first, rivals in ((advice.method, others), (advice.serve, ["ntk", "llama3", "mrrope"])):
        scores = compared(shipped, first.name, rivals)
        best = not_worse(scores, shipped.trained)
        assert best is None or first.name in best
        if file == "smollm2":  # which has them: a worse method would be seen
            assert best is not None and len(scores) > 3
            one = scores[first.name]
            higher = {at: [loss + 0.1 for loss in row] for at, row in one.losses.items()}
            none = {at: [0.0] * len(row) for at, row in one.passes.items()}
            for worse in (Scores(higher, one.passes), Scores(one.losses, none)):
                assert first.name not in (not_worse(scores | {first.name: worse}, 8192) or ())


def retrieved(method: str, length: int, factor: float, found: int) -> list[dict]:
    """Lines of 25 documents with a question each, of which the first ``found`` are nearest."""
    return [
        {
            **{"model": "embeddinggemma-300m", "task": "retrieval", "dtype": "bfloat16"},
            **{"device": "cpu", "torch": "2", "transformers": "5", "seed": 0},
            **{"method": method, "length": length, "factor": factor, "document": n},
            "alike": [0.9 if n == q < found else 0.5 if n == q else 0.6 for q in range(25)],
            "right": [int(n == q) for q in range(25)],
        }
        for n in range(25)
    ]


def test_the_page_of_an_embedder_has_what_each_method_found() -> None:
    lines = retrieved("cut", 4096, 1, 5) + retrieved("unpatched", 4096, 1, 6)
    lines += retrieved("yarn", 4096, 2, 20) + retrieved("ntk", 4096, 2, 8)
    lines += retrieved("pi", 4096, 2, 25)[:24]  # not complete
    assert sum(found_in(lines[50:75])) == 20
    evidence = retrieval_page.Retrieved("embeddinggemma-300m", lines)
    table = retrieval_page.table(evidence, 2)
    rows = [row.split(" | ")[0].strip("| `") for row in table.splitlines()[2:]]
    assert rows == ["unpatched, cut at 2,048 tokens", "unpatched", "yarn", "ntk"]
    assert "20 of 25, 80% [59, 93]" in table and "**+56.0" in table
    assert retrieval_page.table(evidence, 4) == ""
    methods = retrieval_page.summary(evidence)["methods"]
    assert methods["yarn"] == {"at": {"2": {"retrieval": {"found": 20, "of": 25, "clear": True}}}}
    assert methods["unpatched"]["at"]["2"]["retrieval"] == {"found": 6, "of": 25, "cut": 5}


def test_documents_of_an_embedder_are_measured_once_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.evidence.retrieval.all_methods", lambda: [method_class("yarn")])
    place = ROOT / "checkpoints" / "tiny-512"
    embedder = Embedder(AutoModel.from_pretrained(place).eval(), Recipe.from_files(str(place)))
    rng = np.random.default_rng(0)
    words = [f"w{n}." for n in rng.integers(0, 500, 60000)]

    def measured(seconds: float) -> bool:
        return Retrievals(
            name="tiny",
            embedder=embedder,
            tokenizer=AutoTokenizer.from_pretrained(place),
            texts=[" ".join(words)],
            trained=128,
            output=tmp_path / "cells.jsonl",
            until=time.monotonic() + seconds,
            methods=("cut", "unpatched"),
        ).run()

    assert not measured(-1) and lines(tmp_path / "cells.jsonl") == []
    assert measured(1e9)
    cells = lines(tmp_path / "cells.jsonl")
    keys = [(x["method"], x["factor"], x["length"], x["document"]) for x in cells]
    assert len(set(keys)) == len(keys) == 25 * 5  # cut at two lengths, unpatched at three
    whole = (tmp_path / "cells.jsonl").read_bytes()
    (tmp_path / "cells.jsonl").write_bytes(whole[: len(whole) * 2 // 3])
    assert measured(1e9)
    again = lines(tmp_path / "cells.jsonl")
    assert [x["alike"] for x in again] == [x["alike"] for x in cells]
