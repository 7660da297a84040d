import functools
from typing import Annotated, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from rope_ext.encodings.base import Block, Bounds, Encoding, Heads, Learned, linear
from rope_ext.encodings.fire import FIRE
from rope_ext.methods.checked import Tokens, Whole, not_none
from rope_ext.methods.kinds import build_method, register

On = Literal["kerple_log", "kerple_power", "alibi", "t5", "sandwich", "fire"]
_FIRE = "fire_"
"""Prefix of FIRE's parameters, which have the names of the network's own."""


@register
class DAPE(Encoding):
    """Replaces RoPE with a bias by distance that a small network adapts to the logits of all heads.

    ``S + B + f([S; B])``: ``S`` are the logits of the content and ``B`` is a bias by distance.
    ``f`` maps the ``2H`` numbers of all heads to ``hidden`` units, with a leaky ReLU of slope 0.01,
    and to ``H`` numbers. Without a bias it is ``S + f(S)``. Version 1 uses one key at a time. In
    version 2, both layers are convolutions over ``width`` keys, with zeros for hidden keys.

    Args:
        on: the bias ``B``: ``"kerple_log"`` (the authors' best), ``"kerple_power"``, ``"alibi"``,
            ``"t5"``, ``"sandwich"`` or ``"fire"``; its parameters are learned, too. None: no bias.
        version: 1 or 2.
        hidden: size of the hidden layer.
        width: keys of each convolution in version 2, an odd number.

    Zheng et al. 2024, arXiv 2405.14722 and, version 2, arXiv 2410.04798.
    """

    name = "dape"
    causal_only = "is trained on the scores of earlier keys"
    summary = "a bias that adapts to the content; slower; needs training"
    redefining = ("on", "version")

    on: On | None = "kerple_log"
    version: Literal[1, 2] = 1
    hidden: Tokens = 32
    width: Annotated[int, Whole(parity="odd")] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        convolves = self.version == 2 or self.width == DAPE.width
        self.require("width", convolves, "left out with version=1")

    @functools.cached_property
    def _bias(self) -> Encoding | None:
        return None if self.on is None else cast(Encoding, build_method(self.on))

    @property
    def bounds(self) -> Bounds:
        return {} if self._bias is None else self._bias.bounds

    def initial(self, heads: Heads) -> dict[str, Tensor]:
        kernel = (self.width,) if self.version == 2 else ()
        of_bias = {} if self._bias is None else self._bias.initial(heads)
        prefix = _FIRE if self.on == "fire" else ""
        inputs = heads.count if self._bias is None else 2 * heads.count
        return {
            **{f"{prefix}{name}": value for name, value in of_bias.items()},
            **linear("first", outputs=self.hidden, inputs=inputs, kernel=kernel),
            **linear("second", outputs=heads.count, inputs=self.hidden, kernel=kernel),
        }

    def pair_width(self, heads: int) -> int:
        of_bias = 0 if self._bias is None else self._bias.pair_width(heads)
        return 4 * heads + 2 * self.hidden + of_bias

    def logits(self, block: Block, learned: Learned) -> Tensor:
        given = content = block.content
        if self._bias is not None:
            bias = self._added(self._bias, block, learned).expand_as(content)
            given = torch.cat((content, bias), dim=1)
            content = content + bias
        adapt = self._alone if self.version == 1 else self._beside
        return content + adapt(given, block, learned)

    @staticmethod
    def _added(bias: Encoding, block: Block, learned: Learned) -> Tensor:
        """The bias ``B``, ``[heads, rows, keys]``."""
        if isinstance(bias, FIRE):
            own = {k.removeprefix(_FIRE): x for k, x in learned.items() if k.startswith(_FIRE)}
            return bias.by_place(block, own)
        distance = block.distance
        heads = block.content.shape[1]
        if torch.compiler.is_compiling():  # a graph does not know the largest distance
            found = not_none(bias.bias(distance.flatten(), heads, learned))
            return found.unflatten(1, distance.shape)
        every = torch.arange(int(distance.max()) + 1, dtype=distance.dtype, device=distance.device)
        return not_none(bias.bias(every, heads, learned))[:, distance.long()]

    def _alone(self, both: Tensor, block: Block, learned: Learned) -> Tensor:
        x = both.flatten(2)
        for name in ("first", "second"):
            weight, bias = _layer(name, learned, x)
            x = F.leaky_relu(x) if name == "second" else x
            x = torch.baddbmm(bias[:, None], weight.expand(len(x), -1, -1), x)
        return x.unflatten(2, both.shape[2:])

    def _beside(self, both: Tensor, block: Block, learned: Learned) -> Tensor:
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
        x = self._convolved(both, visible, learned)
        return x if order is None else torch.empty_like(x).scatter(-1, order.expand_as(x), x)

    def _convolved(self, both: Tensor, visible: Tensor, learned: Learned) -> Tensor:
        """Convolve keys that are visible without a gap.

        The hidden layer continues beyond the last key that a query attends to, as in all rows of a
        training sequence except the last; before the first key it is zero.
        """
        side = self.width // 2
        weight, bias = _layer("first", learned, both)
        x = F.conv2d(F.pad(both, (side, 2 * side)), weight.unsqueeze(2), bias)
        reached = F.pad(visible.cumsum(-1) > 0, (0, side), value=True)
        x = F.leaky_relu(x) * reached
        weight, bias = _layer("second", learned, both)
        return F.conv2d(F.pad(x, (side, 0)), weight.unsqueeze(2), bias)


def _layer(name: str, learned: Learned, like: Tensor) -> tuple[Tensor, Tensor]:
    return learned[f"{name}_weight"].to(like), learned[f"{name}_bias"].to(like)
