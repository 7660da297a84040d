"""What a search and a calibration are asked alike: how far, and for which model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from rope_ext.errors import OptionError
from rope_ext.methods import Rope
from rope_ext.options import SlidingLayers
from rope_ext.patching import first_site


@dataclass(frozen=True, kw_only=True)
class Target:
    """Options of both, as they are documented there.

    ``scored`` is the number of tokens that count, or a word where other things do.
    """

    target_length: int
    scored: int | str
    samples: int
    seed: int
    compose: bool
    sliding_layers: SlidingLayers
    original_max_position_embeddings: int | None

    @property
    def arguments(self) -> dict[str, Any]:
        """Of :func:`rope_ext.patch`."""
        names = ("compose", "sliding_layers", "original_max_position_embeddings")
        return {name: getattr(self, name) for name in names}

    def rope(self, model: nn.Module) -> Rope:
        """The trained embedding of ``model``.

        Raises:
            OptionError: the length is not beyond it, or leaves nothing to score.
        """
        rope = first_site(model, self.sliding_layers, self.original_max_position_embeddings).rope
        if self.target_length <= rope.length:
            raise OptionError(
                f"target_length={self.target_length} is not beyond the {rope.length} tokens that "
                f"the model was trained for; give more"
            )
        if isinstance(self.scored, int) and self.scored >= self.target_length:
            raise OptionError(
                f"scored={self.scored} is not valid; it must be below "
                f"target_length={self.target_length}, since nothing comes before the first token"
            )
        return rope
