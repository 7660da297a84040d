"""Intervals, scores, windows, prompts and texts: against naive computations and decoding."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tokenizers import Tokenizer, decoders, trainers
from tokenizers import models as bpe
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import rope_ext
from rope_eval import sliding
from rope_eval.cases import Case, Outcome, loss, share_found
from rope_eval.data import templates
from rope_eval.data.prompts import Frame, joined
from rope_eval.data.text import library_words, python_documentation, read_texts, sentences
from rope_eval.forward import score, write
from rope_eval.reports.summary import TOO_FEW, difference, estimate
from rope_eval.tasks.passkey import FILLER, INTRO, QUESTION, Passkey, PasskeyPrompts
from rope_eval.tasks.perplexity import Perplexity, choose_windows
from rope_ext.errors import MeasureError, OptionError
from tests.families.zoo import tiny_model


@pytest.fixture(scope="module")
def tiny(checkpoint: Path) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(checkpoint).eval()


def documents(*sizes: int) -> list[list[int]]:
    """Token k of document d is 1000 d + k."""
    return [list(range(1000 * d, 1000 * d + size)) for d, size in enumerate(sizes, 1)]


def test_windows_end_at_the_same_place_and_score_the_same_tokens() -> None:
    windows = choose_windows(documents(500, 700), [64, 200, 130], 4, bos=(0,), eos=1, seed=0)
    assert windows.scored == 32 and not windows.joined and len(windows.texts) == 4
    for length in (64, 130, 200):
        for ids, longest in zip(windows.at(length), windows.at(200), strict=True):
            assert len(ids) == length and ids[0] == 0 and ids.count(0) == 1
            assert ids[1:] == longest[-length + 1 :]
            assert {token // 1000 for token in ids[1:]} in ({1}, {2})
    tokens = [token for text in windows.texts for token in text]
    assert len(tokens) == len(set(tokens))  # no overlap
    assert {text[0] // 1000 for text in windows.texts[:2]} == {1, 2}  # every document first


def test_windows_join_short_documents() -> None:
    windows = choose_windows(documents(60, 50, 50), [40, 80], 2, bos=(), eos=1, seed=3)
    stream = [*range(1000, 1060), 1, *range(2000, 2050), 1, *range(3000, 3050), 1]
    assert windows.joined and len(windows.texts) == 2
    for ids in windows.texts:
        assert list(ids) == stream[stream.index(ids[0]) :][:80]
    book = choose_windows(documents(900, 5), [80], 16, bos=(), eos=1, seed=0)
    assert book.joined and book.documents[:3] == (0, 0, 0)  # of the same document as before
    with pytest.raises(MeasureError, match=r"has 160 tokens.*give a longer --text"):
        choose_windows(documents(60, 50, 50), [40, 300], 2, bos=(), eos=1, seed=0)


def naive(model: Any, ids: list[int], tail: int) -> tuple[list[float], list[bool]]:
    """Losses and hits of the last ``tail`` tokens, one row alone, all logits, in float64."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    losses, hits = [], []
    for position in range(len(ids) - tail, len(ids)):
        scores = logits[position - 1]
        losses.append(float(scores.exp().sum().log() - scores[ids[position]]))
        hits.append(int(scores.argmax()) == ids[position])
    return losses, hits


def random_rows(*sizes: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 400, (size,), generator=generator).tolist() for size in sizes]


