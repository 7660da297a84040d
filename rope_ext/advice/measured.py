"""What decides without fine-tuning where no vendor has a recipe: numbers of the two checkpoints.

At 8 times the trained length of ``checkpoints/tiny-512`` and ``checkpoints/tiny-bytes-512``, with
each method's defaults: ``rope-ext compare --factor 8 --lengths 512,4096 --windows 12 --trials 4``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """Perplexity of 256 tokens after 3840 others, and the share of 20 passkeys found.

    Args:
        perplexity: on the first and on the second checkpoint.
        passkeys: percent, likewise.
    """

    perplexity: tuple[float, float]
    passkeys: tuple[int, int]

    def __str__(self) -> str:
        (one, two), (first, second) = self.perplexity, self.passkeys
        return f"perplexity {one:g} and {two:g}, passkeys {first} % and {second} %"


MEASURED = {
    "rerope": Measured((7.52, 2.31), (100, 95)),
    "self_extend": Measured((7.57, 2.31), (100, 90)),
    "dpe": Measured((7.72, 2.34), (100, 90)),
    "leaky_rerope": Measured((7.61, 2.34), (100, 85)),
    "dual_chunk": Measured((8.02, 2.33), (100, 85)),
    "dynamic_yarn": Measured((7.97, 4.64), (100, 60)),
    "yarn": Measured((7.97, 4.64), (100, 60)),
    "lampe": Measured((7.93, 2.32), (100, 70)),
    "mrrope": Measured((7.99, 2.82), (100, 45)),
}
"""By name. :func:`ranked` sorts them."""


def ranked() -> list[str]:
    """Names, by the fewest passkeys found on either checkpoint, then by the mean log-perplexity."""

    def key(name: str) -> tuple[int, float]:
        found = MEASURED[name]
        return -min(found.passkeys), found.perplexity[0] * found.perplexity[1]

    return sorted(MEASURED, key=key)
