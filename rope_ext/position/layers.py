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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from rope_ext.attention.call import Pairs
from rope_ext.encodings import Heads
from rope_ext.errors import OptionError, UnsupportedModelError
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

_NAME = "rope_ext_probe"  # names with sdpa, flash, flex_attention or a slash take special paths
_TOKENS = 16
_Found = TypeVar("_Found")
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3}  # of the size of a column
_EXACT = 1e-4
_ROUNDED = 3e-2  # of what a quantized linear layer returns


@dataclass(frozen=True, eq=False)
class Layout:
    """How an attention layer rotates its queries and keys.

    Args:
        site: the rotary site whose frequencies it uses.
        pairs: columns of each pair in a head.
        pair: index of each pair in the frequencies of the site, int64, ``[pairs]``.
        local: whether the layer sees a limited window only.
        heads: number of query heads, and columns of heads.
    """

    site: RotarySite
    pairs: Pairs
    pair: torch.Tensor
    local: bool
    heads: Heads

    def equals(self, other: Layout) -> bool:
        """Whether both rotate the same columns by the same frequencies, for the same reach."""
        columns = (self.pairs.first, self.pairs.second, self.pair)
        others = (other.pairs.first, other.pairs.second, other.pair)
        same = all(_same_columns(one, two) for one, two in zip(columns, others, strict=True))
        alike = (self.site, self.local, self.heads) == (other.site, other.local, other.heads)
        return alike and same


def _same_columns(one: slice | torch.Tensor, two: slice | torch.Tensor) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return torch.equal(one, two)
    return isinstance(one, slice) and isinstance(two, slice) and one == two


def find_layouts(
    decoder: nn.Module, sites: list[RotarySite], instead: str = "use a frequency method"
) -> dict[nn.Module, Layout | None]:
    """The layout of every attention layer of ``decoder``; None for layers that no site rotates.

    ``instead`` is the advice at the end of an error.

    Raises:
        UnsupportedModelError: the rotation of a layer cannot be proven, or a layer does not use
            transformers' attention interface.
    """
    layouts: dict[nn.Module, Layout | None] = {}
    with _refusing(decoder, f"rope_ext's attention cannot be shown to be correct here; {instead}"):
        for site in sites:
            for module, query, key, columns, window in _run(decoder, site, _ProbeRotation(site)):
                layout = _read(decoder, module, site, query, key, columns, window)
                if layout is not None:  # one object for all layers that rotate alike
                    known = (other for other in layouts.values() if other and other.equals(layout))
                    layout = next(known, layout)
                before = layouts.get(module)
                if layout is not None and before is not None and layout is not before:
                    raise _RefusedError(f"{_path(decoder, module)} rotates in two ways")
                layouts[module] = before or layout
        if not any(layouts.values()):
            raise _RefusedError("no attention layer takes its queries and keys from it")
    return layouts


def layer_number(module: nn.Module) -> int | None:
    """The number of the decoder layer that an attention module is in, as transformers counts."""
    number = getattr(module, "layer_idx", None)
    return number if isinstance(number, int) else None


def chosen_layers(
    decoder: nn.Module, modules: list[nn.Module], layers: tuple[int, ...] | str | None
) -> list[nn.Module]:
    """The attention modules that ``layers`` chooses; see :class:`rope_ext.options.Options`.

    Raises:
        UnsupportedModelError: the layer number of a module is unknown.
        OptionError: there are none, or a chosen layer is not among them.
    """
    if layers is None:
        return modules
    numbers, family = {}, type(decoder).__name__
    for module in modules:
        number = layer_number(module)
        if number is None:
            raise UnsupportedModelError(
                f"{family}: {_path(decoder, module)} has no layer_idx, so layers={layers!r} cannot "
                f"choose it; leave layers out"
            )
        numbers[module] = number
    known = set(numbers.values())
    if isinstance(layers, str):
        every = int("".join(filter(str.isdigit, layers)))
        wanted = {number for number in known if (number + 1) % every == 0}
    else:
        wanted = set(layers)
    if not wanted or wanted - known:
        shown = layers if isinstance(layers, str) else list(layers)
        absent = ", ".join(map(str, sorted(wanted - known))) or "none of them"
        raise OptionError(
            f"layers={shown!r}: {family} has a rotation to change in layers "
            f"{', '.join(map(str, sorted(numbers.values())))}, and {absent} is asked for; choose "
            f"among these (sliding layers with sliding_layers='scale')"
        )
    return [module for module, number in numbers.items() if number in wanted]


