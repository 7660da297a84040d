"""The tiles for the flash kernel of CUDA, on a CPU: a stand-in for its two operators.

The stand-in does what the operators are documented to do; that torch's operators take what they
are given is seen by shapes. What is left for a GPU is whether they do as documented.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rope_ext.attention import cards, flash, flash_cuda
from rope_ext.attention import dispatch as attention
from rope_ext.attention.call import Call, Pairs, RotatedBand
from rope_ext.errors import OptionError
from rope_ext.methods.geometry import ChunkGap, Distance, Sinks
from tests.helpers import bands as kernels
from tests.helpers.bands import geometries, seen


def logits(query, key, causal, left, scale):
    """``[batch, heads, queries, keys]``, -inf where nothing is seen: aligned at the end."""
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    queries, keys = query.shape[2], key.shape[2]
    apart = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if causal:
        hidden = (apart < 0) | (apart > (keys if left is None else left))
    else:
        assert left is None
    assert not hidden.all(1).any(), "the kernel has no log-sum-exp of a row that sees nothing"
    return (query @ key.mT * scale).masked_fill(hidden, -torch.inf)


def forward(query, key, value, *asked):
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    scores = logits(query, key, *asked)
    value = value.transpose(1, 2).repeat_interleave(query.shape[2] // value.shape[2], 1)
    return (scores.softmax(-1) @ value).transpose(1, 2), scores.logsumexp(-1)


def backward(grad, query, key, value, out, lse, *asked):
    """With the weights that ``lse`` says, and the sums that ``grad`` and ``out`` say."""
    assert lse.is_contiguous()
    groups = query.shape[2] // key.shape[2]
    weights = (logits(query, key, *asked) - lse[..., None]).exp()
    grad, out = grad.transpose(1, 2), out.transpose(1, 2)
    many = [x.transpose(1, 2).repeat_interleave(groups, 1) for x in (key, value)]
    of_logits = weights * (grad @ many[1].mT - (grad * out).sum(-1, keepdim=True)) * asked[2]
    of_query = of_logits @ many[0]
    of_key = of_logits.mT @ query.transpose(1, 2)
    of_key, of_value = (x.unflatten(1, (-1, groups)).sum(2) for x in (of_key, weights.mT @ grad))
    return tuple(x.transpose(1, 2) for x in (of_query, of_key, of_value))


@pytest.fixture
def on_cpu(monkeypatch) -> None:
    monkeypatch.setitem(flash.BY_DEVICE, "cpu", flash_cuda)
    monkeypatch.setattr(flash_cuda, "forward", forward)
    monkeypatch.setattr(flash_cuda, "backward", backward)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(geometries(), *[st.integers(*most) for most in ((1, 90), (0, 90), (0, 70))])
def test_tiles_have_each_visible_key_once_and_no_row_without_keys(geometry, queries, more, start):
    keys = queries + more
    found = torch.zeros(queries, keys, dtype=torch.int)
    left = flash_cuda.farthest_key(geometry)
    for tile in flash_cuda.tiles(geometry, queries, keys, start):
        assert tile.blocks == 1 or tile.step == tile.rows, "rows of blocks adjoin"
        ahead = torch.arange(tile.keys) - torch.arange(tile.rows)[:, None] - tile.keys + tile.rows
        shown = torch.ones_like(ahead, dtype=torch.bool)
        if tile.causal:
            shown = (ahead <= 0) & (ahead >= -(keys if left is None else left))
        assert shown.any(1).all()
        for block in range(tile.blocks):
            row, key = tile.row + block * tile.step, tile.key + block * tile.step
            found[row : row + tile.rows, key : key + tile.keys] += shown
    assert torch.equal(found, seen(geometry, queries, keys, start).int())


@pytest.mark.parametrize("method", kernels.METHODS)
def test_bands_are_the_oracle(on_cpu, method) -> None:
    for queries, keys, heads, kv in ((70, 70, 4, 2), (7, 61, 3, 3), (1, 60, 7, 1)):
        at = torch.arange(keys)
        bands = kernels.method_bands(method, 16, 8, at[keys - queries :], at)
        tensors = kernels.inputs(2, heads, kv, queries, keys, value_columns=8)
        kernels.compare(flash.attend, tensors, bands, kernels.HALVES)
        with torch.no_grad():
            out = kernels.by(flash.attend, *tensors[:3], bands, kernels.HALVES, sinks=tensors[3])
        expected = kernels.oracle(tensors, bands, kernels.HALVES)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_training_keeps_queries_keys_values_and_the_output_only(on_cpu) -> None:
    at = torch.arange(256)
    bands = kernels.method_bands("rerope", 16, 8, at, at)
    tensors = [x.requires_grad_() for x in kernels.inputs(1, 8, 2, 256, 256)[:3]]
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = kernels.by(flash.attend, *tensors, bands, kernels.HALVES)
    given = sum(x.nbytes for x in tensors)
    tables = sum(x.nbytes for band in bands for x in (*(band.query or ()), *(band.key or ())))
    assert sum(kept.values()) <= given + out.nbytes + 4 * 8 * 256 + tables + 64


def test_a_row_without_keys_before_and_now_is_zero() -> None:
    out, lse = torch.full((1, 3, 2, 4), 9.0), torch.full((1, 2, 3), 9.0)
    nothing, some = torch.full((1, 2, 3), -torch.inf), torch.zeros(1, 2, 3)
    zeros, ones = torch.zeros_like(out), torch.ones_like(out)
    flash_cuda.merge(out, lse, zeros, zeros, nothing, nothing, None)
    assert (out == 0).all() and (lse == -torch.inf).all()
    flash_cuda.merge(out, lse, zeros, ones, nothing, some, None)
    assert (out == 1).all() and (lse == 0).all()
    flash_cuda.merge(out, lse, zeros, ones, nothing, some, torch.zeros(2))  # as large as the key
    torch.testing.assert_close(out, ones / 2)


class _Asked(TorchDispatchMode):
    """Shapes of what torch's operators of the flash kernel are given, which check them."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards, self.backwards = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if "_flash_attention_forward" in name:
            self.forwards.append((*args[0].shape, args[1].shape[1], kwargs.get("window_size_left")))
        if "_flash_attention_backward" in name:
            self.backwards.append(
                (*args[1].shape, args[2].shape[1], kwargs.get("window_size_left"))
            )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("bands", "expected"),
    [
        (
            (Distance(0, 512), Distance(512, None)),
            [(2, 4096, 8, 128, 4096, 511), (2, 3584, 8, 128, 3584, None)],
        ),
        (
            (ChunkGap(1024, 0, 0), ChunkGap(1024, 1, 1), ChunkGap(1024, 2, None)),
            [
                (8, 1024, 8, 128, 1024, None),
                (6, 1024, 8, 128, 1024, None),
                (2, 1024, 8, 128, 1024, None),
                (2, 1024, 8, 128, 2048, None),
            ],
        ),
        (
            (Distance(0, 512), Sinks(4, 512)),
            [(2, 4096, 8, 128, 4096, 511), (2, 4, 8, 128, 4, None), (2, 3580, 8, 128, 4, None)],
        ),
    ],
)
def test_torchs_operators_take_what_they_are_given_in_few_calls(bands, expected) -> None:
    with _Asked() as asked:
        query, key, value, grad = (
            torch.empty(2, 4096, heads, 128, dtype=torch.bfloat16, device="meta").transpose(1, 2)
            for heads in (8, 2, 2, 8)
        )
        call = Call([RotatedBand(band, None, None) for band in bands], Pairs(slice(0), slice(0)), 1)
        out, lse = flash_cuda.compute(query, key, value, call)
        grads = flash_cuda.differentiate(grad, query, key, value, out, lse, call)
    assert sorted(asked.forwards, key=str) == sorted(expected, key=str)
    assert asked.backwards == asked.forwards
    assert (out.shape, out.dtype, lse.dtype) == (query.shape, torch.bfloat16, torch.float32)
    assert [x.shape for x in grads] == [query.shape, key.shape, value.shape]


