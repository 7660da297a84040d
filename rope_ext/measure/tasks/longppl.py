"""LongPPL: perplexity of the tokens alone that need a long context.

A token is a key token when an evaluator finds it much likelier after all of the text before it
than after the last ``short`` tokens (by a factor of e^2), and not unlikely then (above e^-2).
Ordinary perplexity is mostly about the other tokens, which is why it says so little about the use
of long contexts: Fang et al. 2024, arXiv 2410.23771.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from rope_ext.errors import MeasureError, OptionError
from rope_ext.measure import models
from rope_ext.measure.arguments import parse_length
from rope_ext.measure.cases import Questions, require_positive
from rope_ext.measure.forward import score
from rope_ext.measure.prompts import Frame
from rope_ext.measure.settings import UNPATCHED, Settings
from rope_ext.measure.systems import checked_methods, under
from rope_ext.measure.tasks.base import option, register
from rope_ext.measure.tasks.perplexity import Stretches

GAIN = 2.0
"""Log likelihood that the long context must add, nats (alpha of the paper)."""
LEAST = -2.0
"""Log likelihood that it must lead to, nats (beta of the paper)."""


@register
@dataclass(frozen=True)
class LongPPL(Stretches):
    """The task: sliding-window perplexity, less all tokens that are not key tokens.

    Args:
        documents, text, windows, min_context: as of ``Stretches``.
        stride: tokens; by default, half the shortest length.
        evaluator: folder or Hub id of the model that chooses the key tokens, once for all
            methods; None: the measured model under the first method.
        short_context: tokens of it; up to a quarter more in fact, so that one forward scores
            many tokens (as in the authors' code).
        opened: opens that model, in place of ``evaluator``.
        who: that model, for a reader of the results.
    """

    name: ClassVar[str] = "longppl"

    evaluator: str | None = option(
        None, "model that chooses those tokens; default: that of the first method"
    )
    short_context: int = option(4096, "tokens that are not enough for them", parse_length)
    opened: Callable[[], AbstractContextManager[Any]] | None = None
    who: str = "the model"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(short_context=self.short_context)

    def parts(self, settings: Settings) -> Sequence[Stretches]:
        """With its texts, and with the model that chooses the key tokens."""
        if self.opened is not None:
            return super().parts(settings)
        names = [name for name in settings.methods if name != UNPATCHED]
        who = self.evaluator or (f"the model with {names[0]}" if names else "the model")
        made = replace(self, opened=lambda: self._open(settings, names[:1]), who=who)
        return made.parts(settings)

    @contextmanager
    def _open(self, given: Settings, names: Sequence[str]) -> Iterator[Any]:
        if self.evaluator is None and len(given.models) > 1:
            raise OptionError("several models need one --evaluator that chooses the key tokens")
        if self.evaluator is not None:
            names_of = (self.evaluator, *given.models)
            first, *others = [models.load_tokenizer(name).get_vocab() for name in names_of]
            if any(vocabulary != first for vocabulary in others):
                raise OptionError("the --evaluator must have the tokenizer of the model")
            yield models.load_model(
                self.evaluator, given.dtype, given.device, given.attn, as_saved=True
            )
            return
        model = models.load_model(
            given.models[0], given.dtype, given.device, given.attn, given.adapter
        )
        if not names:
            yield model
            return
        own = {name: given.options[name] for name in names if name in given.options}
        methods = checked_methods(names, given.factor, own, given.adapter, given.force)
        [(name, values)] = methods.items()
        with under(model, name, values, given.compose, given.trained_length):
            yield model

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        """All windows with a key token in them. It loads and runs the evaluator.

        Raises:
            OptionError: the short context is not shorter than the longest length.
            MeasureError: the texts are too short, or hold no key token.
        """
        if self.short_context + self.short_context // 4 >= max(lengths):
            raise OptionError(
                f"short_context={self.short_context} is too long for lengths up to {max(lengths)}; "
                f"give a shorter one, or longer --lengths"
            )
        sliding = self if self.stride else replace(self, stride=min(lengths) // 2)
        windows = sliding.choose(frame, lengths, seed)
        with self.opened() as model:
            keys = [self.keys(model, windows.bos, text) for text in windows.texts]
        count = sum(map(len, keys))
        if not count:
            raise MeasureError(
                f"{self.who} finds no token in the text that needs more than "
                f"{self.short_context} tokens of context; give another --text or a shorter "
                f"--short-context"
            )
        cases = list(sliding.slide(windows, sorted(lengths), keys))
        size = sum(map(len, windows.texts))
        definition = (
            f"perplexity of the {count} of {size} tokens whose log likelihood rises by more than "
            f"{GAIN:g} to above {LEAST:g} when {self.who} sees all of the text instead of the last "
            f"{self.short_context} tokens (LongPPL, arXiv 2410.23771); a window of each length "
            f"moving by {sliding.stride} tokens, bootstrap over documents"
        )
        return Questions(cases, definition)

    def keys(self, model: Any, bos: Sequence[int], text: Sequence[int]) -> set[int]:
        """Places of the key tokens in ``text``."""
        row = [*bos, *text]
        tail = len(row) - 1
        long = score(model, [row], tail)[0][0]
        short = long.clone()  # at the start both contexts are the same
        stride = max(1, self.short_context // 4)
        for begin in range(self.short_context + stride, len(row), stride):
            end = min(len(row), begin + stride)
            window = [*bos, *row[max(len(bos), end - stride - self.short_context) : end]]
            count = end - begin
            short[begin - 1 : end - 1] = score(model, [window], count)[0][0]
        key = (short - long > GAIN) & (-long > LEAST)
        return {int(place) + 1 - len(bos) for place in torch.nonzero(key).flatten()}
