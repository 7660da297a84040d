"""Computes the numbers of plots that need no weights, from an embedding and a method.

If the method is None, it is the unpatched model.
"""

from __future__ import annotations

import torch

from rope_ext.encodings import Encoding, Heads
from rope_ext.encodings.base import Learned
from rope_ext.encodings.scores import Block
from rope_ext.errors import OptionError
from rope_ext.methods import Method, Rope

SEED = 0
"""Seed for the initial parameters of encodings."""


def frequencies(rope: Rope, method: Method | None, length: int) -> torch.Tensor:
    """Frequencies in a sequence of ``length`` tokens, radians/token, float64, ``[pairs]``."""
    return rope.inv_freq if method is None else method.frequencies(rope, length)


def largest_angles(rope: Rope, method: Method | None, length: int) -> torch.Tensor:
    """Largest angles within ``length`` tokens, as in ``diagnose``, float64, ``[pairs]``.

    For a position method, this is the angle at the largest distance that it uses.
    """
    end = length if method is None else method.span(rope, length)
    return end * frequencies(rope, method, length)


def used_distances(
    rope: Rope, method: Method | None, length: int, distance: torch.Tensor
) -> torch.Tensor:
    """The distances that a method uses in place of the true ones, for the last token.

    Args:
        rope: the trained embedding.
        method: the method.
        length: sequence length in tokens.
        distance: true distances, whole numbers below ``length``; float64, ``[n]``.

    Returns:
        Distances in tokens, ``[n]``, or ``[n, pairs]`` if pairs differ; NaN for hidden tokens.
    """
    return distance if method is None else method.distances(rope, length, distance)


def by_pair(used: torch.Tensor) -> torch.Tensor:
    """Add a dimension for pairs to :func:`used_distances` if it is missing: ``[n, 1 or pairs]``."""
    return used if used.ndim == 2 else used.unsqueeze(-1)


def decay_at(
    rope: Rope, method: Method | None, length: int, distance: torch.Tensor
) -> torch.Tensor:
    """``g(x) = 2 sum_i cos(x theta_i)``: q.k of two vectors of ones at ``distance`` ``[n]``.

    Su et al. 2021, arXiv 2104.09864, section 3.4.3, without its bound. Scalings of the logits
    (YaRN's temperature, ReRoPE's log n) are left out, since they only multiply a whole line.
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
    """Whether the rotation of queries and keys depends on their position."""
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
    """The bias that an encoding adds to the logits of the last token, in nats.

    Args:
        rope: the trained embedding.
        encoding: an encoding whose bias depends on positions only.
        heads: number of query heads.
        length: sequence length in tokens.
        distance: true distances, whole numbers below ``length``; float64, ``[n]``.
        learned: trained parameters; None initializes them with :data:`SEED`.

    Returns:
        Float64, ``[heads, n]``.

    Raises:
        OptionError: the logits depend on queries and keys, or positions on the content.
    """
    if learned is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            learned = encoding.initial(Heads(heads, rope.dim, rope.dim), rope)
    scores = encoding.scores(heads, rope, learned)
    if (scores is not None and not encoding.adds()) or encoding.computes_positions():
        raise OptionError(
            f"the logits of {encoding.name} depend on queries and keys, so it cannot be plotted by "
            f"distance; leave {encoding.name} out, or plot attention"
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
