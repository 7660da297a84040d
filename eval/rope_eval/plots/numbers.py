"""The numbers behind pictures that need no weights: from a trained embedding and a method.

A method of None is the unpatched model.
"""

from __future__ import annotations

import torch

from rope_ext.encodings import Encoding, Heads
from rope_ext.encodings.base import Learned
from rope_ext.encodings.scores import Block
from rope_ext.errors import OptionError
from rope_ext.methods import Method, Rope

SEED = 0
"""Of what an encoding learns, as it begins."""


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
    angles = used * frequencies(rope, method, length)
    if not isinstance(method, Encoding):
        return 2 * angles.cos().sum(-1)
    query = method.phase(torch.full_like(distance, length - 1))
    key = method.phase(length - 1 - distance)
    if query is not None and key is not None:
        angles = angles + query[:, None] - key[:, None]
    growth = method.growth(angles.shape[1])
    fading = 1.0 if growth is None else torch.exp(distance[:, None] * growth)
    return 2 * (fading * angles.cos()).sum(-1)


def rotates(rope: Rope, method: Method | None) -> bool:
    """Whether queries and keys of different positions are turned differently."""
    if not isinstance(method, Encoding):
        return True
    one = torch.ones(1, dtype=torch.float64, device="cpu")
    return bool((method.distances(rope, 2, one) != 0).any())


def bias_at(
    rope: Rope,
    encoding: Encoding,
    heads: int,
    length: int,
    distance: torch.Tensor,
    learned: Learned | None = None,
) -> torch.Tensor:
    """What an encoding adds to the logits of the last of ``length`` tokens, in nats.

    Args:
        rope: the trained embedding.
        encoding: adds nothing, or what follows from where query and key are.
        heads: of the queries.
        length: tokens.
        distance: from the last token back, whole numbers below ``length``; float64, ``[n]``.
        learned: what was; None: as it begins, drawn with :data:`SEED`.

    Returns:
        Float64, ``[heads, n]``.

    Raises:
        OptionError: its logits follow from queries and keys.
    """
    if learned is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            learned = encoding.initial(Heads(heads, rope.dim, rope.dim), rope)
    scores = encoding.scores(heads, rope, learned)
    if scores is not None and not encoding.adds():
        raise OptionError(
            f"{encoding.name} makes its logits of queries and keys, so there is no line by "
            f"distance to draw of it; leave {encoding.name} out, or draw attention"
        )
    with torch.no_grad():
        if scores is not None:
            last = torch.tensor([length - 1], device="cpu")
            nothing = torch.zeros(1, heads, 1, len(distance), dtype=torch.float64, device="cpu")
            block = Block(
                query=nothing[..., :0],
                key=nothing[..., :0],
                content=nothing,
                query_at=last,
                key_at=last - distance.long(),
                visible=torch.ones_like(nothing, dtype=torch.bool),
                scale=1.0,
            )
            return scores.logits(block)[0, :, 0]
        every = torch.arange(int(distance.max()) + 1, dtype=torch.float64, device="cpu")
        values = encoding.bias(every, heads, rope, learned)
    return distance.new_zeros(1, len(distance)) if values is None else values[:, distance.long()]
