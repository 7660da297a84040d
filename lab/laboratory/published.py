"""Published rankings of encodings, and whether the laboratory's numbers agree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from scipy.stats import kendalltau

from lab.laboratory.paired import Difference, difference
from lab.laboratory.results import LONGER

BySeed = Mapping[int, float]


@dataclass(frozen=True)
class Published:
    """A published ranking of encodings.

    Args:
        source: reference and what it measured.
        measure: name of our measure on the page to compare with.
        values: published values, by our names.
        told: these values as text; by default the values themselves.
        rising: whether higher values are better.
    """

    source: str
    measure: str
    values: Mapping[str, float]
    told: Mapping[str, str] | None = None
    rising: bool = False


PUBLISHED = (
    Published(
        "DAPE, arXiv 2405.14722: perplexity of arXiv text at the trained length, 512",
        "loss at the trained length",
        {"nope": 5.10, "rope": 4.57, "kerple_log": 4.57, "dape": 4.49},
    ),
    Published(
        "DAPE, arXiv 2405.14722: perplexity far beyond it, at 8192 (RoPE's is that at 4096)",
        "loss at the longest",
        {"rope": 256, "kerple_log": 9.08, "dape": 3.70},
    ),
    Published(
        source="ALiBi, arXiv 2108.12409: tokens beyond the trained length without loss",
        measure="loss at the longest",
        values={"sinusoidal": 35, "rope": 150, "t5": 700, "alibi": 1e6},
        told={"sinusoidal": "20 to 50", "rope": "100 to 200", "t5": "600 to 800", "alibi": "all"},
        rising=True,
    ),
    Published(
        source="ALiBi, arXiv 2108.12409: words per second in training",
        measure="seconds per step",
        values={"sinusoidal": 26.0e3, "alibi": 25.8e3, "rope": 17.7e3, "t5": 13.0e3},
        told={"sinusoidal": "26.0k", "alibi": "25.8k", "rope": "17.7k", "t5": "13.0k"},
        rising=True,
    ),
    Published(
        "Kazemnejad et al., arXiv 2305.19466: mean reciprocal rank on longer problems; their "
        "RoPE rotates 25 % of each head, their absolute positions are sinusoids",
        "problems longer than trained",
        {"nope": 0.69, "t5": 0.55, "alibi": 0.50, "rope_25": 0.33, "sinusoidal": 0.22},
        rising=True,
    ),
    Published(
        "KERPLE, arXiv 2205.09921, Table 3: perplexity of OpenWebText2 at the trained length, 512",
        "loss at the trained length",
        {
            "t5": 23.7,
            "kerple_log": 23.9,
            "kerple_power": 23.9,
            "alibi": 23.9,
            "rope": 24.2,
            "sinusoidal": 33,
        },
    ),
    Published(
        "KERPLE, arXiv 2205.09921, Table 3: perplexity of OpenWebText2 at 16 times that length",
        "loss at the longest",
        {
            "kerple_log": 21.3,
            "kerple_power": 21.6,
            "alibi": 22.3,
            "t5": 25.5,
            "rope": 185,
            "sinusoidal": 22621,
        },
    ),
    Published(
        "KERPLE, arXiv 2205.09921, Table 4: seconds per step of training, 162M",
        "seconds per step",
        {
            "sinusoidal": 0.298,
            "alibi": 0.302,
            "kerple_log": 0.307,
            "kerple_power": 0.321,
            "rope": 0.332,
            "t5": 0.340,
        },
    ),
    Published(
        "xPos, arXiv 2212.10554, Table 2: perplexity of arXiv text at the trained length, 1024",
        "loss at the trained length",
        {"xpos": 23.31, "alibi": 24.99, "rope": 25.52, "sinusoidal": 29.94},
    ),
    Published(
        "xPos, arXiv 2212.10554, Table 5: perplexity at 4 times that length, without its "
        "blockwise attention",
        "loss at 4 times the trained length",
        {"alibi": 24.26, "xpos": 28.43, "rope": 294.45},
    ),
    Published(
        "CoPE, arXiv 2405.18719, Table 5: perplexity of WikiText-103 at the trained length, "
        "1024; its relative positions are added to keys only",
        "loss at the trained length",
        {"cope": 23.46, "shaw": 23.81, "learned": 24.87},
    ),
    Published(
        "CoPE, arXiv 2405.18719, Table 5: perplexity of code at the trained length, 4096",
        "loss at the trained length",
        {"cope": 3.9, "rope": 4.1, "learned": 4.7},
    ),
    Published(
        "CoPE, arXiv 2405.18719, Table 2: errors (%) in selective copying with twice the blanks",
        "problems longer than trained",
        {"cope": 0.0, "rope": 100.0},
    ),
    Published(
        "CoPE, as measured in DAPE, arXiv 2405.14722, Table 6: perplexity of Books3 at the "
        "trained length, 128",
        "loss at the trained length",
        {"dape": 31.49, "transformer_xl": 31.57, "cope": 31.61},
    ),
    Published(
        "CoPE, as measured in DAPE, arXiv 2405.14722, Table 6: perplexity at 16 times that length",
        "loss at the longest",
        {"dape": 23.34, "transformer_xl": 27.90, "cope": 33.80},
    ),
    Published(
        "FIRE, as measured in DAPE, arXiv 2405.14722, Table 5: perplexity of arXiv text at the "
        "trained length, 512, mean of three seeds",
        "loss at the trained length",
        {
            "dape": 4.5123,
            "t5": 4.5547,
            "fire": 4.5741,
            "rope": 4.5755,
            "kerple_log": 4.5817,
            "alibi": 4.6146,
        },
    ),
    Published(
        "FIRE, as measured in DAPE, arXiv 2405.14722, Table 5: perplexity at 16 times that "
        "length, mean of three seeds",
        "loss at the longest",
        {
            "dape": 3.8642,
            "alibi": 4.7679,
            "kerple_log": 13.3524,
            "rope": 265.4545,
            "fire": 308.6173,
            "t5": 595.0829,
        },
    ),
    Published(
        "FIRE, as measured in CABLE, arXiv 2503.08067, Table 1: perplexity of FineWeb-Edu at the "
        "trained length, 1024",
        "loss at the trained length",
        {
            "kerple_log": 16.70,
            "alibi": 16.79,
            "rope": 16.89,
            "fire": 17.11,
            "t5": 17.26,
            "learned": 17.47,
            "sinusoidal": 17.48,
        },
    ),
    Published(
        "FIRE, as measured in CABLE, arXiv 2503.08067, Table 1: perplexity at 15 times that length",
        "loss at the longest",
        {
            "alibi": 17.46,
            "kerple_log": 26.13,
            "rope": 691.90,
            "fire": 835.92,
            "t5": 1450.83,
            "sinusoidal": 3355.86,
        },
    ),
    Published(
        "CARoPE, arXiv 2507.23083, Table 1, GPT-Tiny: perplexity at the trained length, 512",
        "loss at the trained length",
        {"rope": 29.33, "carope": 28.99, "learned": 30.48, "sinusoidal": 30.62},
    ),
    Published(
        "CARoPE, arXiv 2507.23083, Table 1, GPT-Tiny: perplexity at twice that length",
        "loss at twice the trained length",
        {"rope": 81.27, "carope": 36.74, "sinusoidal": 223.28},
    ),
    Published(
        "TAPA, arXiv 2509.12635, Table 2: perplexity at the trained length, 8192",
        "loss at the trained length",
        {"rope": 12.21, "tapa": 12.22},
    ),
    Published(
        "TAPA, arXiv 2509.12635, Table 2: perplexity at four times that length, not fine-tuned",
        "loss at 4 times the trained length",
        {"rope": 16366.63, "tapa": 122.71},
    ),
    Published(
        "GRAPE, arXiv 2512.07805, the authors' page, 355M: average of seven tasks, 4096 tokens",
        "loss at the trained length",
        {"rope": 51.73, "alibi": 52.87, "grape_ap": 53.25},
        rising=True,
    ),
)


def hold(
    published: Published, measured: Mapping[str, BySeed]
) -> tuple[dict[str, float], list[str]] | None:
    """Compare a ranking with our numbers.

    Args:
        published: the ranking.
        measured: our values by name and seed.

    Returns:
        Our means by name, and conclusions; None if fewer than two encodings are in both.
    """
    names = [name for name in published.values if measured.get(name)]
    if len(names) < 2:
        return None
    ours = {name: sum(measured[name].values()) / len(measured[name]) for name in names}
    direction = 1 if published.rising else -1
    own = 1 if published.measure == LONGER else -1
    ranked = [(direction * published.values[name], own * ours[name]) for name in names]
    # Over the pairs of both rankings; NaN if one of them has only ties.
    tau = kendalltau(*zip(*ranked, strict=True)).statistic
    same, other, unclear = _pairs(published, measured, names)
    total = same + len(other) + len(unclear)
    sentences = [
        f"Of {total} {'pair' if total == 1 else 'pairs'}: {same} as published, {len(other)} "
        f"reversed, {len(unclear)} without a clear difference here"
        + (f"; rank correlation (Kendall) {tau:+.2f}." if math.isfinite(tau) else ".")
    ]
    if other:
        sentences.append(f"Reversed, with an interval that excludes zero: {'; '.join(other)}.")
    if unclear:
        sentences.append(f"No clear difference: {'; '.join(unclear)}.")
    return ours, sentences


def _pairs(
    published: Published, measured: Mapping[str, BySeed], names: Sequence[str]
) -> tuple[int, list[str], list[str]]:
    """Compare every pair: how many are as published, which are reversed, which are unclear."""
    direction = 1 if published.rising else -1
    own = 1 if published.measure == LONGER else -1
    same = 0
    other = []
    unclear = []
    for one, two in combinations(names, 2):
        theirs = direction * (published.values[one] - published.values[two])
        if theirs == 0:  # a tie orders nothing
            continue
        better, worse = (one, two) if theirs > 0 else (two, one)
        found = difference(measured[better], measured[worse])
        if found is None or not found.clear:
            unclear.append(f"{better} and {worse}{_interval(found)}")
        elif own * found.mean > 0:
            same += 1
        else:
            other.append(f"{worse} is ahead of {better}{_interval(found)}")
    return same, other, unclear


def _interval(found: Difference | None) -> str:
    if found is None:
        return ""
    if found.low is None:
        seeds = "one seed" if found.pairs == 1 else f"{found.pairs} seeds"
        return f" (difference {found.mean:+.3g}, {seeds})"
    return f" (difference {found.mean:+.3g}, {found.low:+.3g} to {found.high:+.3g})"
