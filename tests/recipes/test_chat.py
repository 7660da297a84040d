"""recipes/chat.py: conversations, of whose tokens only the answers have a loss."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoTokenizer

import rope_ext
from recipes import data, finetune, settings
from recipes.chat import TokenizeChat, Whole, conversation_of
from rope_eval.data import templates
from rope_ext import OptionError
from tests.helpers.models import tiny_llama
from tests.helpers.recipe_runs import WORDS, arguments, history

PLAIN = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]: "
    "{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]: {% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]: "
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    "{{ eos_token }}\n{% endgeneration %}{% else %}{{ message['content'] }}{{ eos_token }}\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]: {% endif %}"
)
FORGETFUL = (
    "{% for message in messages %}{% if loop.last %}[{{ message['role'] }}]: "
    "{{ message['content'] }}{% endif %}{% endfor %}"
)
ASKED, ANSWERED = "one two three", "four five"
USER = {"role": "user", "content": ASKED}
ASSISTANT = {"role": "assistant", "content": ANSWERED}
SHAPES: list[dict[str, Any]] = [
    {"messages": [{"role": "system", "content": "six"}, USER, ASSISTANT]},
    {"conversations": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": ANSWERED}]},
    {"prompt": [USER], "completion": [ASSISTANT]},
    {"prompt": [USER, {"role": "assistant", "content": "no"}, USER], "completion": [ASSISTANT]},
    {"instruction": "one", "input": "two three", "output": ANSWERED},
    {"instruction": "one", "context": "two three", "response": ANSWERED},
]


@pytest.fixture
def chatting(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint whose tokenizer has a chat template."""
    folder = tmp_path / "chatting"
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return with_template(folder, PLAIN)


def with_template(folder: Path, template: str) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def batch_of(*rows: dict[str, Any]) -> dict[str, list[str]]:
    places = [f"row {number}" for number in range(1, len(rows) + 1)]
    return {"text": [conversation_of(row) for row in rows], "place": places}


