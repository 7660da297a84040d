"""Retrieval by embeddings: recipes of sentence-transformers' files, questions, runs and reports."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModel,
    AutoTokenizer,
    EuroBertConfig,
    EuroBertModel,
    LlamaConfig,
    LlamaForSequenceClassification,
)
from typer.testing import CliRunner

import rope_ext
from rope_eval import sliding
from rope_eval.cases import Candidates, Case
from rope_eval.data.prompts import Frame
from rope_eval.embedder import Embedder, Recipe
from rope_eval.evaluate import evaluate
from rope_eval.reports.intervals import rate_interval
from rope_eval.reports.recommendation import Recommendation, Scores
from rope_eval.run import runner as run
from rope_eval.run.plan import prepare
from rope_eval.settings import Settings
from rope_eval.tasks.embedding import Embedding, Retrieval
from rope_eval.tasks.passkey import Passkey
from rope_ext.advice import evidence
from rope_ext.cli import app
from rope_ext.errors import MeasureError, OptionError
from rope_ext.saving.embedders import saved_by_them
from tests.helpers.both_directions import encoder
from tests.helpers.checkpoint import TRAINED, save_checkpoint

PROMPTS = {"query": "ask: ", "document": "read: "}


def save_embedder(folder: Path) -> Path:
    """Save a tiny encoder of 128 tokens with a tokenizer, and no files of sentence-transformers."""
    save_checkpoint(folder)
    config = EuroBertConfig(
        vocab_size=400,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=TRAINED,
        pad_token_id=1,
    )
    torch.manual_seed(0)
    EuroBertModel(config).save_pretrained(folder)
    return folder


def add_modules(folder: Path, legacy: bool, pooling: str, **more: Any) -> None:
    """Add files of sentence-transformers: pooling, a dense layer, normalization and prompts."""
    root = "sentence_transformers.models." if legacy else "sentence_transformers.modules."
    names = ("Transformer", "Pooling", "Dense", "Normalize")
    paths = ("", "1_Pooling", "2_Dense", "3_Normalize")
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": root + name}
        for at, (name, path) in enumerate(zip(names, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    old = {"lasttoken": "lasttoken", "cls": "cls_token"}.get(pooling, f"{pooling}_tokens")
    chosen = {f"pooling_mode_{old}": True} if legacy else {"pooling_mode": pooling}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({**chosen, **more}))
    dense = folder / "2_Dense"
    dense.mkdir(exist_ok=True)
    about = {"in_features": 16, "out_features": 8, "bias": False}
    about["activation_function"] = "torch.nn.modules.activation.Tanh"
    (dense / "config.json").write_text(json.dumps(about))
    weight = torch.arange(128.0).reshape(8, 16).sin()
    save_file({"linear.weight": weight}, dense / "model.safetensors")
    prompts = {"prompts": PROMPTS, "similarity_fn_name": "cosine"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_embedder(tmp_path_factory.mktemp("embedder"))


@pytest.fixture
def settings(embedder: Path, tmp_path: Path) -> Settings:
    return Settings(
        models=(str(embedder),),
        methods=("yarn", "self_extend"),
        lengths=(256,),
        output=tmp_path / "results",
    )


TASK = Embedding(queries=6, candidates=5, facts=2)


def test_without_files_the_mean_of_all_tokens_is_the_embedding(embedder: Path) -> None:
    recipe = Recipe.from_files(str(embedder))
    model = AutoModel.from_pretrained(embedder).eval()
    rows = [[*range(10, 40)], [*range(50, 60)]]
    found = Embedder(model, recipe).embed(rows)
    for row, vector in zip(rows, found, strict=True):
        with torch.no_grad():
            want = model(torch.tensor([row]))[0][0].mean(0)
        torch.testing.assert_close(vector, want / want.norm(), atol=1e-5, rtol=0)
    assert "mean" in recipe.about and "no prompts" in recipe.about


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken", "max"])
def test_files_of_sentence_transformers_name_the_pooling(
    legacy: bool, pooling: str, tmp_path: Path
) -> None:
    folder = save_embedder(tmp_path)
    add_modules(folder, legacy, pooling)
    recipe = Recipe.from_files(str(folder))
    assert (recipe.pooling, recipe.query, recipe.document) == (pooling, "ask: ", "read: ")
    model = AutoModel.from_pretrained(folder).eval()
    rows = [[*range(10, 40)], [*range(50, 60)]]
    found = Embedder(model, recipe).embed(rows)
    weight = torch.arange(128.0).reshape(8, 16).sin()
    for row, vector in zip(rows, found, strict=True):
        with torch.no_grad():
            hidden = model(torch.tensor([row]))[0][0]
        choices = {"mean": hidden.mean(0), "cls": hidden[0], "lasttoken": hidden[-1]}
        want = (weight @ choices.get(pooling, hidden.amax(0))).tanh()
        torch.testing.assert_close(vector, want / want.norm(), atol=1e-5, rtol=0)


def test_what_the_evaluator_does_not_know_is_refused(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path)
    add_modules(folder, False, "weightedmean")
    with pytest.raises(MeasureError, match="weightedmean"):
        Recipe.from_files(str(folder))
    add_modules(folder, False, "mean", include_prompt=False)
    with pytest.raises(MeasureError, match="include_prompt"):
        Recipe.from_files(str(folder))
    modules = [{"path": "", "type": "sentence_transformers.models.Router"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(MeasureError, match="Router"):
        Recipe.from_files(str(folder))


@pytest.mark.parametrize("name", ["embedding_passkey", "embedding_needle"])
def test_documents_fill_the_length_and_hold_their_facts(name: str, embedder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedder)
    frame = Frame(tokenizer, (), model=str(embedder))
    task = Retrieval(name, queries=9, candidates=6, facts=2)
    cases = task.questions(frame, [512], 0).cases
    assert len(cases) == 9 and len({case.prompt for case in cases}) == 9
    documents = cases[0].candidates.documents
    assert len(documents) == 6 and all(400 < len(one) <= 512 for one in documents)
    for case in cases:
        texts = [tokenizer.decode(one) for one in documents]
        [fact] = case.answers
        holding = [at for at, text in enumerate(texts) if fact in text]
        assert holding == [case.right]
        place = texts[case.right].index(fact) / len(texts[case.right])
        assert abs(place - case.depth) < 0.35
    assert [c.prompt for c in task.questions(frame, [512], 0).cases] == [c.prompt for c in cases]
    assert [c.prompt for c in task.questions(frame, [512], 1).cases] != [c.prompt for c in cases]


def test_a_document_is_cut_before_its_last_special_tokens() -> None:
    from array import array

    candidates = Candidates((array("i", [0, *range(10, 30), 1]), array("i", [0, 5, 1])), closing=1)
    assert [list(one) for one in candidates.cut(6)] == [[0, 10, 11, 12, 13, 1], [0, 5, 1]]


def test_the_report_has_the_cut_model_in_a_row_of_its_own(settings: Settings) -> None:
    report = evaluate(settings, [TASK])
    assert report is not None
    rows = ["unpatched", f"unpatched, cut at {TRAINED} tokens", "yarn", "self_extend"]
    assert [system.name for system in report.plan.systems] == rows
    plan = report.plan
    cases = [case for case in plan.cases(plan.systems[0]) if case.length == 256]
    values = {(o.system, o.task, o.seed): o for o in report.outcomes if o.length == 256}
    model = AutoModel.from_pretrained(settings.models[0]).eval()
    by_hand = Embedder(model, Recipe.from_files(settings.models[0]))
    with rope_ext.patched(model, "self_extend", factor=4):
        for case in cases:
            texts = [case.ids, *case.candidates.documents]
            [asked, *found] = (by_hand.embed([text])[0].double() for text in texts)
            alike = torch.stack([asked @ one for one in found])
            nearest = int(alike.argmax())
            outcome = values["self_extend", case.task, case.seed]
            assert outcome.value == float(nearest == case.right)
    found = [o.value for o in report.outcomes if (o.system, o.task) == (rows[0], cases[0].task)]
    found = found[: len(cases) // 2]
    estimate = report.estimates[cases[0].task, rows[0], plan.lengths[0]]
    assert (estimate.low, estimate.high) == rate_interval(sum(found), len(found))
    page = (settings.output / "report.html").read_text()
    assert "mean pooling" in page and "no prompts" in page
    assert plan.questions[settings.models[0], cases[0].task].definition.count("5") >= 1


def test_what_is_beyond_the_window_of_a_cut_text_is_not_found(settings: Settings) -> None:
    given = dataclasses.replace(settings, methods=("unpatched",), lengths=(512,))
    report = evaluate(given, [Embedding(queries=10, candidates=10)])
    assert report is not None
    cut = [o for o in report.outcomes if o.length == 512 and "cut" in o.system]
    beyond = [o for o in cut if o.task == "embedding_passkey" and o.depth and o.depth > 0.5]
    assert beyond and not any(o.value for o in beyond)  # only the filler is left of them


def test_an_interrupted_run_keeps_the_documents_that_it_embedded(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = dataclasses.replace(settings, batch_size=1)
    whole = run.run(prepare(given, [TASK]))
    forwards: list[int] = []
    embed = Embedder.embed

    def count(self: Embedder, rows: Any, limit: int = 10**9) -> Any:
        if len(forwards) == limit:
            raise KeyboardInterrupt
        forwards.append(len(rows))
        return embed(self, rows)

    cut = dataclasses.replace(given, output=settings.output / "cut", resume=True)
    monkeypatch.setattr(Embedder, "embed", lambda self, rows: count(self, rows, 30))
    with pytest.raises(KeyboardInterrupt):
        run.run(prepare(cut, [TASK]))
    monkeypatch.setattr(Embedder, "embed", count)
    assert run.run(prepare(cut, [TASK])) == whole
    resumed = len(forwards)
    forwards.clear()
    run.run(prepare(dataclasses.replace(given, output=settings.output / "new"), [TASK]))
    assert resumed == len(forwards)


def test_your_own_documents_are_the_candidates(settings: Settings, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for n in range(4):
        words = " ".join(f"word{n}{i % 89}." for i in range(400))
        (folder / f"{n}.txt").write_text(words)
    (folder / "short.txt").write_text("Too short.")
    task = Embedding(queries=3, documents=(str(folder),))
    plan = prepare(dataclasses.replace(settings, methods=("unpatched",)), [task])
    cases = [case for case in plan.cases(plan.systems[0]) if case.length == 256]
    assert len(cases) == 3 and {case.task for case in cases} == {"embedding_documents"}
    assert len(cases[0].candidates.documents) == 4
    few = Embedding(documents=(str(folder / "0.txt"),))
    with pytest.raises(OptionError, match="--documents"):
        prepare(settings, [few])


def test_wrong_combinations_are_refused_before_weights_are_read(settings: Settings) -> None:
    with pytest.raises(OptionError, match="separately"):
        prepare(settings, [TASK, Passkey()])
    with pytest.raises(OptionError, match="merge"):
        prepare(dataclasses.replace(settings, adapter="adapter"), [TASK])
    with pytest.raises(OptionError, match="candidates"):
        prepare(settings, [Embedding(candidates=100, facts=2)])
    with pytest.raises(OptionError, match="--tasks embedding"):
        prepare(settings, [Passkey()])  # an encoder predicts no text
    with pytest.raises(OptionError, match="candidates"):
        Embedding(candidates=1)


def test_compare_measures_the_task_on_an_embedder(embedder: Path, tmp_path: Path) -> None:
    words = ["compare", str(embedder), "--method", "yarn", "--factor", "2", "--lengths", "256"]
    few = ["--queries", "5", "--candidates", "5", "--output", str(tmp_path / "out")]
    ran = CliRunner().invoke(app, [*words, *few])
    assert ran.exit_code == 0, ran.output
    assert "embedding_needle" in ran.output and "Cannot tell" in " ".join(ran.output.split())
    ran = CliRunner().invoke(app, [*words, "--digits", "3"])
    assert ran.exit_code == 2 and "--digits" in ran.output and "embedder" in ran.output


def test_a_language_model_with_files_of_an_embedder_is_compared_as_one(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_checkpoint(folder)  # as E5-Mistral: architectures names a language model
    columns = json.loads((folder / "config.json").read_text())["hidden_size"]
    add_modules(folder, legacy=False, pooling="lasttoken")
    dense = {"in_features": columns, "out_features": 8, "bias": False}
    dense["activation_function"] = "torch.nn.modules.linear.Identity"
    (folder / "2_Dense" / "config.json").write_text(json.dumps(dense))
    weight = torch.arange(8.0 * columns).reshape(8, columns).sin()
    save_file({"linear.weight": weight}, folder / "2_Dense" / "model.safetensors")
    words = ["compare", str(folder), "--method", "yarn", "--factor", "2", "--lengths", "256"]
    few = ["--queries", "5", "--candidates", "5", "--output", str(tmp_path / "out")]
    ran = CliRunner().invoke(app, [*words, *few])
    assert ran.exit_code == 0, ran.output
    assert "embedding_needle" in ran.output


def test_a_file_of_weights_is_no_embedder_of_sentence_transformers(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert not saved_by_them(str(file))


@pytest.mark.parametrize("tasks", ["embedding", "perplexity,passkey", None])
@pytest.mark.parametrize("kind", ["reranker", "reward model"])
def test_what_gives_labels_is_measured_by_nothing_here(
    kind: str, tasks: str | None, tmp_path: Path
) -> None:
    folder = save_embedder(tmp_path / "model")
    if kind == "reranker":  # its configuration may name any class
        add_modules(folder, legacy=False, pooling="mean")
        settings = json.dumps({"model_type": "CrossEncoder"})
        (folder / "config_sentence_transformers.json").write_text(settings)
    else:
        sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
        config = LlamaConfig(vocab_size=400, max_position_embeddings=TRAINED, **sizes)
        LlamaForSequenceClassification(config).save_pretrained(folder)
    words = ["--method", "yarn", "--factor", "2", "--lengths", "256"]
    words += ["--queries", "3"] if tasks != "perplexity,passkey" else []
    command = ["compare"] if tasks is None else ["eval", "--tasks", tasks]
    out = ["--output", str(tmp_path / "out")]
    ran = CliRunner().invoke(app, [*command, str(folder), *words, *out])
    assert ran.exit_code == 2
    assert "gives labels or scores of texts" in " ".join(ran.output.split())
    advice = str(rope_ext.recommend(folder, 2 * TRAINED))
    assert "score your own texts" in advice and "--tasks" not in advice
    ran = CliRunner().invoke(app, ["recommend", str(folder), "--length", str(2 * TRAINED)])
    assert ran.exit_code == 0 and "next:" not in ran.output


@pytest.mark.parametrize("fault", ["tokens", "cannot be run"])
def test_a_model_that_cannot_be_run_ends_in_one_line(
    fault: str, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needs_more(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise AttributeError("decoder_input_ids")

    folder = save_embedder(tmp_path / "model")
    if fault == "tokens":
        encoder(vocab_size=60).save_pretrained(folder)
    else:
        monkeypatch.setattr(EuroBertModel, "forward", needs_more)
    given = dataclasses.replace(settings, models=(str(folder),), methods=("unpatched",))
    with pytest.raises(MeasureError, match=fault):
        evaluate(given, (TASK,))


def scores(found: int, of: int = 100) -> Scores:
    made = Scores()
    made.passes.update({128: [1.0] * of, 512: [1.0] * found + [0.0] * (of - found)})
    return made


def test_methods_are_ranked_by_the_questions_that_they_find() -> None:
    measured = {"unpatched": scores(40), "good": scores(80), "bad": scores(20), "even": scores(78)}
    found = Recommendation(measured, 128, things="questions")
    assert found.beyond.best.name == "good"
    assert [rival.name for rival in found.beyond.rivals] == ["even"]
    assert found.beyond.best.helps and "80% of questions" in str(found)
    assert "perplexity" not in str(found) and "passkeys" not in str(found)
    near = {"unpatched": scores(40, 50), "a": scores(41, 50)}
    assert "Cannot tell" in str(Recommendation(near, 128, things="questions"))


@pytest.mark.parametrize("name", ["ModernBertModel", "Gemma3TextModel"])
def test_windows_in_both_directions_equal_their_mask(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = {"local_attention": 12} if name == "ModernBertModel" else {"sliding_window": 12}
    both = {} if name == "ModernBertModel" else {"use_bidirectional_attention": True}
    model = encoder(name, **window, **both)
    ids = torch.arange(3, 59).repeat(2)[None, :96]
    assert any(getattr(m, "sliding_window", None) for m in model.modules())
    with torch.no_grad():
        want = model(ids)[0]
        monkeypatch.setattr(sliding, "BLOCK", 8)
        monkeypatch.setitem(sliding.FUNCTIONS, "sdpa", sliding.attend)
        torch.testing.assert_close(model(ids)[0], want, atol=1e-4, rtol=0)


def test_a_tie_is_not_found() -> None:
    from array import array

    case = Case("embedding_needle", 8, 0, "rank", 1, array("i", [1]), ("a",), right=1)
    assert run.ranked(case, torch.tensor([0.5, 0.5, 0.1])).value == 0
    assert run.ranked(case, torch.tensor([0.4, 0.5, 0.1])).value == 1


def test_advice_for_an_embedder_ends_with_its_task(embedder: Path) -> None:
    found = rope_ext.recommend(embedder, 2 * TRAINED)
    assert "--tasks embedding" in str(found) and "calibrate" not in str(found)
    ran = CliRunner().invoke(app, ["recommend", str(embedder), "--length", str(2 * TRAINED)])
    assert "next: rope-ext eval" in ran.output and "--tasks embedding" in ran.output
    ran = CliRunner().invoke(
        app, ["describe", str(embedder), *("--method", "rerope", "--factor", "2")]
    )
    assert "next: rope-ext eval" in ran.output and "--tasks embedding" in ran.output


def test_advice_for_a_language_model_with_files_of_an_embedder(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path / "model")
    config = LlamaConfig(
        vocab_size=400, hidden_size=16, num_attention_heads=2, max_position_embeddings=TRAINED
    )
    config.save_pretrained(folder)
    assert "--tasks embedding" not in str(rope_ext.recommend(folder, 2 * TRAINED))
    add_modules(folder, legacy=False, pooling="lasttoken")
    (folder / "config_sentence_transformers.json").write_text("[]")
    assert "--tasks embedding" in str(rope_ext.recommend(folder, 2 * TRAINED))
    ran = CliRunner().invoke(app, ["recommend", str(folder), "--length", str(2 * TRAINED)])
    assert "next: rope-ext eval" in ran.output and "--tasks embedding" in ran.output


def test_embedders_are_judged_by_embedders_only() -> None:
    def retrieval(found: int, **more: int) -> dict[str, Any]:
        return {"at": {"2": {"retrieval": {"found": found, "of": 50, "clear": True, **more}}}}

    methods = {"unpatched": retrieval(13, cut=12), "ntk": retrieval(30), "yarn": retrieval(40)}
    measured = {"model": "e", "trained": 2048, "embeds": True, "methods": methods}
    assert evidence.ranked(2, [measured])[:2] == ["yarn", "ntk"]
    said = evidence.sentence("ntk", 2, [measured])
    assert "30 of 50 questions" in said and "unpatched 13," in said and "12 if" in said
    assert not any(model.get("embeds") for model in evidence.measured_models())
    # What may be chance does not count: then the published order.
    methods["yarn"] = retrieval(17, clear=False)
    methods["self_extend"] = retrieval(12, clear=False)
    assert evidence.ranked(2, [measured])[:2] == ["ntk", "self_extend"]
    assert "too close to tell" in evidence.sentence("yarn", 2, [measured])
    methods["ntk"] = retrieval(2, clear=True)
    assert evidence.ranked(2, [measured])[:3] == ["self_extend", "yarn", "ntk"]
