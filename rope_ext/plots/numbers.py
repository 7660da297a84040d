"""The numbers behind pictures that need no weights: from a trained embedding and a method.

A method of None is the unpatched model.
"""

from __future__ import annotations

import math

import torch

from rope_ext.advice.recommend import distances_in_use, frequencies_at
from rope_ext.methods import FrequencyMethod, Method, PositionMethod, Rope


def frequencies(rope: Rope, method: Method | None, length: int) -> torch.Tensor:
    """Radians per token of every pair in a sequence of ``length`` tokens: float64, ``[pairs]``."""
    if isinstance(method, FrequencyMethod):
        return frequencies_at(rope, method, length)
    return rope.inv_freq


def largest_angles(rope: Rope, method: Method | None, length: int) -> torch.Tensor:
    """Radians of every pair at the end of ``length`` tokens, as ``diagnose`` counts them.

    Under a position method, at the largest distance in use. Float64, ``[pairs]``.
    """
    end = float(length)
    if isinstance(method, PositionMethod):
        end = distances_in_use(method.resolved(rope).bands(), length)
    return end * frequencies(rope, method, length)


def used_distances(
    rope: Rope, method: Method | None, length: int, distance: torch.Tensor
) -> torch.Tensor:
    """The distances that the last of ``length`` tokens uses in place of the real ones.

    Args:
        rope: the trained embedding.
        method: frequency methods leave distances alone.
        length: tokens.
        distance: from the last token back, whole numbers below ``length``; float64, ``[n]``.

    Returns:
        Tokens, ``[n]``; NaN where a method hides the token.
    """
    if not isinstance(method, PositionMethod):
        return distance
    query = torch.full_like(distance, length - 1)
    used = torch.full_like(distance, math.nan)
    for band in method.resolved(rope).bands():
        found = band.distances(query, query - distance)
        used = torch.where(found.isnan(), used, found)
    return used


def decay_at(
    rope: Rope, method: Method | None, length: int, distance: torch.Tensor
) -> torch.Tensor:
    """``g(x) = 2 sum_i cos(x theta_i)``: q.k of vectors of ones, ``distance`` (``[n]``) apart.

    Su et al. 2021, arXiv 2104.09864, section 3.4.3, without its bound. Scalings of the logits
    (YaRN's temperature, ReRoPE's log n), which multiply whole lines, are left out.
    """
    used = used_distances(rope, method, length, distance)
    return 2 * (used.unsqueeze(-1) * frequencies(rope, method, length)).cos().sum(-1)