@pytest.mark.parametrize("method", [None, "yarn", "dynamic_ntk"])
@pytest.mark.parametrize("sizes", [(200, 200, 200), (200, 131, 160)], ids=["alike", "padded"])
@pytest.mark.parametrize("logits", [10**9, 3 * 400 * 7], ids=["at once", "in stretches"])
def test_score_equals_a_naive_computation(
    tiny: LlamaForCausalLM, method: str | None, sizes: tuple[int, ...], logits: int
) -> None:
    rows, made = random_rows(*sizes), []
    for row in rows:  # else no token is ever the argmax
        row[-1] = int(tiny(input_ids=torch.tensor([row[:-1]])).logits[0, -1].argmax())
    hook = tiny.lm_head.register_forward_hook(lambda m, args, out: made.append(args[0].shape[1]))
    with rope_ext.patched(tiny, method, factor=4) if method else nullcontext():
        losses, hits = score(tiny, rows, 50, pad=1, logits=logits)
        hook.remove()
        assert made == ([51] if logits > 10**8 else [1, *[7] * 7, 1])
        for row, ids in enumerate(rows):
            expected_losses, expected_hits = naive(tiny, ids, 50)
            assert losses[row].tolist() == pytest.approx(expected_losses, abs=2e-5)
            assert hits[row].tolist() == expected_hits
    assert method or hits[:, -1].all()
    assert "forward" not in vars(tiny.model)  # the decoder is itself again


def test_stretches_go_through_the_models_own_head(tmp_path: Path) -> None:
    """Families that cap or scale their logits do so here as well."""
    model = tiny_model("gemma2").eval()
    rows = torch.randint(3, 100, (1, 60), generator=torch.Generator().manual_seed(0)).tolist()
    once, _ = score(model, rows, 40)
    stretched, _ = score(model, rows, 40, logits=model.config.vocab_size * 9)
    plain = model.lm_head(model.model(torch.tensor(rows)).last_hidden_state)[0, 19:-1]
    uncapped = torch.nn.functional.cross_entropy(
        plain, torch.tensor(rows[0][20:]), reduction="none"
    )
    assert torch.allclose(once, stretched, atol=1e-5)
    assert not torch.allclose(once, uncapped, atol=1e-3)


def test_a_loss_that_is_not_a_number_counts_as_infinite() -> None:
    case = Case("perplexity", 37, 0, "loss", 5, joined(range(37)))
    assert loss(case, torch.tensor([1.0, math.nan, 1, 1, 1], dtype=torch.float64)).value == math.inf
    outcome = Outcome("key", "yarn", "perplexity", 37, None, None, 0, "p", (), 0, math.inf, 5)
    assert b"Infinity" not in outcome.to_line()
    assert Outcome.from_json(json.loads(outcome.to_line())) == outcome
    assert estimate([outcome], "loss").value == math.inf
    assert estimate([outcome, dataclasses.replace(outcome, group=1)], "loss").high == math.inf


def test_perplexity_is_weighted_by_tokens_and_resampled_by_document() -> None:
    def outcome(value: float, tokens: int, group: int) -> Outcome:
        return Outcome("k", "s", "perplexity", 9, None, None, 0, "p", (), group, value, tokens)

    outcomes = [outcome(1.0, 300, 0), outcome(4.0, 100, 0), outcome(2.0, 100, 1)]
    assert estimate(outcomes, "loss").value == pytest.approx(math.exp(900 / 500))
    assert estimate(outcomes, "loss").count == 2
    assert estimate(outcomes, "loss").note == TOO_FEW  # windows of one document count once


def book(words: int, start: int = 0) -> str:
    return " ".join(f"word{(start + i) * 7 % 97}" for i in range(words))


def scored(case: Case) -> list[int]:
    return case.ids[-case.count :].tolist()


def test_sliding_scores_every_token_once_with_enough_context(tokenizer: Any) -> None:
    task = Perplexity([book(300)], windows=1, protocol="sliding", stride=30)
    built = task.questions(Frame.from_tokenizer(tokenizer), [64, 100, 210], seed=0)
    text = task.choose(Frame.from_tokenizer(tokenizer), [64, 100, 210], 0).texts[0]
    assert len(text) == 209
    for length in (64, 100, 210):
        cases = [case for case in built.cases if case.length == length]
        assert [token for case in cases for token in scored(case)] == list(text)
        assert all(case.ids[0] == 0 and len(case.ids) <= length for case in cases)
        for case in cases[1:]:
            assert len(case.ids) == length and case.count <= 30
    assert len([case for case in built.cases if case.length == 210]) == 1


