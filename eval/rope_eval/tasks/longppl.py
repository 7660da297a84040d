"""LongPPL: perplexity of the tokens that need a long context.

A token is a key token if an evaluator finds it much more likely after all of the preceding text
than after only the last ``short`` tokens (by a factor of e^2), and then not unlikely (above e^-2).
Perplexity is dominated by the other tokens, so it says little about the use of long contexts: Fang
et al. 2024, arXiv 2410.23771.

There are two variants. ``official`` is what the authors' code computes (PKU-ML/LongPPL,
``longppl/longppl.py``). Both models read the detokenized text, the evaluator with its special
tokens and the measured model without; key tokens are passed on as slices of characters, also
between equal tokenizers, so if one token of a character is a key token, all are. At the longest
length, where one window contains all of the text, the result equals theirs. A key token at the very
start is left out, because nothing precedes it (the authors' code uses the last loss instead).
``start`` puts the beginning-of-sequence token before every context, so that tokens that only need a
start token do not count as key tokens.

An evaluator with a different tokenizer tokenizes the text itself; a token of the measured model is
a key token if it is within one of the evaluator's (as in the authors' code).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from rope_eval.cases import Questions, require_positive
from rope_eval.data.prompts import Frame, beginning
from rope_eval.settings import BEFORE, UNPATCHED, Settings
from rope_eval.tasks.base import Task, option, register, require_one_of
from rope_eval.tasks.perplexity import Segments, Windows
from rope_ext.command.arguments import parse_length
from rope_ext.errors import MeasureError, OptionError

VARIANTS = {"start": "a start token before every one", "official": "as the authors' code"}
GAIN = 2.0
"""Minimum gain in log likelihood from the long context, nats (alpha in the paper)."""
LEAST = -2.0
"""Minimum log likelihood with the long context, nats (beta in the paper)."""

Slice = tuple[int, int]


def within(places: Sequence[Slice], slices: Sequence[Slice]) -> set[int]:
    """Return which of ``places`` are entirely inside a slice; adjacent slices are merged."""
    whole: list[Slice] = []
    for begin, end in slices:
        if whole and whole[-1][1] == begin:
            begin, _ = whole.pop()
        whole.append((begin, end))
    found, at = set(), 0
    for index, (begin, end) in enumerate(places):
        # As in the authors' ``cal_overlap``.
        while at < len(whole) and begin >= whole[at][0] and whole[at][1] < end:
            at += 1
        if at < len(whole) and begin >= whole[at][0]:
            found.add(index)
    return found


def _placed(tokenizer: Any, string: str, special: bool = False) -> tuple[list[int], list[Slice]]:
    """Tokenize a text, with the characters of each token; ``special``: with special tokens."""
    if not tokenizer.is_fast:
        raise OptionError(
            f"the tokenizer of {tokenizer.name_or_path} does not report which characters its "
            f"tokens cover; give --longppl-variant start and an --evaluator with the tokenizer "
            f"of the model"
        )
    made = tokenizer(string, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    return made["input_ids"], [tuple(place) for place in made["offset_mapping"]]


@register
@dataclass(frozen=True)
class LongPPL(Segments):
    """Sliding-window perplexity of key tokens only.

    By default, the stride is half the shortest length. The short context is up to a quarter
    longer than specified, so that a forward scores many tokens, as in the authors' code. ``opened``
    loads the evaluator, ``who`` is its name for the results, ``reader`` its tokenizer (None: that
    of the measured model), and ``judges_itself`` is True if it is a measured model.
    """

    name: ClassVar[str] = "longppl"

    evaluator: str | None = option(
        None, "model that chooses key tokens; default: the first method's"
    )
    short_context: int = option(
        4096, "tokens of context that key tokens need more of", parse_length
    )
    longppl_variant: Literal["start", "official"] = option(
        "start", "start (a start token before every context) or official (as in the authors' code)"
    )
    opened: Callable[[], AbstractContextManager[Any]] | None = None
    who: str = "the model"
    reader: Any | None = None
    judges_itself: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(short_context=self.short_context)
        require_one_of(longppl_variant=(self.longppl_variant, tuple(VARIANTS)))

    def parts(self, settings: Settings) -> Sequence[Task]:
        """Load the texts and the model that selects the key tokens."""
        from rope_ext.saving import checkpoints as models  # not for --help: torch

        if self.opened is not None:
            return super().parts(settings)
        names = [name for name in settings.methods if name not in (UNPATCHED, BEFORE)]
        who = self.evaluator or (f"the model with {names[0]}" if names else "the model")
        made = replace(
            self,
            opened=lambda: self._open(settings, names[:1]),
            who=who,
            reader=None if self.evaluator is None else models.load_tokenizer(self.evaluator),
            judges_itself=self.evaluator in (None, *settings.models),
        )
        return made.parts(settings)

    @contextmanager
    def _open(self, given: Settings, names: Sequence[str]) -> Iterator[Any]:
        from rope_eval.systems import under
        from rope_ext.command.method_options import checked_methods
        from rope_ext.saving import checkpoints as models

        how = (given.dtype, given.device, given.attn)
        if self.evaluator is not None:
            yield models.load_model(self.evaluator, *how, as_saved=True)
            return
        first, *others = given.models
        if others:
            raise OptionError("several models need one --evaluator that chooses the key tokens")
        model = models.load_model(first, *how, given.adapter)
        if not names:
            yield model
            return
        own = {name: given.options[name] for name in names if name in given.options}
        methods = checked_methods(names, given.factor, own, given.adapter, given.force)
        [(name, values)] = methods.items()
        with under(model, name, values, given.compose, given.trained_length):
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
        reader = frame.tokenizer if self.reader is None else self.reader
        if self.opened is None:
            raise RuntimeError("LongPPL has no model to choose key tokens; call parts() first")
        if self._official or reader.get_vocab() != frame.tokenizer.get_vocab():
            windows, keys = self._by_characters(self.opened, frame.tokenizer, reader, windows)
        else:
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
            f"moving by {sliding.stride} tokens, {VARIANTS[self.longppl_variant]}, intervals over "
            f"documents"
        )
        note = (
            f"longppl: {self.who} chooses the tokens that it is judged by, which favors it; give "
            f"--evaluator a stronger model"
        )
        notes = (*self._notes(windows, lengths, cases), *((note,) if self.judges_itself else ()))
        return Questions(cases, definition, notes)

    @property
    def _official(self) -> bool:
        return self.longppl_variant == "official"

    def _by_characters(
        self,
        opened: Callable[[], AbstractContextManager[Any]],
        tokenizer: Any,
        reader: Any,
        windows: Windows,
    ) -> tuple[Windows, list[set[int]]]:
        """Return windows as tokenized for the measured model, and the key tokens in each.

        Each model's own tokenizer is applied to the texts.
        """
        strings = [tokenizer.decode(list(text)) for text in windows.texts]
        bos = () if self._official else beginning(reader)
        read = [_placed(reader, string, special=self._official) for string in strings]
        own = [_placed(tokenizer, string) for string in strings]
        with opened() as model:
            marked = [
                [places[key] for key in sorted(self.keys(model, bos, ids))] for ids, places in read
            ]
        # At the edges of an excerpt, words may become more or fewer tokens.
        most = len(windows.texts[0])
        pairs = zip(own, marked, strict=True)
        keys = [within(places[:most], slices) for (_, places), slices in pairs]
        if self._official:
            windows, keys = replace(windows, bos=()), [found - {0} for found in keys]
        return replace(windows, texts=tuple(tuple(ids[:most]) for ids, _ in own)), keys

    def keys(self, model: Any, bos: Sequence[int], text: Sequence[int]) -> set[int]:
        """Return the positions of key tokens in ``text``."""
        from rope_eval.forward import score

        row = [*bos, *text]
        long = score(model, [row], len(row) - 1)[0][0]
        short = long.clone()  # at the start, both contexts are equal
        stride = max(1, self.short_context // 4)
        for begin in range(self.short_context + stride, len(row), stride):
            end = min(len(row), begin + stride)
            if self._official:
                window = row[begin - self.short_context : end]
            else:
                window = [*bos, *row[max(len(bos), end - stride - self.short_context) : end]]
            short[begin - 1 : end - 1] = score(model, [window], end - begin)[0][0]
        key = (short - long > GAIN) & (-long > LEAST)
        return {int(place) + 1 - len(bos) for place in key.nonzero().flatten()}
