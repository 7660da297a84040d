"""Objectives for tables and options: losses on a text, and on answers hidden in one.

Windows of a text measure how well a model continues it. The answer tokens of needles measure
whether it finds distant information: LongRoPE2 (arXiv 2502.20082, section 3.2) searches with their
loss alone, because most other tokens hardly need a long context.
"""

from __future__ import annotations

import logging
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from rope_eval.cases import digest
from rope_eval.data.prompts import Frame, blanks, encode
from rope_eval.data.text import read_texts
from rope_eval.data.words import NOUNS
from rope_eval.forward import cost, score
from rope_eval.tasks.passkey import ASK, FILLER, INTRO, LEAD, NEEDLE
from rope_eval.tasks.perplexity import Perplexity
from rope_ext.errors import MeasureError, OptionError
from rope_ext.rotary.sites import evaluating, unwrap

HAY = ("filler", "text")
MOST_REPEATED = 0.2
"""Largest share of repeated text; see :func:`repeated_share`."""
_SPAN = 50  # characters
_DIGITS = 5
_logger = logging.getLogger("rope_ext")
Advance = Callable[[float], None]
"""Told the work (:func:`cost`) of every finished forward."""


@dataclass(frozen=True)
class Prompt:
    """A key hidden in ``hay``, asked for at the end: the last ``count`` of ``ids`` spell it."""

    hay: str
    ids: tuple[int, ...]
    count: int

    @property
    def length(self) -> int:
        """Tokens, with the answer."""
        return len(self.ids)


@dataclass(frozen=True)
class Rows:
    """Windows of a text, all of the same length, and the index of the document of each."""

    windows: tuple[tuple[int, ...], ...] = ()
    documents: tuple[int, ...] = ()

    def by_document(self, values: Sequence[float]) -> list[list[float]]:
        """Values of the windows, grouped by document."""
        groups: dict[int, list[float]] = {}
        for document, value in zip(self.documents, values, strict=True):
            groups.setdefault(document, []).append(value)
        return list(groups.values())

    def some(self, numbers: Iterable[int]) -> Rows:
        """The windows with these indices."""
        kept = list(numbers)
        return Rows(*(tuple(part[i] for i in kept) for part in (self.windows, self.documents)))


def read(text: str | os.PathLike[str] | Iterable[str]) -> list[str]:
    """Documents: those given, those of a file, folder or ``hf:ID``; one with line breaks is itself.

    Raises:
        OptionError: it is neither.
        MeasureError: it cannot be read.
    """
    if isinstance(text, str) and "\n" in text:
        return [text]
    if isinstance(text, (str, os.PathLike)):
        return read_texts([os.fspath(text)])
    texts = list(text)
    if not texts or not all(isinstance(each, str) for each in texts):
        raise OptionError("text is not valid; give a path, or documents that are strings")
    return texts


def windows_of(
    tokenizer: Any, texts: Sequence[str], length: int, count: int, seed: int, cure: str
) -> Rows:
    """``count`` windows of ``length`` tokens, from as many documents as possible.

    ``cure`` says in the error which option sets the number, and how to fix it.

    Raises:
        MeasureError: there are fewer, or the text repeats itself.
    """
    task = Perplexity(texts, windows=count, protocol="start")
    found = task.choose(Frame(tokenizer, ()), [length], seed, option="--length")
    if len(found.texts) < count:
        raise MeasureError(
            f"the text has only {len(found.texts)} windows of {length} tokens, and {cure}"
        )
    if found.joined:
        _logger.warning(
            "rope_ext: too few documents of %d tokens: documents are joined, so that a window may "
            "hold unrelated texts",
            length,
        )
    windows = tuple(map(tuple, found.at(length)))
    share = repeated_share([tokenizer.decode(window) for window in windows])
    if share > MOST_REPEATED:
        raise MeasureError(
            f"{share:.0%} of the text is repeated (spans of {_SPAN} characters that occur "
            f"earlier), and at most {MOST_REPEATED:.0%} may be, since results would not carry over "
            f"to other text; give a text without copies"
        )
    return Rows(windows, found.documents)


def repeated_share(texts: Iterable[str]) -> float:
    """The share of spans of 50 characters that occurred before, in the same text or another.

    White space counts as one space. Python's library and Django's documentation have 2 to 5 %, ten
    copies of a text 90 %, and ten copies with every twentieth word changed 50 %.
    """
    flat = (" ".join(text.split()) for text in texts)
    spans = [hash(text[i : i + _SPAN]) for text in flat for i in range(len(text) - _SPAN + 1)]
    return 1 - len(set(spans)) / max(1, len(spans))


