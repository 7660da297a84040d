"""Finds the attention layers that a rotary site rotates, and the columns of its pairs in a head.

The decoder runs on a few tokens with an attention function that records queries and keys and
returns zeros. The batch has the same tokens in two rows: unrotated, and with every pair rotated by
a different angle. If the rows of a layer do not differ by this rotation, an error is raised.

The layout depends on the code, not on the weights: some columns of trained queries are a hundred
times larger than others, and some are zero. So random numbers replace the outputs of projections
and norms in attention layers.
"""

import copy
import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from rope_ext.attention.call import Pairs
from rope_ext.encodings import Heads
from rope_ext.errors import UnsupportedModelError
from rope_ext.position.direction import by_mask, sees_ahead, visible_keys
from rope_ext.rotary import context
from rope_ext.rotary.hooks import positions_given, rotation
from rope_ext.rotary.probe import replaced
from rope_ext.rotary.sites import (
    RotarySite,
    encoder_states,
    no_text,
    run,
    sees_window,
    text_config,
    vocabulary_of,
)

LAYER = "_rope_ext"  # attribute of an attention module: the state of its patch
_NAME = "rope_ext_probe"  # names with sdpa, flash, flex_attention or a slash take special paths
_TOKENS = 17  # odd, to tell dimensions of tokens and rows apart
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3}  # relative to a column's size
_EXACT = 1e-4


@dataclass(frozen=True, eq=False)
class Layout:
    """Rotary layout of an attention layer's queries and keys."""

    site: RotarySite  # the site with its frequencies
    pairs: Pairs  # columns of each pair in a head, in the order of the frequencies
    local: bool  # whether it has a sliding window
    heads: Heads
    key_heads: int
    inputs: int | None  # columns of hidden states; None: not its first argument
    scales: bool  # whether its attribute ``scaling`` is the softmax scale
    ahead: bool  # whether queries see later keys
    by_mask: bool  # whether it says is_causal=False wherever it has a mask


def find_layouts(
    decoder: nn.Module, sites: list[RotarySite], instead: str = "use a frequency method"
) -> dict[nn.Module, Layout | None]:
    """Return the layout of each attention layer of ``decoder``; None for layers without rotation.

    Equal layouts share one object. ``instead`` is the advice at the end of an error.
    """
    layouts: dict[nn.Module, Layout | None] = {}
    known: dict[str, Layout] = {}
    try:
        for number, site in enumerate(sites):
            for seen in _run(decoder, site):
                layout = _read(decoder, site, seen)
                if layout is not None:
                    layout = known.setdefault(str({**vars(layout), "site": number}), layout)
                before = layouts.get(seen.module)
                if layout is not None and before is not None and layout is not before:
                    raise _RefusedError(f"{_path(decoder, seen.module)} rotates in two ways")
                layouts[seen.module] = before or layout
        if not any(layouts.values()):
            raise _RefusedError("no attention layer takes its queries and keys from it")
    except _RefusedError as error:
        there = "; ".join(replaced(decoder))
        reason = f"there is {there}, and {error}" if there else str(error)
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: {reason}, so rope_ext's attention cannot be shown to be "
            f"correct here; {instead}"
        ) from error
    return layouts


@dataclass(frozen=True)
class Surveyed:
    """What the code of an attention layer does, whatever its weights are."""

    rotates: bool
    local: bool  # whether it has a sliding window
    ahead: bool  # whether queries see later keys; False if its mask contains values of the input


class _Rotated(Tensor):
    """Marks cosines and sines, and everything that is computed from them."""


@torch.no_grad()
def survey(decoder: nn.Module, sites: list[RotarySite]) -> list[Surveyed] | None:
    """Run the decoder that its configuration describes, without weights; returns its layers.

    None: it cannot be run on the meta device.
    """
    found: list[Surveyed] = []

    def mark(module: nn.Module, args: tuple, output: Any) -> Any:
        if isinstance(output, Tensor):
            return output.as_subclass(_Rotated)
        return tuple(one.as_subclass(_Rotated) for one in output)

    def look(seen: _Seen) -> None:
        local = sees_window(text_config(twin), seen.module, seen.given.get("sliding_window"))
        ahead = False
        with suppress(RuntimeError):  # of a tensor on the meta device
            ahead = seen.ahead()
        found.append(Surveyed(isinstance(seen.query, _Rotated), local, ahead))

    try:
        tokens = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
        with torch.device("meta"):
            twin = type(decoder)(copy.deepcopy(cast("Any", decoder).config)).eval()
        for parameter in twin.parameters():  # some kernels of experts take no other dtype
            parameter.data = parameter.data.to(torch.bfloat16)
        for site in sites:
            twin.get_submodule(site.name).register_forward_hook(mark)
        with context.attending(twin, _NAME, look):
            # With a mask, no value is read to tell packed documents apart.
            given = {"attention_mask": torch.ones_like(tokens), **encoder_states(twin, 1)}
            twin(input_ids=tokens, use_cache=False, **given)
    except Exception:
        return None
    return found