def rotated_layers(decoder: nn.Module, sites: list[RotarySite]) -> dict[nn.Module, bool]:
    """The attention layers whose queries ``sites`` rotate, in any layout.

    Returns:
        Whether each sees a limited window only.

    Raises:
        UnsupportedModelError: there are none, or they do not go through transformers' attention
            interface.
    """
    found: dict[nn.Module, bool] = {}
    with _refusing(
        decoder,
        "a temperature cannot be proven to reach them; leave temperature out, or give an "
        "attention_factor, which multiplies cosine and sine",
    ):
        for site in sites:
            for module, query, _, _, window in _run(decoder, site, _ProbeRotation(site)):
                if _changes(decoder, module, query):
                    found[module] = sees_window(text_config(decoder), module, window)
        if not found:
            raise _RefusedError("no attention layer takes its queries from the rotary embedding")
    return found


@dataclass(frozen=True, eq=False)
class KeyProjection:
    """The part of a linear layer that makes the keys of an attention layer.

    Args:
        name: of the linear layer in the attention module.
        rows: rows of its weight, one for each column of the keys of all heads.
        heads: number of key heads.
        inputs: columns of its input.
    """

    name: str
    rows: slice | torch.Tensor
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


class LayerInput(NamedTuple):
    """Columns of the hidden states that an attention layer gets, and its number of key heads."""

    columns: int
    heads: int


def _complete(
    decoder: nn.Module, modules: list[nn.Module], found: dict[nn.Module, _Found], problem: str
) -> dict[nn.Module, _Found]:
    """``found``; raises an UnsupportedModelError if one of ``modules`` is not in it.

    ``problem``: what is wrong with such a module, with braces for its path.
    """
    lacking = next((module for module in modules if module not in found), None)
    if lacking is not None:
        named = problem.format(_path(decoder, lacking))
        raise UnsupportedModelError(f"{type(decoder).__name__}: {named}")
    return found


def find_inputs(
    decoder: nn.Module, sites: list[RotarySite], modules: list[nn.Module]
) -> dict[nn.Module, LayerInput]:
    """The input of attention layers.

    Raises:
        UnsupportedModelError: the first argument of a layer is not the hidden states.
    """
    found: dict[nn.Module, LayerInput] = {}
    given: dict[nn.Module, Any] = {}

    def look(module: nn.Module, args: tuple, kwargs: dict) -> None:
        given[module] = args[0] if args else kwargs.get("hidden_states")

    handles = [m.register_forward_pre_hook(look, with_kwargs=True) for m in modules]
    try:
        for site in sites:
            for module, query, key, *_ in _run(decoder, site, _ProbeRotation(site)):
                x = given.get(module)
                tokens = (len(query), query.shape[2])
                if isinstance(x, torch.Tensor) and x.ndim == 3 and x.shape[:2] == tokens:
                    found[module] = LayerInput(x.shape[-1], key.shape[1])
    finally:
        for handle in handles:
            handle.remove()
    return _complete(
        decoder,
        modules,
        found,
        "{} does not get hidden states of [rows, tokens, columns] as its first argument, so it "
        "cannot compute positions from them; use an encoding such as 'alibi'",
    )


def find_key_projections(
    decoder: nn.Module, sites: list[RotarySite], modules: list[nn.Module]
) -> dict[nn.Module, KeyProjection]:
    """The linear layers that make the keys of attention layers, found by what they return.

    Raises:
        UnsupportedModelError: the keys of a layer are not columns of what one linear layer in it
            returns, as where they are normalized.
    """
    found: dict[nn.Module, KeyProjection] = {}
    returned: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}

    def look(part: nn.Module, args: tuple, output: Any) -> None:
        if args and isinstance(args[0], torch.Tensor) and isinstance(output, torch.Tensor):
            returned[part] = args[0], output

    parts = {part for module in modules for part in module.children()}
    handles = [part.register_forward_hook(look) for part in parts]
    try:
        for site in sites:
            for module, _, key, *_ in _run(decoder, site, _ProbeRotation(site)):
                for name, part in module.named_children():
                    if module in modules and module not in found and part in returned:
                        made = _key_projection(module, name, key[0], *returned[part])
                        found |= {} if made is None else {module: made}
    finally:
        for handle in handles:
            handle.remove()
    return _complete(
        decoder,
        modules,
        found,
        "the keys of {} are not what one linear layer in it returns (they may be normalized, or "
        "made in several steps), so there is no key projection to apply to positions; use "
        "projection='learned'",
    )


