"""The numbers behind pictures that need no weights: from a trained embedding and a method.

A method of None is the unpatched model.
"""

from __future__ import annotations

import torch

from rope_ext.methods import Method, Rope


def frequencies(rope: Rope, method: Method | None, length: int) -> torch.Tensor:
    """Radians per token of every pair in a sequence of ``length`` tokens: float64, ``[pairs]``."""
    return rope.inv_freq if method is None else method.frequencies(rope, length)


def largest_angles(rope: Rope, method: Method | None, length: int) -> torch.Tensor:
    """Radians of every pair at the end of ``length`` tokens, as ``diagnose`` counts them.

    Under a position method, at the largest distance in use. Float64, ``[pairs]``.
    """
    end = length if method is None else method.span(rope, length)
    return end * frequencies(rope, method, length)


def used_distances(
    rope: Rope, method: Method | None, length: int, distance: torch.Tensor
) -> torch.Tensor:
    """The distances that the last of ``length`` tokens uses in place of the real ones.

    Args:
        rope: the trained embedding.
        method: whose distances.
        length: tokens.
        distance: from the last token back, whole numbers below ``length``; float64, ``[n]``.

    Returns:
        Tokens, ``[n]``, or ``[n, pairs]`` where every pair uses its own; NaN where a method hides
        the token.
    """
    return distance if method is None else method.distances(rope, length, distance)


def by_pair(used: torch.Tensor) -> torch.Tensor:
    """Distances in use (:func:`used_distances`) with an axis for pairs: ``[n, 1]`` or more."""
    return used if used.ndim == 2 else used.unsqueeze(-1)


def decay_at(
    rope: Rope, method: Method | None, length: int, distance: torch.Tensor
) -> torch.Tensor:
    """``g(x) = 2 sum_i cos(x theta_i)``: q.k of vectors of ones, ``distance`` (``[n]``) apart.

    Su et al. 2021, arXiv 2104.09864, section 3.4.3, without its bound. Scalings of the logits
    (YaRN's temperature, ReRoPE's log n), which multiply whole lines, are left out.
    """
    used = by_pair(used_distances(rope, method, length, distance))
    return 2 * (used * frequencies(rope, method, length)).cos().sum(-1)