def rotates_windows_only(decoder: nn.Module, sites: list[RotarySite]) -> bool:
    """Whether layers that see the whole text have no positions, so that no method extends it.

    False if :func:`survey` cannot tell.
    """
    if not any(site.shared for site in sites):  # all or none of its layers have a window
        return False
    layers = survey(decoder, sites) or []
    return bool(layers) and all(layer.local for layer in layers if layer.rotates)


WINDOWS_ONLY = (
    "of its layers, only those with a window rotate, and the others have no positions (NoPE), so "
    "no method lengthens their reach; use the model unpatched, at any length"
)


def ignores_scaling(decoder: nn.Module, site: RotarySite) -> bool:
    """Whether a factor of cosine and sine has no effect because queries are normalized afterwards.

    False if the probe cannot tell.
    """
    try:
        seen = _run(decoder, site, scaling=1.5)
        return bool(seen) and not any(_changes(decoder, one.module, one.query) for one in seen)
    except _RefusedError:
        return False


@dataclass(frozen=True, eq=False)
class KeyProjection:
    """The part of a linear layer that computes an attention layer's keys."""

    name: str  # path of the linear layer in the attention module
    rows: Tensor  # rows of its weight, one per key column of all heads
    heads: int

    def weight(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the matrix ``[heads, columns, inputs]``, with gradients for ``module``'s weights.

        Adapters, quantized, offloaded and partitioned weights have no readable matrix, so apply
        the layer to unit vectors and subtract its bias.
        """
        linear = getattr(module, self.name)
        if type(linear) is nn.Linear and linear.weight.device == device and linear.weight.numel():
            weight = linear.weight
        else:
            count = linear.in_features
            unit = torch.eye(count + 1, count, device=device, dtype=dtype)
            out = linear(unit[None])[0]  # the last row of ``unit`` is zero: the bias
            weight = (out[:-1] - out[-1:]).mT
        return weight[self.rows.to(weight.device)].unflatten(0, (self.heads, -1))


@torch.no_grad()
def find_key_projections(
    decoder: nn.Module, sites: list[RotarySite], modules: list[nn.Module]
) -> dict[nn.Module, KeyProjection]:
    """Find the linear layers that compute the keys of attention layers, by their outputs."""
    found: dict[nn.Module, KeyProjection] = {}
    for seen in (seen for site in sites for seen in _run(decoder, site)):
        keys = seen.key[0].transpose(0, 1).flatten(1).double()  # [tokens, columns of all heads]
        for name, part in seen.module.named_children():
            output = seen.returned.get(part) if hasattr(part, "in_features") else None
            if output is None or output.shape[:-1] != (2, len(keys)):
                continue
            rows = torch.cdist(keys.mT, output[0].double().mT).argmin(1)
            if torch.equal(output[0, :, rows].double(), keys):
                found.setdefault(seen.module, KeyProjection(name, rows, len(seen.key[0])))
    lacking = next((module for module in modules if module not in found), None)
    if lacking is not None:
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: the keys of {_path(decoder, lacking)} are not what one "
            f"linear layer in it returns (they may be normalized, or made in several steps), so "
            f"there is no key projection to apply to positions; use projection='learned'"
        )
    return found


class _RefusedError(AttributeError):  # so that hasattr is False
    """A decoder cannot be probed; see the message."""


def _path(decoder: nn.Module, module: nn.Module) -> str:
    return next(name for name, other in decoder.named_modules() if other is module)


class _Seen(NamedTuple):
    """One attention call, with a row for each rotation."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any  # a _Mask, or None
    given: dict[str, Any]  # further arguments
    hidden: Any = None  # the layer's first argument
    returned: Any = None  # the outputs of its submodules, by submodule

    def ahead(self) -> bool:
        """Whether queries see later keys."""
        return sees_ahead(self.module, self.mask, self.given)


@torch.no_grad()
def _run(decoder: nn.Module, site: RotarySite, scaling: float | None = None) -> list[_Seen]:
    """Record queries and keys of each attention layer, with the rotations of :func:`_forward`."""
    try:
        vocabulary_of(decoder)
    except UnsupportedModelError:
        raise _RefusedError(no_text(decoder)) from None
    parameters = list(decoder.parameters())
    offloaded = any("_hf_hook" in vars(module) for module in decoder.modules())
    if not offloaded and any(parameter.is_meta for parameter in parameters):
        raise _RefusedError("its weights are on the meta device (load them first)")
    if any(hasattr(parameter, "device_mesh") for parameter in parameters):
        raise _RefusedError(
            "its weights are sharded (by tensor parallelism, or patch it before fully_shard)"
        )
    layers: list[nn.Module] = []
    hidden = _forward(decoder, site, scaling=scaling, look=lambda seen: layers.append(seen.module))
    if hidden.isnan().any():
        raise _RefusedError("its hidden states are NaN (check its weights and configuration)")
    # Rounding may depend on the row; then it also does in a forward that rotates nothing.
    spread = _spread(hidden)
    if spread and spread > 4 * _spread(
        _forward(decoder, site, scaling=1.0, look=lambda seen: None)
    ):
        raise _RefusedError("positions act outside of its attention layers")
    numbers = _Numbers({*layers})
    try:
        _forward(decoder, site, scaling=scaling, look=numbers.look)
    finally:
        for handle in numbers.handles:
            handle.remove()
    return numbers.found


def _forward(
    decoder: nn.Module, site: RotarySite, scaling: float | None, look: Callable[[_Seen], Any]
) -> Tensor:
    """Run the decoder with ``look`` instead of attention; returns hidden states in float64.

    Row 0 is not rotated, and row 1 with an angle per pair. With ``scaling``, no row is rotated, and
    the cosine of row 1 is multiplied by it.
    """
    angles = _angles(len(site.loaded))
    factors = torch.ones(2, 1, 1, device="cpu")
    if scaling is not None:
        angles = 0 * angles
        factors[1] = scaling
    of_rows = torch.stack((0 * angles, angles))[:, None]

    def rotate(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        if positions_given(site, args, kwargs) is None:
            return None
        like = output if site.columns.complex else output[0]
        ones = like.real.new_ones(2, like.shape[-2])
        return rotation(
            site=site,
            t=ones,
            inv_freq=of_rows,
            scaling=factors.to(ones.device),
            precise=True,
            like=output,
        )

    tokens = (torch.arange(_TOKENS, device="cpu") * 37 + 3) % vocabulary_of(decoder).num_embeddings
    handle = site.module.register_forward_hook(rotate, with_kwargs=True)
    try:
        with context.attending(decoder, _NAME, look):
            return run(decoder, tokens.expand(2, -1))[0].double()
    except _RefusedError:
        raise
    except Exception as error:
        raise _RefusedError(f"the probe of its attention layers failed ({error})") from error
    finally:
        handle.remove()


def _angles(pairs: int) -> Tensor:
    """Return different, well separated angles for all pairs, in radians."""
    return 0.2 + 5.8 * torch.arange(pairs, dtype=torch.float64, device="cpu") / pairs


def _spread(hidden: Tensor) -> float:
    """Return the difference of the rows, relative to each column's size."""
    size = hidden.abs().amax((0, 1)).clamp(min=torch.finfo(hidden.dtype).tiny)
    return float(((hidden - hidden[:1]) / size).norm())


def _changes(decoder: nn.Module, module: nn.Module, x: Tensor) -> bool:
    if len(x) != 2:
        raise _RefusedError(f"{_path(decoder, module)} changes the batch before it attends")
    return _differs(x, _TOLERANCE.get(x.dtype, _EXACT))


def _differs(x: Tensor, tolerance: float) -> bool:
    """Whether rows of ``x`` differ in a column by more than this share of its largest value."""
    columns = x.double().unsqueeze(1).flatten(1, -2)  # [rows, values, columns]
    away = (columns - columns[:1]).abs().amax((0, 1))
    return bool((away > tolerance * columns.abs().amax((0, 1))).any())


class _Numbers:
    """Hooks that make submodules of attention layers return random numbers, equal in all rows."""

    def __init__(self, layers: set[nn.Module]) -> None:
        self.inside = False  # whether a layer is running and has not called attention
        self.generator = torch.Generator("cpu").manual_seed(0)
        self.hidden: dict[nn.Module, Any] = {}
        self.returned: dict[nn.Module, Tensor] = {}
        self.found: list[_Seen] = []
        parts = {part for layer in layers for part in layer.modules()} - layers
        self.handles = [part.register_forward_hook(self._replace, prepend=True) for part in parts]
        for layer in layers:
            self.handles.append(layer.register_forward_pre_hook(self._enter, with_kwargs=True))

    def look(self, seen: _Seen) -> None:
        self.inside = False
        hidden = self.hidden.get(seen.module)
        self.found.append(seen._replace(hidden=hidden, returned=self.returned))

    def _enter(self, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        self.inside = True
        self.hidden[layer] = args[0] if args else kwargs.get("hidden_states")

    def _replace(self, part: nn.Module, args: tuple, output: Any) -> Any:
        if type(output) is tuple:
            return tuple(self._replace(part, args, one) for one in output)
        if not self.inside or not isinstance(output, Tensor) or output.ndim < 2:
            return output
        if not output.is_floating_point() or len(output) % 2:
            return output
        rows = output.unflatten(0, (2, -1))
        if _differs(rows, 0.1):  # it comes after the rotation
            return output
        random = torch.randn(rows.shape[1:], generator=self.generator, device="cpu")
        self.returned[part] = random.to(output).expand_as(rows).flatten(0, 1)
        return self.returned[part]


def _look(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention function that returns zeros, so that all rows stay equal."""
    if attention_mask is not None and not isinstance(attention_mask, _Mask):
        raise _RefusedError(f"{type(module).__name__} makes an attention mask of its own")
    look = context.forward_context.look
    assert look is not None, "only _forward sets this attention function"
    look(_Seen(module=module, query=query, key=key, value=value, mask=attention_mask, given=kwargs))
    rows, heads, tokens = query.shape[:3]
    return value.new_zeros(rows, tokens, heads, value.shape[-1]), None


class _Mask:
    """Placeholder for the attention mask, which layers may only pass on."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments  # with which transformers requested it

    @functools.cached_property
    def visible(self) -> Tensor:
        return visible_keys(self.arguments)

    def _touched(self, *args: Any, **kwargs: Any) -> None:
        raise _RefusedError("it computes with its attention mask outside of the attention function")

    __getitem__ = __add__ = __radd__ = __and__ = __rand__ = __getattr__ = _touched
    __torch_function__ = classmethod(cast("Any", _touched))  # torch calls this on the class


AttentionInterface.register(_NAME, _look)
AttentionMaskInterface.register(_NAME, lambda **arguments: _Mask(**arguments))


def _read(decoder: nn.Module, site: RotarySite, seen: _Seen) -> Layout | None:
    """Return the layout of a layer; None if it does not rotate."""
    where = _path(decoder, seen.module)
    query = seen.query
    key = seen.key
    x = seen.hidden
    rotates = [_changes(decoder, seen.module, one) for one in (query, key)]
    if not any(rotates):
        return None
    of_query, of_key = (_pairs(one, len(site.loaded)) for one in (query, key))
    if not all(rotates) or str(of_query) != str(of_key):
        raise _RefusedError(f"{where} rotates its queries and keys differently")
    if of_query is None:
        raise _RefusedError(f"{where} does not rotate pairs of columns")
    local = sees_window(text_config(decoder), seen.module, seen.given.get("sliding_window"))
    ahead = seen.ahead()
    heads = Heads(
        count=query.shape[1],
        columns=query.shape[-1],
        value_columns=seen.value.shape[-1],
        both=ahead,
    )
    fits = isinstance(x, Tensor) and x.shape[:-1] == (len(query), query.shape[2])
    inputs = x.shape[-1] if fits else None
    scaling = seen.given.get("scaling")
    scales = scaling is not None and vars(seen.module).get("scaling") == scaling
    return Layout(
        site=site,
        pairs=of_query,
        local=local,
        heads=heads,
        key_heads=key.shape[1],
        inputs=inputs,
        scales=scales,
        ahead=ahead,
        by_mask=by_mask(seen.module, seen.given),
    )


def _pairs(x: Tensor, count: int) -> Pairs | None:
    """Return the columns of the ``count`` pairs in a head, in the order of the frequencies.

    They are neighbors or halves, at the start or end of a head. None: no rotation.
    """
    tolerance = _TOLERANCE.get(x.dtype, _EXACT)
    still, rotated = x.transpose(1, 3).flatten(2).double()  # [columns, tokens * heads]
    size = still.norm(dim=1)
    away = (rotated - still).norm(dim=1)
    angles = _angles(count).to(x.device)[:, None, None]
    if 2 * count > len(still):
        return None
    every = torch.arange(len(still), device="cpu")
    for own in (every[: 2 * count], every[-2 * count :]):
        halves = own.unflatten(0, (2, -1))
        neighbours = own.unflatten(0, (-1, 2)).mT
        for first, second in (halves, neighbours, halves.flip(0), neighbours.flip(0)):
            a = still[first]
            b = still[second]
            error = (a * angles.cos() - b * angles.sin() - rotated[first]).norm(dim=-1)
            error += (b * angles.cos() + a * angles.sin() - rotated[second]).norm(dim=-1)
            worst, pair = (error / torch.maximum(size[first], size[second])).min(0)
            others = torch.ones(len(still), dtype=torch.bool, device=x.device)
            others[own] = False
            proven = (worst <= 2 * tolerance).all() and (away <= tolerance * size)[others].all()
            if proven and len(pair.unique()) == count:
                order = pair.argsort().cpu()  # families may permute the frequencies
                return Pairs(_columns(first[order]), _columns(second[order]))
    return None


def _columns(index: Tensor) -> slice | Tensor:
    steps = {*index.diff().tolist()} or {1}
    if len(steps) > 1 or min(steps) < 1:
        return index
    return slice(int(index[0]), int(index[-1]) + 1, *steps)
