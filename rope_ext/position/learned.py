"""Learned parameters of patches: modules in the decoder or in its attention modules.

Their forwards compute what a layer needs, since wrappers gather parameters before a forward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from rope_ext.encodings import Encoding, Heads, InputEncoding
from rope_ext.encodings.base import Sized
from rope_ext.errors import OptionError, UnsupportedModelError
from rope_ext.methods import Rope
from rope_ext.methods.temperature import SSMax
from rope_ext.rotary.swapping import Changes

BIAS = "rope_ext_bias"  # module names, also in checkpoints
TEMPERATURE = "rope_ext_temperature"
INPUT = "rope_ext_input"
POSITIONS = "rope_ext_positions"
NAMES = (BIAS, TEMPERATURE, INPUT, POSITIONS)
_Tensors = tuple[dict[str, Any], dict[str, Any]]  # parameters and buffers of a module


def learned(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the model's encoding and temperature parameters, by their names in ``state_dict``."""
    return {
        f"{name}.{key}" if name else key: value
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Learning)
        for key, value in module.state_dict(keep_vars=True).items()
    }


def put(holder: nn.Module, name: str, module: Learning, changes: Changes) -> None:
    """Add a module to another module until ``changes`` are undone."""
    holder.add_module(name, module)
    changes.append(partial(delattr, holder, name))


class Learning(nn.Module):
    """Parameters of an encoding or a temperature.

    They get the dtype and device of the weights of ``near``, a neighboring module.
    """

    encoding: Encoding | SSMax

    def __init__(self, encoding: Any, values: dict[str, Tensor], near: nn.Module) -> None:
        super().__init__()
        self.encoding = encoding
        self.bounds = dict(getattr(encoding, "bounds", {}))
        self._kept: tuple[Any, int, list[Tensor], Any] | None = None
        like = _like(near)
        with torch.inference_mode(False):  # inference tensors could not be trained
            for name, value in values.items():
                value = value.clone() if value.is_inference() else value
                self.register_parameter(name, nn.Parameter(value.to(like)))

    def clamp(self) -> None:
        """Clamp the stored values to their bounds.

        Via ``.data``, which autograd does not track: if a forward is rerun before its backward
        pass, as in gradient checkpointing, there is nothing left to clamp.
        """
        for name, (least, most) in self.bounds.items():
            value = getattr(self, name)
            # Graphs cannot call is_inference, and have no inference tensors if gradients matter.
            if torch.compiler.is_compiling() or not value.is_inference():
                value.data.clamp_(least, most)

    def clamped(self) -> dict[str, Tensor]:
        """Return the parameters within their bounds; during training, clamp the stored values.

        A clamp in the forward has no gradient outside the bounds, so a value that an optimizer
        moved there would never come back.
        """
        if torch.is_grad_enabled():
            self.clamp()
            return dict(self.named_parameters())
        return {
            name: value.clamp(*self.bounds[name]) if name in self.bounds else value
            for name, value in self.named_parameters()
        }

    def _save_to_state_dict(self, *args: Any) -> None:
        self.clamp()  # the optimizer may have stepped since the last forward
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.clamp()

    def kept(self, where: Any, count: int, room: int, make: Callable[[int], Any]) -> Any:
        """Return ``make(count)``, or more up to ``room``; cached while nothing is trained.

        Parameters are compared by value, since changes via ``.data`` (such as weight averaging)
        do not change their version.
        """
        learned = list(self.parameters())
        training = torch.is_grad_enabled() and any(value.requires_grad for value in learned)
        if torch.compiler.is_compiling() or training:
            return make(count)
        key = (where, [x.dtype for x in learned])
        kept = self._kept  # read once, since threads share it
        fits = kept is not None and kept[0] == key and kept[1] >= count
        if kept is None or not fits or not all(map(torch.equal, learned, kept[2])):
            with torch.inference_mode(False), torch.no_grad():  # it outlives the mode
                copies = [value.detach().clone() for value in learned]
                self._kept = kept = (key, room, copies, make(room))
        return kept[3]


def _like(near: nn.Module) -> Tensor:
    """Return an empty tensor with the dtype and device of a module's weights."""
    like = next((p for p in near.parameters() if p.is_floating_point()), torch.empty(0))
    # Offloaded: no hook would load a new parameter from the meta device.
    return torch.empty(0, dtype=like.dtype, device="cpu" if like.is_meta else like.device)


