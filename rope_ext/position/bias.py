"""The bias of an encoding in an attention layer: its parameters, and its values by distance."""

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
from rope_ext.methods.temperature import SSMax
from rope_ext.position.layers import KeyProjection

NAME = "rope_ext_bias"  # name of the module within an attention module, and so in checkpoints
_HIDES = -1e30
"""In place of -inf, which could hide all of a tile from a row, and kernels then divide by zero."""


def learned(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of encoding and temperature on ``model``, by their names in ``state_dict``."""
    return {
        f"{name}.{key}" if name else key: value
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Learning)
        for key, value in module.state_dict(keep_vars=True).items()
    }


class Added(NamedTuple):
    """Additions to the logits, with the names of :class:`rope_ext.attention.call.Call`."""

    bias: torch.Tensor | None = None
    scores: Scores | None = None


class Held(NamedTuple):
    """The tensors of one :class:`Learning`."""

    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class Earlier:
    """The parameters of a patch on a model before the model is patched again.

    Args:
        modules: by path; PEFT may have wrapped them.
        held: the tensors of every :class:`Learning` in them. The modules may get other tensors
            while a ``with`` block lasts.
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
        """Let the patch that replaced the earlier one continue with its parameters.

        Tensors of the same shape stay the same parameter objects, so that an optimizer can
        continue with them. Tables that grow keep their rows.

        Returns:
            Names of parameters that do not exist under this patch: those of another encoding or
            temperature, or of layers that are no longer patched.

        Raises:
            OptionError: the same encoding or temperature now has a shape into which they do not
                fit. Nothing is changed in that case.
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
        raise _no_place(
            before, now, f"its parameters belong to another value of {', '.join(other)}"
        )
    if held.parameters.keys() != new._parameters.keys():
        raise _no_place(part.encoding, new.encoding, f"{_names(held)} would be {_names(new)}")
    parameters = {}
    for name, begun in new._parameters.items():
        value = held.parameters[name]
        if value is None or begun is None:  # nn.Module allows it, an encoding registers none
            raise _no_place(part.encoding, new.encoding, f"{name} is missing")
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


def _no_place(before: Encoding | SSMax, now: Encoding | SSMax, what: str) -> OptionError:
    old, new = before.options(), now.options()
    changed = [f"{k}={new[k]!r} instead of {old[k]!r}" for k in new if new[k] != old[k]]
    return OptionError(
        f"{now.name} with {', '.join(changed)} cannot continue from what the model has learned: "
        f"{what}. Keep the options that set this shape, or call rope_ext.unpatch(model) first to "
        f"start from new parameters"
    )


def like_weights(module: nn.Module) -> torch.Tensor:
    """A tensor with the dtype and device for parameters next to the weights of ``module``."""
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
    # Offloaded: no hook would ever load a new parameter from the meta device.
    return torch.empty(0, dtype=like.dtype, device="cpu") if like.is_meta else like


class Learning(nn.Module):
    """Parameters of an encoding, or of a temperature.

    Args:
        values: initial values, by name.
        like: gives their dtype and device.
        bounds: least and largest value of those that are bounded, by name.
    """

    encoding: Encoding | SSMax  # what has them

    def __init__(
        self, values: dict[str, torch.Tensor], like: torch.Tensor, bounds: Bounds | None = None
    ) -> None:
        super().__init__()
        self.bounds = dict(bounds or {})
        with torch.inference_mode(False):  # they outlive the mode, and may be trained
            for name, value in values.items():
                value = value.clone() if value.is_inference() else value
                self.register_parameter(name, nn.Parameter(value.to(like.device, like.dtype)))

    def follow(self, other: Learning, held: Held) -> None:
        """Take over the state of ``other``, with these tensors."""
        own = vars(nn.Module())
        self.__dict__.update((k, v) for k, v in vars(other).items() if k not in own)
        self.__dict__.update(_parameters=dict(held.parameters), _buffers=dict(held.buffers))

    def clamp(self) -> None:
        """Clamp the stored values to their bounds.

        Through ``.data``, which autograd does not track: a forward may run again before its
        backward pass, as in gradient checkpointing, and then nothing is left to clamp.
        """
        for name, (least, most) in self.bounds.items():
            value = getattr(self, name)
            # A graph cannot call is_inference, and has no inference tensors where gradients matter.
            if torch.compiler.is_compiling() or not value.is_inference():
                value.data.clamp_(least, most)

    def clamped(self) -> dict[str, torch.Tensor]:
        """The parameters within their bounds; gradients pass as if there were no bounds.

        A clamp has no gradient outside its bounds, so a value that an optimizer moved there would
        never come back.
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
        """Whether results computed from the parameters may be cached for the next forward."""
        learned = list(self.parameters())
        training = torch.is_grad_enabled() and any(value.requires_grad for value in learned)
        return not training and not any(value.is_inference() for value in learned)

    def copies(self) -> tuple[torch.Tensor, ...]:
        """Copies of the parameters in their current state."""
        return tuple(value.detach().clone() for value in self.parameters())

    def unchanged(self, copies: tuple[torch.Tensor, ...]) -> bool:
        """Whether the parameters still equal ``copies``.

        Compares values, since changes through ``.data`` (weight averaging, for example) do not
        change the version of a parameter.
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
    """The bias of an encoding in one attention layer, or in all.

    Args:
        encoding: the encoding, resolved.
        heads: number of query heads of the layer, and sizes of heads.
        rope: the trained embedding.
        like: gives dtype and device of the parameters.
    """

    encoding: Encoding

    def __init__(self, encoding: Encoding, heads: Heads, rope: Rope, like: torch.Tensor) -> None:
        super().__init__(encoding.initial(heads, rope), like, encoding.bounds)
        self.encoding, self.heads, self.rope = encoding, heads, rope
        self.projection: KeyProjection | None = None
        self._made: tuple[tuple, tuple, torch.Tensor] | None = None

    def forward(
        self,
        distances: int,
        device: torch.device,
        dtype: torch.dtype,
        owner: nn.Module | None = None,
    ) -> Added:
        """Additions at all distances below ``distances``; a bias is ``[heads, n]``.

        If the bias is constant from some distance on, that distance is the last entry. ``owner`` is
        the attention module whose keys an encoding may project.
        """
        # This is forward, and not another method, because wrappers gather parameters before it.
        given = {**self.clamped(), **self.encoding.constants(self.heads, device)}
        if self.projection is not None and owner is not None:
            like = next(self.parameters())
            weight = self.projection.weight(owner, like.device, like.dtype)
            groups = self.heads.count // len(weight)
            given["key_projection"] = weight.repeat_interleave(groups, 0)
        scores = self.encoding.scores(self.heads.count, self.rope, given)
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
