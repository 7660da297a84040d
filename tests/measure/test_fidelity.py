"""The evaluators against the code of their authors.

Expected values are computed here from the authors' definitions (NVIDIA/RULER,
epfml/landmark-attention, the documentation of transformers), without the code under test.
"""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_eval.cases import Case
from rope_eval.data.prompts import Frame
from rope_eval.reports.report import Report
from rope_eval.reports.summary import estimate_perplexity
from rope_eval.run.runner import Result, Runner, share_found
from rope_eval.settings import Settings
from rope_eval.tasks import Needle, Passkey, Perplexity, Ruler, haystack, ruler
from rope_eval.tasks import answering as qa
from rope_eval.tasks.passkey import FirstNumber, PasskeyPrompts, own_prompt
from rope_eval.tasks.perplexity import choose_windows
from rope_ext.errors import MeasureError, OptionError
from tests.helpers.small_tokenizers import Characters, merging, spacing

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "checkpoints" / "tiny-512"
CHARACTERS = Frame(Characters(), ())
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@pytest.fixture(scope="module")
def shipped() -> Frame:
    return Frame.from_tokenizer(AutoTokenizer.from_pretrained(SHIPPED))


def cases(task: Any, frame: Frame, *lengths: int, seed: int = 0) -> list[Case]:
    return list(task.questions(frame, lengths, seed).cases)


def text_of(case: Case) -> str:
    return Characters().decode(case.ids)


def prompt(name: str, length: int = 9000, **options: Any) -> tuple[Case, str]:
    """One prompt of a RULER task, a character a token."""
    [case] = cases(ruler.build_task(name, 1, **options), CHARACTERS, length)
    return case, text_of(case)


@pytest.mark.parametrize("made", [merging, spacing], ids=lambda made: made.__name__)
def test_a_prompt_is_the_tokens_of_its_text(made: Any) -> None:
    """As a user's text would be tokenised; parts that are tokenised alone give other tokens."""
    tokenizer = made()
    frame = Frame.from_tokenizer(tokenizer)
    alone = [
        *tokenizer("a.")["input_ids"],
        *tokenizer("\nb", add_special_tokens=False)["input_ids"],
    ]
    assert alone != tokenizer("a.\nb")["input_ids"]
    plain = {"text": f"{NOISE} Now and then.", "source": "noise"}
    tasks = [
        ruler.build_task(name, 1, haystack=plain) for name in ("niah_single_1", "niah_multivalue")
    ]
    tasks += [ruler.build_task(name, 1) for name in ("vt", "cwe", "fwe", "qa_1")]
    tasks += [Passkey(1, 1, prompt="published"), Passkey(1, 1, prompt="inline")]
    tasks += Needle(trials=1, depths=1, haystack=("noise",)).parts(None)
    for task in tasks:
        [case] = cases(task, frame, 4000)
        text = tokenizer.decode(list(case.ids), skip_special_tokens=True)
        assert tokenizer(text)["input_ids"] == case.ids.tolist(), task.name
        assert 3800 < case.tokens <= 4000


def test_the_published_passkey_prompt_is_its_five_lines() -> None:
    garbage = " ".join([NOISE] * 200)
    for case in cases(Passkey(2, 5, prompt="published"), CHARACTERS, 400, 5000):
        task, before, needle, after, question = text_of(case).split("\n")
        assert task == (
            "There is an important info hidden inside a lot of irrelevant text. Find it and "
            "memorize them. I will quiz you about the important information there."
        )
        assert needle == f"The pass key is {case.key}. Remember it. {case.key} is the pass key."
        assert question.rstrip() == "What is the pass key? The pass key is"
        total = len(before) + len(after)
        assert before == garbage[: len(before)] and after == garbage[: len(after)]
        assert len(before) == round(case.depth * total) and case.tokens == case.length


