"""Options of ``search`` and ``calibrate``, for the functions and the commands."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from rope_eval.options import option
from rope_eval.settings import require_seed
from rope_eval.tasks.base import require_one_of
from rope_ext.command.arguments import parse_length, parse_lengths, split
from rope_ext.errors import OptionError

if TYPE_CHECKING:
    from rope_ext.methods import YaRN
    from rope_ext.options import SlidingLayers

FEWEST_PROMPTS = 16
"""Minimum number of prompts per length, unless 0: fewer say too little about retrieval."""
FEWEST_SAMPLES = 4
"""Minimum number of deciding windows: fewer differences often have one sign by chance."""
CONFIDENCE = 0.99
"""Confidence of intervals that decide on replacing a default, since many candidates are tried."""


@dataclass(kw_only=True)
class TuneOptions:
    """Options that a search and a calibration share; each field has its help.

    A calibration takes ``samples`` windows and ``prompts`` for each half. ``compose``,
    ``sliding_layers`` and ``original_max_position_embeddings`` are those of :func:`rope_ext.patch`:
    give them again when you patch with the result.

    Raises:
        OptionError: a value is not valid.
    """

    target_length: int
    samples: int
    prompts: int = option(
        16, f"Passkey prompts of each length: at least {FEWEST_PROMPTS}, or 0 for only the text."
    )
    needle: Literal["number", "word"] = option(
        "number", "number, or word: a key that small models can copy.", str
    )
    seed: int = option(0, "Random seed.")
    compose: bool = option(False, "Apply on top of existing RoPE scaling.")
    scored: int | None = None
    sliding_layers: SlidingLayers = "auto"
    original_max_position_embeddings: int | None = option(
        None, "Override the trained length in the config.", int, "--trained-length"
    )

    def __post_init__(self) -> None:
        self._require_whole(target_length=2, samples=1, prompts=0)
        if 0 < self.prompts < FEWEST_PROMPTS:
            raise OptionError(
                f"prompts={self.prompts} is not valid; it must be 0 or at least {FEWEST_PROMPTS}, "
                f"since fewer say too little about retrieval"
            )
        require_one_of(needle=(self.needle, ("number", "word")))
        require_seed(self.seed)

    @property
    def tail(self) -> int:
        """``scored`` with its default."""
        return cast(int, self.scored)

    @property
    def arguments(self) -> dict[str, Any]:
        names = ("compose", "sliding_layers", "original_max_position_embeddings")
        return {name: getattr(self, name) for name in names}

    def _require_whole(self, **least: int) -> None:
        for name, smallest in least.items():
            value = getattr(self, name)
            if type(value) is not int or value < smallest:
                raise OptionError(
                    f"{name}={value!r} is not valid; it must be a whole number of at least "
                    f"{smallest}"
                )


@dataclass(kw_only=True)
class SearchOptions(TuneOptions):
    """Options of :func:`rope_ext.search`, in addition to :class:`TuneOptions`.

    Args:
        population: tables to start with, of each of which another is made ``iterations`` times.
        scored: tokens at the end of each window whose loss counts. None scores half of them: if
            all count, as in the paper, the search gives up the far end for the many tokens before
            it. 0 scores the answers of the prompts alone, as LongRoPE2 does.
        critical: index of the first pair to search, with numbers between the factor and twice the
            factor; pairs below it follow from its number as with an NTK base, as in LongRoPE2.
            None searches all pairs.
        start_tokens: numbers of start tokens to choose from. Values above 0 cannot be exported;
            ``rope_eval.tune.search.START_TOKENS`` has the paper's.
        validation_samples: other windows, on which, with passkey prompts of other keys, the best of
            the tables that evolution found and of those it started from are compared: the best on
            the few windows that rank tables is there partly by chance. YaRN's table is kept unless
            another is better beyond noise and neither its loss of text nor of answers is higher. 0
            skips this.
        start: the YaRN that a table has to beat, as :func:`rope_ext.calibrate` finds it, or where
            that is saved. None tries a few ramps and attention factors.
    """

    samples: int = option(5, "Text windows used to score a table, at least 1.")
    population: int = option(64, "Number of initial tables.")
    iterations: int = option(20, "Number of iterations of evolution.")
    scored: int | None = option(
        None,
        "Number of tokens to score at the end of each window; 0 scores only passkeys. "
        "Default: half.",
        parse_length,
    )
    critical: int | None = option(
        None, "First pair to search; lower pairs follow NTK. Default: all pairs.", int
    )
    start_tokens: Iterable[int] = option(
        (0,),
        "Candidate numbers of start tokens; values above 0 cannot be exported.",
        parse_lengths,
        repeat=False,
    )
    attention_factor: float | None = option(
        None, "Attention factor of every table. Default: searched too.", float
    )
    validation_samples: int = option(
        8, "Text windows for comparing the best tables: 0, or at least 4."
    )
    start: YaRN | str | os.PathLike[str] | None = option(  # noqa: RUF009
        None, "YaRN settings to beat: a calibration.json of rope-ext calibrate.", str
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.start_tokens = tuple(self.start_tokens)
        if self.scored is None:
            self.scored = self.target_length // 2
        self._require_whole(population=5, iterations=1)
        self._require_whole(scored=0 if self.prompts else 1)
        if self.validation_samples:
            self._require_whole(validation_samples=FEWEST_SAMPLES)
        if self.critical is not None:
            self._require_whole(critical=1)


@dataclass(kw_only=True)
class CalibrationOptions(TuneOptions):
    """Options of :func:`rope_ext.calibrate`, in addition to :class:`TuneOptions`.

    ``cost`` is the largest increase of perplexity over the published default that the upper end of
    its interval may show, within the trained length and at the target length.
    """

    samples: int = option(8, f"Text windows in each half, at least {FEWEST_SAMPLES}.")
    options: str | Iterable[str] | None = option(
        None, "Method options to find, such as attention_factor,window. Default: all.", split
    )
    cheap: bool = option(
        False,
        f"For long targets: --samples {FEWEST_SAMPLES} --prompts 0 --options attention_factor.",
    )
    scored: int | None = option(
        None,
        "Number of tokens to score at the end of each window. Default: a quarter.",
        parse_length,
    )
    cost: float = option(0.02, "Largest increase of perplexity, as a share.")

    def __post_init__(self) -> None:
        cheap = {"samples": FEWEST_SAMPLES, "prompts": 0, "options": ("attention_factor",)}
        for name, value in cheap.items() if self.cheap else ():
            if getattr(self, name) == getattr(type(self), name):  # what is given counts
                setattr(self, name, value)
        super().__post_init__()
        if self.scored is None:
            self.scored = max(1, self.target_length // 4)
        self._require_whole(samples=FEWEST_SAMPLES, scored=1)
        if self.options is not None:
            self.options = tuple(split(self.options))
        if self.options == ():
            raise OptionError("options names none; name some, or leave it out for all")
        if not self.cost >= 0:
            raise OptionError(
                f"cost={self.cost!r} is not valid; it must be a share of at least 0, such as 0.02"
            )
