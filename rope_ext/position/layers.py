"""Finds the attention layers that a rotary site rotates, and the columns of its pairs in a head.

The decoder runs once on a few tokens with an attention function that records queries and keys and
attends to nothing. The rows of that batch are the same tokens under different cosines and sines:
not rotated, rotated by a quarter turn, and every pair by a different angle. The differences between
the rows give the layout; layers that do not fit any layout raise an error.

The layout belongs to the code, not to the weights: some columns of trained queries are a hundred
times larger than others, and some are zero. So the attention layers rotate random numbers, which
take the place of what their projections and norms return.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from rope_ext.attention.call import Pairs
from rope_ext.encodings import Heads
from rope_ext.errors import UnsupportedModelError
from rope_ext.rotary.context import forward_context
from rope_ext.rotary.sites import (
    RotarySite,
    evaluating,
    input_device,
    sees_window,
    text_config,
    vocabulary_of,
)
from rope_ext.rotary.third_party import replaced

LAYER = "_rope_ext"  # attribute of an attention module: what its patch knows of it
_NAME = "rope_ext_probe"  # names with sdpa, flash, flex_attention or a slash take special paths
_TOKENS = 16
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3}  # of the size of a column
_EXACT = 1e-4
_ROUNDED = 3e-2  # of what a quantized linear layer returns


@dataclass(frozen=True, eq=False)
class Layout:
    """How an attention layer rotates its queries and keys."""

    site: RotarySite  # whose frequencies it uses
    pairs: Pairs  # columns of each pair in a head
    pair: torch.Tensor  # index of each pair in the frequencies of the site, int64, [pairs]
    local: bool  # whether it sees a limited window only
    heads: Heads
    key_heads: int
    inputs: int | None  # columns of the hidden states; None: they are not its first argument


def find_layouts(
    decoder: nn.Module, sites: list[RotarySite], instead: str = "use a frequency method"
) -> dict[nn.Module, Layout | None]:
    """The layout of every attention layer of ``decoder``; None for layers that no site rotates.

    Layers that rotate alike share one object. ``instead`` is the advice at the end of an error.
    """
    layouts: dict[nn.Module, Layout | None] = {}
    known: dict[str, Layout] = {}
    with _refusing(decoder, f"rope_ext's attention cannot be shown to be correct here; {instead}"):
        for number, site in enumerate(sites):
            for seen in _run(decoder, site):
                layout = _read(decoder, site, seen)
                if layout is not None:
                    name = {**vars(layout), "site": number}
                    layout = known.setdefault(str(name), layout)
                before = layouts.get(seen.module)
                if layout is not None and before is not None and layout is not before:
                    raise _RefusedError(f"{_path(decoder, seen.module)} rotates in two ways")
                layouts[seen.module] = before or layout
        if not any(layouts.values()):
            raise _RefusedError("no attention layer takes its queries and keys from it")
    return layouts


def rotated_layers(
    decoder: nn.Module, sites: list[RotarySite]
) -> dict[nn.Module, tuple[bool, int]]:
    """The attention layers whose queries ``sites`` rotate: whether each has a window, its heads."""
    advice = (
        "a temperature cannot be proven to reach them; leave temperature out, or give an "
        "attention_factor, which multiplies cosine and sine"
    )
    with _refusing(decoder, advice):
        found = {
            seen.module: (
                sees_window(text_config(decoder), seen.module, seen.window),
                seen.query.shape[1],
            )
            for site in sites
            for seen in _run(decoder, site)
            if _changes(decoder, seen.module, seen.query)
        }
        if not found:
            raise _RefusedError("no attention layer takes its queries from the rotary embedding")
    return found


def ignores_scaling(decoder: nn.Module, site: RotarySite) -> bool:
    """Whether a factor of cosine and sine has no effect, since queries are normalized afterwards.

    False if the probe cannot tell.
    """
    try:
        seen = _run(decoder, site, scaling=1.5)
        return bool(seen) and not any(_changes(decoder, one.module, one.query) for one in seen)
    except _RefusedError:
        return False


@dataclass(frozen=True, eq=False)
class KeyProjection:
    """The part of a linear layer that makes the keys of an attention layer."""

    name: str  # of the linear layer in the attention module
    rows: slice | torch.Tensor  # of its weight, one for each column of the keys of all heads
    heads: int
    inputs: int

    def weight(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """``[heads, columns, inputs]``, with gradients for the weights of ``module``.

        Adapters, quantized, offloaded and partitioned weights have no matrix to read. What they
        return for unit vectors is one, once their bias is subtracted.
        """
        linear = getattr(module, self.name)
        if type(linear) is nn.Linear and linear.weight.device == device and linear.weight.numel():
            weight = linear.weight
        else:
            unit = torch.eye(self.inputs + 1, self.inputs, device=device, dtype=dtype)
            out = linear(unit[None])[0]  # the last row of ``unit`` is zero
            weight = (out[:-1] - out[-1:]).mT
        return weight[self.rows].unflatten(0, (self.heads, -1))


def find_key_projections(
    decoder: nn.Module, sites: list[RotarySite], modules: list[nn.Module]
) -> dict[nn.Module, KeyProjection]:
    """The linear layers that make the keys of attention layers, found by what they return."""
    found: dict[nn.Module, KeyProjection] = {}
    for seen in (seen for site in sites for seen in _run(decoder, site)):
        for name, part in seen.module.named_children():
            if seen.module in modules and part in seen.returned:
                made = _key_projection(seen, name, part)
                if made is not None:
                    found.setdefault(seen.module, made)
    lacking = next((module for module in modules if module not in found), None)
    if lacking is not None:
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: the keys of {_path(decoder, lacking)} are not what one "
            f"linear layer in it returns (they may be normalized, or made in several steps), so "
            f"there is no key projection to apply to positions; use projection='learned'"
        )
    return found


@torch.no_grad()
def _key_projection(seen: _Seen, name: str, part: nn.Module) -> KeyProjection | None:
    """The submodule ``part`` of a layer if it is linear and returns the keys, not rotated."""
    key, (x, y) = seen.key[0], seen.returned[part]  # rows of a probe differ in the rotation alone
    if x.ndim != 3 or y.ndim != 3 or y.shape[:2] != x.shape[:2]:
        return None
    keys = key.transpose(0, 1).flatten(1).double()  # [tokens, columns of all heads]
    rows = torch.cdist(keys.mT, y[0].double().mT).argmin(1)
    if not torch.equal(y[0].double()[:, rows], keys):
        return None
    made = KeyProjection(name, _columns(rows), len(key), x.shape[-1])
    try:
        weight = made.weight(seen.module, key.device, key.dtype).flatten(0, 1).double()
    except (RuntimeError, TypeError):  # it does not take other numbers of tokens
        return None
    y = part(x)[0].double()[:, rows]
    x = x[0].double()
    # Without a bias, and up to the rounding of quantized layers, in any dtype.
    away = (x - x[:1]) @ weight.mT - (y - y[:1])
    size = (x.square() @ weight.mT.square()).sqrt() + y.abs()  # rounding is a share of it
    return made if bool((away.norm(dim=0) <= _ROUNDED * size.norm(dim=0)).all()) else None


class _RefusedError(AttributeError):  # so that hasattr says no
    """A decoder cannot be probed; the message says why."""


@contextmanager
def _refusing(decoder: nn.Module, consequence: str) -> Iterator[None]:
    """Turn an error of the probe into one that names the family and the consequence."""
    try:
        yield
    except _RefusedError as error:
        there = "; ".join(replaced(decoder))
        reason = f"there is {there}, and {error}" if there else str(error)
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: {reason}, so {consequence}"
        ) from error


def _path(decoder: nn.Module, module: nn.Module) -> str:
    return next(name for name, other in decoder.named_modules() if other is module)


class _Seen(NamedTuple):
    """One call of attention: one row for each rotation, value columns, and the layer's window.

    ``hidden`` is the first argument of the layer; ``returned`` what its parts got and returned.
    """

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value_columns: int
    window: int | None
    hidden: Any
    returned: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]]


@torch.no_grad()
def _run(decoder: nn.Module, site: RotarySite, scaling: float | None = None) -> list[_Seen]:
    """What every attention layer attends with, under the rotations of :func:`_rotation`."""
    if _lacks_weights(decoder):
        raise _RefusedError("its weights are on the meta device (load them first)")
    if any(hasattr(parameter, "device_mesh") for parameter in decoder.parameters()):
        raise _RefusedError("its weights are sharded (patch it before fully_shard)")
    probe = _Probe()
    hidden = _forward(decoder, site, scaling, probe)
    if hidden.isnan().any():
        raise _RefusedError("its hidden states are NaN (check its weights and configuration)")
    # Rounding may depend on the row. Then it does so in a forward that rotates nothing, too.
    spread = _spread(hidden)
    if spread and spread > 4 * _spread(_forward(decoder, site, 1.0, _Probe())):
        raise _RefusedError("positions act outside of its attention layers")
    return probe.seen


def _forward(
    decoder: nn.Module, site: RotarySite, scaling: float | None, probe: _Probe
) -> torch.Tensor:
    """Run the decoder with ``probe`` in place of attention; its hidden states in float64."""

    def rotate(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        return _rotation(site, scaling, output) if site.called(args, kwargs) else None

    config = text_config(decoder)
    vocabulary = vocabulary_of(decoder)
    tokens = (torch.arange(_TOKENS, device="cpu") * 37 + 3) % vocabulary.num_embeddings
    parts = [module for module in decoder.modules() if next(module.children(), None) is not None]
    handles = [part.register_forward_pre_hook(probe.called, with_kwargs=True) for part in parts]
    handles.append(site.module.register_forward_hook(rotate, with_kwargs=True))
    before = config._attn_implementation_internal
    look, forward_context.look = forward_context.look, probe.attends
    try:
        config._attn_implementation_internal = _NAME  # the public name sets sub-configurations too
        with evaluating(decoder):
            output = decoder(
                input_ids=tokens.expand(3, -1).to(input_device(decoder)), use_cache=False
            )
    except _RefusedError:
        raise
    except Exception as error:
        raise _RefusedError(f"the probe of its attention layers failed ({error})") from error
    finally:
        for handle in handles:
            handle.remove()
        config._attn_implementation_internal = before
        forward_context.look = look
    return output[0].double()


def _rotation(site: RotarySite, scaling: float | None, output: Any) -> Any:
    """For ``output`` of the rotary module: row 0 not rotated, row 1 by a quarter, row 2 by pair.

    With ``scaling``, no row is rotated, and the cosine of the last row is multiplied by it.
    """
    columns = site.columns
    angles = _angles(len(site.loaded))[columns.pair]
    rotations = torch.stack((0 * angles, torch.full_like(angles, math.pi / 2), angles))
    like = output if columns.complex else output[0]
    rows = rotations.unsqueeze(1).expand(-1, like.shape[-2], -1)
    cos, sin = (f(rows.to(like.device)) for f in (torch.cos, torch.sin))
    cos[1] = 0  # exactly
    if scaling is not None:
        cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        cos[2] = scaling
    if like.ndim == 4:
        cos, sin = (part.expand(len(like), -1, -1, -1) for part in (cos, sin))
    if columns.complex:
        return torch.complex(cos, sin).to(like.dtype)
    return cos.to(like.dtype), sin.to(like.dtype)


def _angles(pairs: int) -> torch.Tensor:
    """A different angle for each pair, far apart, radians."""
    return 0.2 + 5.8 * torch.arange(pairs, dtype=torch.float64, device="cpu") / pairs


def _spread(hidden: torch.Tensor) -> float:
    """How far the rows are apart, each column against its own size."""
    size = hidden.abs().amax((0, 1)).clamp(min=torch.finfo(hidden.dtype).tiny)
    return float(((hidden - hidden[:1]) / size).norm())


def _lacks_weights(module: nn.Module, loaded: bool = False) -> bool:
    """Whether a weight is on the meta device and no hook of accelerate (offloading) loads it.

    ``loaded``: a parent module has a hook that loads its submodules as well.
    """
    hook: Any = module.__dict__.get("_hf_hook")
    hooks = [one for one in getattr(hook, "hooks", (hook,)) if getattr(one, "offload", False)]
    own = module.parameters(recurse=False)
    if not loaded and not hooks and any(parameter.is_meta for parameter in own):
        return True
    loaded = loaded or any(one.place_submodules for one in hooks)
    return any(_lacks_weights(part, loaded) for part in module.children())


def _changes(decoder: nn.Module, module: nn.Module, x: torch.Tensor) -> bool:
    """Whether the rows of a probe differ in the queries or keys of a layer."""
    if len(x) != 3:
        raise _RefusedError(f"{_path(decoder, module)} changes the batch before it attends")
    return _differs(x, _tolerance(x))


def _differs(x: torch.Tensor, tolerance: float) -> bool:
    """Whether the rows of ``x`` differ in a column by more than this share of its largest value."""
    columns = x.double().unsqueeze(1).flatten(1, -2)  # [rows, values, columns]
    away = (columns - columns[:1]).abs().amax((0, 1))
    return bool((away > tolerance * columns.abs().amax((0, 1))).any())


def _tolerance(x: torch.Tensor) -> float:
    return _TOLERANCE.get(x.dtype, _EXACT)


class _Probe:
    """The queries and keys that attention layers make of random numbers."""

    def __init__(self) -> None:
        self.seen: list[_Seen] = []
        self._calls: dict[nn.Module, tuple[tuple, dict]] = {}
        self._again: nn.Module | None = None
        self._returned: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}
        self._generator = torch.Generator("cpu").manual_seed(0)

    def called(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Forward pre-hook of every module that may be an attention layer."""
        self._calls[module] = args, kwargs

    def attends(self, seen: _Seen) -> None:
        """Record a call of the attention function, which tells that its module is a layer.

        The layer made it of its weights. So it runs once more, on random numbers.
        """
        module = seen.module
        args, kwargs = self._calls.get(module, ((), {}))
        if self._again is module or module not in self._calls:
            hidden = args[0] if args else kwargs.get("hidden_states")
            self.seen.append(seen._replace(hidden=hidden, returned=self._returned))
            return
        parts = [part for part in module.modules() if part is not module]
        handles = [part.register_forward_hook(self._replace, prepend=True) for part in parts]
        self._again, self._returned = module, {}
        try:
            module.forward(*args, **kwargs)
        finally:
            self._again = None
            for handle in handles:
                handle.remove()

    def _replace(self, part: nn.Module, args: tuple, output: Any) -> Any:
        """Random numbers, equal in all rows, for the output of a projection or a norm."""
        if type(output) is tuple:
            return tuple(self._replace(part, args, one) for one in output)
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        if output.ndim < 2 or len(output) % 3:
            return output
        rows = output.unflatten(0, (3, -1))
        if _differs(rows, 0.1):  # it comes after the rotation
            return output
        known = torch.randn(rows.shape[1:], generator=self._generator, device="cpu")
        made = known.to(output).expand_as(rows).flatten(0, 1)
        if args and isinstance(args[0], torch.Tensor):
            self._returned[part] = args[0], made
        return made