def test_the_space_before_a_key_belongs_to_the_lead_in() -> None:
    tokenizer = spacing()  # where it is a token of its own
    for published in (True, False):
        prompts = PasskeyPrompts(tokenizer, published=published)
        case = prompts.case(300, 0.5, seed=0)
        assert case.count == (10 if published else len(case.key))
        assert tokenizer.convert_ids_to_tokens(case.ids[-1]) == "▁"
        given = tokenizer.decode(list(case.ids), skip_special_tokens=True)
        assert given.rstrip().endswith("What is the pass key? The pass key is")
        scored = prompts.forward_case(300, 0.5, seed=0)
        assert scored.ids[: -scored.count] == case.ids and scored.count == len(case.key)


def test_a_key_may_be_a_word() -> None:
    made = cases(Passkey(9, 1, needle="word"), CHARACTERS, 400)
    assert all(case.key.isalpha() and text_of(case).count(case.key) >= 2 for case in made)
    assert len({case.key for case in made}) > 3
    assert share_found(made[0], f": {made[0].key}. It is") == 1 and share_found(made[0], "7") == 0
    assert share_found(made[0], f": {made[0].key}x") == 0
    for wrong in ({"needle": "word", "digits": 3}, {"needle": "letter"}):
        with pytest.raises(OptionError, match=r"needle=.* is not valid"):
            Passkey(**wrong)


def test_a_decoded_published_key_is_the_first_number() -> None:
    [case] = cases(Passkey(1, 1, prompt="published"), CHARACTERS, 400)
    assert case.mode == "write" and case.count == 10
    assert text_of(case).endswith("\nWhat is the pass key? The pass key is ")
    key = case.key
    for written, value in ((f" {key}. Rem", 1), (f": 0{key}\n9", 1), (f" {key}1", 0), (" no", 0)):
        assert share_found(case, written) == value
    assert FirstNumber("7")("seven is 7, not 8") == 1


def test_a_checkpoint_says_which_prompt_it_was_trained_on(shipped: Frame) -> None:
    assert own_prompt(shipped.tokenizer) == "inline"
    assert own_prompt(merging()) == own_prompt(Characters()) == "published"
    asked = [
        cases(Passkey(1, 1, prompt=name), shipped, 300) for name in ("auto", "inline", "published")
    ]
    assert asked[0] == asked[1] != asked[2]
    with pytest.raises(OptionError, match="prompt='ours' is not valid; it must be one of auto, p"):
        Passkey(prompt="ours")


# RULER: retrieval

KEY = r"[a-z]+-[a-z]+"
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}"
ONE = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will "
    "quiz you about the number afterwards.\n{context}\nWhat is the special magic number for "
    "{query} mentioned in the provided text? The special magic number for {query} mentioned in the "
    "provided text is"
)
SOME = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. I "
    "will quiz you about the numbers afterwards.\n{context}\nWhat are all the special magic "
    "numbers for {query} mentioned in the provided text? The special magic numbers for {query} "
    "mentioned in the provided text are"
)
NEEDLE = re.compile(rf"One of the special magic (\w+) for ({KEY}|{UUID}) is: ([0-9a-f-]+)\.")
RETRIEVAL = {  # of synthetic.yaml: needles, queries, kinds of key and value
    "niah_single_1": (1, 1, KEY, r"\d{7}"),
    "niah_single_2": (1, 1, KEY, r"\d{7}"),
    "niah_single_3": (1, 1, KEY, UUID),
    "niah_multikey_1": (4, 1, KEY, r"\d{7}"),
    "niah_multikey_2": (None, 1, KEY, r"\d{7}"),
    "niah_multikey_3": (None, 1, UUID, UUID),
    "niah_multivalue": (4, 1, KEY, r"\d{7}"),
    "niah_multiquery": (4, 4, KEY, r"\d{7}"),
}


def parted(text: str, template: str, query: str) -> str:
    """The context in a prompt that is, letter for letter, of this template."""
    before, after = template.replace("{query}", query).split("{context}")
    assert text.startswith(before) and text.endswith(after)
    return text[len(before) : -len(after)]


