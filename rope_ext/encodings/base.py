"""What an encoding beside the rotation is: mostly nothing turns, and something else tells places.

    x_t      <- p(x_t, t)                                  in front of the layers
    logit_ij  = scale * <q_i, k_j> + b_h(i - j)            in each of them

A bias is asked for by distance, ``[heads, distances]``, and never becomes a matrix of queries and
keys: the kernels read it as a view (:mod:`rope_ext.attention.flash`). What is done in front of
the layers is in :mod:`rope_ext.encodings.inputs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch

from rope_ext.encodings.scores import Scores
from rope_ext.methods.geometry import Distance
from rope_ext.methods.kinds import Band, PositionMethod
from rope_ext.methods.rope import Rope

Learned = Mapping[str, torch.Tensor]
Bounds = Mapping[str, tuple[float, float]]


class Heads(NamedTuple):
    """The queries' heads of a layer: how many, their columns, and those of the values."""

    count: int
    columns: int
    value_columns: int


@dataclass(frozen=True, kw_only=True)
class Encoding(PositionMethod):
    """Base of the encodings that take the place of the rotation.

    A model that was trained with the rotation has to be trained again under one of them.

    Args:
        factor: the context grows to this many times the trained length; 1 changes the encoding
            only.
    """

    kind: ClassVar[str] = "encoding"
    works_within: ClassVar[bool] = True
    shared: ClassVar[bool] = False  # what is learned belongs to the model, not to each layer
    additive: ClassVar[bool] = False  # its scores add the same to whatever queries and keys
    redefining: ClassVar[tuple[str, ...]] = ()  # options that change what parameters mean
    entered: ClassVar[Literal["first", "every"] | None] = None  # layers whose input it changes

    factor: float = 1.0

    def bands(self) -> tuple[Band, ...]:
        return (Band(Distance(0, None), 0.0, 0.0),)

    @classmethod
    def adds(cls) -> bool:
        """Whether it adds to logits by where query and key are, and does nothing else to them."""
        return cls.additive if cls.scored() else cls.bias is not Encoding.bias

    @classmethod
    def scored(cls) -> bool:
        """Whether it changes the logits by more than a bias of the distance."""
        return cls.scores is not Encoding.scores

    @classmethod
    def changes_logits(cls) -> bool:
        """Whether it does anything to them but turn queries and keys."""
        return cls.scored() or cls.bias is not Encoding.bias

    def reached(self, rope: Rope) -> int:
        return self.target_length(rope)  # no distance is an angle that had to be trained

    def phase(self, t: torch.Tensor) -> torch.Tensor | None:
        """Radians by which every pair of the tokens at ``t`` (float64) turns besides; None: 0."""
        return None

    def growth(self, pairs: int) -> torch.Tensor | None:
        """What ``ln`` of a query gains with every token, and that of a key loses.

        Float64, ``[pairs]``, 0 or less: of two tokens, the logit falls with their distance. None:
        nothing.
        """
        return None

    def initial(self, heads: Heads, rope: Rope) -> dict[str, torch.Tensor]:
        """What is learned, by name, as it begins: float32, reproducible by torch's seed."""
        return {}

    @property
    def bounds(self) -> Bounds:
        """The least and the largest value of what must stay between some, by name.

        They are applied to what is stored and in front of :meth:`bias` and :meth:`scores`.
        """
        return {}

    def grown(self, name: str, learned: torch.Tensor, initial: torch.Tensor) -> torch.Tensor | None:
        """What was learned under other options, in the shape of ``initial``.

        Args:
            name: as in :meth:`initial`.
            learned: of another shape.
            initial: as it would begin under these options.

        Returns:
            None where they have no exact correspondence; patching is then refused.
        """
        return None

    def saturates_at(self, rope: Rope) -> int | None:
        """Distance (tokens) from which on the bias stays the same; None: it never does."""
        return 0

    def bias(
        self, distance: torch.Tensor, heads: int, rope: Rope, learned: Learned
    ) -> torch.Tensor | None:
        """What is added to the logits.

        Args:
            distance: from query to key, tokens: 0, 1, 2, ...; float32 or better, ``[n]``.
            heads: of the queries.
            rope: the trained embedding, for its length.
            learned: as :meth:`initial`, after training.

        Returns:
            ``[heads, n]``, in the dtype of ``distance``, -inf for distances that are hidden; None:
            nothing.
        """
        return None

    def scores(self, heads: int, rope: Rope, learned: Learned) -> Scores | None:
        """What changes the logits by more than a bias of the distance; None: nothing does.

        The arguments are those of :meth:`bias`, which is not asked then.
        """
        return None
