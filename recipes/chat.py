"""Supervised data: conversations with a loss on the answers only.

A row has one of these shapes:

* ``messages``: objects with ``role`` and ``content``;
* ``conversations`` (ShareGPT): objects with ``from`` and ``value``;
* ``prompt`` and ``completion``: two texts, or two lists of messages;
* ``instruction``, ``output`` or ``response``, and optionally ``input`` or ``context``: three texts;
  also ``history``: pairs of question and answer before them, whose answers have a loss as well.

A text of prompt and completion is used as it is. All else goes through the chat template of the
tokenizer, with ``system`` (a text) and ``tools`` of the row, if it has them.
"""

from __future__ import annotations

import copy
import importlib
import json
import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from recipes.contents import digest_of
from recipes.files import encodable, stop
from recipes.stream import PLACE, PROBLEM, DataError, Documents
from rope_eval.data.prompts import beginning
from rope_eval.data.templates import RejectionError, TemplateError, Templates
from rope_ext.errors import OptionError, first_line, nearest

_KNOWN = ("system", "developer", "user", "assistant", "tool")
_ROLES = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "bot"), "assistant"),
    **dict.fromkeys(("function", "observation", "ipython"), "tool"),
}
_CALL = "function_call"
"""Role in ShareGPT whose text is a call of a tool, as JSON."""
_SHAPES = "messages, conversations, prompt with completion, or instruction with output"


class _RowError(ValueError):
    """What a row must have, and has not."""


class _RejectedError(DataError):
    """The chat template cannot write a conversation, though it may write others."""


def conversation_of(row: Mapping[str, Any], *, from_arrow: bool = True) -> str:
    """Return a row as JSON: ``messages``, or a ``prompt`` and a ``completion`` of text.

    ``first`` is the number of messages before those that are answered.

    Args:
        row: a row of one of the shapes above.
        from_arrow: the row comes from an Arrow table, which adds nulls for keys of other rows, so
            that nulls in ``tools`` and in arguments of calls mean nothing; in JSON they are values.

    Raises:
        DataError: the row has another shape.
    """
    try:
        return encodable(json.dumps(_conversation(row, from_arrow), ensure_ascii=False))
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        what = first_line(error)
        if not isinstance(error, _RowError):
            what = f"{type(error).__name__}: {what}"
        raise DataError(
            f"a row is not a conversation ({what}): {reprlib.repr(dict(row))[:80]}; give rows with "
            f"{_SHAPES}"
        ) from None


def _conversation(row: Mapping[str, Any], from_arrow: bool) -> dict[str, Any]:
    """Convert a row of a known shape to messages, or to a prompt and its completion."""
    given = _without_none(row, () if from_arrow else _VALUES)
    tools = given.get("tools")
    more = {"tools": json.loads(tools) if isinstance(tools, str) else tools} if tools else {}
    system = given.get("system")
    if "messages" in given:
        return {"messages": _opened(system, _messages(given, "messages")), "first": 0, **more}
    if "conversations" in given:
        return {"messages": _opened(system, _messages(given, "conversations")), "first": 0, **more}
    if "completion" in given:
        if isinstance(given.get("prompt"), str):
            if system:
                raise _RowError("it has system beside a prompt of text; put it into the prompt")
            return {"prompt": given["prompt"], "completion": _text(given, "completion")}
        before = _opened(system, _messages(given, "prompt"))
        messages = before + _messages(given, "completion")
        return {"messages": messages, "first": len(before), **more}
    if "instruction" in given:
        context = given.get("input") or given.get("context")  # Alpaca's name, and Dolly's
        instruction = "\n\n".join(filter(None, (_text(given, "instruction"), context)))
        pairs = [*_history(given), (instruction, _text(given, "output", "response"))]
        messages = [
            {"role": role, "content": content}
            for pair in pairs
            for role, content in zip(("user", "assistant"), pair, strict=True)
        ]
        return {"messages": _opened(system, messages), "first": 0, **more}
    raise DataError(
        f"a row has the columns {', '.join(map(str, row)) or 'none'}, which make no conversation; "
        f"give rows with {_SHAPES}, or --format text"
    )


def _text(row: Mapping[str, Any], *names: str) -> str:
    """The text in the first of these columns that the row has."""
    name = next((name for name in names if name in row), None)
    if name is None:
        raise _RowError(f"it has no {' or '.join(names)}, or it is null")
    if not isinstance(row[name], str):
        raise _RowError(f"{name} is {type(row[name]).__name__}, and must be a text")
    return row[name]


