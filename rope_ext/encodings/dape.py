import functools
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F

from rope_ext.encodings.base import Bounds, Encoding, Heads, Learned
from rope_ext.encodings.fire import FIREScores
from rope_ext.encodings.scores import Block, Scores, linear
from rope_ext.methods.checked import Tokens, not_none
from rope_ext.methods.kinds import Rope, build_method, register

On = Literal["kerple_log", "kerple_power", "alibi", "t5", "sandwich", "fire"]
_FIRE = "fire_"
"""Prefix of FIRE's parameters, which have the names of the network's own."""


@register
class DAPE(Encoding):
    """Replaces RoPE with a bias by distance that a small network adapts to the logits of all heads.

    ``S + B + f([S; B])``: ``S`` are the logits of the content and ``B`` is a bias by distance.
    ``f`` maps the ``2H`` numbers of all heads to ``hidden`` units, with a leaky ReLU of slope 0.01,
    and to ``H`` numbers. Without a bias it is ``S + f(S)``. Version 1 uses one key at a time. In
    version 2, both layers are convolutions over ``width`` keys, with zeros for keys that a query
    does not attend to. Attention runs in blocks of queries and is several times slower.

    Args:
        on: the bias ``B``: ``"kerple_log"`` (the authors' best), ``"kerple_power"``, ``"alibi"``,
            ``"t5"``, ``"sandwich"`` or ``"fire"``; its parameters are learned, too. None: no bias.
        version: 1 or 2.
        hidden: size of the hidden layer.
        width: keys of each convolution in version 2, an odd number.

    Zheng et al. 2024, arXiv 2405.14722 and, version 2, arXiv 2410.04798. The authors' code masks
    all keys but the first in a decoding step; here decoding equals recomputation.
    """

    name = "dape"
    summary = "a bias that adapts to the content; slower; needs training"
    redefining = ("on", "version")

    on: On | None = "kerple_log"
    version: Literal[1, 2] = 1
    hidden: Tokens = 32
    width: Tokens = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("width", self.width % 2 == 1, "an odd number")

    @functools.cached_property
    def _bias(self) -> Encoding | None:
        return None if self.on is None else cast(Encoding, build_method(self.on))

    @property
    def bounds(self) -> Bounds:
        return {} if self._bias is None else self._bias.bounds

    def initial(self, heads: Heads, rope: Rope) -> dict[str, torch.Tensor]:
        kernel = (self.width,) if self.version == 2 else ()
        of_bias = {} if self._bias is None else self._bias.initial(heads, rope)
        prefix = _FIRE if self.on == "fire" else ""
        inputs = heads.count if self._bias is None else 2 * heads.count
        return {
            **{f"{prefix}{name}": value for name, value in of_bias.items()},
            **linear("first", self.hidden, inputs, *kernel),
            **linear("second", heads.count, self.hidden, *kernel),
        }

    def bias(
        self, distance: torch.Tensor, heads: int, rope: Rope, learned: Learned
    ) -> torch.Tensor | None:
        """The bias ``B``, if it depends on the distance alone."""
        return self._bias and self._bias.bias(distance, heads, rope, learned)

    def fire(self, heads: int, rope: Rope, learned: Learned) -> FIREScores | None:
        """The bias ``B``, if it also depends on the position of the query."""
        if self.on != "fire":
            return None
        own = {k.removeprefix(_FIRE): x for k, x in learned.items() if k.startswith(_FIRE)}
        return cast(FIREScores, not_none(self._bias).scores(heads, rope, own))

    def scores(self, heads: int, rope: Rope, learned: Learned) -> Scores:
        return DAPEScores(learned=learned, encoding=self, heads=heads, rope=rope)


@dataclass(frozen=True, eq=False, kw_only=True)
class DAPEScores(Scores):
    """The logits of :class:`DAPE`."""

    encoding: DAPE
    heads: int
    rope: Rope

    @property
    def width(self) -> int:
        fire = self.encoding.fire(self.heads, self.rope, self.learned)
        return 4 * self.heads + 2 * self.encoding.hidden + (0 if fire is None else fire.width)

    def logits(self, block: Block) -> torch.Tensor:
        given = content = block.content
        if self.encoding.on is not None:
            bias = self._bias(block).expand_as(content)
            given = torch.cat((content, bias), dim=1)
            content = content + bias
        adapted = self._alone(given) if self.encoding.version == 1 else self._beside(given, block)
        return content + adapted

    def _bias(self, block: Block) -> torch.Tensor:
        fire = self.encoding.fire(self.heads, self.rope, self.learned)
        return self._by_distance(block.distance) if fire is None else fire.bias(block)

    def _by_distance(self, distance: torch.Tensor) -> torch.Tensor:
        of = (self.heads, self.rope, self.learned)
        if torch.compiler.is_compiling():  # a graph does not know the largest distance
            found = not_none(self.encoding.bias(distance.flatten(), *of))
            return found.unflatten(1, distance.shape)
        every = torch.arange(int(distance.max()) + 1, dtype=distance.dtype, device=distance.device)
        return not_none(self.encoding.bias(every, *of))[:, distance.long()]

    def _layer(self, name: str, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.learned[f"{name}_weight"].to(like), self.learned[f"{name}_bias"].to(like)

    def _alone(self, both: torch.Tensor) -> torch.Tensor:
        x = both.flatten(2)
        for name in ("first", "second"):
            weight, bias = self._layer(name, x)
            x = F.leaky_relu(x) if name == "second" else x
            x = torch.baddbmm(bias[:, None], weight.expand(len(x), -1, -1), x)
        return x.unflatten(2, both.shape[2:])

    def _beside(self, both: torch.Tensor, block: Block) -> torch.Tensor:
        """Version 2: visible keys form one sequence, with hidden keys between them skipped."""
        visible = block.visible.expand(len(both), 1, *both.shape[2:])
        both = both * visible
        begun = visible[..., 1:] & ~visible[..., :-1]
        torn = torch.compiler.is_compiling() or bool(((begun.sum(-1) + visible[..., 0]) > 1).any())
        order = None
        if torn:  # move the visible ones together, in order
            order = torch.argsort(~visible, dim=-1, stable=True)
            both = both.gather(-1, order.expand_as(both))
            visible = visible.gather(-1, order)
        x = self._convolved(both, visible)
        if order is None:
            return x
        return torch.empty_like(x).scatter(-1, order.expand_as(x), x)

    def _convolved(self, both: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """Convolve keys that are visible without a gap.

        The hidden layer continues beyond the last key that a query attends to, as in all rows of a
        training sequence except the last; before the first key it is zero.
        """
        side = self.encoding.width // 2
        weight, bias = self._layer("first", both)
        x = F.conv2d(F.pad(both, (side, 2 * side)), weight.unsqueeze(2), bias)
        reached = F.pad(visible.cumsum(-1) > 0, (0, side), value=True)
        x = F.leaky_relu(x) * reached
        weight, bias = self._layer("second", both)
        return F.conv2d(F.pad(x, (side, 0)), weight.unsqueeze(2), bias)
