import torch

from rope_ext.encodings.base import Block, Encoding, Heads, Learned, linear
from rope_ext.methods.checked import Positive, Tokens
from rope_ext.methods.kinds import register


@register
class FIRE(Encoding):
    """Replaces RoPE with a small network of the distance relative to the position of the query.

    ``f(ln(1 + |c| d) / ln(1 + |c| max(i, T)))`` for query ``i``, so that the input of the network
    is between 0 and 1 at any length. ``f`` maps this number to ``hidden`` units with a ReLU, and to
    the heads; ``T = |m| threshold``. ``c`` starts at 0.1, ``m`` at 1, and the network with torch's
    default initialization; each layer learns its own.

    Args:
        threshold: tokens; for earlier queries, the bias depends on the distance alone. DAPE's
            authors, whose code this follows, train with half of their argument: 256 by default.
        hidden: size of the hidden layer.

    Li et al. 2024, arXiv 2310.04418.
    """

    name = "fire"
    causal_only = "divides distances by the position of the query"
    summary = "a learned bias on the relative distance; needs training"
    additive = True

    threshold: Positive = 512.0
    hidden: Tokens = 32

    def initial(self, heads: Heads) -> dict[str, torch.Tensor]:
        return {
            "c": torch.tensor([0.1]),
            "multiplier": torch.ones(1),
            **linear("first", self.hidden, 1),
            **linear("second", heads.count, self.hidden),
        }

    def pair_width(self, heads: int) -> int:
        return 2 * self.hidden

    def logits(self, block: Block, learned: Learned) -> torch.Tensor:
        return block.content + self.by_place(block, learned)

    def by_place(self, block: Block, learned: Learned) -> torch.Tensor:
        """The bias, ``[heads, rows, keys]``."""
        learned = {name: value.to(block.content) for name, value in learned.items()}
        c = learned["c"].abs()
        place = block.query_at.to(block.content)
        least = learned["multiplier"].abs() * self.threshold
        far = torch.log1p(c * torch.maximum(place, least)) + 1e-6  # as in the authors' code
        numbers = torch.log1p(c * block.distance) / far[:, None]
        weight = learned["first_weight"]
        bias = learned["first_bias"][:, None]
        inner = torch.addcmul(bias, weight, numbers.flatten()).relu()
        biases = learned["second_bias"][:, None]
        found = torch.addmm(biases, learned["second_weight"], inner)
        return found.unflatten(1, numbers.shape)
