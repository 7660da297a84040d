"""What an encoding does in front of the layers: what it learns, and the hooks that do it.

A layer is entered by a hook on itself, not on the embedding: there is all that a family does to
its embeddings before (Gemma multiplies them), and embeddings may be given. Gradient checkpointing
runs such a hook again with its layer; which forward that belongs to, the attention mask says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rope_ext.encodings.inputs import InputEncoding
from rope_ext.errors import UnsupportedModelError
from rope_ext.forward.context import current
from rope_ext.forward.positions import PositionForward
from rope_ext.methods import Rope
from rope_ext.position.bias import Learning
from rope_ext.position.map import PositionMap
from rope_ext.position.segments import BatchMask
from rope_ext.rotary.sites import evaluating
from rope_ext.rotary.zero3 import size

NAME = "rope_ext_input"  # of the module within the decoder, and so in checkpoints
_SAMPLE = 64
"""Tokens of the vocabulary whose size in front of the first layer is measured."""


class InputPositions(Learning):
    """``p`` of an encoding, with what it learns.

    Args:
        encoding: resolved.
        columns: of the hidden states.
        size: root mean square of what the first layer gets.
        rope: the trained embedding.
        like: whose dtype and device the parameters take.
    """

    def __init__(
        self, encoding: InputEncoding, columns: int, size: float, rope: Rope, like: torch.Tensor
    ) -> None:
        super().__init__(encoding.initial_inputs(columns, size, rope), like, encoding.bounds)
        self.encoding, self.columns, self.rope = encoding, columns, rope
        if encoding.sized and encoding.scale is None:
            size = torch.tensor(size, dtype=torch.float32, device=like.device)
            self.register_buffer("scale", size)
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
            scale = self.encoding.scale
            p = p * (self.scale.to(p) if scale is None else scale)
        return p.to(dtype)

    def _of(self, t: torch.Tensor) -> torch.Tensor:
        learned = self.clamped()
        return self.encoding.p(t, self.columns, self.rope, learned)

    def _table(self, tokens: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """``p`` of the first ``tokens`` positions or more, kept where nothing is learned."""
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


class Entrance:
    """Pre-hook of a decoder layer, which changes the hidden states that it gets.

    Args:
        decoder: which has the :class:`InputPositions`; peft may have wrapped them since.
        position_map: in force.
    """

    def __init__(self, decoder: nn.Module, position_map: PositionMap) -> None:
        self.decoder, self.map = decoder, position_map

    @torch.compiler.disable
    def __call__(self, layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        forward = _forward(self.map, args, kwargs)
        if forward is None or not forward.located:
            raise UnsupportedModelError(
                f"{type(layer).__name__} was run by itself under {self.map.method.name}, so the "
                f"positions of its tokens are not known; run the whole model"
            )
        x = args[0] if args else kwargs["hidden_states"]
        x = self.map.encoding.join(x, self._positions(forward, x))
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

    def _positions(self, forward: PositionForward, x: torch.Tensor) -> torch.Tensor:
        """``p`` of the tokens of a forward, made once for all layers, ``[rows or 1, ...]``."""
        p, module = forward.entering, getattr(self.decoder, NAME)
        learning = torch.is_grad_enabled() and any(v.requires_grad for v in module.parameters())
        if p is None or (learning and not p.requires_grad):
            t = forward.query.clamp(min=0)
            # Checkpointing, which counts what a layer saves, is not to count what is shared by all.
            shared = torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)
            with shared, torch.autocast(x.device.type, enabled=False):
                p = module(t, x.dtype)
            if current(self.map) is forward:  # else a layer is run again by itself
                forward.entering = p
        return p.to(x.device, x.dtype)


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def enter(decoder: nn.Module, position_map: PositionMap) -> list[Any]:
    """Put an encoding in front of the layers of ``decoder``; returns the handles of its hooks.

    Raises:
        UnsupportedModelError: nothing is known of what its layers get.
    """
    encoding, layers = position_map.encoding, _layers(decoder)
    columns, size = _measured(decoder, layers[0], position_map)
    like = next((p for p in layers[0].parameters() if p.is_floating_point()), torch.empty(0))
    if like.is_meta:  # offloaded: nothing would load what is not there yet
        like = torch.empty(0, dtype=like.dtype, device="cpu")
    module = InputPositions(encoding, columns, size, position_map.rope, like)
    decoder.add_module(NAME, module)
    entered = layers if encoding.entered == "every" else layers[:1]
    hook = Entrance(decoder, position_map)
    return [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in entered]


def note(decoder: nn.Module) -> str:
    """A sentence for ``describe``."""
    module = getattr(decoder, NAME)
    layers = "every layer gets" if module.encoding.entered == "every" else "the first layer gets"
    scale = module.encoding.scale if module.encoding.sized else None
    scale = float(module.scale) if module.encoding.sized and scale is None else scale
    size = "" if scale is None else f", times {scale:.3g}"
    return f"inputs: what {layers} has its positions{size}"


def leave(decoder: nn.Module) -> None:
    """Take the module of :func:`enter` out again."""
    decoder._modules.pop(NAME, None)


def _forward(position_map: PositionMap, args: tuple, kwargs: dict) -> PositionForward | None:
    masks = (one for one in (*args, *kwargs.values()) if isinstance(one, BatchMask))
    known = next((mask.forward for mask in masks if mask.forward is not None), None)
    return known or current(position_map)


def _layers(decoder: nn.Module) -> list[nn.Module]:
    """Its layers, in order: of all lists of modules, the one with the most parameters."""
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise UnsupportedModelError(
            f"{type(decoder).__name__} has no list of layers, so it is not known where to put "
            f"positions; use an encoding in the attention, such as 'alibi'"
        )
    return list(max(lists, key=lambda module: sum(map(size, module.parameters()))))


@torch.no_grad()
def _measured(decoder: nn.Module, first: nn.Module, position_map: PositionMap) -> tuple[int, float]:
    """Columns and root mean square of what the first layer gets of a sample of the vocabulary."""
    seen = []

    def look(layer: nn.Module, args: tuple, kwargs: dict) -> None:
        forward = current(position_map)
        located = forward is not None and forward.located
        seen.append((args[0] if args else kwargs.get("hidden_states"), located))

    vocabulary = decoder.get_input_embeddings()
    count = min(_SAMPLE, vocabulary.num_embeddings)
    tokens = torch.arange(count, device="cpu") * (vocabulary.num_embeddings // count)
    device = vocabulary.weight.device
    device = "cpu" if device.type == "meta" else device  # offloaded: a hook moves the tokens along
    handle = first.register_forward_pre_hook(look, with_kwargs=True)
    try:
        with evaluating(decoder):
            decoder(input_ids=tokens[None].to(device), use_cache=False)
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
