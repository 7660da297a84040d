"""LongPPL: perplexity of the tokens that need a long context.

A token is a key token if an evaluator finds it much more likely after all of the preceding text
than after only the last ``short`` tokens (by a factor of e^2), and then not unlikely (above e^-2).
Perplexity is dominated by the other tokens, so it says little about the use of long contexts: Fang
et al. 2024, arXiv 2410.23771.

Unlike in the authors' code (PKU-ML/LongPPL), the beginning-of-sequence token precedes every
context, so that tokens that only need a start token do not count as key tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from rope_eval.cases import Questions
from rope_eval.data.prompts import Frame
from rope_eval.settings import BEFORE, Settings
from rope_eval.tasks.base import Task, option, register
from rope_eval.tasks.perplexity import Segments
from rope_ext.command.arguments import UNPATCHED, parse_length
from rope_ext.errors import MeasureError, OptionError

GAIN = 2.0
"""Minimum gain in log likelihood from the long context, nats (alpha in the paper)."""
LEAST = -2.0
"""Minimum log likelihood with the long context, nats (beta in the paper)."""


@register
@dataclass(frozen=True)
class LongPPL(Segments):
    """Sliding-window perplexity of key tokens only.

    By default, the stride is half the shortest length. The short context is up to a quarter
    longer than specified, so that a forward scores many tokens, as in the authors' code. ``opened``
    loads the evaluator, ``who`` is its name for the results, and ``judges_itself`` is True if it is
    a measured model.
    """

    name: ClassVar[str] = "longppl"

    evaluator: str | None = option(
        None, "model with the same tokenizer that chooses key tokens; default: the first method's"
    )
    short_context: int = option(
        4096, "tokens of context that key tokens need more of", parse_length
    )
    opened: Callable[[], AbstractContextManager[Any]] | None = None
    who: str = "the model"
    judges_itself: bool = False

    def parts(self, settings: Settings) -> Sequence[Task]:
        from rope_ext.saving import checkpoints as models  # not for --help: torch

        if self.opened is not None:
            return super().parts(settings)
        if settings.url:
            raise OptionError(
                "longppl needs a model in this process; measure perplexity, or leave out --url"
            )
        names = [name for name in settings.methods if name not in (UNPATCHED, BEFORE)]
        who = self.evaluator or (f"the model with {names[0]}" if names else "the model")
        itself = self.evaluator in (None, *settings.models)
        words = [] if itself else [models.load_tokenizer(str(self.evaluator)).get_vocab()]
        for name in settings.models if words else ():
            if models.load_tokenizer(name).get_vocab() not in words:
                raise OptionError(
                    f"{who} has another tokenizer than {name}; give another --evaluator, or none"
                )
        opened = partial(self._open, settings, names[:1])
        return replace(self, opened=opened, who=who, judges_itself=itself).parts(settings)

    @contextmanager
    def _open(self, given: Settings, names: Sequence[str]) -> Iterator[Any]:
        from rope_eval.systems import under
        from rope_ext.command.method_options import checked_methods
        from rope_ext.saving import checkpoints as models

        how: dict[str, Any] = {"dtype": given.dtype, "device": given.device, "attn": given.attn}
        if self.evaluator is not None:
            yield models.load_model(self.evaluator, as_saved=True, **how)
            return
        first, *others = given.models
        if others:
            raise OptionError("several models need one --evaluator that chooses the key tokens")
        model = models.load_model(first, adapter=given.adapter, **how)
        if not names:
            yield model
            return
        own = {name: given.options[name] for name in names if name in given.options}
        methods = checked_methods(
            names, given.factor, options=own, adapter=given.adapter, force=given.force
        )
        [(name, values)] = methods.items()
        with under(
            model, name, options=values, compose=given.compose, trained_length=given.trained_length
        ):
            yield model

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        """Return all windows that contain a key token; loads and runs the evaluator."""
        if self.short_context + self.short_context // 4 >= max(lengths):
            raise OptionError(
                f"short_context={self.short_context} is too long for lengths up to {max(lengths)}; "
                f"give a shorter one, or longer --lengths"
            )
        sliding = self if self.stride else replace(self, stride=min(lengths) // 2)
        windows = sliding.choose(frame, lengths, seed)
        assert self.opened is not None  # of ``parts``
        with self.opened() as model:
            keys = [self.keys(model, windows.bos, text) for text in windows.texts]
        count = sum(map(len, keys))
        if not count:
            raise MeasureError(
                f"{self.who} finds no token in the text that needs more than {self.short_context} "
                f"tokens of context; give another --text or a shorter --short-context"
            )
        cases = list(sliding.slide(windows, sorted(lengths), keys))
        size = sum(map(len, windows.texts))
        definition = (
            f"perplexity of the {count} of {size} tokens whose log likelihood rises by more than "
            f"{GAIN:g} to above {LEAST:g} when {self.who} sees all of the text instead of the last "
            f"{self.short_context} tokens (LongPPL, arXiv 2410.23771); a window of each length "
            f"moving by {sliding.stride} tokens, after a start token; intervals over documents"
        )
        note = (
            f"longppl: {self.who} chooses the tokens that it is judged by, which favors it; give "
            f"--evaluator a stronger model"
        )
        notes = (*self._notes(windows, lengths, cases), *((note,) if self.judges_itself else ()))
        return Questions(cases, definition, notes)

    def keys(self, model: Any, bos: Sequence[int], text: Sequence[int]) -> set[int]:
        """Return the places in ``text`` of the tokens that a long context makes much more likely.

        ``bos`` and ``text`` are token ids; see ``GAIN`` and ``LEAST``.
        """
        from rope_eval.forward import score

        row = [*bos, *text]
        long = score(model, [row], len(row) - 1)[0][0]
        short = long.clone()  # at the start, both contexts are equal
        # One forward scores this many tokens, with the short context before the first of them.
        stride = max(1, self.short_context // 4)
        for begin in range(self.short_context + stride, len(row), stride):
            end = min(len(row), begin + stride)
            window = [*bos, *row[max(len(bos), end - stride - self.short_context) : end]]
            short[begin - 1 : end - 1] = score(model, [window], end - begin)[0][0]
        key = (short - long > GAIN) & (-long > LEAST)
        return {int(place) + 1 - len(bos) for place in key.nonzero().flatten()}