class DistanceBias(Learning):
    """An encoding's bias, for one attention layer or all."""

    encoding: Encoding

    def __init__(self, encoding: Encoding, heads: Heads, near: nn.Module) -> None:
        super().__init__(encoding, encoding.initial(heads), near)
        self.heads = heads

    def forward(
        self,
        count: int,
        device: torch.device,
        dtype: torch.dtype,
        projection: Tensor | None = None,
        both: bool = False,
    ) -> dict[str, Any]:
        """Return changes to the logits, as fields of :class:`rope_ext.attention.call.Call`.

        A bias is ``[heads, n]``, for all distances below ``count``, or until it becomes constant;
        in ``both`` directions, entries for later keys come first.
        ``projection`` is the key projection that an encoding may use, ``[kv_heads, columns,
        inputs]``.
        """
        learned = self.clamped()
        given = {**learned, **self.encoding.constants(self.heads, device)}
        if projection is not None:
            groups = self.heads.count // len(projection)
            given["key_projection"] = projection.repeat_interleave(groups, 0)
        if self.encoding.scored():
            return {"scores": (self.encoding, given)}
        settled = self.encoding.saturates_at()
        room = 2 * count
        if settled is not None:
            count, room = (min(n, settled + 1) for n in (count, room))

        def make(count: int, ahead: bool = False) -> Tensor | None:
            distance = torch.arange(count, dtype=dtype, device=device)
            of = self.encoding.bias_ahead if ahead else self.encoding.bias
            bias = of(distance, self.heads.count, learned)
            # With -inf, a tile could be masked for a whole row, and kernels would divide by zero.
            return None if bias is None else bias.clamp(min=-1e30)

        if not both:
            bias = self.kept((device, dtype), count=count, room=room, make=make)
            return {"bias": None if bias is None else bias[:, :count]}
        sides = self.kept(
            (device, dtype, "both"), count=count, room=room, make=lambda n: (make(n), make(n, True))
        )
        if sides[0] is None:
            return {"bias": None}
        earlier, later = (side[:, :count] for side in sides)
        return {"bias": torch.cat((later[:, 1:].flip(1), earlier), 1), "ahead": count - 1}


class HeadScales(Learning):
    """Learned scales of a temperature: one number per query head of a layer."""

    scale: nn.Parameter

    def __init__(self, temperature: SSMax, heads: int, near: nn.Module) -> None:
        initial = torch.full((heads,), float(temperature.scale))
        super().__init__(temperature, {"scale": initial}, near)

    def forward(self, query: Tensor, growth: Tensor) -> Tensor:
        """Multiply queries, ``[rows, heads, tokens, columns]``, by ``1 + scale * growth``.

        ``growth``: ``[rows or 1, 1, tokens, 1]``.
        """
        scale = self.scale
        if len(scale) != query.shape[1]:
            raise UnsupportedModelError(
                f"temperature='ssmax' has a scale for each of {len(scale)} heads, and an attention "
                f"layer runs {query.shape[1]}, as under tensor parallelism; run the model without "
                f"it, or patch with temperature='log_n'"
            )
        factor = 1 + growth * scale.to(growth)[:, None, None]
        return (query * factor).to(query.dtype)