def tokenized(folder: Path, row: dict[str, Any]) -> tuple[Any, list[int], list[bool]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = TokenizeChat(tokenizer, strict=True)(batch_of(row))
    return tokenizer, found["input_ids"][0], found["scored"][0]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_only_answers_have_a_loss(template: str, chatting: Path) -> None:
    with_template(chatting, template)
    for row in SHAPES:
        tokenizer, ids, scored = tokenized(chatting, row)
        spelled = tokenizer.decode([token for token, one in zip(ids, scored, strict=True) if one])
        assert spelled == f"{ANSWERED}</s>\n"
        assert ids[0] == 0 and ids.count(0) == 1  # one start token
    two = {"messages": [USER, ASSISTANT, USER, ASSISTANT]}
    tokenizer, ids, scored = tokenized(chatting, two)
    spelled = tokenizer.decode([token for token, one in zip(ids, scored, strict=True) if one])
    assert spelled == 2 * f"{ANSWERED}</s>\n"
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(two["messages"], tokenize=False)


@pytest.mark.parametrize("name", ["phi3", "qwen3"])
def test_templates_that_change_earlier_messages(name: str, chatting: Path) -> None:
    """Phi-3 ends a conversation with one more token, Qwen3 drops earlier reasoning."""
    known = pytest.importorskip("trl.chat_template_utils")
    with_template(chatting, getattr(known, f"{name}_chat_template"))
    row = {"messages": [USER, ASSISTANT, USER, {"role": "assistant", "content": "six"}]}
    tokenizer, ids, scored = tokenized(chatting, row)
    kept = [token for token, one in zip(ids, scored, strict=True) if one]
    between = [token for token, one in zip(ids, scored, strict=True) if not one]
    assert ANSWERED in tokenizer.decode(kept) and "six" in tokenizer.decode(kept)
    assert ASKED not in tokenizer.decode(kept) and tokenizer.decode(between).count(ASKED) == 2
    assert "user" not in tokenizer.decode(kept) and "six" not in tokenizer.decode(between)


def test_an_answer_ends_with_what_the_model_stops_at(chatting: Path, tmp_path: Path) -> None:
    """GLM-4.5 ends a turn by the next one's beginning, which its own template does not write."""
    known = pytest.importorskip("trl.chat_template_utils")
    tokenizer = AutoTokenizer.from_pretrained(chatting)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    tokenizer.save_pretrained(chatting)
    with_template(chatting, known.glm4moe_chat_template)
    file = tmp_path / "chats.jsonl"
    row = {"messages": [USER, ASSISTANT, USER, {"role": "assistant", "content": "six"}]}
    file.write_text(json.dumps(row))
    tokenizer, ids, scored = tokenized(chatting, row)
    answers = [token for token, one in zip(ids, scored, strict=True) if one]
    assert tokenizer.decode(answers).count("<|user|>") == 2
    assert tokenizer.decode(answers).endswith("six<|user|>")
    rows = data.documents(str(file), chat=True)
    assert data.chat_note(rows, tokenizer) is None
    tokenizer.chat_template = PLAIN.replace("{{ eos_token }}", "")  # nobody has another one for it
    said = data.chat_note(rows, tokenizer)
    assert said is not None and "does not learn where to stop" in said
    for template in (PLAIN, MARKED):
        tokenizer.chat_template = template
        assert data.chat_note(rows, tokenizer) is None


def test_a_template_that_leaves_out_a_text_is_refused(chatting: Path) -> None:
    """SmolVLM's writes the parts of a list, and nothing of a text."""
    known = pytest.importorskip("trl.chat_template_utils")
    with_template(chatting, known.smolvlm_chat_template)
    with pytest.raises(data.DataError, match="leaves out the text"):
        tokenized(chatting, {"messages": [USER, ASSISTANT]})
    in_parts = [
        {**m, "content": [{"type": "text", "text": m["content"]}]} for m in SHAPES[0]["messages"]
    ]
    tokenizer, ids, scored = tokenized(chatting, {"messages": in_parts})
    answers = [token for token, one in zip(ids, scored, strict=True) if one]
    assert ANSWERED in tokenizer.decode(answers) and ASKED in tokenizer.decode(ids)


def test_tools_reach_the_template_without_what_arrow_adds(chatting: Path) -> None:
    with_template(chatting, "{{ tools[0] | tojson }}" + PLAIN)
    tools = [{"name": "add", "parameters": {"a": {"type": "number", "default": None}}}]
    tokenizer, ids, scored = tokenized(chatting, {"messages": [USER, ASSISTANT], "tools": tools})
    text = tokenizer.decode(ids)
    assert '"type": "number"' in text and "default" not in text
    assert sum(scored) == len(tokenizer(f"{ANSWERED}</s>\n", add_special_tokens=False).input_ids)


ROLES = [  # ShareGPT's, and the roles of the messages that they become
    (["human", "gpt"], ["user", "assistant"]),
    (["user", "chatgpt"], ["user", "assistant"]),
    (
        ["system", "user", "bing", "user", "bard"],
        ["system", *2 * ["user", "assistant"]],
    ),
    (["human", "model", "human", "bot"], ["user", "assistant"] * 2),
    (["human", "gpt", "observation", "gpt"], ["user", "assistant", "tool", "assistant"]),
    (["human", "gpt", "function", "gpt"], ["user", "assistant", "tool", "assistant"]),
    (["human", "function_call", "tool", "gpt"], ["user", "assistant", "tool", "assistant"]),
]


@pytest.mark.parametrize(("given", "expected"), ROLES, ids=lambda names: " ".join(names))
def test_every_message_keeps_its_place_under_the_role_of_templates(
    given: list[str], expected: list[str]
) -> None:
    values = [f"text {number}" for number in range(len(given))]
    pairs = list(zip(given, values, strict=True))
    for row in (
        {"conversations": [{"from": role, "value": value} for role, value in pairs]},
        {"messages": [{"role": role, "content": value} for role, value in pairs]},
    ):
        messages = json.loads(conversation_of(row))["messages"]
        assert [each["role"] for each in messages] == expected
        assert [each["content"] for each in messages] == values


def test_a_function_call_of_sharegpt_calls_a_tool(chatting: Path) -> None:
    call = {"name": "add", "arguments": {"a": 7, "b": None}}
    for text in (json.dumps(call), json.dumps([call])):
        turns = [("human", ASKED), ("function_call", text), ("observation", "7"), ("gpt", "six")]
        row = {"conversations": [{"from": role, "value": value} for role, value in turns]}
        row["tools"] = json.dumps([{"name": "add"}])
        found = json.loads(conversation_of(row))
        assert found["tools"] == [{"name": "add"}]
        [made] = found["messages"][1]["tool_calls"]
        assert made == {"type": "function", "function": call}
    with pytest.raises(data.DataError, match="does not write tool_calls"):
        tokenized(chatting, row)
    calling = "{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}"
    with_template(chatting, PLAIN.replace("{{ eos_token }}", calling + "{{ eos_token }}"))
    tokenizer, ids, scored = tokenized(chatting, row)
    spelled = tokenizer.decode([token for token, one in zip(ids, scored, strict=True) if one])
    assert '"name": "add"' in spelled and '"b": null' in spelled and "six" in spelled


def test_arguments_of_calls_in_the_format_of_openai_are_objects() -> None:
    """As templates write them; other texts stay as they are."""
    for given, expected in (
        ('{"city": "Bern", "unit": null}', {"city": "Bern", "unit": None}),
        ({"city": "Bern"}, {"city": "Bern"}),
        ("Bern", "Bern"),
        ("[1]", "[1]"),
    ):
        function = {"name": "weather", "arguments": given}
        call = {"role": "assistant", "tool_calls": [{"id": "c1", "function": function}]}
        [_, found] = json.loads(conversation_of({"messages": [USER, call]}))["messages"]
        [made] = found["tool_calls"]
        assert made == {"id": "c1", "function": {"name": "weather", "arguments": expected}}


@pytest.mark.parametrize("template", ["plain", "marked", "qwen3"])
def test_an_answer_of_weight_zero_has_no_loss(template: str, chatting: Path) -> None:
    templates = {"plain": PLAIN, "marked": MARKED}
    if template not in templates:  # TRL's for training
        known = pytest.importorskip("trl.chat_template_utils")
        templates[template] = known.qwen3_chat_template
    with_template(chatting, templates[template])
    wrong = {"role": "assistant", "content": "six", "weight": 0}
    row = {"messages": [USER, wrong, USER, {**ASSISTANT, "weight": 1}, USER, ASSISTANT]}
    tokenizer, ids, scored = tokenized(chatting, row)
    spelled = tokenizer.decode([token for token, one in zip(ids, scored, strict=True) if one])
    assert spelled.count(ANSWERED) == 2 and "six" not in spelled
    assert "six" in tokenizer.decode(ids)
    assert not any(tokenized(chatting, {"messages": [USER, wrong]})[2])


def test_system_and_history_come_first() -> None:
    system = {"role": "system", "content": "six"}
    history = {"history": [["a", "b"], ["c", "d"]]}
    roles = 2 * ["user", "assistant"]
    before = [{"role": role, "content": text} for role, text in zip(roles, "abcd", strict=True)]
    alpaca = {"instruction": "one", "input": "two three", "output": ANSWERED}
    asked = {"role": "user", "content": "one\n\ntwo three"}
    for row, expected in (
        ({**alpaca, "system": "six", **history}, [system, *before, asked, ASSISTANT]),
        ({**alpaca, "system": "", "history": []}, [asked, ASSISTANT]),
        ({"messages": [USER, ASSISTANT], "system": "six"}, [system, USER, ASSISTANT]),
        ({"messages": [system, USER, ASSISTANT], "system": "six"}, [system, USER, ASSISTANT]),
        ({**SHAPES[1], "system": "six"}, [system, USER, ASSISTANT]),
        ({"prompt": [USER], "completion": [ASSISTANT], "system": "six"}, [system, USER, ASSISTANT]),
    ):
        found = json.loads(conversation_of(row))
        assert found["messages"] == expected
        assert found["first"] == (2 if "prompt" in row else 0)


def test_nulls_of_json_are_values_and_those_of_arrow_are_not(tmp_path: Path) -> None:
    function = {"name": "add", "arguments": {"a": 7, "unit": None}}
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    row = {"messages": [USER, call], "tools": [{"name": "add", "default": None}], "system": None}
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(row))
    [found] = [json.loads(text) for text in data.documents(str(file), chat=True)["text"]]
    assert found["messages"][1]["tool_calls"][0]["function"] == function
    assert "content" not in found["messages"][1] and found["tools"] == row["tools"]
    other = {**function, "arguments": {"b": 1}}  # of a row with other arguments
    rows = [{"messages": [USER, {**call, "tool_calls": [{"function": other}]}]}, row]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    read = data.documents(str(tmp_path / "a.parquet"), chat=True)["text"]
    found = json.loads(read[0])
    assert found["messages"][1]["tool_calls"][0]["function"] == other