def _parts(frame: Frame, hay: str, key: str) -> tuple[Sequence[int], ...]:
    """Head, needle, question with answer, and of the latter the tokens that spell the answer."""
    intro = encode(frame.tokenizer, INTRO) if hay == "filler" else []
    asked, count = frame.whole(ASK, LEAD, key)
    count -= blanks(frame.tokenizer, asked, count)
    needle = encode(frame.tokenizer, NEEDLE.format(key=key))
    return [*frame.head, *intro], needle, asked[len(frame.head) :], asked[-count:]


def shortest(tokenizer: Any, hay: str) -> int:
    """Fewest tokens of a prompt; without a chat template, since one may hold the date."""
    parts = _parts(Frame.from_tokenizer(tokenizer, "no"), hay, "9" * _DIGITS)
    return sum(map(len, parts[:3]))


def prompts_of(
    tokenizer: Any,
    lengths: Sequence[int],
    count: int,
    texts: Sequence[Sequence[int]],
    seed: int,
    needle: str = "number",
) -> tuple[Prompt, ...]:
    """``count`` prompts of each length, alternately in filler and in the text, at all depths.

    A hay in which no prompt of the shortest length fits is left out. ``texts`` are token ids, at
    least of the longest length; ``needle`` is ``number`` or ``word``, as of passkeys.
    """
    frame, prompts = Frame.from_tokenizer(tokenizer, "no"), []
    hays = [hay for hay in HAY if count and shortest(tokenizer, hay) <= min(lengths)]
    for length in lengths:
        filler = encode(tokenizer, "".join(islice(cycle(FILLER), length)))
        for turn, hay in enumerate(hays):
            rng = random.Random(f"needles:{seed}:{hay}:{length}")
            number = len(range(turn, count, len(hays)))
            for index, text in enumerate(islice(cycle(texts), number)):
                depth = (index + rng.random()) / number
                key = "".join(rng.choice("0123456789") for _ in range(_DIGITS))
                key = rng.choice(NOUNS) if needle == "word" else key
                head, hidden, asked, answer = _parts(frame, hay, key)
                room = length - len(head) - len(hidden) - len(asked)
                cut, text = round(depth * room), filler if hay == "filler" else text
                ids = chain(head, text[:cut], hidden, text[cut:room], asked)
                prompts.append(Prompt(hay, tuple(ids), len(answer)))
    return tuple(prompts)


def losses_at_end(
    model: nn.Module, windows: Sequence[Sequence[int]], scored: int, advance: Advance
) -> list[float]:
    """Mean loss of the last ``scored`` tokens of every window in nats; infinite if it is NaN."""
    found: list[float] = []
    for batch in _batches(model, windows, windows):
        losses, _ = score(model, batch, scored)
        found += map(_finite, losses.double().mean(1).tolist())
        advance(len(batch) * cost(len(batch[0])))
    return found


def losses_of_answers(
    model: nn.Module, prompts: Sequence[Prompt], advance: Advance
) -> list[tuple[float, bool]]:
    """Mean loss of every answer in nats, and whether greedy decoding would write it."""
    found: dict[int, tuple[float, bool]] = {}
    for length in sorted({prompt.length for prompt in prompts}):
        numbers = [i for i, prompt in enumerate(prompts) if prompt.length == length]
        for batch in _batches(model, numbers, [prompts[numbers[0]].ids]):
            asked = [prompts[i] for i in batch]
            tail = max(prompt.count for prompt in asked)
            losses, hits = score(model, [prompt.ids for prompt in asked], tail)
            for row, (i, prompt) in enumerate(zip(batch, asked, strict=True)):
                loss = float(losses[row, -prompt.count :].double().mean())
                found[i] = _finite(loss), bool(hits[row, -prompt.count :].all())
            advance(len(batch) * cost(length))
    return [found[i] for i in range(len(prompts))]


def _batches(
    model: nn.Module, rows: Sequence[Any], windows: Sequence[Sequence[int]]
) -> Iterator[Sequence[Any]]:
    """Batches of rows of one length, as large as in an evaluation; always the same together."""
    tokens = 8192 if model.device.type == "cpu" else 32768
    size = max(1, tokens // len(windows[0])) if rows else 1
    yield from (rows[start : start + size] for start in range(0, len(rows), size))


def _finite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def fingerprint(model: nn.Module) -> str:
    """Identifies a model: its configuration, and its losses on some tokens.

    In thousandths of a nat, because other numbers of threads change the last digits.
    """
    plain = cast(PreTrainedModel, model)
    config = cast(PreTrainedModel, unwrap(model)).config.to_dict()
    left = {"_name_or_path", "transformers_version"}
    dtypes = sorted({str(weight.dtype) for weight in model.parameters()})
    with evaluating(model):
        tokens = cast(nn.Embedding, plain.get_input_embeddings()).num_embeddings
        losses, _ = score(model, [tuple(i % tokens for i in range(64))], 63)
    mean = f"{float(losses.double().mean()):.3f}"
    return digest({k: v for k, v in config.items() if k not in left}, dtypes, mean)