def _history(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs of question and answer before an instruction."""
    pairs = row.get("history") or []
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(each, str) for each in pair)
        for pair in pairs
    ):
        raise _RowError("history must be a list of pairs [question, answer] of texts")
    return [(question, answer) for question, answer in pairs]


def _opened(system: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages that begin with the system message of the row, if it has one."""
    if not system:
        return messages
    if not isinstance(system, str):
        raise _RowError(f"system is {type(system).__name__}, and must be a text")
    if not messages or messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": system}, *messages]
    if messages[0].get("content") != system:
        raise _RowError("its system and its first message are different system messages")
    return messages


def is_conversation(row: Mapping[str, Any]) -> bool:
    """Whether a row has one of the shapes above."""
    try:
        conversation_of(row)
    except DataError:
        return False
    return True


_VALUES = ("arguments", "tools")
"""Keys whose values are those of a tool, in which a null is a value."""


def _without_none(value: Any, kept: Collection[str]) -> Any:
    """Without nulls, also inside of lists and objects, but not in the values of ``kept`` keys."""
    if isinstance(value, Mapping):
        return {
            key: each if key in kept else _without_none(each, kept)
            for key, each in value.items()
            if each is not None
        }
    return [_without_none(each, kept) for each in value] if isinstance(value, list) else value


def _messages(row: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The messages in a column, with roles that chat templates know."""
    given = row.get(name)
    if not isinstance(given, list):
        kind = "missing" if given is None else type(given).__name__
        raise _RowError(f"{name} is {kind}, and must be a list of objects with role and content")
    found = []
    for number, each in enumerate(given, 1):
        if not isinstance(each, Mapping):
            raise _RowError(f"message {number} of {name} is {type(each).__name__}, not an object")
        message = dict(each)
        if "from" in message:
            if "value" not in message:
                raise _RowError(f"message {number} of {name} has no value, or it is null")
            message = {"role": message.pop("from"), "content": message.pop("value"), **message}
        if "role" not in message:
            raise _RowError(f"message {number} of {name} has no role")
        role = message["role"]
        if role == _CALL:
            message |= _tool_calls(message.get("content"))
        elif role in _ROLES:
            message["role"] = _ROLES[role]
        elif role not in _KNOWN:
            known = (*_KNOWN, *_ROLES, _CALL)
            near = nearest(str(role), known) or ";"
            raise _RowError(
                f"message {number} of {name} has the unknown role {role!r}{near} known are "
                f"{', '.join(known)}"
            )
        if isinstance(message.get("tool_calls"), list):
            message["tool_calls"] = [_with_arguments(call) for call in message["tool_calls"]]
        weight = message.get("weight", 1)
        if weight not in (0, 1):
            raise _RowError(
                f"message {number} of {name} has the weight {weight!r}; known are 1, and 0 for an "
                f"answer without a loss"
            )
        found.append(message)
    return found


def _with_arguments(call: Any) -> Any:
    """A call of a tool whose arguments are an object, not its JSON as in OpenAI's format."""
    if not isinstance(call, Mapping):
        return call
    if "function" in call:
        return {**call, "function": _with_arguments(call["function"])}
    text = call.get("arguments")
    if isinstance(text, str):
        with suppress(ValueError):
            arguments = json.loads(text)
            return {**call, "arguments": arguments} if isinstance(arguments, dict) else call
    return call


def _tool_calls(text: Any) -> dict[str, Any]:
    """An assistant's message that calls the tools in a text of JSON; other texts are its content.

    As LLaMA-Factory reads ``function_call``: an object with name and arguments, or a list of them.
    """
    try:
        calls = json.loads(text)
    except (TypeError, ValueError):
        return {"role": "assistant", "content": text}
    calls = calls if isinstance(calls, list) else [calls]
    whole = [isinstance(call, dict) and {"name", "arguments"} <= call.keys() for call in calls]
    if not whole or not all(whole):
        return {"role": "assistant", "content": text}
    functions = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
    tool_calls = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def require_template(tokenizer: Any) -> None:
    """Raise OptionError if a tokenizer cannot say where the answers of a conversation are."""
    if not getattr(tokenizer, "is_fast", False):
        raise OptionError(
            "--format chat needs a tokenizer of the tokenizers library, which says where a token "
            "is in the text; convert it to a tokenizer.json, or give --format text"
        )


@dataclass(frozen=True)
class TokenizeChat:
    """Tokenizes conversations; ``scored`` is true for the tokens of answers.

    An answer is what the chat template adds for an assistant's message after its generation prompt,
    with the end of the turn. A template with ``{% generation %}`` says it itself. A template that
    drops earlier reasoning (Qwen3), or ends no turn (GLM-4.5), is replaced by TRL's template for
    training.

    A template is a program from elsewhere, so a process with limits renders it, one per batch.

    Args:
        tokenizer: tokenizer of the model.
        strict: raise an error for a conversation that the template rejects, instead of leaving it
            out with its ``problem``.
    """

    tokenizer: Any
    strict: bool = False
    names = ("input_ids", "scored", PROBLEM)

    def __call__(self, batch: Mapping[str, Sequence[str | None]]) -> dict[str, Any]:
        ids: list[list[int]] = []
        scored: list[list[bool]] = []
        problems: list[str | None] = []
        with Templates(_Programs(self.tokenizer)) as templates:
            conversations = _Conversations(self.tokenizer, templates, _Ends(self.tokenizer))
            for text, place in zip(batch["text"], batch[PLACE], strict=True):
                tokens, answers, problem = [], [], None
                try:
                    if text:
                        tokens, answers = conversations.tokenize(json.loads(text))
                except _RejectedError as error:
                    problem = f"{place}: {error}"
                    stop(self.strict, problem)
                used = any(answers)  # a conversation without an answer teaches nothing
                ids.append(tokens if used else [])
                scored.append(answers if used else [])
                problems.append(problem)
        return {
            "input_ids": ids,
            "scored": scored,
            PROBLEM: problems,
            "tokens": [len(tokens) for tokens in ids],
            "digest": [digest_of(text or "") for text in batch["text"]],
        }


@dataclass(frozen=True)
class _Ends:
    """The special tokens of a tokenizer, from which a model learns to stop."""

    tokenizer: Any

    @cached_property
    def special(self) -> frozenset[int]:  # Gemma has six thousand
        return frozenset((*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder))

    def an_answer(self, ids: Sequence[int], scored: Sequence[bool]) -> bool:
        """Whether the last answer ends with one; white space may follow it, as after ChatML's."""
        answers = (token for token, one in zip(ids[::-1], scored[::-1], strict=True) if one)
        for token in answers:
            if token in self.special:
                return True
            if self.tokenizer.decode([token]).strip():
                return False
        return False


def note_of(tokenizer: Any, first: Mapping[str, Sequence[str]]) -> str | None:
    """Return what to know before training on conversations like these, or None.

    Args:
        tokenizer: tokenizer of the model.
        first: the first conversations, as for :class:`TokenizeChat`.

    Raises:
        DataError: the chat template rejects one of them.
    """
    found = TokenizeChat(tokenizer)(first)
    problem = next(filter(None, found[PROBLEM]), None)
    if problem is not None:
        raise DataError(problem)
    pairs = zip(found["input_ids"], found["scored"], strict=True)
    used = next((pair for pair in pairs if pair[0]), None)
    if used is None or _Ends(tokenizer).an_answer(*used):
        return None
    return (
        "the chat template ends answers with no special token, so the model does not learn where "
        "to stop; save the tokenizer with a template that does, or give texts of prompt and "
        "completion"
    )


@dataclass(frozen=True)
class _Programs:
    """What the process with limits does: all that executes a chat template."""

    tokenizer: Any

    def __call__(self, name: str, *given: Any, **options: Any) -> Any:
        return getattr(self, name)(*given, **options)

    def render(self, messages: Any, **options: Any) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)

    def render_marked(self, messages: Any, **options: Any) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and where in it the generation blocks begin and end."""
        # Real tokens of a long text would need more memory than a template may take.
        reader = copy.copy(self.tokenizer)
        reader.__class__ = type("Reader", (_Characters, type(reader)), {})
        rendered = reader.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, **options
        )
        edges = np.diff(rendered["assistant_masks"], prepend=0, append=0)
        begins, ends = (np.flatnonzero(edges == edge).tolist() for edge in (1, -1))
        return rendered["text"], list(zip(begins, ends, strict=True))

    def training_template(self) -> str | None:
        """TRL's template for training in place of a known template; None without one."""
        templates = _trl_templates()
        if templates is None:
            return None
        try:
            return templates.get_training_chat_template(self.tokenizer)
        except MemoryError:
            raise
        except Exception:  # it does not know the template, or cannot render its own probe with it
            return None


class _Characters:
    """Base of a tokenizer of which every character is a token."""

    def __call__(self, text: str, **options: Any) -> _CharacterEncoding:
        return _CharacterEncoding(text=text, input_ids=range(len(text)))


class _CharacterEncoding(dict):
    """Where the characters of a text are; transformers asks in one of two ways, by its version."""

    def char_to_token(self, row: int, char: int) -> int:  # before 5.24
        return char

    @property
    def encodings(self) -> list[_CharacterEncoding]:
        return [self]

    @property
    def offsets(self) -> list[tuple[int, int]]:
        return [(at, at + 1) for at in self["input_ids"]]


def _trl_templates() -> Any:
    try:
        return importlib.import_module("trl.chat_template_utils")
    except ImportError:
        return None


@dataclass(frozen=True)
class _Conversations:
    """Tokenizes conversations one by one; ``templates`` renders them."""

    tokenizer: Any
    templates: Templates
    ends: _Ends

    def tokenize(self, row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        if "completion" in row:
            return self._completion(row["prompt"], row["completion"])
        messages = row["messages"]
        first = row["first"]
        if self.tokenizer.chat_template is None:
            raise DataError(
                "the tokenizer has no chat template, which messages need; save it with one, or "
                "give rows with texts of prompt and completion"
            )
        options = {"tools": row["tools"]} if "tools" in row else {}
        calls = any(message.get("tool_calls") for message in messages)
        if calls and "tool_calls" not in str(self.tokenizer.chat_template):
            raise _RejectedError(
                f"the chat template does not write tool_calls, which {str(messages[:1])[:60]} and "
                f"what follows have; give a model whose template does, or write the calls into "
                f"the content of messages"
            )
        if first == 0 and _marks_answers(self.tokenizer.chat_template):
            return self._marked(messages, options)
        whole = self._rendered(messages, options)
        spans = []
        for at, message in enumerate(messages):
            if message["role"] != "assistant" or not _is_taught(at, message, first):
                continue
            span = self._answer(whole, messages[: at + 1], options)
            if span is None:
                return self._by_training_template(messages, first, options)
            spans.append(span)
        _require_written(messages, whole)
        found = self._in_spans(whole, spans)
        if spans and not self.ends.an_answer(*found):
            with suppress(DataError):  # without such a template
                return self._by_training_template(messages, first, options)
        return found

    def _answer(self, whole: str, messages: Any, options: Mapping[str, Any]) -> Any:
        """Where the last of these messages is in the whole text; None if earlier text differs."""
        before = self._rendered(messages[:-1], options, add_generation_prompt=True)
        answered = self._rendered(messages, options)
        if not whole.startswith(answered):
            # Phi-3 adds the end token to the last message only.
            answered = answered.removesuffix(self.tokenizer.eos_token or "")
        if whole.startswith(before) and whole.startswith(answered):
            return len(before), len(answered)
        return None

    def _by_training_template(
        self, messages: Any, first: int, options: Mapping[str, Any]
    ) -> tuple[list[int], list[bool]]:
        """Tokenize with TRL's template for training, which keeps earlier messages as they were."""
        _trl_templates()  # for the processes of the next batches, which then need not import it
        template = self._called(messages, "training_template")
        if template is None:
            installed = _trl_templates() is not None
            fix = "" if installed else "install trl, which has templates for known models, "
            raise DataError(
                f"the chat template changes earlier messages when later ones follow, or writes an "
                f"answer otherwise than after its generation prompt, so the answers of "
                f"{str(messages[0])[:60]} cannot be found; {fix}give a chat template with "
                f"generation blocks, or give texts of prompt and completion"
            )
        options = {**options, "chat_template": template}
        text, spans = self._called(messages, "render_marked", messages, **options)
        return self._in_spans(text, _taught(messages, first, spans))

    def _marked(self, messages: Any, options: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        text, spans = self._called(messages, "render_marked", messages, **options)
        _require_written(messages, text)
        return self._in_spans(text, _taught(messages, 0, spans))

    def _rendered(self, messages: Any, options: Mapping[str, Any], **more: Any) -> str:
        if not messages:  # an answer at the beginning
            return ""
        return self._called(messages, "render", messages, **options, **more)

    def _called(self, messages: Any, name: str, *given: Any, **options: Any) -> Any:
        """Call a method of :class:`_Programs` for ``messages``."""
        try:
            return self.templates(name, *given, **options)
        except TemplateError as error:
            rejected = isinstance(error, RejectionError)  # raised as for the order of roles
            raise (_RejectedError if rejected else DataError)(
                f"{error} on {str(messages[:1])[:60]} and what follows; correct or remove this "
                f"conversation, or give --format text"
            ) from None

    def _completion(self, prompt: str, completion: str) -> tuple[list[int], list[bool]]:
        ids, scored = self._in_spans(
            prompt + completion, [(len(prompt), len(prompt) + len(completion))]
        )
        head = list(beginning(self.tokenizer))
        end = self.tokenizer.eos_token_id
        if ids[: len(head)] != head:
            ids = head + ids
            scored = [False] * len(head) + scored
        if end is not None and ids[-1:] != [end]:
            ids = [*ids, end]
            scored = [*scored, True]
        return ids, scored

    def _in_spans(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[bool]]:
        encoded = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        scored = [
            # A token with letters of both belongs to the answer, as in recipes/retrieval.py.
            any(start < last and first < end for first, last in spans)
            for start, end in encoded["offset_mapping"]
        ]
        return list(encoded["input_ids"]), scored


def _is_taught(at: int, message: Mapping[str, Any], first: int) -> bool:
    """Whether an answer has a loss: it is none of the prompt, nor has it the weight 0 (OpenAI)."""
    return at >= first and message.get("weight") != 0


def _taught(
    messages: Sequence[Mapping[str, Any]], first: int, spans: Sequence[tuple[int, int]]
) -> Sequence[tuple[int, int]]:
    """Of the spans that a template marks, those of answers with a loss."""
    answers = [(at, each) for at, each in enumerate(messages) if each["role"] == "assistant"]
    taught = [_is_taught(at, each, first) for at, each in answers]
    if all(taught):
        return spans
    if len(spans) != len(answers):
        raise _RejectedError(
            f"the chat template marks {len(spans)} answers in {str(messages[0])[:60]} and what "
            f"follows, which has {len(answers)}, so those without a loss are not known; give "
            f"messages without weights instead of prompt and completion"
        )
    return [span for span, one in zip(spans, taught, strict=True) if one]


def _require_written(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """Raise _RejectedError if the chat template leaves out what a user or the assistant says.

    Templates trim and take apart what they write, but keep the last word of it.
    """
    for message in messages:
        content = message.get("content")
        if message["role"] not in ("user", "assistant") or not isinstance(content, str):
            continue
        words = content.split()
        if words and words[-1] not in text:
            raise _RejectedError(
                f"the chat template leaves out the text of {str(message)[:60]}; give it as those "
                f"of models for images take it, content: [{{type: text, text: ...}}]"
            )


def _marks_answers(template: Any) -> bool:
    return re.search(r"\{%-?\s*generation\s*-?%\}", str(template)) is not None


@dataclass(frozen=True)
class Whole:
    """Puts whole conversations into rows of ``length`` tokens, and fills the rest without a loss.

    Each goes into the first of the open rows with room for it; those longer than a row are dropped.
    Rows get ``scored``, and with ``masking`` also ``position_ids`` that restart in each
    conversation.

    Args:
        length: length of a row in tokens.
        filler: token that fills a row.
        masking: add ``position_ids``.
    """

    length: int
    filler: int
    masking: bool = False

    def __call__(self, batch: Documents) -> dict[str, Any]:
        lengths = [len(ids) for ids in batch["input_ids"]]
        bins: list[list[int]] = []
        room: list[int] = []
        # First fit, the longest first; a stable sort, so that a resumed run packs the same rows.
        for index in np.argsort(lengths, kind="stable")[::-1].tolist():
            size = lengths[index]
            if not 0 < size <= self.length:
                continue
            for number, left in enumerate(room):
                if size <= left:
                    bins[number].append(index)
                    room[number] -= size
                    break
            else:
                bins.append([index])
                room.append(self.length - size)
        rows = [self._row(batch, members) for members in bins]
        return {name: [row[name] for row in rows] for name in self.names}

    def _row(self, batch: Documents, members: Sequence[int]) -> dict[str, Any]:
        ids = [np.asarray(batch["input_ids"][index], np.int32) for index in members]
        scored = [np.asarray(batch["scored"][index], np.int32) for index in members]
        rest = self.length - sum(map(len, ids))
        # A part like the others, so that the filler is a document of its own when masked.
        ids.append(np.full(rest, self.filler, np.int32))
        scored.append(np.zeros(rest, np.int32))
        return {
            "input_ids": np.concatenate(ids),
            "scored": np.concatenate(scored),
            "position_ids": np.concatenate([np.arange(len(part), dtype=np.int32) for part in ids]),
        }

    def rows(self, tokens: int) -> float:
        return tokens / self.length if tokens <= self.length else 0.0

    @property
    def shortest(self) -> int:
        return 1

    @property
    def longest(self) -> int:
        return self.length

    @property
    def names(self) -> list[str]:
        return ["input_ids", "scored", *(["position_ids"] if self.masking else [])]
