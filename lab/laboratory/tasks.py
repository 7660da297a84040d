"""Length generalization: copy, reverse, addition, sorting and parity in one model.

Models train on problems of up to ``MOST`` items and are evaluated on up to twice as many. Sums
begin with their last digit, and parity is answered bit by bit, so that a small decoder can learn
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lab.laboratory.model import Reading, read_with

MOST = 20
READ = (5, 10, 15, 20, 22, 24, 28, 32, 36, 40)
"""Numbers of items to evaluate."""
# Tokens in addition to bytes.
BEGIN = 256  # before a problem
GIVEN = 257  # before its answer
END = 258  # after its answer
_HELD_OUT = 7919
_CHOOSING = 512  # problems to choose rates on
_TOGETHER = 4
"""Number of steps whose problems are grouped by length."""
_LETTERS = np.arange(ord("a"), ord("z") + 1)


Problem = Callable[[np.random.Generator, int], tuple[list[int], list[int]]]
"""Draws a problem of so many items: what is given, and the answer."""


def _letters(answer: Callable[[list[int]], list[int]]) -> Problem:
    def drawn(rng: np.random.Generator, items: int) -> tuple[list[int], list[int]]:
        letters = rng.choice(_LETTERS, items).tolist()
        return letters, answer(letters)

    return drawn


def _parity(rng: np.random.Generator, items: int) -> tuple[list[int], list[int]]:
    bits = rng.integers(0, 2, items)
    return (bits + ord("0")).tolist(), (np.cumsum(bits) % 2 + ord("0")).tolist()


def _addition(rng: np.random.Generator, items: int) -> tuple[list[int], list[int]]:
    one, other = (rng.integers(0, 10, items).tolist() for _ in range(2))
    digits = []
    carry = 0
    for a, b in zip(one, other, strict=True):
        carry, digit = divmod(a + b + carry, 10)
        digits.append(digit)
    text = [[ord("0") + digit for digit in number] for number in (one, other, [*digits, carry])]
    return [*text[0], ord("+"), *text[1]], text[2]


TASKS: dict[str, Problem] = {
    "copy": _letters(list),
    "reverse": _letters(lambda letters: letters[::-1]),
    "addition": _addition,
    "sorting": _letters(sorted),
    "parity": _parity,
}


def problem(rng: np.random.Generator, task: str, items: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of a problem with its answer, and weights: the answer and its end count."""
    given, answer = TASKS[task](rng, items)
    ids = [BEGIN, ord(task[0].upper()), *given, GIVEN, *answer, END]
    weights = np.zeros(len(ids), dtype=np.float32)
    weights[-len(answer) - 1 :] = 1
    return np.array(ids), weights


@dataclass(frozen=True)
class Tasks:
    """Problems for training and evaluation.

    Args:
        names: names of the tasks, sampled at random.
        batch: problems per step.
        rows: problems of each task to evaluate at each size.
        steps: training steps.
    """

    names: Sequence[str] = tuple(TASKS)
    batch: int = 16
    rows: int = 32
    steps: int = 2400

    @property
    def trained(self) -> int:
        """Trained length in tokens: the longest row."""
        rng = np.random.default_rng(0)
        return max(len(problem(rng, name, MOST)[0]) for name in self.names)

    def rows_of(self, seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and weights of a step; depends only on the seed and the step.

        Problems for several steps are sampled at once, and each step gets some of similar length:
        with all lengths in one step, half of the tokens would be padding.
        """
        number, turn = divmod(step, _TOGETHER)
        rng = np.random.default_rng((seed, number))
        drawn = self._drawn(rng, self.batch * _TOGETHER)
        drawn.sort(key=lambda one: len(one[0]))
        # In another order for each group, or every fourth step would have the longest rows.
        first = int(rng.permutation(_TOGETHER)[turn]) * self.batch
        return _padded(drawn[first : first + self.batch])

    def choosing(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and weights of unreported problems, for choosing rates."""
        return _padded(self._drawn(np.random.default_rng(_HELD_OUT), _CHOOSING))

    def _drawn(self, rng: np.random.Generator, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
        chosen = zip(
            rng.choice(list(self.names), count), rng.integers(1, MOST + 1, count), strict=True
        )
        return [problem(rng, str(name), int(items)) for name, items in chosen]

    @torch.no_grad()
    def read(self, model: torch.nn.Module, make: Reading, device: torch.device) -> dict:
        """Fraction of problems whose answer has the most likely token at every position.

        This is what greedy decoding would write, because it fails at the first wrong token.

        Returns:
            ``exact`` by task and items; errors of methods are in ``refused``, by items.
        """
        found: dict = {"exact": {name: {} for name in self.names}, "refused": {}}
        for items in READ:
            for place, name in enumerate(self.names):
                # The same problems for every model and seed.
                rng = np.random.default_rng((_HELD_OUT, place, items))
                ids, weights = _padded([problem(rng, name, items) for _ in range(self.rows)])
                try:
                    with read_with(model, make, ids.shape[1] / self.trained):
                        logits = model(input_ids=ids.to(device)).logits[:, :-1]
                except (ValueError, IndexError) as error:
                    found["refused"][items] = str(error).splitlines()[0]
                    continue
                right = (logits.argmax(-1).cpu() == ids[:, 1:]) | (weights[:, 1:] == 0)
                found["exact"][name][items] = right.all(-1).float().mean().item()
        return found


def _padded(
    problems: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows to the longest; causality hides the padding from the answers."""
    longest = max(len(ids) for ids, _ in problems)
    ids = torch.full((len(problems), longest), END)
    weights = torch.zeros((len(problems), longest))
    for row, (tokens, counts) in enumerate(problems):
        ids[row, : len(tokens)] = torch.from_numpy(tokens)
        weights[row, : len(counts)] = torch.from_numpy(counts)
    return ids, weights