def test_start_scores_all_tokens(tokenizer: Any) -> None:
    task = Perplexity([book(300)], windows=1, protocol="start")
    short, whole = task.questions(Frame.from_tokenizer(tokenizer), [64, 210], seed=0).cases
    assert whole.ids[:64] == short.ids
    assert (short.count, whole.count) == (63, 209)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"protocol": "slide"}, "one of ending, sliding, start"),
        ({"protocol": "sliding"}, "--protocol sliding needs --stride"),
        ({"protocol": "ending", "stride": 5}, "--stride does not apply to the protocol ending"),
        ({"protocol": "sliding", "stride": 0}, "stride=0 is not valid"),
        ({"protocol": "sliding", "stride": 64}, "stride=64 would skip tokens at length 64"),
        ({"windows": 0}, "windows=0 is not valid"),
    ],
    ids=str,
)
def test_perplexity_refuses(tokenizer: Any, options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Perplexity([book(300)], **options).questions(
            Frame.from_tokenizer(tokenizer), [64, 210], seed=0
        )


def test_passkey_prompts_have_the_length_asked_for_but_for_a_sentence(tokenizer: Any) -> None:
    prompts = PasskeyPrompts(tokenizer)
    least = prompts.minimum_length()
    for length in (*range(least, least + 60), 400, 1001):
        case = prompts.forward_case(length, 0.5, seed=length)
        assert length - 12 < len(case.ids) == case.tokens <= length
        decoded = prompts.case(length, 0.5, seed=length)
        assert decoded.ids == case.ids[: -case.count] and decoded.count == case.count
        text = tokenizer.decode(case.ids)
        assert text.count(case.key) == 3 and text.endswith(f"The pass key is {case.key}")
        assert tokenizer.decode(case.ids[-case.count :]) == case.key
        # Filler ends where sentences end, before the needle and after it.
        assert re.search(rf"\. The pass key is {case.key}\. Remember it\.", text)
        assert re.search(rf"{case.key} is the pass key\.( [A-Z][a-z ]*\.)*\nWhat is", text)
    with pytest.raises(OptionError, match=f"needs at least {least} tokens"):
        prompts.case(least - 1, 0.5, seed=0)


def test_the_answer_is_what_is_scored_even_where_it_merges_with_the_question() -> None:
    """A tokenizer whose tokens reach across words, so that ``is `` is one before a digit."""
    made = Tokenizer(bpe.BPE(unk_token="<unk>"))
    made.train_from_iterator(
        [INTRO, *FILLER, QUESTION + " 1234567890"] * 3,
        trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False),
    )
    made.decoder = decoders.Fuse()
    odd = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    lead = odd(QUESTION, add_special_tokens=False)["input_ids"]
    assert odd(QUESTION + " 7", add_special_tokens=False)["input_ids"][: len(lead)] != lead
    case = PasskeyPrompts(odd).forward_case(300, 0.5, seed=0)
    assert 290 < len(case.ids) <= 300
    assert odd.decode(case.ids[-case.count :]).strip() == case.key
    assert odd.decode(case.ids).endswith(f"{QUESTION} {case.key}")


