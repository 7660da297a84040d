"""Options of ``search`` and ``calibrate``, for the functions and the commands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

from typing_extensions import TypedDict

from rope_eval.options import check_options, option
from rope_eval.settings import Dtype, require_seed
from rope_ext.command.arguments import parse_length, parse_lengths, split
from rope_ext.errors import OptionError

FEWEST_PROMPTS = 16
"""Minimum number of prompts per length, unless 0: fewer say too little about retrieval."""
FEWEST_SAMPLES = 4
"""Minimum number of deciding windows: fewer differences often have one sign by chance."""
CONFIDENCE = 0.99
"""Confidence of intervals that decide on replacing a default, since many candidates are tried."""


@dataclass(kw_only=True)
class Loading:
    """Options of both commands for the text and the model."""

    text: tuple[str, ...] = option(
        (),
        "Text file, .jsonl, .parquet or directory. Repeatable. Default: the Python standard "
        "library, without the files that evaluation uses by default.",
    )
    dtype: Dtype = option(  # noqa: RUF009
        "auto", "Dtype: auto (float32 on CPU), float32, bfloat16 or float16."
    )
    device: str = option("auto", "Device: auto, cpu, cuda, cuda:1 or mps.")

    def load(self, model: str) -> tuple[Any, Any, list[str]]:
        from rope_eval.data.text import python_library, read_texts
        from rope_eval.sliding import in_blocks
        from rope_ext.saving.checkpoints import (
            load_config,
            load_model,
            load_tokenizer,
            require_causal,
        )

        require_causal(model, load_config(model))
        texts = read_texts(self.text) if self.text else python_library("train")
        tokenizer = load_tokenizer(model)
        in_blocks()
        return load_model(model, self.dtype, self.device), tokenizer, texts


@dataclass(kw_only=True)
class TuneOptions:
    """Options that a search and a calibration share; each field has its help.

    A calibration takes ``samples`` windows and ``prompts`` for each half. ``compose``,
    ``sliding_layers`` and ``original_max_position_embeddings`` are those of :func:`rope_ext.patch`:
    give them again when you patch with the result.
    """

    target_length: int
    samples: int
    prompts: int = option(
        16,
        f"Passkey prompts of each length: at least {FEWEST_PROMPTS}, or 0 for only the text.",
        least=0,
    )
    needle: Literal["number", "word"] = option(
        "number", "number, or word: a key that small models can copy."
    )
    seed: int = option(0, "Random seed.", least=0)
    compose: bool = option(False, "Apply on top of existing RoPE scaling.")
    scored: int | None = None
    sliding_layers: Literal["auto", "keep", "scale"] = "auto"
    original_max_position_embeddings: int | None = option(
        None, "Override the trained length in the config.", parse_length, "--trained-length"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if type(self.target_length) is not int or self.target_length < 1:
            raise OptionError(
                f"target_length={self.target_length!r} is not valid; it must be a whole number"
            )
        if 0 < self.prompts < FEWEST_PROMPTS:
            raise OptionError(
                f"prompts={self.prompts} is not valid; it must be 0 or at least {FEWEST_PROMPTS}"
            )
        require_seed(self.seed)

    @property
    def tail(self) -> int:
        """``scored`` with its default."""
        return cast(int, self.scored)

    @property
    def arguments(self) -> dict[str, Any]:
        names = ("compose", "sliding_layers", "original_max_position_embeddings")
        return {name: getattr(self, name) for name in names}


@dataclass(kw_only=True)
class SearchOptions(TuneOptions):
    """Options of :func:`rope_ext.search`, in addition to :class:`TuneOptions`.

    Of each of the tables to start with (``population``), another is made ``iterations`` times.
    ``scored``: if all tokens counted, as in the paper, the search would give up the far end for the
    many before it. ``critical``, as in LongRoPE2: numbers are between the factor and twice the
    factor; pairs below it follow from its number as with an NTK base. ``start_tokens``: the
    paper's are in ``rope_eval.tune.search``. ``validation_samples``: other windows, with prompts
    of other keys, decide between the best tables; 0 skips this. ``start`` is the YaRN that
    a table has to beat, or the file of a calibration; None tries a few.
    """

    samples: int = option(5, "Text windows used to score a table, at least 1.")
    population: int = option(64, "Number of initial tables.", least=5)
    iterations: int = option(20, "Number of iterations of evolution.")
    scored: int | None = option(
        None,
        "Number of tokens to score at the end of each window; 0 scores only passkeys. "
        "Default: half.",
        parse_length,
        least=0,
    )
    critical: int | None = option(
        None, "First pair to search; lower pairs follow NTK. Default: all pairs."
    )
    start_tokens: Iterable[int] = option(
        (0,),
        "Candidate numbers of start tokens; values above 0 cannot be exported.",
        parse_lengths,
        repeat=False,
        least=0,
    )
    attention_factor: float | None = option(
        None, "Attention factor of every table. Default: searched too."
    )
    validation_samples: int = option(
        8, "Text windows for comparing the best tables: 0, or at least 4.", least=0
    )
    start: Any = option(  # noqa: RUF009
        None, "YaRN settings to beat: a calibration.json of rope-ext calibrate.", str
    )

    def __post_init__(self) -> None:
        # First: the checks would use up an iterator.
        self.start_tokens = tuple(self.start_tokens)
        super().__post_init__()
        if self.scored is None:
            self.scored = self.target_length // 2
        if not (self.scored or self.prompts):
            raise OptionError("scored=0 and prompts=0 leave nothing to rank tables by; raise one")
        if 0 < self.validation_samples < FEWEST_SAMPLES:
            raise OptionError(
                f"validation_samples={self.validation_samples} is not valid; it must be 0 or at "
                f"least {FEWEST_SAMPLES}"
            )


@dataclass(kw_only=True)
class CalibrationOptions(TuneOptions):
    """Options of :func:`rope_ext.calibrate`, in addition to :class:`TuneOptions`.

    ``cost`` is the largest increase of perplexity over the published default that the upper end of
    its interval may show, within the trained length and at the target length.
    """

    samples: int = option(
        8, f"Text windows in each half, at least {FEWEST_SAMPLES}.", least=FEWEST_SAMPLES
    )
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
        self.cheap = False  # the same settings given one by one resume its log
        super().__post_init__()
        if self.scored is None:
            self.scored = max(1, self.target_length // 4)
        if self.options is not None:
            self.options = tuple(split(self.options))
        if self.options == ():
            raise OptionError("options names none; name some, or leave it out for all")
        if not self.cost >= 0:
            raise OptionError(
                f"cost={self.cost!r} is not valid; it must be a share of at least 0, such as 0.02"
            )


# The same fields as keywords of the functions: editors read them here, since they cannot follow a
# decorator. A test compares both.


class TuneKeywords(TypedDict, total=False):
    """:class:`TuneOptions` without ``target_length``."""

    samples: int
    prompts: int
    needle: Literal["number", "word"]
    seed: int
    compose: bool
    scored: int | None
    sliding_layers: Literal["auto", "keep", "scale"]
    original_max_position_embeddings: int | None


class SearchKeywords(TuneKeywords, total=False):
    """:class:`SearchOptions` without ``target_length``."""

    population: int
    iterations: int
    critical: int | None
    start_tokens: Iterable[int]
    attention_factor: float | None
    validation_samples: int
    start: Any


class CalibrationKeywords(TuneKeywords, total=False):
    """:class:`CalibrationOptions` without ``target_length``."""

    options: str | Iterable[str] | None
    cheap: bool
    cost: float
