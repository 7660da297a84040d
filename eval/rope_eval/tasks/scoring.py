"""Comparisons of answers and references that several published benchmarks share."""

from __future__ import annotations

import importlib
import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from rope_ext.errors import MeasureError

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Lower case, without punctuation, articles and spare blanks, as SQuAD has it."""
    plain = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", plain).split())


def overlap_f1(written: Sequence[str], right: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of words, each as often as it occurs."""
    shared = sum((Counter(written) & Counter(right)).values())
    return 2 * shared / (len(written) + len(right)) if shared else 0.0


def rouge(
    written: str, answers: Sequence[str], kind: Literal["rougeL", "rougeLsum"], stem: bool
) -> float:
    """F-measure of the package ``rouge-score``, the best over the answers.

    Raises:
        MeasureError: that package is not installed.
    """
    try:
        scoring = importlib.import_module("rouge_score.rouge_scorer")  # in no extra of ours
    except ImportError:
        raise MeasureError(
            "this task is scored with ROUGE, which is not installed; install it with: pip install "
            "rouge-score, or leave the task out"
        ) from None
    scorer = scoring.RougeScorer([kind], use_stemmer=stem)
    return max(scorer.score(answer, written)[kind].fmeasure for answer in answers)
