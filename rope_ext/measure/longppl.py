"""LongPPL: perplexity of the tokens alone that need a long context.

A token is a key token when an evaluator finds it much likelier after all of the text before it
than after the last ``short`` tokens (by a factor of e^2), and not unlikely then (above e^-2).
Ordinary perplexity is mostly about the other tokens, which is why it says so little about the use
of long contexts: Fang et al. 2024, arXiv 2410.23771.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from rope_ext.errors import MeasureError, OptionError
from rope_ext.measure.cases import Questions, require_positive
from rope_ext.measure.forward import score
from rope_ext.measure.perplexity import Perplexity
from rope_ext.measure.prompts import Frame

GAIN = 2.0
"""Log likelihood that the long context must add, nats (alpha of the paper)."""
LEAST = -2.0
"""Log likelihood that it must lead to, nats (beta of the paper)."""


@dataclass(frozen=True)
class LongPPL:
    """The task: sliding-window perplexity, less all tokens that are not key tokens.

    Args:
        sliding: the perplexity to restrict; without a stride, windows move by half the shortest
            length.
        evaluator: opens the model that chooses the key tokens, once for all methods.
        who: that model, for a reader of the results.
        short: tokens of the short context; up to a quarter more in fact, so that one forward
            scores many tokens (as in the authors' code).
    """

    name: ClassVar[str] = "longppl"
    kind: ClassVar[str] = "loss"

    sliding: Perplexity
    evaluator: Callable[[], AbstractContextManager[Any]]
    who: str
    short: int = 4096

    def __post_init__(self) -> None:
        require_positive(short_context=self.short)

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        """All windows with a key token in them. It loads and runs the evaluator.

        Raises:
            OptionError: the short context is not shorter than the longest length.
            MeasureError: the texts are too short, or hold no key token.
        """
        if self.short + self.short // 4 >= max(lengths):
            raise OptionError(
                f"short_context={self.short} is too long for lengths up to {max(lengths)}; give a "
                f"shorter one, or longer --lengths"
            )
        stride = self.sliding.stride or min(lengths) // 2
        sliding = replace(self.sliding, protocol="sliding", stride=stride)
        windows = sliding.choose(frame, lengths, seed)
        with self.evaluator() as model:
            keys = [self.keys(model, windows.bos, text) for text in windows.texts]
        count = sum(map(len, keys))
        if not count:
            raise MeasureError(
                f"{self.who} finds no token in the text that needs more than {self.short} tokens "
                f"of context; give another --text or a shorter --short-context"
            )
        cases = list(sliding.slide(windows, sorted(lengths), self.name, keys))
        size = sum(map(len, windows.texts))
        definition = (
            f"perplexity of the {count} of {size} tokens whose log likelihood rises by more than "
            f"{GAIN:g} to above {LEAST:g} when {self.who} sees all of the text instead of the last "
            f"{self.short} tokens (LongPPL, arXiv 2410.23771); a window of each length moving by "
            f"{stride} tokens, bootstrap over documents"
        )
        return Questions(cases, definition)

    def keys(self, model: Any, bos: Sequence[int], text: Sequence[int]) -> set[int]:
        """Places of the key tokens in ``text``."""
        row = [*bos, *text]
        tail = len(row) - 1
        long = score(model, [row], tail)[0][0]
        short = long.clone()  # at the start both contexts are the same
        stride = max(1, self.short // 4)
        for begin in range(self.short + stride, len(row), stride):
            end = min(len(row), begin + stride)
            window = [*bos, *row[max(len(bos), end - stride - self.short) : end]]
            count = end - begin
            short[begin - 1 : end - 1] = score(model, [window], count)[0][0]
        key = (short - long > GAIN) & (-long > LEAST)
        return {int(place) + 1 - len(bos) for place in torch.nonzero(key).flatten()}