@pytest.mark.parametrize("name", RETRIEVAL)
def test_needles_are_asked_for_as_in_ruler(name: str) -> None:
    needles, queries, key, value = RETRIEVAL[name]
    case, text = prompt(name)
    found = NEEDLE.findall(text)
    assert len(found) > 40 if needles is None else len(found) == needles
    asked = [next(k for _, k, v in found if v == answer) for answer in case.answers]
    assert all(re.fullmatch(key, k) and re.fullmatch(value, v) for _, k, v in found)
    asked = list(dict.fromkeys(asked))
    several = name in ("niah_multivalue", "niah_multiquery")
    assert len(asked) == queries and len(case.answers) == (4 if several else 1)
    query = ", ".join(asked[:-1]) + ", and " + asked[-1] if queries > 1 else asked[0]
    template = SOME if len(case.answers) > 1 else ONE
    kind = found[0][0]  # always the plural in a needle
    assert kind == ("uuids" if value == UUID else "numbers")
    if kind == "uuids":
        template = template.replace("number", "uuid")
    context = parted(text, template, query)
    if name in ("niah_single_1", "niah_multikey_2", "niah_multikey_3"):  # a line each
        assert all(line == NOISE or NEEDLE.fullmatch(line) for line in context.split("\n"))
    else:
        assert "\n" not in context and "  " not in context
    assert case.count == 128


def test_needles_stand_at_rulers_forty_depths() -> None:
    depths = {round(100 * place / 39) for place in range(40)}
    words = " ".join(f"Word{i} ends." for i in range(4000))
    own = {"text": words, "source": "words"}
    for case in cases(ruler.build_task("niah_multivalue", 3, haystack=own), CHARACTERS, 40000):
        pieces = re.split(r"(?<=[.!?]) ", text_of(case).split("\n")[1])
        total, before, places = sum(p.startswith("Word") for p in pieces), 0, []
        for piece in pieces:
            before += piece.startswith("Word")
            if NEEDLE.fullmatch(piece):
                places.append(before)
        assert len(set(places)) == 4
        assert all(place in {int(total * (depth / 100)) for depth in depths} for place in places)


def test_the_essays_of_ruler_are_read_from_their_beginning(tmp_path: Path) -> None:
    essays = tmp_path / "PaulGrahamEssays.json"
    essays.write_text(json.dumps({"text": "I wrote   this.\n\nIt is\tshort. Ünïcode ends"}))
    settings = Settings(models=("m",), methods=(), lengths=(1000,))
    task = Ruler(ruler_tasks="niah_single_2", trials=1, haystack=(str(essays),))
    [part] = task.parts(settings)
    [case] = cases(part, CHARACTERS, 1500)
    plain = re.sub(NEEDLE, "", text_of(case).split("\n")[1]).replace("  ", " ").strip()
    repeated = " ".join(["I wrote this. It is short. Ünïcode ends"] * 50)
    assert repeated.startswith(plain) and len(plain) > 500  # cut after a word
    assert plain.split() == repeated.split()[: len(plain.split())]
    for wrong in ("{}", '{"text": 3}', "[", '{"text": " "}'):
        essays.write_text(wrong)
        with pytest.raises(MeasureError, match="PaulGrahamEssays"):
            haystack.read_haystack([str(essays)])


def test_vt_is_rulers_with_a_solved_example() -> None:
    template = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        "{context}\nQuestion: Find all variables that are assigned the value {value} in the text "
        "above. Answer: According to the chain(s) of variable assignment in the text above, 5 "
        "variables are assigned the value {value}, they are: "
    )
    case, text = prompt("vt")
    begin = template[: template.index("{")]
    example, question = (begin + part for part in text.split(begin)[1:])
    assert example.endswith("\n\n") and case.count == 30
    *_, solved = example[:-2].split("they are:  ")
    for given, names, letters in ((example, solved.split(), 3), (question, case.answers, 5)):
        value = re.findall(r"the value (\d{5}) in", given)[-1]
        end = f" {' '.join(names)}\n\n" if letters == 3 else ""
        context = parted(given, template.replace("{value}", value) + end, "")
        lines = context.split("\n")
        hops = [line for line in lines if line != NOISE]
        # The space after a hop is in the authors' prompts.
        links = [f"VAR {b} = VAR {a} " for a, b in pairwise(names)]
        assert hops == [f"VAR {names[0]} = {value}", *links]
        assert all(re.fullmatch(f"[A-Z]{{{letters}}}", name) for name in names)
        assert len(set(names)) == 5


