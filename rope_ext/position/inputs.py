"""Encodings that change the input of layers: their parameters, and the hooks.

The hook is on a layer and not on the embedding, since families may change embeddings before the
first layer (Gemma multiplies them), and embeddings may be given. Gradient checkpointing runs the
hook again with its layer; the attention mask then identifies the forward.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from rope_ext.encodings.inputs import InputEncoding
from rope_ext.errors import OptionError, UnsupportedModelError
from rope_ext.methods import Rope
from rope_ext.position.bias import Learning, like_weights
from rope_ext.position.forward import PositionForward
from rope_ext.position.map import PositionMap
from rope_ext.position.masks import BatchMask
from rope_ext.rotary.context import current, run_eagerly
from rope_ext.rotary.sites import evaluating, input_device, vocabulary_of
from rope_ext.rotary.zero3 import size

NAME = "rope_ext_input"  # name of the module within the decoder, and so in checkpoints
_SAMPLE = 64
"""Tokens of the vocabulary whose hidden states before the first layer are measured."""


class InputPositions(Learning):
    """``p`` of an encoding, with its parameters.

    Args:
        encoding: the encoding, resolved.
        columns: columns of the hidden states.
        size: root mean square of the input of the first layer.
        rope: the trained embedding.
        like: gives dtype and device of the parameters.
    """

    encoding: InputEncoding
    scale: torch.Tensor  # a buffer of encodings that are sized and have no scale

    def __init__(
        self, encoding: InputEncoding, columns: int, size: float, rope: Rope, like: torch.Tensor
    ) -> None:
        super().__init__(encoding.initial_inputs(columns, size, rope), like, encoding.bounds)
        self.encoding, self.columns, self.rope = encoding, columns, rope
        if encoding.sized and _fixed_scale(encoding) is None:
            with torch.inference_mode(False):  # it outlives the mode
                scale = torch.tensor(size, dtype=torch.float32, device=like.device)
            self.register_buffer("scale", scale)
        self._path: tuple[tuple, tuple, torch.Tensor] | None = None

    def forward(self, t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``[..., columns]`` in ``dtype`` at the positions ``t``, int64, ``[...]``."""
        t = t.to(next(self.parameters(), t).device)
        tokens = int(t.max()) + 1
        self.encoding.covers(tokens, self.rope)
        if self.encoding.tabled:
            p = self._table(tokens, t.device, dtype)[t]
        else:
            p = self._of(t.double())
        if self.encoding.sized:
            scale = _fixed_scale(self.encoding)
            p = p * (self.scale.to(p) if scale is None else scale)
        return p.to(dtype)

    def _of(self, t: torch.Tensor) -> torch.Tensor:
        learned = self.clamped()
        return self.encoding.p(t, self.columns, self.rope, learned)

    def _table(self, tokens: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """``p`` of the first ``tokens`` positions or more, cached while nothing is trained."""
        dtype = torch.promote_types(dtype, torch.float32)
        if not self.keeps():
            return self._of(torch.arange(tokens, dtype=dtype, device=device))
        made, where = self._path, (device, dtype)  # another thread may put others there
        if made is None or made[0] != where or not self.unchanged(made[1]):
            made = None
        if made is None or len(made[2]) < tokens:
            with torch.inference_mode(False), torch.no_grad():  # it outlives the mode
                path = self._of(torch.arange(2 * tokens, dtype=dtype, device=device))
                self._path = made = (where, self.copies(), path)
        return made[2]


def _fixed_scale(encoding: InputEncoding) -> float | None:
    """The option ``scale`` of a sized encoding; None: measured on the model."""
    return getattr(encoding, "scale", None)


class Entrance:
    """Pre-hook of a decoder layer that changes its hidden states.

    Args:
        decoder: the decoder that has the :class:`InputPositions`, which peft may have wrapped.
        position_map: the map in force; its encoding is an :class:`InputEncoding`.
    """

    def __init__(self, decoder: nn.Module, position_map: PositionMap) -> None:
        self.decoder, self.map = decoder, position_map
        self.encoding = cast("InputEncoding", position_map.encoding)

    @run_eagerly()
    def __call__(self, layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        forward = forward_among(self.map, args, kwargs)
        if forward is None or not forward.located:
            raise UnsupportedModelError(
                f"{type(layer).__name__} was run by itself under {self.map.method.name}, so the "
                f"positions of its tokens are not known; run the whole model"
            )
        x = args[0] if args else kwargs["hidden_states"]
        x = self.encoding.join(x, self._positions(forward, x))
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

    def _positions(self, forward: PositionForward, x: torch.Tensor) -> torch.Tensor:
        """``p`` of the tokens of a forward, made once for all layers, ``[rows or 1, ...]``."""
        p, module = forward.entering, getattr(self.decoder, NAME)
        learning = torch.is_grad_enabled() and any(v.requires_grad for v in module.parameters())
        if p is None or (learning and not p.requires_grad):
            t = forward.query.clamp(min=0)
            # Checkpointing counts the tensors that a layer saves, and must not count shared ones.
            shared = torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)
            with shared, torch.autocast(x.device.type, enabled=False):
                p = module(t, x.dtype)
            if current(self.map) is forward:  # else checkpointing runs a layer again
                forward.entering = p
        return p.to(x.device, x.dtype)


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def enter(decoder: nn.Module, position_map: PositionMap) -> list[Any]:
    """Install an input encoding on ``decoder``; returns the handles of its hooks.

    Raises:
        UnsupportedModelError: the input of its layers is unknown.
        OptionError: it has fewer layers than the encoding enters.
    """
    encoding, layers = cast("InputEncoding", position_map.encoding), _layers(decoder)
    entered = _entered(encoding, layers)
    columns, size = _measured(decoder, layers[0], position_map)
    like = like_weights(layers[0])
    module = InputPositions(encoding, columns, size, position_map.rope, like)
    decoder.add_module(NAME, module)
    hook: Any = Entrance(decoder, position_map)
    return [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in entered]


def _entered(encoding: InputEncoding, layers: list[nn.Module]) -> list[nn.Module]:
    """The layers whose input ``encoding`` changes."""
    entered = encoding.entered
    if not isinstance(entered, int):
        return layers if entered == "every" else layers[:1]
    if entered > len(layers):
        raise OptionError(
            f"{encoding.name} changes the input of the last {entered} layers, and the model has "
            f"{len(layers)}; choose fewer"
        )
    return [layers[-entered]]


def note(decoder: nn.Module) -> str:
    """A sentence for ``describe``."""
    module = getattr(decoder, NAME)
    entered: Any = module.encoding.entered
    named = {"first": "the first layer", "every": "every layer"}
    layers = named.get(entered, f"the first of the last {entered} layers")
    scale = _fixed_scale(module.encoding) if module.encoding.sized else None
    scale = float(module.scale) if module.encoding.sized and scale is None else scale
    size = "" if scale is None else f", times {scale:.3g}"
    return f"inputs: what {layers} gets has its positions{size}"


def leave(decoder: nn.Module) -> None:
    """Remove the module of :func:`enter`."""
    decoder._modules.pop(NAME, None)


def forward_among(position_map: PositionMap, args: tuple, kwargs: dict) -> PositionForward | None:
    """The forward that a layer with these arguments is part of; None if it is not known."""
    masks = (one for one in (*args, *kwargs.values()) if isinstance(one, BatchMask))
    known = next((mask.owner for mask in masks if mask.owner is not None), None)
    return known or current(position_map)


def _layers(decoder: nn.Module) -> list[nn.Module]:
    """Its layers, in order: the list of modules with the most parameters."""
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise UnsupportedModelError(
            f"{type(decoder).__name__} has no list of layers, so it is not known where to put "
            f"positions; use an encoding in the attention, such as 'alibi'"
        )
    return list(max(lists, key=lambda module: sum(map(size, module.parameters()))))


@torch.no_grad()
def _measured(decoder: nn.Module, first: nn.Module, position_map: PositionMap) -> tuple[int, float]:
    """Columns and root mean square of the input of the first layer, for some tokens."""
    seen = []

    def look(layer: nn.Module, args: tuple, kwargs: dict) -> None:
        forward = current(position_map)
        located = forward is not None and forward.located
        seen.append((args[0] if args else kwargs.get("hidden_states"), located))

    vocabulary = vocabulary_of(decoder)
    count = min(_SAMPLE, vocabulary.num_embeddings)
    tokens = torch.arange(count, device="cpu") * (vocabulary.num_embeddings // count)
    handle = first.register_forward_pre_hook(look, with_kwargs=True)
    try:
        with evaluating(decoder):
            decoder(input_ids=tokens[None].to(input_device(decoder)), use_cache=False)
    finally:
        handle.remove()
    x, located = seen[0] if seen else (None, False)
    if not located or not isinstance(x, torch.Tensor) or x.shape[:-1] != (1, count):
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: its first layer does not get hidden states of "
            f"[rows, tokens, columns] whose positions are known, so {position_map.method.name} "
            f"cannot be put in front of it; use an encoding in the attention, such as 'alibi'"
        )
    return x.shape[-1], float(x.double().square().mean().sqrt())
