"""Perplexity: ``exp`` of the mean negative log likelihood, each token scored once.

There are four protocols for segments of text (``choose_windows``) and context lengths:

* ``ending``: the same tokens with an increasing context. The windows of all lengths end at the same
  positions and score the same last tokens: 256, or half the shortest length if that is less. Every
  token has at least ``length`` minus that number of tokens before it.
* ``sliding``: a window of ``length`` tokens moves over each segment by ``stride`` tokens. The first
  window scores all of its tokens, each later one its last ``stride``.
* ``start``: all of the first ``length`` tokens of each segment.
* ``huggingface``: ``nll_sum / n_tokens`` on transformers' page "Perplexity of fixed-length models".
  Windows start at every multiple of ``stride`` and score the tokens that no earlier window scored;
  only the first one has the beginning-of-sequence token. As on that page, each window's mean loss
  is weighted by its number of labels minus one.

Otherwise a window is the beginning-of-sequence token (once, if the tokenizer has one) and text;
this token counts towards ``length`` as context, and is never scored. Perplexity is weighted by
tokens.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Literal

from rope_eval.cases import Case, Questions
from rope_eval.data.prompts import Frame, beginning, encode, joined
from rope_eval.data.text import MOST_REPEATED, python_library, read_texts, share_of_copies
from rope_eval.settings import Settings
from rope_eval.tasks.base import Kind, Task, option, register
from rope_ext.command.arguments import parse_length
from rope_ext.errors import MeasureError, OptionError

SCORED = 256
STRIDING = ("sliding", "huggingface")
_SPAN = 12  # tokens


@dataclass(frozen=True)
class Windows:
    """Segments of text, as long as required for the longest window, and the document of each.

    ``texts`` are token ids without ``bos``, which is one token or none; the last ``scored`` tokens
    of every window count, and documents are ``joined`` if too few were long enough.
    """

    texts: tuple[tuple[int, ...], ...]
    bos: tuple[int, ...]
    scored: int
    joined: bool
    documents: tuple[int, ...]

    def at(self, length: int) -> list[tuple[int, ...]]:
        return [self.bos + text[len(self.bos) - length :] for text in self.texts]


def choose_windows(
    documents: Sequence[Sequence[int]],
    lengths: Sequence[int],
    count: int,
    bos: Sequence[int],
    eos: int | None,
    seed: int,
    option: str = "--lengths",
) -> Windows:
    """Choose up to ``count`` disjoint windows from as many documents as possible.

    If there are fewer, all documents are joined in order, with ``eos`` between them, and split
    instead; a window is then of the document in which it ends, where tokens are scored. ``option``
    sets the lengths, for errors.
    """
    size = max(lengths) - len(bos)
    rng = random.Random(f"windows:{seed}")
    places = _cut(documents, size, rng)
    joined = len(places) < count and len(documents) > 1
    texts = documents
    ends = []
    if joined:
        # As models were trained on documents that are packed into rows.
        gap = [] if eos is None else [eos]
        texts = [[token for ids in documents for token in (*ids, *gap)]]
        places = _cut(texts, size, rng)
        ends = list(accumulate(len(ids) + len(gap) for ids in documents))
    if not places:
        raise MeasureError(
            f"the text has {sum(map(len, documents))} tokens, but a window of "
            f"{max(lengths)} is to be measured; give a longer --text or a shorter {option}"
        )
    del places[count:]
    chosen = tuple(tuple(texts[number][at : at + size]) for number, at in places)
    numbers = tuple(bisect_left(ends, at + size) if joined else number for number, at in places)
    return Windows(
        texts=chosen,
        bos=tuple(bos),
        scored=min(SCORED, min(lengths) // 2),
        joined=joined,
        documents=numbers,
    )


def _cut(
    documents: Sequence[Sequence[int]], size: int, rng: random.Random
) -> list[tuple[int, int]]:
    """Return (document, place of ``size`` tokens in it) in random order, one per document first."""
    found: list[tuple[int, int, int]] = []
    for number in rng.sample(range(len(documents)), len(documents)):
        ids = documents[number]
        pieces = len(ids) // size
        start = rng.randint(0, len(ids) - pieces * size)
        for turn, piece in enumerate(rng.sample(range(pieces), pieces)):
            found.append((turn, number, start + piece * size))
    return [(number, at) for _, number, at in sorted(found, key=lambda one: one[0])]


@dataclass(frozen=True)
class Segments(Task):
    """Segments of text with moving windows; ``documents`` are texts instead of ``text``."""

    kind: ClassVar[Kind] = "loss"

    documents: Sequence[str] | None = None
    text: Sequence[Path | str] = option(
        (),
        "file (txt, md, jsonl, parquet), folder or hf:ID/CONFIG:SPLIT; repeatable. Default: the "
        "held-out part of Python's library",
        str,
    )
    windows: int = option(16, "maximum number of text segments")
    stride: int | None = option(
        None, "stride of the sliding window in tokens; implies --protocol sliding", parse_length
    )

    def parts(self, settings: Settings) -> Sequence[Task]:
        """Read the texts, so that errors in them are reported first; returns the task."""
        self._texts  # noqa: B018
        return [self]

    @cached_property
    def _texts(self) -> Sequence[str]:
        if self.documents is not None:
            return self.documents
        return read_texts(self.text) if self.text else python_library("held_out")

    def choose(
        self, frame: Frame, lengths: Sequence[int], seed: int, option: str = "--lengths"
    ) -> Windows:
        """Return segments of text, as long as the longest window; see :func:`choose_windows`."""
        shortest = min(lengths)
        if shortest < 2:
            raise OptionError(
                f"length {shortest} leaves nothing to score; give {option} of 2 or more"
            )
        if self.stride is not None and self.stride > shortest - self._unscored:
            raise OptionError(
                f"stride={self.stride} would skip tokens at length {shortest}; give a smaller one"
            )
        documents = [encode(frame.tokenizer, text) for text in self._texts]
        eos = frame.tokenizer.eos_token_id
        return choose_windows(
            documents,
            lengths,
            count=self.windows,
            bos=beginning(frame.tokenizer),
            eos=eos,
            seed=seed,
            option=option,
        )

    _unscored: ClassVar[int] = 1  # first tokens of a window

    def slide(
        self, windows: Windows, lengths: Sequence[int], keys: Sequence[Container[int]] | None = None
    ) -> Iterator[Case]:
        """Yield windows that move over each segment and score each of its tokens once.

        ``keys`` are the positions of tokens to score in each segment; None: all.
        """
        bos = windows.bos
        stride = self.stride or 1
        for length in lengths:
            size = length - len(bos)
            number = 0
            for index, text in enumerate(windows.texts):
                done = 1 - len(bos)  # the first token has nothing before it
                end = size
                while done < len(text):
                    end = min(end, len(text))
                    begin = max(0, end - size)
                    scored = (
                        [] if keys is None else [p for p in range(done, end) if p in keys[index]]
                    )
                    if keys is None or scored:
                        only = tuple(len(bos) + place - begin for place in scored)
                        ids = bos + text[begin:end]
                        group = windows.documents[index]
                        yield self._case(
                            length, number, ids, count=end - done, group=group, only=only
                        )
                    number += 1
                    done = end
                    end += stride

    def _notes(
        self, windows: Windows, lengths: Sequence[int], cases: Sequence[Case]
    ) -> Iterator[str]:
        """Yield what limits the result: joined or copied documents, one document, few windows."""
        copies = share_of_copies(windows.texts, _SPAN)
        if copies > MOST_REPEATED:
            yield (
                f"{copies:.0%} of the text is repeated (spans of {_SPAN} tokens that occur "
                f"earlier), so that its documents are not independent and intervals are too "
                f"narrow; give a --text without copies"
            )
        if windows.joined:
            yield (
                f"too few documents of {max(lengths)} tokens: documents are joined, so that a "
                f"window may hold unrelated texts"
            )
        if len({case.group for case in cases}) == 1:
            yield "all windows are from one document, so there is no interval"
        if len(windows.texts) < self.windows:
            yield (
                f"the text gives only {len(windows.texts)} windows of {max(lengths)} tokens "
                f"({self.windows} asked for)"
            )

    def _case(
        self, length: int, number: int, ids: Any, count: int, group: int, **more: Any
    ) -> Case:
        return Case(
            task=self.name,
            length=length,
            seed=number,
            mode="loss",
            count=count,
            ids=joined(ids),
            group=group,
            **more,
        )


@register
@dataclass(frozen=True)
class Perplexity(Segments):
    """Perplexity on segments of text; the protocol is ``sliding`` where only a stride is given."""

    name: ClassVar[str] = "perplexity"

    protocol: Literal["ending", "sliding", "start", "huggingface"] | None = option(
        None,
        "ending (the same tokens with an increasing context), sliding, start, or huggingface "
        "(nll_sum / n_tokens, as transformers documents it); default: ending",
    )

    def __post_init__(self) -> None:
        protocol = self.protocol or ("ending" if self.stride is None else "sliding")
        object.__setattr__(self, "protocol", protocol)  # shown in reports
        super().__post_init__()
        if protocol in STRIDING and self.stride is None:
            raise OptionError(f"--protocol {protocol} needs --stride TOKENS; give both")
        if protocol not in STRIDING and self.stride is not None:
            raise OptionError(
                f"--stride does not apply to the protocol {protocol}, but to {', '.join(STRIDING)}"
            )

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        windows = self.choose(frame, lengths, seed)
        lengths = sorted(lengths)
        plan = {"ending": self._ending, "sliding": self.slide, "start": self._ending}
        cases = list(plan.get(str(self.protocol), self._huggingface)(windows, lengths))
        return Questions(cases, self._define(windows), tuple(self._notes(windows, lengths, cases)))

    @property
    def _unscored(self) -> int:
        return 0 if self.protocol == "huggingface" else 1

    def _define(self, windows: Windows) -> str:
        count = len(windows.texts)
        source = ", ".join(map(str, self.text))
        source = source or "Python's standard library (held-out files)"
        source = source if self.documents is None else "the given documents"
        segments = f"{count} segment{'s' * (count != 1)} of {source}, intervals over documents"
        what = {
            "huggingface": (
                f"windows that move by {self.stride} tokens, from nll_sum / n_tokens as "
                f"transformers documents it (--protocol huggingface)"
            ),
            "ending": (
                f"the last {windows.scored} tokens of windows of each length; every length scores "
                f"the same tokens, only the context before them grows"
            ),
            "sliding": (
                f"all tokens of each segment, a window of each length moving {self.stride} tokens"
            ),
            "start": "the first tokens of each segment, as many as the length",
        }[str(self.protocol)]
        return f"token-weighted perplexity of {what}; {segments}"

    def _ending(self, windows: Windows, lengths: Sequence[int]) -> Iterator[Case]:
        for length in lengths:
            for number, text in enumerate(windows.texts):
                bos = windows.bos
                group = windows.documents[number]
                if self.protocol == "start":
                    ids = bos + text[: length - len(bos)]
                    count = len(ids) - max(len(bos), 1)
                else:
                    ids = bos + text[len(bos) - length :]
                    count = windows.scored
                yield self._case(length, number, ids, count=count, group=group)

    def _huggingface(self, windows: Windows, lengths: Sequence[int]) -> Iterator[Case]:
        """Yield windows as transformers' page on perplexity moves them, with its weights."""
        for length in lengths:
            number = 0
            for text, group in zip(windows.texts, windows.documents, strict=True):
                row = windows.bos + text
                done = 0
                for begin in range(0, len(row), self.stride or 1):
                    end = min(begin + length, len(row))
                    count = end - max(done, begin + 1)  # the first token has no context
                    # The page subtracts one label per window; only windows without overlap lose one
                    # to the label shift.
                    weight = end - done - 1
                    if count and weight:
                        ids = row[begin:end]
                        yield self._case(
                            length, number, ids, count=count, group=group, weight=weight
                        )
                    number += 1
                    done = end
                    if end == len(row):
                        break