def _look(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function that attends to nothing, so that all rows stay equal."""
    if attention_mask is not None and attention_mask is not _MASK:
        raise _RefusedError(f"{type(module).__name__} makes an attention mask of its own")
    assert forward_context.look is not None, "only _forward sets this attention function"
    window = kwargs.get("sliding_window")
    forward_context.look(_Seen(module, query, key, value.shape[-1], window, None, {}))
    rows, heads, tokens = query.shape[:3]
    return query.new_zeros(rows, tokens, heads, value.shape[-1]), None


class _Mask:
    """Stands in for the attention mask; layers may only pass it on."""

    def _touched(self, *args: Any, **kwargs: Any) -> None:
        raise _RefusedError("it computes with its attention mask outside of the attention function")

    __getitem__ = __add__ = __radd__ = __and__ = __rand__ = __getattr__ = _touched
    __torch_function__ = classmethod(cast("Any", _touched))  # torch calls it with the class


_MASK = _Mask()
AttentionInterface.register(_NAME, _look)
AttentionMaskInterface.register(_NAME, lambda **arguments: _MASK)


def _read(decoder: nn.Module, site: RotarySite, seen: _Seen) -> Layout | None:
    """The layout of a layer; None if it does not rotate."""
    where, query, key, x = _path(decoder, seen.module), seen.query, seen.key, seen.hidden
    rotates = [_changes(decoder, seen.module, one) for one in (query, key)]
    if not any(rotates):
        return None
    if not all(rotates):
        raise _RefusedError(f"{where} rotates its queries and keys differently")
    found = [_pairs(one, len(site.loaded)) for one in (query, key)]
    if found[0] is None or found[1] is None:
        raise _RefusedError(f"{where} does not rotate pairs of columns")
    if not torch.equal(found[0], found[1]):
        raise _RefusedError(f"{where} rotates its queries and keys differently")
    first, second, pair = found[0]
    local = sees_window(text_config(decoder), seen.module, seen.window)
    heads = Heads(query.shape[1], query.shape[-1], seen.value_columns)
    fits = isinstance(x, torch.Tensor) and x.shape[:-1] == (len(query), query.shape[2])
    inputs = x.shape[-1] if fits else None
    pairs = Pairs(_columns(first), _columns(second))
    return Layout(site, pairs, pair, local, heads, key.shape[1], inputs)


def _pairs(x: torch.Tensor, pairs: int) -> torch.Tensor | None:
    """First column, second column and index of every pair, ``[3, pairs]``; None: no rotation.

    Args:
        x: queries or keys: not rotated, rotated by a quarter, by :func:`_angles`.
        pairs: number of frequencies.
    """
    tolerance = _tolerance(x)  # a share of the size of a column
    still, quarter, rotated = x.transpose(1, 3).flatten(2).double()  # [columns, tokens * heads]
    size, turned = still.norm(dim=1), quarter.norm(dim=1)
    # A quarter rotation makes the first column minus the second, and the second the first.
    away = torch.cdist(_directions(quarter), -_directions(still))
    away.fill_diagonal_(math.inf)
    distance, second = away.min(1)
    moved = (quarter - still).norm(dim=1) > tolerance * torch.maximum(size, turned)
    alike = (turned - size[second]).abs() <= tolerance * size[second]
    first = torch.nonzero(moved & alike & (distance <= tolerance)).flatten()
    second = second[first]
    both = torch.cat((first, second))
    if len(both) != int(moved.sum()) or len(both.unique()) != len(both):
        return None
    angles = _angles(pairs).to(x.device)[:, None, None]
    a, b = still[first], still[second]
    error = (a * angles.cos() - b * angles.sin() - rotated[first]).norm(dim=-1)
    error += (b * angles.cos() + a * angles.sin() - rotated[second]).norm(dim=-1)
    worst, pair = (error / torch.maximum(size[first], size[second])).min(0)  # over frequencies
    others = torch.ones(len(still), dtype=torch.bool, device=x.device)
    others[both] = False
    same = (rotated - still).norm(dim=1) <= tolerance * size
    if not same[others].all() or bool((worst > 2 * tolerance).any()):
        return None
    order = torch.argsort(pair, stable=True)
    return torch.stack((first[order], second[order], pair[order])).cpu()


def _directions(x: torch.Tensor) -> torch.Tensor:
    """``x`` with rows of length one; rows of zeros point nowhere."""
    return torch.nan_to_num(x / x.norm(dim=1, keepdim=True), nan=math.inf)


def _columns(index: torch.Tensor) -> slice | torch.Tensor:
    """A slice if the columns are evenly spaced."""
    if len(index) == 1:
        return slice(int(index[0]), int(index[0]) + 1)
    step = int(index[1] - index[0])
    if step < 1 or not bool((index.diff() == step).all()):
        return index
    return slice(int(index[0]), int(index[-1]) + 1, step)