def test_passkey_grid_depths_and_seeds(tokenizer: Any) -> None:
    task, frame = Passkey(trials=2, depths=4, digits=10), Frame.from_tokenizer(tokenizer)
    cases = task.questions(frame, [200, 300], seed=0).cases
    assert len(cases) == 2 * 4 * 2 == len({case.key for case in cases})
    for case in cases:
        assert case.bin / 4 <= case.depth < (case.bin + 1) / 4
        assert len(case.key) == 10 and case.length - 12 < case.tokens <= case.length
    assert cases == task.questions(frame, [200, 300], seed=0).cases
    assert cases != task.questions(frame, [200, 300], seed=1).cases


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def test_chat_prompts_use_the_template_once(tokenizer: Any, checkpoint: Path) -> None:
    chat = AutoTokenizer.from_pretrained(checkpoint)
    chat.chat_template = TEMPLATE
    assert Frame.from_tokenizer(chat, "no").around is Frame.from_tokenizer(tokenizer).around is None
    prompts = PasskeyPrompts(chat, Frame.from_tokenizer(chat))
    case = prompts.case(300, 0.5, seed=0)
    text = chat.decode(case.ids)
    assert 288 < case.tokens <= 300 and case.ids.tolist().count(chat.bos_token_id) == 1
    assert re.match(r"<s>\s?\[user\] There is an important info", text)
    # Nothing of the answer is given, so it may be a sentence, and one forward cannot score it.
    assert text.endswith("What is the pass key? Answer with the number only.\n[assistant] ")
    for written, value in (
        (f"The pass key is {case.key}.", 1),
        (f"{case.key}7", 0),
        (f"It is {int(case.key) + 1}", 0),
        ("The pass key is a magical item", 0),
    ):
        assert share_found(case, written) == value
    with pytest.raises(OptionError, match="chat model"):
        prompts.forward_case(300, 0.5, seed=0)
    with pytest.raises(OptionError, match="no chat template; give --chat no"):
        Frame.from_tokenizer(tokenizer, "yes")
    chat.chat_template = "nothing of yours"
    with pytest.raises(OptionError, match="leaves the user's text out"):
        Frame.from_tokenizer(chat)


LOOPS = "{% for i in range(99999) %}" * 4 + "a" + "{% endfor %}" * 4
DOUBLED = "{% set n = namespace(x='abcd') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
TEMPLATES = {  # what each is refused for
    LOOPS: "does not end within",
    "{{ 10 ** (10 ** 9) }}": "does not end within",  # one operation
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "fails",
    "{{ 'a' * 10**10 }}": "needs more than 512 MB",
    DOUBLED + "{% endfor %}": "needs more than 512 MB|does not end",
    "{{ messages[0].content * 10**6 }}": "4 MB of text",
}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the memory of a process")
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_that_does_not_end_or_fails_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    chat = AutoTokenizer.from_pretrained(checkpoint)
    chat.chat_template = template
    if TEMPLATES[template] == "does not end within":
        monkeypatch.setattr(templates, "SECONDS", 0.5)
    before = sys.gettrace()
    with pytest.raises(OptionError, match=TEMPLATES[template]):
        Frame.from_tokenizer(chat)
    assert sys.gettrace() is before


@pytest.mark.parametrize("method", [None, "yarn", "dynamic_ntk"])
def test_writing_is_what_greedy_decoding_does(
    tiny: LlamaForCausalLM, tokenizer: Any, method: str | None
) -> None:
    """On random weights, where every token is a surprise; the prompts differ in length."""
    prompts = PasskeyPrompts(tokenizer)
    rows = [prompts.case(n, 0.5, seed=n).ids for n in (130, 200, 171)]
    with rope_ext.patched(tiny, method, factor=4) if method else nullcontext():
        texts = write(tiny, rows, 6, pad=1, eos=1)
        for ids, text in zip(rows, texts, strict=True):
            # Each of the written tokens is the argmax when all of them are given.
            padded = [*ids, *text]
            assert len(text) == 6, "a random model that stops tests nothing"
            _, hits = score(tiny, [padded], 6)
            assert hits.all()
            _, hits = score(tiny, [[*padded[:-1], padded[-1] ^ 1]], 6)
            assert hits[0, :5].all() and not hits[0, 5]


