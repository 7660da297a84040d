"""Supervised data: conversations with a loss on the answers only.

A row has one of these shapes:

* ``messages``: objects with ``role`` and ``content``, and optionally ``tools`` beside them;
* ``conversations`` (ShareGPT): objects with ``from`` and ``value``;
* ``prompt`` and ``completion``: two texts, or two lists of messages;
* ``instruction``, ``output`` or ``response``, and optionally ``input`` or ``context``: three texts.

A text of prompt and completion is used as it is. All else goes through the chat template of the
tokenizer.
"""

from __future__ import annotations

import copy
import importlib
import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recipes.contents import digest_of
from recipes.files import encodable
from recipes.stream import DataError, Documents
from rope_eval.data.prompts import beginning
from rope_eval.data.templates import TemplateError, Templates
from rope_ext.errors import OptionError, first_line

_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "function": "tool"}
_SHAPES = "messages, conversations, prompt with completion, or instruction with output"


def conversation_of(row: Mapping[str, Any]) -> str:
    """Return a row as JSON: ``messages``, or a ``prompt`` and a ``completion`` of text.

    ``first`` is the number of messages before those that are answered.

    Raises:
        DataError: the row has another shape.
    """
    try:
        return encodable(json.dumps(_conversation(row), ensure_ascii=False))
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"a row is not a conversation ({type(error).__name__}: {first_line(error)}): "
            f"{reprlib.repr(dict(row))[:80]}; give rows with {_SHAPES}"
        ) from None


def _conversation(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row of a known shape to messages, or to a prompt and its completion."""
    given = _without_none(row)
    more = {"tools": given["tools"]} if given.get("tools") else {}
    if "messages" in given:
        return {"messages": _messages(given["messages"]), "first": 0, **more}
    if "conversations" in given:
        system = [{"from": "system", "value": given["system"]}] if given.get("system") else []
        return {"messages": _messages([*system, *given["conversations"]]), "first": 0, **more}
    if "completion" in given:
        prompt = given["prompt"]
        completion = given["completion"]
        if isinstance(prompt, str):
            if not isinstance(completion, str):
                raise TypeError("prompt is a text, and completion is not")
            return {"prompt": prompt, "completion": completion}
        before = _messages(prompt)
        return {"messages": before + _messages(completion), "first": len(before), **more}
    if "instruction" in given:
        context = given.get("input") or given.get("context")  # Alpaca's name, and Dolly's
        answer = given["output"] if "output" in given else given["response"]
        instruction = "\n\n".join(filter(None, (given["instruction"], context)))
        pair = (("user", instruction), ("assistant", answer))
        messages = [{"role": role, "content": content} for role, content in pair]
        return {"messages": messages, "first": 0}
    raise DataError(
        f"a row has the columns {', '.join(map(str, row)) or 'none'}, which make no conversation; "
        f"give rows with {_SHAPES}, or --format text"
    )


def is_conversation(row: Mapping[str, Any]) -> bool:
    """Whether a row has one of the shapes above."""
    try:
        conversation_of(row)
    except DataError:
        return False
    return True


def _without_none(value: Any) -> Any:
    """Without what Arrow adds where rows have different keys, also inside of tools."""
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


def _messages(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for each in given:
        message = dict(each.items())
        if "from" in message:
            role = message.pop("from")
            message = {"role": _ROLES.get(role, role), "content": message.pop("value"), **message}
        message["role"]  # a KeyError names what is missing
        found.append(message)
    return found


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
    drops earlier reasoning (Qwen3) is replaced by TRL's template for training.

    A template is a program from elsewhere, so a process with limits renders it, one per batch.
    """

    tokenizer: Any
    names = ("input_ids", "scored")

    def __call__(self, batch: Mapping[str, Sequence[str | None]]) -> dict[str, Any]:
        ids = []
        scored = []
        with Templates(_Programs(self.tokenizer)) as templates:
            conversations = _Conversations(self.tokenizer, templates)
            for text in batch["text"]:
                tokens, answers = conversations.tokenize(json.loads(text)) if text else ([], [])
                used = any(answers)  # a conversation without an answer teaches nothing
                ids.append(tokens if used else [])
                scored.append(answers if used else [])
        digests = [digest_of(text or "") for text in batch["text"]]
        counts = [len(tokens) for tokens in ids]
        return {"input_ids": ids, "scored": scored, "tokens": counts, "digest": digests}


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
        if first == 0 and _marks_answers(self.tokenizer.chat_template):
            return self._marked(messages, options)
        whole = self._rendered(messages, options)
        spans = []
        for at in range(first, len(messages)):
            if messages[at]["role"] != "assistant":
                continue
            span = self._answer(whole, messages[: at + 1], options)
            if span is None:
                return self._by_training_template(messages, first, options)
            spans.append(span)
        return self._in_spans(whole, spans)

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
        if template is None or first:
            raise DataError(
                f"the chat template changes earlier messages when later ones follow, so the "
                f"answers of {str(messages[0])[:60]} cannot be found; install trl, which has "
                f"templates for training of known models, give a chat template with generation "
                f"blocks, or give texts of prompt and completion"
            )
        return self._marked(messages, {**options, "chat_template": template})

    def _marked(self, messages: Any, options: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        text, spans = self._called(messages, "render_marked", messages, **options)
        return self._in_spans(text, spans)

    def _rendered(self, messages: Any, options: Mapping[str, Any], **more: Any) -> str:
        if not messages:  # an answer at the beginning
            return ""
        return self._called(messages, "render", messages, **options, **more)

    def _called(self, messages: Any, name: str, *given: Any, **options: Any) -> Any:
        """Call a method of :class:`_Programs` for ``messages``."""
        try:
            return self.templates(name, *given, **options)
        except TemplateError as error:  # also raised on purpose, as for the order of roles
            raise DataError(
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