def test_the_example_of_vt_has_up_to_500_tokens() -> None:
    tokenizer = merging()
    [case] = cases(ruler.build_task("vt", 1), Frame.from_tokenizer(tokenizer), 4096)
    text = tokenizer.decode(list(case.ids), skip_special_tokens=True)
    example = text[: text.index("they are: ") + len("they are: ")]
    size = len(tokenizer(example, add_special_tokens=False)["input_ids"])
    line = len(tokenizer(f"{NOISE}\n", add_special_tokens=False)["input_ids"])
    # It is measured once; the names drawn for each prompt are a few tokens more or fewer.
    assert 500 - line < size <= 500 + line // 2


@pytest.mark.parametrize(("length", "often", "seldom"), [(60000, 30, 3), (3000, 6, 1)])
def test_cwe_is_rulers_with_a_solved_example(length: int, often: int, seldom: int) -> None:
    template = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n{context}\nQuestion: What are the 10 most "
        "common words in the above list? Answer: The top 10 words that appear most often in the "
        "list are:"
    )
    case, text = prompt("cwe", length)
    begin = template[: template.index("{")]
    example, question = (begin + part for part in text.split(begin)[1:])
    *_, solved = example.split("list are:")
    top = re.findall(r"(\d+)\. ([a-z]+)", solved)
    assert solved == " " + " ".join(f"{i}. {w}" for i, w in top) + "\n" and len(top) == 10
    shown = (10, 3, 40) if length >= 4096 else (3, 1, 20)
    for given, answers, counts in (
        (example.removesuffix(solved), {w for _, w in top}, shown),
        (question, set(case.answers), (often, seldom, None)),
    ):
        context = parted(given, template, "")
        words = re.findall(r"\d+\. ([a-z]+)", context)
        assert context == " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))
        times = {word: words.count(word) for word in set(words)}
        assert {w for w, n in times.items() if n == counts[0]} == answers
        assert {n for w, n in times.items() if w not in answers} == {counts[1]}
        assert counts[2] in (None, len(times))
    assert case.count == 120


CWE = "Below is a numbered list of words."


def variant_of_cwe(case: Case) -> tuple[int, int]:
    """How often the question's list repeats the common words, and the others."""
    words = re.findall(r"\d+\. ([a-z]+)", text_of(case).split(CWE)[-1])
    common = {words.count(word) for word in case.answers}
    other = {words.count(word) for word in words if word not in case.answers}
    [one], [two] = common, other
    return one, two


def test_all_cwe_prompts_of_a_length_are_of_one_variant() -> None:
    task = ruler.build_task("cwe", 4)
    kinds = set()
    for length in range(6500, 7701, 150):
        variants = {variant_of_cwe(case) for case in cases(task, CHARACTERS, length)}
        assert len(variants) == 1
        kinds |= variants
    assert kinds == {(6, 1), (30, 3)}  # the boundary is within


CHAT = Frame(Characters(), (), ("<user>", "<model>\n"))


@pytest.mark.parametrize("name", ruler.TASKS)
def test_chat_prompts_of_ruler_have_its_answer_prefix_as_it_is(name: str) -> None:
    """``template.format(...) + answer_prefix``, which begins with a space."""
    [case] = cases(ruler.build_task(name, 1), CHAT, 9000)
    text = text_of(case)
    assert text.startswith("<user>")
    assert re.fullmatch(r"<model>\n [ATS].*", text[text.rindex("<model>") :])
    assert text.count("<user>") == text.count("<model>") == (2 if name == "cwe" else 1)