@pytest.mark.parametrize("name", ["deepseekv3", "qwen3"])
def test_a_prompt_and_a_completion_of_messages_are_the_conversation(
    name: str, chatting: Path
) -> None:
    """Also where only TRL's template for training shows where answers are."""
    known = pytest.importorskip("trl.chat_template_utils")
    with_template(chatting, getattr(known, f"{name}_chat_template"))
    row = {"prompt": [USER], "completion": [ASSISTANT]}
    assert tokenized(chatting, row)[1:] == tokenized(chatting, {"messages": [USER, ASSISTANT]})[1:]
    before = [USER, {"role": "assistant", "content": "six"}]
    row = {"prompt": [*before, USER], "completion": [ASSISTANT]}
    tokenizer, ids, scored = tokenized(chatting, row)
    spelled = tokenizer.decode([token for token, one in zip(ids, scored, strict=True) if one])
    assert ANSWERED in spelled and "six" not in spelled and "six" in tokenizer.decode(ids)


def test_texts_of_prompt_and_completion_need_no_template(checkpoint: Path) -> None:
    tokenizer, ids, scored = tokenized(checkpoint, {"prompt": "one two ", "completion": "three"})
    assert tokenizer.decode(ids) == "<s>one two three</s>"
    assert scored == [False] * scored.index(True) + [True] * sum(scored)
    # A token with a space of the prompt and letters of the completion belongs to the completion.
    assert tokenizer.decode(ids[scored.index(True) :]) == " three</s>"


