"""Words in prompts: adjectives and nouns for keys, and made-up words."""

from __future__ import annotations

import random
from functools import cache
from itertools import product
from pathlib import Path

from rope_eval.data.text import library_words

_LISTS = Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split("\n\n")
ADJECTIVES, NOUNS = (tuple(part.split()) for part in _LISTS)


@cache
def pairs() -> tuple[str, ...]:
    """Every adjective with every noun, as ``adjective-noun``, like RULER's keys."""
    return tuple(f"{one}-{other}" for one, other in product(ADJECTIVES, NOUNS))


def many_words(count: int, rng: random.Random) -> list[str]:
    """``count`` different words in random order: those in Python's library, then made-up ones."""
    ordinary = library_words()
    words = dict.fromkeys(rng.sample(ordinary, min(count, len(ordinary))))
    while len(words) < count:  # ends: there are millions
        syllables = (rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3))
        words["".join(syllables) + rng.choice("dklmnrst")] = None
    return list(words)