def test_one_token_is_a_call_for_each_band_on_the_keys_that_it_sees() -> None:
    with _Asked() as asked:
        query, key = (
            torch.empty(4, heads, tokens, 64, dtype=torch.float16, device="meta")
            for heads, tokens in ((14, 1), (2, 5000))
        )
        bands = [RotatedBand(x, None, None) for x in (Distance(0, 512), Distance(512, None))]
        call = Call(bands, Pairs(slice(0), slice(0)), 1)
        flash_cuda.compute(query, key, key, call)
    assert asked.forwards == [(4, 1, 14, 64, 512, None), (4, 1, 14, 64, 4488, None)]


def test_what_the_kernel_cannot_have_is_refused(monkeypatch) -> None:
    def asked(columns: int, dtype: torch.dtype, **more) -> list:
        heads = [torch.empty(1, 2, 9, columns, dtype=dtype, device="cuda")] * 3
        band = RotatedBand(Distance(0, None), None, None)
        return [*heads, Call([band], Pairs(slice(0), slice(0)), 1, **more)]

    there = [cards.Card((8, 0), 2**17, True)]
    monkeypatch.setattr(cards, "card", lambda device: there[0])
    with FakeTensorMode():  # of a device that is not there
        bias = torch.zeros(2, 9)
        for given, reason in (
            (asked(12, torch.float16), "heads of a multiple of 8.*have 12; use.*'auto'"),
            (asked(264, torch.float16), "up to 256 columns.*have 264;"),
            (asked(64, torch.float32), "float16 and bfloat16 on a GPU.*this is torch.float32"),
            (asked(64, torch.float16, bias=bias), "no bias on a GPU; use.*'auto'"),
            (asked(64, torch.float16, softcap=2.0), "no soft cap; use.*'auto'"),
        ):
            with pytest.raises(OptionError, match=reason):
                attention.attend(*given, "flash")
        there[0] = cards.Card((7, 5), 2**16, True)
        with pytest.raises(OptionError, match=r"capability 8\.0 or later, and this one has 7\.5"):
            attention.attend(*asked(64, torch.float16), "flash")
