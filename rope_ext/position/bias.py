"""What an encoding adds in an attention layer: what is learned, and the values by distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from rope_ext.encodings import Encoding, Heads
from rope_ext.encodings.scores import Scores
from rope_ext.methods import Rope

NAME = "rope_ext_bias"  # of the module within an attention module, and so in checkpoints
_HIDES = -1e30
"""In place of -inf, with which a row may see nothing of a tile, and a kernel then sees a zero."""


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


@dataclass(frozen=True)
class Earlier:
    """What there was to learn on a model, for an encoding that comes back.

    Args:
        values: as :func:`learned` gives them.
        wrappers: what peft had put around the modules, by their paths.
    """

    values: dict[str, nn.Parameter]
    wrappers: dict[str, nn.Module]

    @classmethod
    def of(cls, model: nn.Module) -> Earlier:
        there = {
            path: module
            for path, module in model.named_modules()
            if path.rpartition(".")[2].startswith("rope_ext_") and not isinstance(module, Learning)
        }
        return cls(learned(model), there)

    def give_back(self, model: nn.Module) -> None:
        """Put it in the place of what is of the same name and shape.

        They are the very same parameters, so that an optimizer goes on with them. What all layers
        share is found in whatever layer it was.
        """
        for path, wrapper in self.wrappers.items():
            parent, _, name = path.rpartition(".")
            modules = model.get_submodule(parent)._modules
            new = modules.get(name)
            parts = [module for module in wrapper.modules() if isinstance(module, Learning)]
            if isinstance(new, Learning) and all(part.fits(new) for part in parts):
                for part in parts:
                    part.follow(new)
                modules[name] = wrapper
        for name, value in learned(model).items():
            path, _, key = name.rpartition(".")
            module = model.get_submodule(path)
            earlier = self.values.get(name)
            if earlier is None and module.encoding.shared:
                same = [v for n, v in self.values.items() if n.endswith(f"{NAME}.{key}")]
                earlier = same[0] if len(same) == 1 else None
            if earlier is not None and earlier.shape == value.shape:
                kind = module._parameters if key in module._parameters else module._buffers
                kind[key] = earlier


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

    def fits(self, other: Learning) -> bool:
        """Whether both learn the same, by name and shape."""
        mine, others = self.state_dict(), other.state_dict()
        return {k: v.shape for k, v in mine.items()} == {k: v.shape for k, v in others.items()}

    def follow(self, other: Learning) -> None:
        """Be what ``other`` is, with the values that are here."""
        own = vars(nn.Module())
        self.__dict__.update((k, v) for k, v in vars(other).items() if k not in own)

    def keeps(self) -> bool:
        """Whether what is made of the parameters may be kept for the next forward."""
        learned = list(self.parameters())
        training = torch.is_grad_enabled() and any(value.requires_grad for value in learned)
        return not training and not any(value.is_inference() for value in learned)

    def copies(self) -> tuple[torch.Tensor, ...]:
        """Of the parameters as they are."""
        return tuple(value.detach().clone() for value in self.parameters())

    def unchanged(self, copies: tuple[torch.Tensor, ...]) -> bool:
        """Whether the parameters are as they were then.

        By their values: changes through ``.data``, as averages of weights are put in place, leave
        the version of a parameter as it was.
        """
        pairs = zip(self.parameters(), copies, strict=True)
        return all(
            (one.dtype, one.device) == (other.dtype, other.device) and torch.equal(one, other)
            for one, other in pairs
        )


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
        self._made: tuple[tuple, tuple, torch.Tensor] | None = None

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
        if torch.compiler.is_compiling() or not self.keeps():
            return self._values(distances, device, dtype, learned)
        made, where = self._made, (device, dtype)  # another thread may put others there
        if made is None or made[0] != where or not self.unchanged(made[1]):
            made = None
        if made is None or made[2].shape[1] < distances:
            room = distances if settled == distances - 1 else 2 * distances
            with torch.inference_mode(False), torch.no_grad():  # it outlives the mode
                values = self._values(room, device, dtype, learned)
                if values is None:
                    return None
                self._made = made = (where, self.copies(), values)
        return made[2][:, :distances]

    def _values(
        self,
        distances: int,
        device: torch.device,
        dtype: torch.dtype,
        learned: dict[str, torch.Tensor],
    ) -> torch.Tensor | None:
        distance = torch.arange(distances, dtype=dtype, device=device)
        made = self.encoding.bias(distance, self.heads.count, self.rope, learned)
        return None if made is None else made.clamp(min=_HIDES)