@torch.no_grad()
def _key_projection(
    module: nn.Module, name: str, key: torch.Tensor, x: torch.Tensor, y: torch.Tensor
) -> KeyProjection | None:
    """The submodule ``name`` of ``module`` if it is linear and returns ``key``, not rotated.

    ``x`` and ``y`` are its input and what the probe put in place of its output; rows of a probe
    differ in the rotation alone.
    """
    if x.ndim != 3 or y.ndim != 3 or y.shape[:2] != x.shape[:2]:
        return None
    keys = key.transpose(0, 1).flatten(1).double()  # [tokens, columns of all heads]
    rows = torch.cdist(keys.mT, y[0].double().mT).argmin(1)
    if not torch.equal(y[0].double()[:, rows], keys):
        return None
    made = KeyProjection(name, _columns(rows), len(key), x.shape[-1])
    try:
        weight = made.weight(module, key.device, key.dtype).flatten(0, 1).double()
    except (RuntimeError, TypeError):  # it does not take other numbers of tokens
        return None
    y = getattr(module, name)(x)[0].double()[:, rows]
    x = x[0].double()
    # Without a bias, and up to the rounding of quantized layers, in any dtype.
    away = (x - x[:1]) @ weight.mT - (y - y[:1])
    size = (x.square() @ weight.mT.square()).sqrt() + y.abs()  # rounding is a share of it
    return made if bool((away.norm(dim=0) <= _ROUNDED * size.norm(dim=0)).all()) else None


def ignores_scaling(decoder: nn.Module, site: RotarySite) -> bool:
    """Whether a factor of cosine and sine has no effect, since queries are normalized afterwards.

    False if the probe cannot tell.
    """
    try:
        seen = _run(decoder, site, _ProbeRotation(site, scaling=1.5))
        rotated = [query for module, query, *_ in seen if _changes(decoder, module, query)]
    except _RefusedError:
        return False
    return bool(seen) and not rotated


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


def _path(decoder: nn.Module, module: nn.Module) -> str:
    return next(name for name, other in decoder.named_modules() if other is module)


def _angles(pairs: int) -> torch.Tensor:
    """A different angle for each pair, far apart, radians."""
    return 0.2 + 5.8 * torch.arange(pairs, dtype=torch.float64, device="cpu") / pairs


@torch.no_grad()
def _run(
    decoder: nn.Module, site: RotarySite, probe_rotation: Callable[..., Any]
) -> list[tuple[nn.Module, torch.Tensor, torch.Tensor, int, int | None]]:
    """Queries and keys of every attention layer, one row per rotation; value columns, window."""
    if _lacks_weights(decoder):
        raise _RefusedError("its weights are on the meta device (load them first)")
    if any(hasattr(parameter, "device_mesh") for parameter in decoder.parameters()):
        raise _RefusedError("its weights are sharded (patch it before fully_shard)")
    probe = _Probe()
    hidden = _forward(decoder, site, probe_rotation, probe)
    if hidden.isnan().any():
        raise _RefusedError("its hidden states are NaN (check its weights and configuration)")
    if not torch.equal(hidden, hidden[:1].expand_as(hidden)):
        # Rounding may depend on the row. Then it does so in a forward that rotates nothing, too.
        still = _forward(decoder, site, _ProbeRotation(site, scaling=1.0), _Probe())
        if _spread(hidden) > 4 * _spread(still):
            raise _RefusedError("positions act outside of its attention layers")
    return probe.seen


def _forward(
    decoder: nn.Module, site: RotarySite, probe_rotation: Callable[..., Any], probe: _Probe
) -> torch.Tensor:
    """Run the decoder with ``probe`` in place of attention; its hidden states in float64."""
    config = text_config(decoder)
    vocabulary = vocabulary_of(decoder)
    tokens = (torch.arange(_TOKENS, device="cpu") * 37 + 3) % vocabulary.num_embeddings
    parts = [module for module in decoder.modules() if next(module.children(), None) is not None]
    handles = [part.register_forward_pre_hook(probe.called, with_kwargs=True) for part in parts]
    handles.append(site.module.register_forward_hook(probe_rotation, with_kwargs=True))
    before = config._attn_implementation_internal
    forward_context.probed = probe
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
        forward_context.probed = None
    return output[0].double()


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


def _tolerance(x: torch.Tensor) -> float:
    return _TOLERANCE.get(x.dtype, _EXACT)


class _ProbeRotation:
    """Forward hook of a rotary module: row 0 is not rotated, row 1 by a quarter, row 2 by pair.

    With ``scaling``, no row is rotated, and the cosine of the last row is multiplied by it.
    """

    def __init__(self, site: RotarySite, scaling: float | None = None) -> None:
        self.site, self.scaling = site, scaling

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        if not self.site.called(args, kwargs):
            return None
        columns = self.site.columns
        angles = _angles(len(self.site.loaded))[columns.pair]
        rotations = torch.stack(
            (torch.zeros_like(angles), torch.full_like(angles, math.pi / 2), angles)
        )
        like = output if columns.complex else output[0]
        rows = rotations.unsqueeze(1).expand(-1, like.shape[-2], -1)
        cos, sin = (f(rows.to(like.device)) for f in (torch.cos, torch.sin))
        cos[1] = 0  # exactly
        if self.scaling is not None:
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
            cos[2] = self.scaling
        if like.ndim == 4:
            cos, sin = (part.expand(len(like), -1, -1, -1) for part in (cos, sin))
        if columns.complex:
            return torch.complex(cos, sin).to(like.dtype)
        return cos.to(like.dtype), sin.to(like.dtype)


