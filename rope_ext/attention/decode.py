"""Decoding on GPUs: one Triton kernel for few queries on all slots of a cache, and a merge.

Every query sees a contiguous range of slots in each band, so visibility is stored as integers. They
are computed on the device once per step, for all layers, without synchronizing; eager steps,
compiled steps and CUDA graphs run the same code. Queries and near keys are rotated in registers.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rope_ext.attention import cards
from rope_ext.attention.call import Call, Pairs, RotatedBand, Rotation

NOTHING = 2**30
"""First slot of a query that sees none, so that it never widens a range."""
MOST_COLUMNS = 256
"""Maximum number of columns of a head."""
SPLITS = 32
"""Splits of the keys, one thread block each: fastest from 16k to 128k tokens on an H200."""


@dataclass(frozen=True, eq=False)
class Ranges:
    """Slot ranges that queries see, and rotations; shared by all layers with the same layout.

    Bands whose keys are rotated come first.
    """

    # The first slot that a query sees in a band, int32, [bands, rows or 1, queries]; NOTHING if it
    # sees none; and one past the last slot; 0 if it sees none.
    low: Tensor
    high: Tensor
    origin: Tensor  # slot of position 0, int32, [rows or 1]
    filled: Tensor  # slot of the first query, int32, [1]
    query: Rotation  # of queries, float32, [bands, rows or 1, queries, pairs]
    query_rotated: int  # bit b is set if band b rotates its queries
    key: Rotation  # of keys by position, [rotated bands, positions, pairs]
    temperature: Tensor | None  # factor for every query, float32, [rows or 1, queries]
    # Prepared launches of this step, by what its layers may differ in.
    launchers: dict[Any, Callable[..., Tensor]] = field(default_factory=dict)


def ranges_of(
    bands: Sequence[RotatedBand],
    t: Tensor,
    origin: Tensor,
    filled: Tensor,
    temperature: Tensor | None = None,
) -> Ranges:
    """Return what queries at ``t`` see in each band.

    ``bands`` have float32 rotations of queries, ``[rows or 1, queries, pairs]``, and of keys by
    position, ``[positions, pairs]``. Positions, ``origin`` and ``filled`` are int64; for these and
    ``temperature`` see :class:`Ranges`.
    """
    # Bands that rotate keys come first; otherwise their order does not matter.
    bands = sorted(bands, key=lambda band: band.key is None)
    low = []
    high = []
    for band in bands:
        first, end = band.geometry.ends(t)
        first = first.clamp(min=0) + origin[:, None]
        end = end + origin[:, None]
        if t.shape[1] > 1:  # a query without keys must not widen ranges
            seen = end > first
            first = torch.where(seen, first, NOTHING)
            end = torch.where(seen, end, 0)
        low.append(first)
        high.append(end)
    return Ranges(
        low=torch.stack(low).int(),
        high=torch.stack(high).int(),
        origin=origin.int(),
        filled=filled.int(),
        query=_stacked([band.query for band in bands]),
        query_rotated=sum((band.query is not None) << number for number, band in enumerate(bands)),
        key=_stacked([band.key for band in bands if band.key is not None]),
        temperature=temperature,
    )


def _stacked(rotations: list[Rotation]) -> Rotation:
    """Stack rotations of several bands, ``[bands, ...]``; placeholders for None are never read."""
    some = next((x for x in rotations if x is not None), None)
    if some is None:
        return None
    every = [some if x is None else x for x in rotations]
    cos, sin = (
        tables[0][None].contiguous() if len(tables) == 1 else torch.stack(tables)
        for tables in zip(*every, strict=True)
    )
    return cos, sin


def refusal(query: Tensor, value: Tensor, pairs: Pairs) -> str | None:
    """Return why the kernel does not support these heads; None if it does."""
    if not runs_on(query.device):
        return "it needs Triton and a GPU of capability 8.0 or later"
    if query.dtype == torch.float64:
        return "it has no float64"
    if max(query.shape[-1], value.shape[-1]) > MOST_COLUMNS:
        return f"it has heads of up to {MOST_COLUMNS} columns"
    if _columns(pairs, query.shape[-1]) is None:
        return "it needs rotary pairs at equal steps, beside one range of columns at most"
    return None


@torch.compiler.assume_constant_result  # since dynamo cannot trace card properties
def runs_on(device: torch.device) -> bool:
    """Whether Triton compiles for a device."""
    if device.type != "cuda":
        return False
    card = cards.card(device)
    return card.compiles and card.capability >= cards.AMPERE


class _Columns(NamedTuple):
    """Where a head has its rotary pairs, at equal steps, and one range of columns beside them."""

    first: int  # first column of the first pair
    second: int  # second column of the first pair
    step: int
    pairs: int
    rest_at: int  # start of the columns that do not rotate
    rest: int  # their number


def _columns(pairs: Pairs, columns: int) -> _Columns | None:
    """Return where the columns lie; None if they lie otherwise."""
    first = pairs.first
    second = pairs.second
    if not (isinstance(first, slice) and isinstance(second, slice)):
        return None
    step = first.step or 1
    count = (first.stop - first.start + step - 1) // step  # dynamo of torch 2.11 has no indices()
    if not count:
        return _Columns(first=0, second=0, step=1, pairs=0, rest_at=0, rest=columns)
    if step != (second.step or 1):
        return None
    low = min(first.start, second.start)
    high = max(first.start, second.start) + (count - 1) * step + 1
    if high - low != 2 * count:  # other columns between the pairs
        return None
    if low and high < columns:
        return None
    return _Columns(
        first=first.start,
        second=second.start,
        step=step,
        pairs=count,
        rest_at=0 if low else high,
        rest=low or columns - high,
    )


class _Settings(NamedTuple):
    """All that the operator gets beside query, key and value, in the order of its schema."""

    low: Tensor
    high: Tensor
    origin: Tensor
    filled: Tensor
    query_rotation: Sequence[Tensor]  # cosine and sine; empty: none
    key_rotation: Sequence[Tensor]
    temperature: Tensor | None
    sinks: Tensor | None
    bias: Tensor | None
    columns: Sequence[int]  # a _Columns
    query_rotated: int
    scale: float
    softcap: float | None


def attend(query: Tensor, key: Tensor, value: Tensor, call: Call, ranges: Ranges) -> Tensor:
    """Compute attention of few queries on all slots, without gradients.

    ``call`` has no bands and no scores; ``ranges`` are what the queries see.
    """
    columns = _columns(call.pairs, query.shape[-1])
    assert columns is not None, "callers ask refusal() first"
    settings = _Settings(
        low=ranges.low,
        high=ranges.high,
        origin=ranges.origin,
        filled=ranges.filled,
        query_rotation=[*(ranges.query or ())],
        key_rotation=[*(ranges.key or ())],
        temperature=ranges.temperature,
        sinks=call.sinks,
        bias=call.bias,
        columns=[*columns],
        query_rotated=ranges.query_rotated,
        scale=call.scale,
        softcap=call.softcap,
    )
    if torch.compiler.is_compiling():
        return _operator(query, key, value, *settings).transpose(1, 2)
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    # Triton compiles other kernels for other alignments of addresses.
    alike = tuple(
        None if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() % 16)
        for x in (query, key, value, call.sinks, call.bias)
    )
    same = (alike, columns, call.scale, call.softcap)
    if same not in ranges.launchers:
        ranges.launchers[same] = _launcher(query, key, value, settings=settings)
    run = ranges.launchers[same]
    return run(query, key, value, sinks=call.sinks, bias=call.bias).transpose(1, 2)


def tiles(rows: int, columns: int, value_columns: int, size: int) -> dict[str, int]:
    """Return rows and keys of a tile, and warps, that fit in registers and 96 KiB.

    ``rows`` are queries times the heads of a key; columns are padded to powers of two; ``size`` is
    bytes per number.
    """
    width = max(columns, value_columns) * size  # bytes
    height = min(max(_power(rows), 16), 64 if width <= 256 else 32 if width <= 512 else 16)
    return {
        "ROWS": height,
        "SIZE": 64 if width <= 256 else 32 if width <= 512 else 16,
        "SIZE_ROTATED": 16,
        "num_warps": 8 if height * width > 32 * 256 or width > 512 else 4,
        "num_stages": 3 if width <= 256 else 2,
    }


def _power(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _launcher(
    query: Tensor, key: Tensor, value: Tensor, settings: _Settings
) -> Callable[..., Tensor]:
    """Return a function of query, key, value, sinks and bias that differ in their numbers only.

    It returns ``[rows, queries, heads, value columns]``. Its calls share memory for the splits, so
    they have to be on one stream.
    """
    kernels = importlib.import_module("rope_ext.attention.decode_kernel")  # it imports triton
    columns = _Columns(*settings.columns)
    temperature = settings.temperature
    bias = settings.bias
    softcap = settings.softcap
    batch, heads, tokens, _ = query.shape
    _, kv_heads, _, value_columns = value.shape
    groups = heads // kv_heads
    pairs_padded, rest_padded, value_padded = (
        max(_power(x), 16) for x in (columns.pairs, columns.rest, value_columns)
    )
    width = 0  # columns of a key that the kernel loads
    if columns.pairs:
        width += 2 * pairs_padded
    if columns.rest:
        width += rest_padded
    shape = tiles(
        rows=groups * tokens, columns=width, value_columns=value_padded, size=query.element_size()
    )
    every = (batch * kv_heads, SPLITS, groups * tokens)
    out = query.new_empty(*every, value_columns, dtype=torch.float32)
    lse = query.new_empty(every, dtype=torch.float32)
    unused = query  # kernels need a tensor even for arguments that they do not read
    cos, sin = settings.query_rotation or (unused, unused)
    key_cos, key_sin = settings.key_rotation or (unused, unused)
    # Arguments of the kernel before and after the bias, in its order.
    before = (
        settings.low,
        settings.high,
        settings.origin,
        settings.filled,
        cos,
        sin,
        key_cos,
        key_sin,
        unused if temperature is None else temperature,
    )
    after = (
        out,
        lse,
        settings.scale,
        softcap or 1.0,
        1 if bias is None else bias.shape[1],
        0 if bias is None else bias.stride(0),
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        settings.low.stride(0),
        _by_row(settings.low, 1),
        cos.stride(0),
        _by_row(cos, 1),
        key_cos.stride(0),
        0 if temperature is None else _by_row(temperature, 0),
        len(settings.origin) > 1,
    )
    split = _Launch(
        kernels.split_kernel,
        (SPLITS, batch * kv_heads, -(-groups * tokens // shape["ROWS"])),
        KV=kv_heads,
        GROUPS=groups,
        TOKENS=tokens,
        BANDS=len(settings.low),
        QUERY_ROTATED=settings.query_rotated,
        KEY_ROTATED=len(key_cos) if settings.key_rotation else 0,
        HAS_TEMPERATURE=temperature is not None,
        HAS_BIAS=bias is not None,
        HAS_CAP=softcap is not None,
        PAIRS=columns.pairs,
        PAIRS2=pairs_padded,
        FIRST=columns.first,
        SECOND=columns.second,
        STEP=columns.step,
        REST=columns.rest,
        REST2=rest_padded,
        REST_AT=columns.rest_at,
        DV=value_columns,
        DV2=value_padded,
        SPLITS=SPLITS,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        **shape,
    )
    merge = _Launch(
        kernels.merge_kernel,
        (batch * kv_heads, groups * tokens, 1),
        KV=kv_heads,
        GROUPS=groups,
        TOKENS=tokens,
        HAS_SINKS=settings.sinks is not None,
        DV=value_columns,
        DV2=value_padded,
        SPLITS=SPLITS,
    )

    def run(
        query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        if query.is_cuda and query.device.index != torch.cuda.current_device():
            with torch.cuda.device(query.device):  # Triton launches on the current device
                return run(query, key, value, sinks=sinks, bias=bias)
        merged = query.new_empty(batch, tokens, heads, value_columns)
        split(query, key, value, *before, unused if bias is None else bias, *after)
        merge(out, lse, lse if sinks is None else sinks, merged)
        return merged

    return run


class _Launch:
    """Launches of a kernel with the same grid, types, sizes and alignment.

    Triton examines all arguments of a launch, which takes longer than the launch; only the first
    one is examined here.
    """

    def __init__(self, kernel: Any, grid: tuple[int, int, int], **settings: Any) -> None:
        self.kernel = kernel
        self.grid = grid
        self.settings = settings
        self.compiled: Callable[..., object] | None = None

    def __call__(self, *tensors: Any) -> None:
        if self.compiled is not None:
            self.compiled(*tensors)
            return
        compiled = self.kernel[self.grid](*tensors, **self.settings)
        if compiled is not None:  # not in Triton's interpreter
            constants = [self.settings[x] for x in self.kernel.arg_names[len(tensors) :]]
            run = compiled[self.grid]
            self.compiled = lambda *tensors: run(*tensors, *constants)


def _by_row(x: Tensor, dim: int) -> int:
    """Return the stride of the rows; 0 if one row serves all."""
    return x.stride(dim) if x.shape[dim] > 1 else 0


_SETTINGS = (
    "Tensor low, Tensor high, Tensor origin, Tensor filled, Tensor[] query_rotation, "
    "Tensor[] key_rotation, Tensor? temperature, Tensor? sinks, Tensor? bias, SymInt[] columns, "
    "SymInt query_rotated, float scale, float? softcap"
)


@torch.library.custom_op(
    "rope_ext::decode",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {_SETTINGS}) -> Tensor",
)
def _operator(query, key, value, *settings):  # noqa: ANN001, ANN002, ANN202
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    given = _Settings(*settings)
    run = _launcher(query, key, value, settings=given)
    return run(query, key, value, sinks=given.sinks, bias=given.bias)


@_operator.register_fake
def _(query, key, value, *_rest):  # noqa: ANN001, ANN002, ANN202
    rows, heads, queries, _ = query.shape
    return query.new_empty(rows, queries, heads, value.shape[-1])