class InputPositions(Learning):
    """``p`` of an encoding that changes layer inputs, whose root mean square is ``size``."""

    encoding: InputEncoding

    def __init__(
        self, encoding: InputEncoding, columns: int, size: float, rope: Rope, near: nn.Module
    ) -> None:
        super().__init__(encoding, encoding.initial_inputs(columns, size, rope), near)
        self.columns = columns
        self.rope = rope
        if isinstance(encoding, Sized) and encoding.scale is None:
            with torch.inference_mode(False):  # it outlives the mode
                measured = torch.tensor(size, device=_like(near).device).float()
                self.register_buffer("scale", measured)

    def forward(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``[..., columns]`` in ``dtype`` at positions ``t``, int64, ``[...]``."""
        encoding = self.encoding
        device = next(self.parameters(), t).device
        t = t.to(device)
        tokens = int(t.max()) + 1
        encoding.covers(tokens, self.rope)

        def make(t: Tensor) -> Tensor:
            return encoding.p(t, self.columns, self.rope, self.clamped())

        if encoding.tabled:
            wide = torch.promote_types(dtype, torch.float32)

            def table(count: int) -> Tensor:
                return make(torch.arange(count, dtype=wide, device=device))

            p = self.kept((device, wide), count=tokens, room=2 * tokens, make=table)[t]
        else:
            p = make(t.double())
        if self.factor is not None:
            p = p * (self.factor.to(p) if isinstance(self.factor, Tensor) else self.factor)
        return p.to(dtype)

    @property
    def factor(self) -> float | Tensor | None:
        return self._buffers.get("scale", getattr(self.encoding, "scale", None))


class HeadPositions(Learning):
    """Computes token positions in one attention layer."""

    encoding: Encoding

    def __init__(self, encoding: Encoding, columns: int, key_heads: int, near: nn.Module) -> None:
        super().__init__(encoding, encoding.initial_positions(columns, key_heads), near)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Return ``[rows, key heads, tokens]``, at least float32, for states ``x`` at ``t``.

        ``t`` is int64, or float64 to keep the fractions of a sum with it.
        """
        # In bfloat16, positions beyond 256 would lose their fractions.
        wide = torch.promote_types(x.dtype, torch.float32)
        device = next(self.parameters(), x).device
        with torch.autocast(x.device.type, enabled=False):
            learned = {name: value.to(wide) for name, value in self.clamped().items()}
            return self.encoding.places(x.to(device, wide), t.to(device), learned)


class Earlier:
    """The parameters of a patch, saved before the model is patched again."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = {  # by path; PEFT may have wrapped them
            path: module
            for path, module in model.named_modules()
            if path.rpartition(".")[2].startswith("rope_ext_")
        }
        parts = {part for module in self.modules.values() for part in _parts(module)}
        # Modules may change inside a ``with`` block.
        self.held = {part: (dict(part._parameters), dict(part._buffers)) for part in parts}

    def carry(self, model: nn.Module) -> list[str]:
        """Continue with the earlier parameters in the same patch, or in one that replaced it.

        Tensors of the same shape stay the same parameter objects, so that an optimizer can
        continue with them. Tables that grow keep their rows. Returns the names of parameters that
        the new patch does not have: those of another encoding or temperature, or of other layers.
        """
        dropped = []
        own = vars(nn.Module())
        for path, module in self.modules.items():
            parent, _, last = path.rpartition(".")
            siblings = model.get_submodule(parent)._modules
            parts = _parts(module)
            new = siblings.get(last)
            for part in parts:
                if isinstance(new, Learning) and type(part.encoding) is type(new.encoding):
                    tensors = _carried(part.encoding, self.held[part], new)
                    # It becomes like ``new``, with the earlier tensors.
                    vars(part).update((k, v) for k, v in vars(new).items() if k not in own)
                    part._parameters, part._buffers = map(dict, tensors)
                    siblings[last] = module
                else:
                    dropped += [f"{path}.{name}" for name in self.held[part][0]]
        return dropped


def _parts(module: nn.Module) -> list[Learning]:
    return [part for part in module.modules() if isinstance(part, Learning)]


def _carried(before: Any, held: _Tensors, new: Learning) -> _Tensors:
    """Convert an encoding's tensors to those of ``new``, which has the same kind."""
    now = cast("Any", new.encoding)
    parameters = {}
    options = [(name, value, getattr(now, name)) for name, value in before.options().items()]
    changed = {name: f"{name}={y!r} instead of {x!r}" for name, x, y in options if x != y}

    def refused(what: str) -> OptionError:
        return OptionError(
            f"{now.name} with {', '.join(changed.values())} cannot continue from what the model "
            f"has learned: {what}. Keep the options that set this, or call rope_ext.unpatch(model) "
            f"first to start from new parameters"
        )

    # Parameters with equal names and shapes may have different meanings.
    redefined = changed.keys() & {*getattr(now, "redefining", ())}
    if redefined or held[0].keys() != new._parameters.keys():
        raise refused("its parameters mean something else")
    for name, value in held[0].items():
        begun = cast("nn.Parameter", new._parameters[name])
        if value.shape != begun.shape:
            grow = getattr(now, "grown", lambda *_: None)  # a temperature has none
            grown = grow(name, value.detach(), begun.detach().to(value))
            if grown is None:
                raise refused(f"{name} is {list(value.shape)} and would be {list(begun.shape)}")
            value = nn.Parameter(grown, requires_grad=value.requires_grad)
        parameters[name] = value
    return parameters, {name: held[1].get(name, value) for name, value in new._buffers.items()}
