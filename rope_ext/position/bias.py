"""What an encoding adds in an attention layer: what is learned, and the values by distance."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from rope_ext.encodings import Encoding, Heads
from rope_ext.encodings.scores import Scores
from rope_ext.methods import Rope

NAME = "rope_ext_bias"  # of the module within an attention module, and so in checkpoints


def learned(model: nn.Module) -> dict[str, nn.Parameter]:
    """What the encoding on ``model`` has learned, by the names of its ``state_dict``."""
    return {
        f"{name}.{key}" if name else key: value
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Learning)
        for key, value in module.state_dict(keep_vars=True).items()
    }


class Added(NamedTuple):
    """What is added to the logits, by the names of :class:`rope_ext.attention.Call`."""

    bias: torch.Tensor | None = None
    scores: Scores | None = None


def give_back(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Put what :func:`learned` gave earlier in the place of what is of the same name and shape.

    They are the very same parameters, so that an optimizer goes on with them.
    """
    for name, value in learned(model).items():
        if name in values and values[name].shape == value.shape:
            path, _, key = name.rpartition(".")
            module = model.get_submodule(path)
            kind = module._parameters if key in module._parameters else module._buffers
            kind[key] = values[name]


class Learning(nn.Module):
    """What an encoding learns.

    Args:
        values: by name, as they begin.
        like: whose dtype and device they take.
    """

    def __init__(self, values: dict[str, torch.Tensor], like: torch.Tensor) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value.to(like.device, like.dtype)))

    def keeps(self) -> bool:
        """Whether what is made of the parameters may be kept for the next forward."""
        learned = list(self.parameters())
        training = torch.is_grad_enabled() and any(value.requires_grad for value in learned)
        return not training and not any(value.is_inference() for value in learned)

    def state(self) -> tuple:
        """Changes with the parameters."""
        return tuple((value._version, value.data_ptr()) for value in self.parameters())


class DistanceBias(Learning):
    """What an encoding adds to the logits of one attention layer, or of all.

    Args:
        encoding: which.
        heads: of the layer's queries, and the sizes of heads.
        rope: the trained embedding.
        like: whose dtype and device the parameters take.
    """

    def __init__(self, encoding: Encoding, heads: Heads, rope: Rope, like: torch.Tensor) -> None:
        super().__init__(encoding.initial(heads, rope), like)
        self.encoding, self.heads, self.rope = encoding, heads, rope
        self._made: tuple[tuple, torch.Tensor] | None = None

    def forward(self, distances: int, device: torch.device, dtype: torch.dtype) -> Added:
        """What is added at all distances below ``distances``; a bias is ``[heads, n]``.

        Where the bias stays the same from some distance on, that is the last.
        """
        # By the forward, not a method of its own: wrappers gather parameters in front of it.
        scores = self.encoding.scores(self.heads.count, self.rope, dict(self.named_parameters()))
        if scores is not None:
            return Added(scores=scores)
        return Added(bias=self._bias(distances, device, dtype))

    def _bias(
        self, distances: int, device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor | None:
        settled = self.encoding.settles(self.rope)
        if settled is not None:
            distances = min(distances, settled + 1)
        learned = dict(self.named_parameters())
        if not self.keeps():
            return self._values(distances, device, dtype, learned)
        state = (device, dtype, *self.state())
        if self._made is None or self._made[0] != state or self._made[1].shape[1] < distances:
            room = distances if settled == distances - 1 else 2 * distances
            with torch.inference_mode(False), torch.no_grad():  # it outlives the mode
                values = self._values(room, device, dtype, learned)
            if values is None:
                return None
            self._made = (state, values)
        return self._made[1][:, :distances]

    def _values(
        self,
        distances: int,
        device: torch.device,
        dtype: torch.dtype,
        learned: dict[str, torch.Tensor],
    ) -> torch.Tensor | None:
        distance = torch.arange(distances, dtype=dtype, device=device)
        return self.encoding.bias(distance, self.heads.count, self.rope, learned)
