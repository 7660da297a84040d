"""Words in prompts: adjectives and nouns for keys, and made-up words."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

from rope_eval.data.text import library_words, rarer_words

_LISTS = Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split("\n\n")
ADJECTIVES, NOUNS = (tuple(part.split()) for part in _LISTS)


@cache
def pairs() -> tuple[str, ...]:
    """Every adjective with every noun, as ``adjective-noun``, like RULER's keys."""
    return tuple(f"{one}-{other}" for one, other in product(ADJECTIVES, NOUNS))


def made_up(rng: random.Random) -> Iterator[str]:
    """Endless three-syllable words that are in no dictionary; some may repeat."""
    while True:
        syllables = (rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3))
        yield "".join(syllables) + rng.choice("dklmnrst")


def many_words(count: int, rng: random.Random) -> list[str]:
    """``count`` different words in random order, preferring common ones.

    They are words in Python's library, then rare ones, then made-up ones.
    """
    ordinary, rare = library_words(), rarer_words()
    words = dict.fromkeys(rng.sample(ordinary, min(count, len(ordinary))))
    if len(words) < count:
        words |= dict.fromkeys(rng.sample(rare, min(count - len(words), len(rare))))
    made = made_up(rng)
    while len(words) < count:  # ends: there are millions
        words[next(made)] = None
    return list(words)