class _Probe:
    """The queries and keys that attention layers make of random numbers."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self._calls: dict[nn.Module, tuple[tuple, dict]] = {}
        self._again: nn.Module | None = None
        self._generator = torch.Generator("cpu").manual_seed(0)

    def called(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Forward pre-hook of every module that may be an attention layer."""
        self._calls[module] = args, kwargs

    def attends(self, module: nn.Module, call: tuple) -> None:
        """Record ``call`` of the attention function, which tells that ``module`` is a layer.

        The layer made it of its weights. So it runs once more, on random numbers.
        """
        if self._again is module or module not in self._calls:
            self.seen.append(call)
            return
        args, kwargs = self._calls[module]
        parts = [part for part in module.modules() if part is not module]
        handles = [part.register_forward_hook(self._replace, prepend=True) for part in parts]
        self._again = module
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
        return known.to(output).expand_as(rows).flatten(0, 1)


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
    assert forward_context.probed is not None, "only _run sets this attention function"
    forward_context.probed.attends(
        module, (module, query, key, value.shape[-1], kwargs.get("sliding_window"))
    )
    rows, heads, tokens = query.shape[:3]
    return query.new_zeros(rows, tokens, heads, value.shape[-1]), None


class _RefusedError(AttributeError):  # so that hasattr says no
    """A decoder cannot be probed; the message says why."""


class _Mask:
    """Stands in for the attention mask; layers may only pass it on."""

    def _touched(self, *args: Any, **kwargs: Any) -> None:
        raise _RefusedError("it computes with its attention mask outside of the attention function")

    __getitem__ = __add__ = __radd__ = __and__ = __rand__ = __getattr__ = _touched
    __torch_function__ = classmethod(cast("Any", _touched))  # torch calls it with the class


_MASK = _Mask()
AttentionInterface.register(_NAME, _look)
AttentionMaskInterface.register(_NAME, lambda **arguments: _MASK)


def _read(
    decoder: nn.Module,
    module: nn.Module,
    site: RotarySite,
    query: torch.Tensor,
    key: torch.Tensor,
    value_columns: int,
    window: int | None,
) -> Layout | None:
    where = _path(decoder, module)
    found = []
    for x in (query, key):
        if not _changes(decoder, module, x):
            found.append(None)
            continue
        rows = x.transpose(1, 3).flatten(2).double()  # [3, columns, tokens * heads]
        pairs = _pairs(rows, len(site.loaded), _tolerance(x))
        if pairs is None:
            raise _RefusedError(f"{where} does not rotate pairs of columns")
        found.append(pairs)
    if found[0] is None and found[1] is None:
        return None
    if found[0] is None or found[1] is None or not torch.equal(*found):
        raise _RefusedError(f"{where} rotates its queries and keys differently")
    first, second, pair = found[0]
    local = sees_window(text_config(decoder), module, window)
    heads = Heads(query.shape[1], query.shape[-1], value_columns)
    return Layout(site, Pairs(_columns(first), _columns(second)), pair, local, heads)


def _pairs(rows: torch.Tensor, pairs: int, tolerance: float) -> torch.Tensor | None:
    """First column, second column and index of every pair, ``[3, pairs]``; None: no rotation.

    Args:
        rows: not rotated, rotated by a quarter, by :func:`_angles`; ``[3, columns, samples]``.
        pairs: number of frequencies.
        tolerance: largest error, as a share of the size of a column.
    """
    still, quarter, rotated = rows
    size, turned = still.norm(dim=1), quarter.norm(dim=1)
    # A quarter rotation makes the first column minus the second, and the second the first.
    away = torch.cdist(_directions(quarter), -_directions(still))
    away.fill_diagonal_(math.inf)
    distance, second = away.min(1)
    moved = (quarter - still).norm(dim=1) > tolerance * torch.maximum(size, turned)
    alike = (turned - size[second]).abs() <= tolerance * size[second]
    first = torch.nonzero(moved & alike & (distance <= tolerance)).flatten()
    second = second[first]
    if 2 * len(first) != int(moved.sum()) or len(torch.cat((first, second)).unique()) != 2 * len(
        first
    ):
        return None
    angles = _angles(pairs).to(rows.device)[:, None, None]
    a, b = still[first], still[second]
    error = (a * angles.cos() - b * angles.sin() - rotated[first]).norm(dim=-1)
    error += (b * angles.cos() + a * angles.sin() - rotated[second]).norm(dim=-1)
    worst, pair = (error / torch.maximum(size[first], size[second])).min(0)  # over frequencies
    others = torch.ones(len(still), dtype=torch.bool, device=rows.device)
    others[first] = others[second] = False
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
