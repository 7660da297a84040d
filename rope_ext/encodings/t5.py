import math
from typing import Annotated, Literal

import torch

from rope_ext.encodings.base import Encoding, Heads, Learned, lengthened
from rope_ext.methods.checked import Tokens, Whole
from rope_ext.methods.kinds import register


@register
class T5(Encoding):
    """Replaces RoPE with a learned number for each head and bucket of distances.

    Half of the buckets are single distances; the others grow logarithmically up to
    ``max_distance``, and larger distances share the last one. All layers share one table, which
    starts at zero. These are the causal half of T5's buckets. In both directions, as in T5's
    encoder, each side has half of the buckets, and later keys a table of their own. Unlike in T5,
    logits keep the model's scale. ``replace=True`` with another ``max_distance`` stretches the
    buckets of a trained table.

    Args:
        buckets: ``"logarithmic"`` as in T5, or ``"offsets"``: a number for each distance below
            ``max_distance``, and one for all larger distances.
        num_buckets: ``relative_attention_num_buckets`` of T5; only for logarithmic buckets.
        max_distance: tokens; ``relative_attention_max_distance`` in T5's configuration.

    Raffel et al. 2020, arXiv 1910.10683, section 2.1.
    """

    name = "t5"
    summary = "a learned bias per bucket of distances; needs training"
    shared = True
    sided = True
    redefining = ("buckets",)

    buckets: Literal["logarithmic", "offsets"] = "logarithmic"
    num_buckets: Annotated[int, Whole(2)] = 32
    max_distance: Tokens = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        logarithmic = not self._by_offset or self.num_buckets == T5.num_buckets
        self.require("num_buckets", logarithmic, "left out with buckets='offsets'")
        exact = self.num_buckets // 2
        holds = self._by_offset or self.max_distance > exact
        self.require("max_distance", holds, f"more than {exact}")

    @property
    def _by_offset(self) -> bool:
        return self.buckets == "offsets"

    def initial(self, heads: Heads) -> dict[str, torch.Tensor]:
        entries = self.max_distance + 1 if self._by_offset else self.num_buckets
        if heads.both and not self._by_offset:
            self.require("num_buckets", self.num_buckets >= 4, "at least 4 in both directions")
            entries //= 2
        names = ("beta", "ahead") if heads.both else ("beta",)
        return {name: torch.zeros(heads.count, entries) for name in names}

    def grown(self, name: str, learned: torch.Tensor, initial: torch.Tensor) -> torch.Tensor | None:
        return lengthened(learned, initial, 1, repeat=True) if self._by_offset else None

    def saturates_at(self) -> int:
        return self.max_distance

    def bias(self, distance: torch.Tensor, heads: int, learned: Learned) -> torch.Tensor:
        return self._by_bucket(learned["beta"], distance)

    def bias_ahead(self, distance: torch.Tensor, heads: int, learned: Learned) -> torch.Tensor:
        return self._by_bucket(learned["ahead"], distance)

    def _by_bucket(self, table: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        return table.to(distance)[:, self.bucket(distance, table.shape[1])]

    def bucket(self, distance: torch.Tensor, num_buckets: int | None = None) -> torch.Tensor:
        """The bucket of each distance among ``num_buckets``; None: those of causal attention."""
        if self._by_offset:
            return distance.long().clamp(max=self.max_distance)
        num_buckets = self.num_buckets if num_buckets is None else num_buckets
        exact = num_buckets // 2
        # In float32, as in T5: rounding puts some distances into the bucket below.
        growth = torch.log(distance.float().clamp(min=exact) / exact)
        growth = growth / math.log(self.max_distance / exact) * (num_buckets - exact)
        large = (exact + growth.long()).clamp(max=num_buckets - 1)
        return torch.where(distance < exact, distance.long(), large)