def test_writing_stops_at_the_end_and_ignores_the_checkpoints_settings(
    tiny: LlamaForCausalLM, tokenizer: Any
) -> None:
    ids = PasskeyPrompts(tokenizer).case(130, 0.5, seed=0).ids
    plain = write(tiny, [ids], 6, pad=1, eos=None)[0]
    own = tiny.generation_config
    tiny.generation_config = GenerationConfig(repetition_penalty=9.0, suppress_tokens=[plain[0]])
    try:
        assert write(tiny, [ids], 6, pad=1, eos=None)[0] == plain
    finally:
        tiny.generation_config = own
    assert write(tiny, [ids], 6, pad=1, eos=plain[2])[0] == plain[: plain.index(plain[2])]


def test_shares_are_rulers() -> None:
    case = Case("vt", 9, 0, "write", 9, joined([]), ("ABC", "DEF", "GHI", "JKL"))
    assert share_found(case, "abc, xDEFx") == 0.5


def test_a_difference_needs_identical_prompts() -> None:
    one, same, other = (
        [Outcome("k", "s", "t", 9, None, None, 0, prompt, (), 0, value, 1)]
        for prompt, value in (("a", 1), ("a", 0.5), ("b", 0.5))
    )
    assert difference(one, same, "rate").value == 0.5 and difference(one, other, "rate") is None


def test_read_texts(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.md", tmp_path / "b.jsonl"
    plain.write_text("one\ntwo")
    lines.write_text('{"text": "three\u2028four"}\n\n{"text": "five", "id": 1}\n')
    assert read_texts([plain, lines]) == ["one\ntwo", "three\u2028four", "five"]
    datasets.Dataset.from_dict({"text": ["six", None, "seven"]}).to_parquet(tmp_path / "c.parquet")
    (tmp_path / "d.bin").write_bytes(b"\xff")
    assert read_texts([tmp_path]) == ["one\ntwo", "three\u2028four", "five", "six", "seven"]
    plain.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MeasureError, match="not UTF-8"):
        read_texts([plain])
    (tmp_path / "c.parquet").write_bytes(b"something else")
    with pytest.raises(MeasureError, match=r"cannot read .*c\.parquet"):
        read_texts([tmp_path / "c.parquet"])


def test_a_data_set_is_streamed(tmp_path: Path) -> None:
    """A folder that ``datasets`` can read stands in for an id of the Hub."""
    folder = tmp_path / "data"
    folder.mkdir()
    rows = "".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(9))
    (folder / "test.jsonl").write_text(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert read_texts(["hf:data:test"], most=4) == [f"text {i}" for i in range(4)]
        with pytest.raises(MeasureError, match="cannot read hf:data"):
            read_texts(["hf:data:validation"])


def test_sentences() -> None:
    text = "One is\n  here. Two! No\n\nThree e.g. 1.5 of it?  Four"
    assert sentences(text) == ["One is here.", "Two!", "No", "Three e.g.", "1.5 of it?", "Four"]
    assert len(sentences(python_documentation())) > 1000
    assert len(library_words()) > 2000 and all(word.isalpha() for word in library_words())


def test_sliding_layers_in_blocks_equal_those_under_a_mask(monkeypatch: Any) -> None:
    model, rows = tiny_model("gemma3_text", sliding_window=12), [[*range(3, 90)], [*range(40, 70)]]
    want, _ = score(model, rows, 20)
    monkeypatch.setattr(sliding, "BLOCK", 8)
    monkeypatch.setitem(sliding.FUNCTIONS, "sdpa", sliding.attend)
    torch.testing.assert_close(score(model, rows, 20)[0], want)


def test_copies_of_a_document_are_no_independent_ones(tokenizer: Any) -> None:
    rng = random.Random(0)
    texts = [" ".join(f"word{rng.randrange(97)}" for _ in range(300)) for _ in range(8)]
    frame = Frame.from_tokenizer(tokenizer)
    for documents, told in ((texts, False), (texts[:1] * 8, True)):
        notes = Perplexity(documents, windows=8).questions(frame, [64], seed=0).notes
        assert any("the text is repeated" in note for note in notes) is told