def test_conversations_that_cannot_be_used_are_refused(chatting: Path, checkpoint: Path) -> None:
    for row, said in (
        ({"words": "one"}, "columns words"),
        ({"messages": [{"content": "one"}]}, "role"),
        ({"messages": "one"}, "messages is str, and must be a list of objects with role"),
        ({"messages": None}, "columns messages"),
        ({"messages": ["one"]}, "message 1 of messages is str"),
        ({"messages": [USER, {**ASSISTANT, "role": "asistant"}]}, "message 2 .* 'asistant'; did"),
        ({"conversations": [{"from": "human"}]}, "message 1 of conversations has no value"),
        ({"instruction": "one", "output": None}, "it has no output or response, or it is null"),
        ({"instruction": "one", "output": ["two"]}, "output is list, and must be a text"),
        ({"instruction": "a", "output": "b", "history": [["c"]]}, "list of pairs"),
        ({"messages": [{"role": "system", "content": "a"}], "system": "b"}, "different system"),
        ({"prompt": "a", "completion": "b", "system": "c"}, "put it into the prompt"),
        ({"prompt": [USER], "completion": "b"}, "completion is str, and must be a list"),
        ({"messages": [{**USER, "content": nested(600)}]}, "not a conversation"),
        ({"messages": [USER, {**ASSISTANT, "weight": 0.5}]}, "message 2 .* weight 0.5; known are"),
    ):
        with pytest.raises(data.DataError, match=said):
            conversation_of(row)
    with pytest.raises(data.DataError, match="no chat template"):
        tokenized(checkpoint, SHAPES[0])
    with pytest.raises(data.DataError, match="changes earlier messages"):
        tokenized(with_template(chatting, FORGETFUL), {"messages": [USER, ASSISTANT, USER]})
    with pytest.raises(data.DataError, match="empty conversation"):
        tokenized(with_template(chatting, MARKED), {"messages": []})