def test_fwe_counts_are_rulers() -> None:
    begin = (
        "Read the following coded text and track the frequency of each coded word. Find the three "
        "most frequently appeared coded words. "
    )
    end = (
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
        "three most frequently appeared words in the above coded text? Answer: According to the "
        "coded text above, the three most frequently appeared words are:"
    )
    case, text = prompt("fwe")
    words = parted(text, begin + "{context}" + end, "").split(" ")
    zeta, different = math.pi**2 / 6, (9000 - 50) // 50
    found = sorted((words.count(word) for word in set(words)), reverse=True)
    sizes = (
        [int(total / rank**2 / zeta) for rank in range(1, different + 1)]
        for total in range(len(words), 2 * len(words))
    )
    assert any([n for n in counts if n] == found for counts in sizes)
    ranked = sorted(set(words), key=words.count, reverse=True)
    assert ranked[0] == "..." and tuple(ranked[1:4]) == case.answers and case.count == 50


# RULER: questions

TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}  # constants.py


def test_tokens_to_write_are_rulers() -> None:
    for name in ruler.TASKS:
        assert ruler.build_task(name, 1).tokens == TOKENS[name.split("_")[0]]
        assert ruler.build_task(name, 1, new_tokens=7).tokens == 7


SQUAD = {
    "data": [
        {
            "title": "Towns",
            "paragraphs": [
                {
                    "context": "Aville is old.",
                    "qas": [
                        {"question": "Unknown?", "answers": [], "is_impossible": True},
                        {
                            "question": "How is Aville?",
                            "answers": [{"text": "old"}, {"text": "Very Old"}],
                            "is_impossible": False,
                        },
                    ],
                },
                {"context": "Bville is new.", "qas": []},
            ],
        },
        {
            "title": "Rivers",
            "paragraphs": [{"context": f"River {n} flows.", "qas": []} for n in range(9)],
        },
    ]
}
HOTPOT = [
    {
        "question": "Where did Ä. settle?",
        "answer": "Cville",
        "context": [[f"T{n}", [f"Line {n}.", " More."]] for n in range(3)],
    },
    {"question": "Q?", "answer": "A", "context": [[f"U{n}", ["Other."]] for n in range(40)]},
]
TEMPLATE = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\nThe following are given documents.\n\n{context}\n\nAnswer the question "
    "based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "Question: {query} Answer:"
)


def documents(text: str, query: str) -> list[str]:
    listed = parted(text, TEMPLATE, query).split("\n\n")
    found = [re.fullmatch(r"Document (\d+):\n(.*)", one, re.DOTALL).groups() for one in listed]
    assert [number for number, _ in found] == [str(n + 1) for n in range(len(found))]
    return [document for _, document in found]


def test_qa_1_is_rulers_on_a_file_of_squad(tmp_path: Path) -> None:
    path = tmp_path / "dev-v2.0.json"
    path.write_text(json.dumps(SQUAD), encoding="utf-8")
    frame = len(TEMPLATE.format(context="", query="How is Aville?")) + 32
    for room, expected in ((60, 2), (100, 3), (5000, 150)):
        case, text = prompt("qa_1", frame + room, squad=str(path))
        found = documents(text, "How is Aville?")
        # The paragraph, then others of its article, then any; and all again where they run out.
        assert "Aville is old." in found and len(found) >= expected
        assert "Bville is new." in found
        assert len(set(found)) == min(len(found), 11)
        assert case.answers == ("old", "Very Old") and case.count == 32
    for written, value in ((" OLD, I think", 1), ("very old", 1), ("new", 0)):
        assert share_found(case, written) == value  # string_match_part
    with pytest.raises(OptionError, match="has 1 questions; give fewer --trials"):
        cases(ruler.build_task("qa_1", 2, squad=str(path)), CHARACTERS, 4000)


def test_qa_2_is_rulers_on_a_file_of_hotpotqa(tmp_path: Path) -> None:
    path = tmp_path / "hotpot_dev_distractor_v1.json"
    path.write_text(json.dumps(HOTPOT), encoding="utf-8")
    case, text = prompt("qa_2", 900, hotpotqa=str(path))
    found = documents(text, "Where did Ä. settle?")
    assert {f"T{n}\nLine {n}. More." for n in range(3)} < set(found) and case.answers == ("Cville",)
    assert len(set(found)) == len(found) > 5
    task = ruler.build_task("qa_2", 1, hotpotqa=str(path))
    one, other = (text_of(cases(task, CHARACTERS, 900, seed=seed)[0]) for seed in (1, 2))
    assert one != other


