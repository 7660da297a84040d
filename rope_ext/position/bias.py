"""What an encoding adds in an attention layer: what is learned, and the values by distance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from rope_ext.encodings import Encoding, Heads
from rope_ext.encodings.base import Bounds
from rope_ext.encodings.scores import Scores
from rope_ext.errors import OptionError
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


class Held(NamedTuple):
    """The tensors of one :class:`Learning`."""

    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class Earlier:
    """What an encoding has learned on a model before the model is patched again.

    Args:
        modules: by path; PEFT may have wrapped them.
        held: the tensors of every :class:`Learning` in them. The modules may get others, for the
            length of a ``with`` block.
    """

    modules: dict[str, nn.Module]
    held: dict[Learning, Held]

    @classmethod
    def from_model(cls, model: nn.Module) -> Earlier:
        modules = {
            path: module
            for path, module in model.named_modules()
            if path.rpartition(".")[2].startswith("rope_ext_")
        }
        parts = (part for module in modules.values() for part in _parts(module))
        return cls(modules, {p: Held(dict(p._parameters), dict(p._buffers)) for p in parts})

    def give_back(self, model: nn.Module) -> None:
        """Put everything back on a model that has the same patch again."""
        self._put(model, self.held)

    def carry(self, model: nn.Module) -> list[str]:
        """Let the patch that replaced the earlier one continue with what was learned.

        Tensors of the same shape stay the very same parameters, so that an optimizer can go on
        with them. Tables that grow keep their rows.

        Returns:
            The names of the parameters that have no place under this patch: those of another
            encoding, or of layers that are not patched any more.

        Raises:
            OptionError: the same encoding has another shape in which they cannot continue. Nothing
                has changed then.
        """
        held, dropped = {}, []
        for path, module in self.modules.items():
            new = _at(model, path)
            for part in _parts(module):
                if new is not None and type(part.encoding) is type(new.encoding):
                    held[part] = _carried(part, self.held[part], new)
                else:
                    dropped += [f"{path}.{name}" for name in self.held[part].parameters]
        self._put(model, held)
        return dropped

    def _put(self, model: nn.Module, held: Mapping[Learning, Held]) -> None:
        for path, module in self.modules.items():
            parts, new = _parts(module), _at(model, path)
            if new is None or not all(part in held for part in parts):
                continue
            for part in parts:
                part.follow(new, held[part])
            parent, _, name = path.rpartition(".")
            model.get_submodule(parent)._modules[name] = module


def _parts(module: nn.Module) -> list[Learning]:
    return [part for part in module.modules() if isinstance(part, Learning)]


def _at(model: nn.Module, path: str) -> Learning | None:
    parent, _, name = path.rpartition(".")
    found = model.get_submodule(parent)._modules.get(name)
    return found if isinstance(found, Learning) else None


def _carried(part: Learning, held: Held, new: Learning) -> Held:
    """The tensors of ``part`` for the encoding of ``new``, an encoding of the same kind."""
    before, now = part.encoding, new.encoding
    other = [name for name in now.redefining if getattr(before, name) != getattr(now, name)]
    if other:  # names and shapes may still agree
        raise _no_place(before, now, f"its parameters belong to another {', '.join(other)}")
    if held.parameters.keys() != new._parameters.keys():
        raise _no_place(part.encoding, new.encoding, f"{_names(held)} would be {_names(new)}")
    parameters = {}
    for name, begun in new._parameters.items():
        value = held.parameters[name]
        if value.shape != begun.shape:
            start = begun.detach().to(value)
            grown = new.encoding.grown(name, value.detach(), start)
            if grown is None:
                shapes = f"{name} is {list(value.shape)} and would be {list(begun.shape)}"
                raise _no_place(part.encoding, new.encoding, shapes)
            value = nn.Parameter(grown, requires_grad=value.requires_grad)
        parameters[name] = value
    buffers = {name: held.buffers.get(name, value) for name, value in new._buffers.items()}
    return Held(parameters, buffers)


def _names(holder: Held | Learning) -> str:
    found = holder.parameters if isinstance(holder, Held) else holder._parameters
    return ", ".join(found) or "nothing"


def _no_place(before: Encoding, now: Encoding, what: str) -> OptionError:
    old, new = before.options(), now.options()
    changed = [f"{k}={new[k]!r} instead of {old[k]!r}" for k in new if new[k] != old[k]]
    return OptionError(
        f"{now.name} with {', '.join(changed)} cannot continue from what the model has learned: "
        f"{what}. Keep the options that set this shape, or call rope_ext.unpatch(model) first to "
        f"start from new parameters"
    )


class Learning(nn.Module):
    """What an encoding learns.

    Args:
        values: by name, as they begin.
        like: whose dtype and device they take.
        bounds: of values that must stay within some, by name.
    """

    encoding: Encoding

    def __init__(
        self, values: dict[str, torch.Tensor], like: torch.Tensor, bounds: Bounds | None = None
    ) -> None:
        super().__init__()
        self.bounds = dict(bounds or {})
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value.to(like.device, like.dtype)))

    def follow(self, other: Learning, held: Held) -> None:
        """Become what ``other`` is, with these tensors."""
        own = vars(nn.Module())
        self.__dict__.update((k, v) for k, v in vars(other).items() if k not in own)
        self.__dict__.update(_parameters=dict(held.parameters), _buffers=dict(held.buffers))

    def clamp(self) -> None:
        """Move what is stored into its bounds.

        Through ``.data``, which autograd does not see: a forward may run again before its backward
        pass, as gradient checkpointing does, and the second time there is nothing to move.
        """
        for name, (least, most) in self.bounds.items():
            value = getattr(self, name)
            # A graph cannot ask, and has no inference tensors where gradients are needed.
            if torch.compiler.is_compiling() or not value.is_inference():
                value.data.clamp_(least, most)

    def clamped(self) -> dict[str, torch.Tensor]:
        """What is learned, within its bounds; gradients pass as if there were none.

        A clamp has no gradient outside of its bounds, so a value that an optimizer moved there
        would stay for ever.
        """
        return {
            name: _clamped(value, *self.bounds[name]) if name in self.bounds else value
            for name, value in self.named_parameters()
        }

    def _save_to_state_dict(self, *args: Any) -> None:
        self.clamp()  # an optimizer may have stepped since the last forward
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.clamp()

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


def _clamped(value: torch.Tensor, least: float, most: float) -> torch.Tensor:
    at = value.detach()
    return at.clamp(least, most) + (value - at)  # which is 0


class DistanceBias(Learning):
    """What an encoding adds to the logits of one attention layer, or of all.

    Args:
        encoding: which.
        heads: of the layer's queries, and the sizes of heads.
        rope: the trained embedding.
        like: whose dtype and device the parameters take.
    """

    def __init__(self, encoding: Encoding, heads: Heads, rope: Rope, like: torch.Tensor) -> None:
        super().__init__(encoding.initial(heads, rope), like, encoding.bounds)
        self.encoding, self.heads, self.rope = encoding, heads, rope
        self._made: tuple[tuple, tuple, torch.Tensor] | None = None

    def forward(self, distances: int, device: torch.device, dtype: torch.dtype) -> Added:
        """What is added at all distances below ``distances``; a bias is ``[heads, n]``.

        Where the bias stays the same from some distance on, that is the last.
        """
        # By the forward, not a method of its own: wrappers gather parameters in front of it.
        scores = self.encoding.scores(self.heads.count, self.rope, self.clamped())
        if scores is not None:
            return Added(scores=scores)
        return Added(bias=self._bias(distances, device, dtype))

    def _bias(
        self, distances: int, device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor | None:
        settled = self.encoding.saturates_at(self.rope)
        if settled is not None:
            distances = min(distances, settled + 1)
        learned = self.clamped()
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