@pytest.mark.parametrize("streaming", [False, True])
def test_a_row_that_is_not_as_the_first_ones_is_left_out_alone(
    streaming: bool, tmp_path: Path
) -> None:
    """The first rows are checked before training; a late one must not end the run."""
    file = tmp_path / "a.jsonl"
    rows = [*20 * [SHAPES[0]], {"messages": [USER, {**ASSISTANT, "role": "asistant"}]}, SHAPES[0]]
    file.write_text("\n".join(map(json.dumps, rows)))
    read = list(data.documents(str(file), chat=True, streaming=streaming))
    assert len([row for row in read if row["text"] is not None]) == 21
    [problem] = [row["problem"] for row in read if row["problem"]]
    assert f"{file}, line 21" in problem and "asistant" in problem and "1 row left out" in problem
    with pytest.raises(data.DataError, match=r"line 21.*--bad_files skip"):
        list(data.documents(str(file), chat=True, streaming=streaming, strict=True))
    file.write_text("\n".join(map(json.dumps, rows[20:])))  # all of them, perhaps
    with pytest.raises(data.DataError, match="asistant"):
        data.documents(str(file), chat=True, streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_late_rows_of_a_saved_dataset_that_are_no_conversations_are_left_out(
    streaming: bool, chatting: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    bad = {"messages": [USER, {**ASSISTANT, "role": "asistant"}]}
    rows = [{"messages": [USER, ASSISTANT]}] * 1100 + [bad] * 70
    datasets.Dataset.from_list(rows).save_to_disk(folder)

    def read(strict: bool) -> Any:
        return data.documents(str(folder), chat=True, streaming=streaming, strict=strict)

    tokenizer = AutoTokenizer.from_pretrained(chatting)
    pack = data.packer("packed", tokenizer, 64, masking=False, most=64, chat=True)
    tokenize = data.tokenization(tokenizer, chat=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made, contents = data.rows(read(strict=False), tokenizer, pack, tokenize=tokenize)
        if streaming:
            for _ in zip(range(1200), made, strict=False):
                pass
    said = [str(one.message) for one in caught]
    if not streaming:
        assert contents.documents == 1100 and contents.empty == 0
        said = list(contents.lines("saved", "", 64, needed=None))
    assert any(f"{folder}, row 1101: " in line and "asistant" in line for line in said)
    assert any(re.match(r"left out: \d+ more", line) for line in said)
    with pytest.raises(data.DataError, match=r"row 1101: .*--bad_files skip"):
        list(read(strict=True))


PICKY = PLAIN.replace(
    "{{ message['content'] }}",
    "{% if message['content'] != 'unseen' %}{{ message['content'] }}{% endif %}"
    "{% if loop.previtem and loop.previtem.role == message.role %}{{ raise_exception('twice') }}"
    "{% endif %}",
)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "saved"])
def test_late_conversations_that_the_template_rejects_are_left_out(
    kind: str, streaming: bool, chatting: Path, tmp_path: Path
) -> None:
    """Those that it raises an error for, and those whose text it leaves out."""
    good = {"messages": [USER, ASSISTANT]}
    twice = {"messages": [USER, USER, ASSISTANT]}
    unseen = {"messages": [{**USER, "content": "unseen"}, ASSISTANT]}
    file = tmp_path / f"a.{kind}"
    tokenizer = AutoTokenizer.from_pretrained(with_template(chatting, PICKY))
    pack = data.packer("packed", tokenizer, 64, masking=False, most=64, chat=True)

    def save(rows: list[dict]) -> Any:
        if kind == "jsonl":
            file.write_text("\n".join(map(json.dumps, rows)))
        else:
            shutil.rmtree(file, ignore_errors=True)
            datasets.Dataset.from_list(rows).save_to_disk(file)
        return data.documents(str(file), chat=True, streaming=streaming)

    def read(strict: bool) -> Any:
        tokenize = data.tokenization(tokenizer, chat=True, strict=strict)
        made, contents = data.rows(conversations, tokenizer, pack, tokenize=tokenize)
        return list(islice(made, 30)), contents

    conversations = save([*20 * [good], twice, good, unseen, good])
    assert data.chat_note(conversations, tokenizer) is None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, contents = read(strict=False)
    said = [str(one.message).removeprefix("left out: ") for one in caught]
    if not streaming:
        assert (contents.documents, contents.duplicates, contents.empty) == (22, 21, 0)
        said = list(contents.problems)
    row = "line" if kind == "jsonl" else "row"
    for number, why in ((21, "(twice)"), (23, "leaves out the text")):
        assert any(line.startswith(f"{file}, {row} {number}: ") and why in line for line in said)
    with pytest.raises(data.DataError, match=rf"{row} 21: .*twice.*--bad_files skip"):
        read(strict=True)
    for early in (twice, unseen):
        with pytest.raises(data.DataError, match=re.escape(f"{file}, {row} 3: the chat template")):
            data.chat_note(save([good, good, early]), tokenizer)


LOOP = (
    "{% for i in range(99999) %}" * 4 + "{% if i < 0 %}a{% endif %}" + "{% endfor %}" * 4
)  # no text
HOSTILE = {  # what each is refused for
    LOOP: "does not end within",
    "{{ (messages | length) ** (10 ** 9) }}": "does not end within",  # one operation
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "fails",
    "{{ 'a' * 10**10 }}": "needs more than 512 MB",
    "{{ messages[0].content * 10**6 }}": "4 MB of text",
}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the memory of a process")
@pytest.mark.parametrize("marked", [False, True], ids=["plain", "marked"])
@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_chat_template_that_does_not_end_is_refused(
    hostile: str, marked: bool, chatting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that behaves on the first conversations."""
    monkeypatch.setattr(templates, "SECONDS", 0.5 if "does not end" in HOSTILE[hostile] else 20.0)
    second = "{% if 'seven' in messages[0]['content'] %}"
    with_template(chatting, f"{second}{hostile}{{% endif %}}{MARKED if marked else PLAIN}")
    fails = HOSTILE[hostile] == "fails"  # an error like any other, which may be of this row alone
    tokenize = TokenizeChat(AutoTokenizer.from_pretrained(chatting), strict=fails)
    rows = [{"messages": [{**USER, "content": text}, ASSISTANT]} for text in (ASKED, "seven")]
    with pytest.raises(data.DataError, match=HOSTILE[hostile]):
        tokenize(batch_of(*rows))
    assert any(tokenize(batch_of(rows[0]))["scored"][0])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="its probe runs in this process")
def test_the_probe_of_trl_does_not_execute_a_template_without_limits(
    chatting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL renders conversations with tools to find a template for training."""
    pytest.importorskip("trl.chat_template_utils")
    monkeypatch.setattr(templates, "SECONDS", 3.0)
    probe = f"{{% if messages[0]['content'] != '{ASKED}' %}}{LOOP}{{% endif %}}"
    with_template(chatting, probe + FORGETFUL)
    with pytest.raises(data.DataError, match="does not end within"):
        tokenized(chatting, {"messages": [USER, ASSISTANT, USER]})


def test_marked_answers_are_those_of_the_tokenizer(chatting: Path) -> None:
    with_template(chatting, "{{ tools[0] | tojson }}" + MARKED)
    row = {"messages": [USER, ASSISTANT, USER, ASSISTANT], "tools": [{"name": "\u00e9 \u732b"}]}
    tokenizer, ids, scored = tokenized(chatting, row)
    made = tokenizer.apply_chat_template(
        row["messages"], tools=row["tools"], return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids == made["input_ids"] and scored == list(map(bool, made["assistant_masks"]))


def nested(depth: int) -> list:
    found: list = []
    for _ in range(depth):
        found = [found]
    return found


def test_a_text_that_is_not_unicode_is_tokenized_as_one_that_is(chatting: Path) -> None:
    """JSON can contain halves of characters."""
    for half in ("\ud800", "\udc00 \ud83d\ude00"):
        whole = half.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        for row in ({"prompt": "@", "completion": "@"}, {"messages": [USER, ASSISTANT]}):
            both = [
                json.loads(json.dumps(row).replace(ANSWERED, "@").replace("@", x))
                for x in (json.dumps(half)[1:-1], whole)
            ]
            found = TokenizeChat(AutoTokenizer.from_pretrained(chatting))(batch_of(*both))
            assert found["input_ids"][0] == found["input_ids"][1] and any(found["scored"][0])


def test_conversations_are_kept_whole_by_hand() -> None:
    documents = {
        "input_ids": [[1, 2, 3], [4, 5, 6, 7], [8, 9], [10] * 6, []],
        "scored": [[0, 0, 1], [0, 1, 1, 1], [0, 1], [1] * 6, []],
    }
    found = Whole(5, filler=0, masking=True)(documents)
    assert [row.tolist() for row in found["input_ids"]] == [[4, 5, 6, 7, 0], [1, 2, 3, 8, 9]]
    assert [row.tolist() for row in found["scored"]] == [[0, 1, 1, 1, 0], [0, 0, 1, 0, 1]]
    assert [row.tolist() for row in found["position_ids"]] == [[0, 1, 2, 3, 0], [0, 1, 2, 0, 1]]


def test_rows_are_filled_with_a_token_that_the_model_has(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.add_special_tokens({"pad_token": "<new>"})  # beyond the embeddings
    for end in ("</s>", None):
        tokenizer.eos_token = end
        pack = data.packer("packed", tokenizer, 8, masking=False, most=8, chat=True)
        assert pack.filler == (tokenizer.eos_token_id if end else 0)


def test_packed_conversations_do_not_see_each_other() -> None:
    model = rope_ext.patch(tiny_llama(), "yarn", factor=4)
    conversations = [list(range(3, 43)), list(range(40, 60)), list(range(90, 120))]
    scored = [[0] * 20 + [1] * (len(ids) - 20) for ids in conversations]
    scored[1] = [0] * 10 + [1] * 10
    packed = Whole(100, 1, masking=True)({"input_ids": conversations, "scored": scored})
    [row] = [{name: packed[name][0] for name in packed}]
    batch = data.Collator()([row])
    labels = batch.pop("labels")[0]
    assert int((labels != data.IGNORED).sum()) == 20 + 10 + 10
    with torch.no_grad():
        together = model(**batch, use_cache=False).logits[0]
        ids, at = batch["input_ids"][0].tolist(), 0
        for each in sorted(conversations, key=len, reverse=True):
            assert ids[at : at + len(each)] == each
            alone = model(torch.tensor([each]), use_cache=False).logits[0]
            # float32 sums in another order
            torch.testing.assert_close(together[at : at + len(each)], alone, rtol=1e-4, atol=1e-4)
            at += len(each)


def save_chats(path: Path, number: int, words: int = 20) -> Path:
    draw = random.Random(0).choices
    rows = []
    for _ in range(number):
        texts = [" ".join(draw(WORDS, k=words)) for _ in range(2)]
        pair = zip(("user", "assistant"), texts, strict=True)
        rows.append({"messages": [{"role": role, "content": text} for role, text in pair]})
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("positions", ["pose", "documents"])
def test_a_run_on_conversations(
    positions: str,
    chatting: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its first loss is the mean over the answers of all accumulated rows."""
    batches = []

    class Watched(data.Collator):
        def __call__(self, rows: Any) -> dict:
            batches.append(super().__call__(rows))
            return batches[-1]

    monkeypatch.setattr(data, "Collator", Watched)
    chats = save_chats(tmp_path / "chats.jsonl", 9)
    long = json.dumps({"messages": [USER, {"role": "assistant", "content": "word " * 500}]})
    chats.write_text(f"{chats.read_text()}\n{long}\n")
    more: dict[str, object] = {"format": "chat", "length": 300, "max_steps": 1}
    more |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3}
    if positions == "documents":
        more |= {"pose_chunks": 0, "document_masking": True}
    run = tmp_path / "run"
    finetune.main(arguments(chatting, chats, run, learning_rate=0.0, **more))
    told = capsys.readouterr().err
    assert "10 documents" in told
    assert "1 of 10 conversations have more than 300 tokens and are dropped" in told

    model = rope_ext.from_pretrained(run).eval()
    tokenizer = AutoTokenizer.from_pretrained(run)
    total = count = 0.0
    for batch in batches[:3]:
        labels = batch.pop("labels")[0]
        with torch.no_grad():
            logits = model(**batch, use_cache=False).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits, labels[1:], reduction="sum", ignore_index=data.IGNORED
        )
        total += float(loss)
        count += int((labels[1:] != data.IGNORED).sum())
        scored = tokenizer.decode(labels[labels != data.IGNORED])
        whole = tokenizer.decode(batch["input_ids"][0])
        assert 0 < len(scored) < 0.6 * len(whole)
        assert "user" not in scored and "[user]" in whole
        assert int(batch["position_ids"].max()) >= 300 or positions == "documents"
    assert history(run / "checkpoint-1")[0][1] == pytest.approx(total / count, rel=1e-5)


def test_a_run_is_not_resumed_with_another_chat_template(chatting: Path, tmp_path: Path) -> None:
    chats = save_chats(tmp_path / "chats.jsonl", 9)
    run = tmp_path / "run"
    words = arguments(chatting, chats, run, format="chat", length=300, save_steps=1)
    finetune.main(words)
    shutil.rmtree(run / "checkpoint-2")
    again = [*words, "--resume_from_checkpoint", "true"]
    with_template(chatting, PLAIN.replace("]: ", "]> "))
    with pytest.raises(OptionError, match="another chat template"):
        finetune.main(again)
    with_template(chatting, PLAIN)
    finetune.main(again)
    assert (run / "checkpoint-2").exists()


def test_documents_and_conversations_are_mixed_by_weights(
    chatting: Path, texts: Path, tmp_path: Path
) -> None:
    """Facts are asked for in rows of text only."""
    chats = save_chats(tmp_path / "chats.jsonl", 40)
    parts = [
        {"dataset": str(texts), "weight": 0.75},
        {"dataset": str(chats), "weight": 0.25, "format": "chat"},
    ]
    more = {"datasets": [json.dumps(part) for part in parts], "retrieval_share": 1.0, "length": 256}
    words = arguments(chatting, texts, tmp_path / "run", dataset=None, **more)
    recipe, args = settings.parse(words)
    plan = finetune.check(recipe, args)
    rows = list(islice(finetune.read(recipe, args, plan).rows, 1000))
    assert sum("scored" in row for row in rows) == 250
    batch = finetune.collator_of(recipe, args, plan)(rows[:20])
    tokenizer = AutoTokenizer.from_pretrained(chatting)
    for row, ids, labels, weights in zip(
        rows, batch["input_ids"], batch["labels"], batch["loss_weights"], strict=False
    ):
        assert ((labels != data.IGNORED) <= (weights > 0)).all()
        if "scored" in row:
            assert "[user]" in tokenizer.decode(ids) and set(weights.tolist()) == {1.0}
            assert labels.ne(data.IGNORED).tolist() == [bool(one) for one in row["scored"]]
        else:
            assert len(set(weights.tolist())) > 1
    finetune.main(words)

    too_long = json.dumps({"messages": [USER, {"role": "assistant", "content": "word " * 500}]})
    chats.write_text(f"{too_long}\n{chats.read_text()}")
    with pytest.warns(UserWarning, match="1 of the first .* conversations have more than 256"):
        finetune.read(recipe, args, plan)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"format": "chats"}, "did you mean 'chat'"),
        ({"format": "chat", "rows": "chunked"}, "leave --rows out"),
        ({"format": "chat", "positions": "pose_released", "pose_chunks": 0}, "their questions"),
        ({"format": "chat", "eval_strategy": "steps"}, "give --eval_dataset"),
        ({"format": "chat"}, "columns text, which make no conversation"),
    ],
    ids=str,
)
def test_settings_that_conversations_do_not_support_are_refused(
    more: dict[str, object], message: str, refused: Callable[..., None]
) -> None:
    refused(message, **more)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
@pytest.mark.parametrize("number", [3, 30])
def test_a_row_that_is_no_conversation_is_named(number: int, kind: str, tmp_path: Path) -> None:
    """Early ones before anything is converted, too."""
    rows = [{"instruction": "one", "output": None if i == number else "two"} for i in range(40)]
    file = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        file.write_text("\n".join(map(json.dumps, rows)))
    elif kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(file)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(file)
    place = f"{file}, {'line' if kind == 'jsonl' else 'row'} {number + 1}: "
    with pytest.raises(data.DataError, match=re.escape(place) + ".*no output or response"):
        data.documents(str(file), chat=True, strict=True)


def test_conversations_that_are_read_as_text_name_the_format(tmp_path: Path) -> None:
    for number, row in enumerate(SHAPES):
        file = tmp_path / f"{number}.jsonl"
        file.write_text(json.dumps(row) + "\n")
        with pytest.raises(data.DataError, match="--format chat"):
            data.documents(str(file))