@pytest.mark.parametrize("source", [qa.SQUAD, qa.HOTPOTQA], ids=lambda source: source.name)
def test_made_up_facts_answer_their_questions_and_no_other_does(source: Any) -> None:
    asked, texts = qa.read(source, None)
    assert len({one.question for one in asked}) == len(asked) >= 500
    assert len(set(texts)) == len(texts) >= 1000
    for one in asked[::41]:
        assert any(one.answers[0] in texts[index] for index in one.needed)
        names = re.findall(r"[A-Z][a-z]{4,}(?: [A-Z][a-z]+)?", one.question[1:])
        assert any(name in texts[index] for name in names for index in one.needed)
    _, notes = (
        ruler.build_task(n, 1).questions(CHARACTERS, [9000], 0).notes for n in ("vt", "qa_1")
    )
    assert "qa_1 asks about made-up facts, not about SQuAD" in notes[0]


def test_an_effective_length_is_over_all_13_tasks() -> None:
    every = [ruler.build_task(name, 1) for name in ruler.TASKS]
    assert len(every) == 13 == every[0].suite_size
    for tasks, name in ((every, "effective length"), (every[:-1], "85.6% up to")):
        assert Report(SimpleNamespace(tasks=tasks), []).threshold("RULER") == name
    own = SimpleNamespace(suite="mine", suite_size=None)
    assert Report(SimpleNamespace(tasks=[own]), []).threshold("mine") is None


# Perplexity

FACTS = " ".join(f"def function_{i}(self, value): return value * {i}" for i in range(9))
TEXT = f"secret_number = 83627194\n{FACTS}\nsecret_number = 83627194\n" * 3


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).eval()


def measured(model: Any, cases: list[Case]) -> list[Result]:
    """One by one, as an evaluation measures them."""
    settings = Settings(models=(str(SHIPPED),), methods=("unpatched",), lengths=(512,))
    runner = Runner(model, str(SHIPPED), settings)
    return [result for case in cases for result in runner.measure([case])]


@torch.no_grad()
def documented_losses(model: Any, ids: list[int], length: int, stride: int) -> list[tuple]:
    """(loss, ``num_loss_tokens``) of each window in the loop of transformers' perplexity.md."""
    found, previous = [], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + length, len(ids))
        row = torch.tensor([ids[begin:end]])
        labels = row.clone()
        labels[:, : -(end - previous)] = -100
        found.append((float(model(row, labels=labels).loss), int((labels != -100).sum()) - 1))
        previous = end
        if end == len(ids):
            break
    return found


@pytest.mark.parametrize(
    "stride", [100, *(pytest.param(stride, marks=pytest.mark.slow) for stride in (64, 128))]
)
def test_huggingface_perplexity_is_that_of_the_documentation(
    stride: int, shipped: Frame, model: Any
) -> None:
    documents = [shipped.tokenizer(TEXT * 2, add_special_tokens=False)["input_ids"]]
    ids = [0, *choose_windows(documents, [300], 1, (0,), None, seed=0).texts[0]]
    expected = {}
    for length in (128, 300):
        losses = documented_losses(model, ids, length, stride)
        nll_sum = sum(loss * tokens for loss, tokens in losses)
        expected[length] = math.exp(nll_sum / sum(tokens for _, tokens in losses))
    task = Perplexity([TEXT * 2], windows=1, stride=stride, protocol="huggingface")
    built = task.questions(shipped, [128, 300], 0)
    for length in (128, 300):
        found = measured(model, [case for case in built.cases if case.length == length])
        values, weights = ([getattr(r, name) for r in found] for name in ("value", "tokens"))
        # Sums of float32 in another order.
        assert estimate_perplexity(values, weights).value == pytest.approx(
            expected[length], rel=1e-5
        )


# The page
