"""Needles in a haystack that you choose: several needles, distractors, any text.

The first needle is placed at all depths, the others anywhere; the score is the fraction of the
requested numbers in the answer. Distractors look the same and are not asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rope_eval.settings import Settings
from rope_eval.tasks.base import Kind, Task, answer_tokens, option, register
from rope_eval.tasks.haystack import KINDS, Needles, read_haystack
from rope_ext.errors import OptionError


@register
@dataclass(frozen=True)
class Needle(Task):
    """Numbers hidden in a text.

    Args:
        trials: prompts for each length and depth bin.
        depths: bins of equal width.
        needles: number of needles that are asked for.
        distractors: number of needles that are not asked for.
        haystack: files, folders or data sets, by default Python's documentation; or only ``noise``
            or ``needles``.
        new_tokens: maximum answer length in tokens; None: 16, and 16 for each number.
    """

    name: ClassVar[str] = "needle"
    kind: ClassVar[Kind] = "rate"

    trials: int = option(10, "prompts for each length and depth")
    depths: int = option(5, "depth bins of equal width")
    needles: int = option(1, "number of needles that are asked for")
    distractors: int = option(0, "number of needles that are not asked for")
    haystack: tuple[str, ...] = option(
        (),
        "file, folder or hf:ID/CONFIG:SPLIT; repeatable; or noise, or needles. Default: Python's "
        "documentation",
    )
    new_tokens: int | None = answer_tokens()

    def __post_init__(self) -> None:
        if self.distractors < 0:
            raise OptionError(f"distractors={self.distractors} is not valid; it must be at least 0")

    def parts(self, settings: Settings) -> Sequence[Task]:
        """The needles in the text, which is read here.

        Raises:
            OptionError: an option is not valid.
            MeasureError: a text is missing or empty.
        """
        kind = self.haystack[0] if len(self.haystack) == 1 and self.haystack[0] in KINDS else None
        hay: dict[str, Any] = {"haystack": kind} if kind else read_haystack(self.haystack)
        tokens = 16 + 16 * self.needles if self.new_tokens is None else self.new_tokens
        return [
            Needles(
                self.name,
                keys=self.needles + self.distractors,
                queries=self.needles,
                trials=self.trials,
                depths=self.depths,
                tokens=tokens,
                **hay,
            )
        ]
