"""The kernels against plain operations, and these against loops and torch's own attention."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rope_ext.attention import bands as plain
from rope_ext.attention import dispatch as attention
from rope_ext.attention import flash, flex
from rope_ext.attention.call import Call, Places, RotatedBand
from rope_ext.errors import OptionError
from rope_ext.methods.geometry import Ahead, Around, ChunkGap, Distance, Sinks, extent
from tests.helpers.bands import (
    COLUMNS,
    HALVES,
    LAYOUTS,
    METHODS,
    PERMUTED,
    by,
    compare,
    count,
    dense,
    geometries,
    inputs,
    method_bands,
    oracle,
    seen,
    turn,
)

fused = partial(attention.attend, kernel="flash")
lengths = st.one_of(st.integers(1, 40), st.integers(100, 420))
quick = partial(
    settings,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def cases(draw, methods=METHODS):
    keys = draw(lengths)
    queries = draw(st.one_of(st.just(1), st.just(keys), st.integers(1, keys)))
    kv_heads, groups = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    start = draw(st.sampled_from([0, 0, 7, 64]))
    size = draw(st.one_of(st.integers(1, 20), st.sampled_from([64, 100, 200, 1000])))
    pairs = draw(st.sampled_from(LAYOUTS))
    at = torch.arange(start, start + keys)
    bands = method_bands(
        draw(st.sampled_from(methods)), size, count(pairs), at[keys - queries :], at
    )
    tensors = inputs(
        draw(st.sampled_from([1, 2])),
        kv_heads * groups,
        kv_heads,
        queries,
        keys,
        draw(st.sampled_from([COLUMNS, COLUMNS, 8, 24])),
        draw(st.integers(0, 9)),
    )
    return tensors if draw(st.booleans()) else tensors[:3], bands, pairs, {"start": start}


@quick(max_examples=120)
@given(cases())
def test_flash_is_the_oracle(case):
    tensors, bands, pairs, options = case
    compare(fused, tensors, bands, pairs, **options)


@quick(max_examples=40)
@given(cases())
def test_without_gradients_flash_is_the_same(case):
    tensors, bands, pairs, options = case
    sinks = {"sinks": tensors[3]} if len(tensors) > 3 else {}
    out = by(fused, *tensors[:3], bands, pairs, **options, **sinks)
    expected = oracle(tensors, bands, pairs, **options)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["rerope", "lm_infinite", "dual_chunk"])
def test_torchs_operators_of_cuda_take_what_they_are_given(name):
    """By shapes, which they check on the device "meta"."""
    at = torch.arange(700)
    for queries in (700, 64):
        x = [
            torch.empty(2, heads, 700, 128, dtype=torch.bfloat16, device="meta")
            for heads in (8, 2, 2)
        ]
        x[0] = x[0][:, :, :queries]
        bands = [RotatedBand(b.geometry, None, None) for b in method_bands(name, 128, 8, at, at)]
        call = Call(bands, HALVES, 0.1)
        out, lse = flash.compute(*x, call)
        assert (out.shape, out.dtype, lse.dtype) == (x[0].shape, torch.bfloat16, torch.float32)
        grads = flash.differentiate(torch.empty_like(out), *x, out, lse, call)
        assert [grad.shape for grad in grads] == [y.shape for y in x]


def visible(query, key, causal):
    shown = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    return shown.tril() if causal else shown


def model_forward(query, key, value, causal, scale):
    """What torch documents of its fused kernels: output, natural log-sum-exp, first-row masks."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    logits = (query @ key.mT * scale).masked_fill(~visible(query, key, causal), -torch.inf)
    return logits.softmax(-1) @ value, logits.logsumexp(-1)


def model_backward(grad, query, key, value, out, lse, causal, scale):
    groups = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(groups, 1) for x in (key, value))
    logits = (query @ keys.mT * scale).masked_fill(~visible(query, key, causal), -torch.inf)
    weights = (logits - lse[..., None]).exp()
    of_logits = weights * (grad @ values.mT - (grad * out).sum(-1, keepdim=True)) * scale
    made = of_logits.mT @ query, weights.mT @ grad
    return of_logits @ keys, *(x.unflatten(1, (-1, groups)).sum(2) for x in made)


def turned(tensors):
    return [x.transpose(1, 2) for x in tensors]


@pytest.fixture(params=["flash", "cudnn"])
def operators_of_cuda(request, monkeypatch):
    """Register models of torch's operators on the CPU, as FA3 and FA4 register theirs on CUDA."""

    def flash_forward(
        q, k, v, _starts_q, _starts_k, _most_q, _most_k, _drop, causal, _debug, scale
    ):
        out, lse = model_forward(*turned((q, k, v)), causal, scale)
        return out.transpose(1, 2), lse, lse[:0], lse[:0], lse[:0]

    def flash_backward(grad, q, k, v, out, lse, *rest, scale):
        grad, q, k, v, out = turned((grad, q, k, v, out))
        return tuple(turned(model_backward(grad, q, k, v, out, lse, rest[5], scale)))

    def cudnn_forward(q, k, v, _bias, logs, _drop=0.0, causal=False, _debug=False, scale=None):
        assert logs
        out, lse = model_forward(q, k, v, causal, scale)
        return out, lse[..., None], None, None, q.shape[2], k.shape[2], lse[:0], lse[:0], lse[:0]

    def cudnn_backward(grad, q, k, v, out, lse, *rest, scale):
        return model_backward(grad, q, k, v, out, lse[..., 0], rest[-1], scale)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash_forward, "CPU")
    library.impl("_flash_attention_backward", flash_backward, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention", cudnn_forward, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", cudnn_backward, "CPU")
    monkeypatch.setattr(flash, "kernel_of", lambda *_: request.param)
    if request.param == "cudnn":  # which comes with compiled rotations and merges
        monkeypatch.setattr(flash, "uses_cudnn", lambda *_: True)
        monkeypatch.setattr(flash.cards, "compiles", lambda: True)
        monkeypatch.setattr(flash, "_compiled", partial(torch.compile, backend="aot_eager"))
    yield
    library._destroy()


@pytest.mark.parametrize("method", METHODS)
def test_tiles_and_gradients_by_torchs_operators_of_cuda(method, operators_of_cuda):
    for queries, keys in ((90, 90), (33, 90), (1, 61)):
        at = torch.arange(keys)
        bands = method_bands(method, 16, 8, at[keys - queries :], at)
        compare(fused, inputs(2, 4, 2, queries, keys), bands, HALVES)


biases = st.one_of(st.sampled_from([1, 2, 257]), st.integers(1, 500))


@quick(max_examples=40)
@given(cases(METHODS[:-1]), biases, st.booleans())
def test_a_bias_by_distance_is_that_of_the_oracle(case, distances, learns):
    """And the gradients; the last value stands for all larger distances."""
    tensors, bands, pairs, options = case
    sinks = len(tensors) > 3
    heads = tensors[0].shape[1]
    bias = torch.randn(heads, distances, generator=torch.Generator().manual_seed(3))
    ours = [x.clone().requires_grad_() for x in (*tensors, bias)]
    exact = [x.double().requires_grad_() for x in (*tensors, bias)]
    ours[-1].requires_grad_(learns)
    outs = []
    for kernel, x in ((attention.attend, ours), (dense, exact)):
        more = {"sinks": x[3] if sinks else None, "bias": x[-1], **options}
        outs.append(by(kernel, *x[:3], bands, pairs, **more))
        with torch.no_grad():
            again = by(kernel, *x[:3], bands, pairs, **more)
        torch.testing.assert_close(again, outs[-1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outs[0].double(), outs[1], rtol=1e-5, atol=1e-5)
    weight = torch.randn(outs[0].shape, generator=torch.Generator().manual_seed(1))
    grads = [
        torch.autograd.grad(out, x if learns else x[:-1], weight.to(out))
        for out, x in zip(outs, (ours, exact), strict=True)
    ]
    for grad, expected in zip(*grads, strict=True):  # of a distance, a sum over all its pairs
        torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=2e-4)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(geometries(), st.integers(1, 700), st.integers(0, 700), st.integers(0, 300))
def test_a_mask_made_of_blocks_is_the_mask_of_every_token(geometry, queries, more, start):
    keys, size = queries + more, 128
    expected = seen(geometry, queries, keys, start)
    there = expected.any(0).nonzero().flatten().tolist()
    part = extent(geometry, queries, keys, start)
    assert not there or part.start <= there[0] <= there[-1] < part.stop <= keys
    assert queries > 1 or there == list(range(part.start, part.stop)), "it then needs no mask"
    made = flex.block_mask_of(geometry, queries, keys, start + more, start, torch.device("cpu"))
    rows, columns = torch.arange(queries)[:, None], torch.arange(keys)
    assert torch.equal(made.mask_mod(None, None, rows, columns), expected)
    found = torch.zeros_like(expected)
    for counts, indices, whole in (
        (made.kv_num_blocks, made.kv_indices, False),
        (made.full_kv_num_blocks, made.full_kv_indices, True),
    ):
        for row, there in enumerate(counts[0, 0].tolist()):
            for column in indices[0, 0, row, :there].tolist():
                block = tuple(slice(x * size, x * size + size) for x in (row, column))
                assert not found[block].any(), "a block is listed once"
                found[block] = expected[block]
                if whole:  # the kernel does not ask the mask there
                    assert expected[block].shape == (size, size) and expected[block].all()
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "geometry", [Distance(0, 4096), Distance(4096, None), ChunkGap(4096, 1, 1), Sinks(4, 4096)]
)
def test_a_mask_of_128k_tokens_takes_megabytes(geometry):
    """A byte for each of 1024 by 1024 blocks, eight in what sorting them makes."""
    with _Largest() as largest:
        flex.block_mask_of.__wrapped__(geometry, 2**17, 2**17, 0, 0, torch.device("meta"))
    assert largest.bytes <= 8 * 2**20 + 2**13


class _Largest(TorchDispatchMode):
    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.numel() * x.element_size())
        return out


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("queries", "softcap", "distances"),
    [
        (1, 2.0, 7),
        pytest.param(25, None, 7, marks=pytest.mark.slow),
        pytest.param(1, None, None, marks=pytest.mark.slow),
        pytest.param(25, 2.0, None, marks=pytest.mark.slow),
    ],
)
def test_flex_is_the_oracle(queries, softcap, distances, keys=60):
    """Forward only: FlexAttention has no backward on a CPU."""
    at = torch.arange(5, 5 + keys)
    tensors = inputs(2, 4, 2, queries, keys, 8)
    for method in ("leaky", "lm_infinite", "dual_chunk", "far only"):
        bands = method_bands(method, 20, 5, at[keys - queries :], at)
        options = {"start": 5, "softcap": softcap}
        if distances is not None:
            options["bias"] = torch.linspace(-1, 1, 4 * distances).view(4, distances)
        out = by(flex.attend, *tensors[:3], bands, PERMUTED, sinks=tensors[3], **options)
        expected = oracle(tensors, bands, PERMUTED, **options)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["leaky", "dual_chunk", "three"])
@pytest.mark.parametrize(("queries", "keys"), [(700, 700), (300, 600), (1, 600)])
def test_long_enough_for_many_strips(method, queries, keys):
    at = torch.arange(keys)
    bands = method_bands(method, 150, 8, at[keys - queries :], at)
    compare(fused, inputs(1, 2, 1, queries, keys), bands, HALVES)


@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("queries", [1, 300])
def test_columns_that_do_not_lie_next_to_each_other(which, queries):
    """The kernel takes them for it."""
    at = torch.arange(300)
    tensors = inputs(1, 2, 1, queries, 300)
    place = ["query", "key", "value"].index(which)
    tensors[place] = tensors[place].mT.contiguous().mT
    bands = method_bands("leaky, cached", 100, 8, at[300 - queries :], at)
    compare(fused, tensors, bands, HALVES)


@pytest.mark.parametrize("window", [1024, 1101, 1450])  # of the last, rows hide a step of keys
def test_wide_bands(window):
    at = torch.arange(2400)
    bands = method_bands("rerope", window, 8, at[1400:], at)
    compare(fused, inputs(1, 1, 1, 1000, 2400), bands, HALVES)


@pytest.mark.parametrize("kernel", ["flash", "flex", "reference"])
@pytest.mark.parametrize("queries", [37, 300])
def test_one_band_over_everything_is_torchs_own_attention(kernel, queries):
    query, key, value, _ = inputs(2, 4, 2, queries, queries)
    at = turn(torch.arange(queries), 8)
    bands = [RotatedBand(Distance(0, None), at, at)]
    out = by(partial(attention.attend, kernel=kernel), query, key, value, bands, HALVES)
    expected = F.scaled_dot_product_attention(
        HALVES.rotate(query, at),
        HALVES.rotate(key, at),
        value,
        is_causal=True,
        scale=0.3,
        enable_gqa=True,
    )
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "forward", "backward"), [(torch.bfloat16, 2e-2, 6e-2), (torch.float16, 2e-3, 8e-3)]
)
@pytest.mark.parametrize("method", ["rerope", "dual_chunk"])
def test_half_precision(method, dtype, forward, backward):
    """Against the oracle on the same rounded tensors; 2 to 3 units in the last place of 1."""
    at = torch.arange(400)
    tensors = [x.to(dtype) for x in inputs(1, 4, 2, 400, 400)]
    bands = method_bands(method, 60, 8, at, at)
    compare(fused, tensors, bands, HALVES, forward, backward)
    for x in (by(fused, *tensors[:3], bands, HALVES), *tensors):
        assert x.dtype == dtype


@pytest.mark.parametrize("hidden", [1, 2, 3, 4])
def test_a_mask_may_hide_keys_at_the_border_of_bands(hidden):
    query, key, value, *_ = inputs(1, 2, 2, 1, 6)
    bands = [RotatedBand(Distance(*ends), None, None) for ends in ((4, None), (2, 4), (0, 2))]
    call = Call(bands=bands, pairs=HALVES, scale=0.3)
    mask = (torch.arange(6) != hidden)[None, None, None]
    places = Places(torch.tensor([5]), torch.arange(6), mask=mask, visible={})
    right = F.scaled_dot_product_attention(query, key, value, mask, scale=0.3)
    torch.testing.assert_close(plain.attend(query, key, value, call, places), right)


def test_rows_without_any_key_are_zero_and_have_no_gradient():
    tensors = inputs(1, 2, 2, 50, 50)
    bands = method_bands("far only", 20, 8, torch.arange(50), torch.arange(50))
    compare(fused, tensors[:3], bands, HALVES)
    compare(fused, tensors, bands, HALVES)
    for kernel in ("flash", "flex", "reference"):
        out = by(partial(attention.attend, kernel=kernel), *tensors[:3], bands, HALVES)
        assert (out[:, :, :20] == 0).all()
        assert not out.isnan().any()
    for queries in (50, 1):
        query = tensors[0][:, :, :queries]
        assert (by(fused, query, *tensors[1:3], [], HALVES) == 0).all()


def graph(method="rerope", queries=300):
    at = torch.arange(300)
    bands = method_bands(method, 50, 8, at[300 - queries :], at)
    tensors = [x.requires_grad_() for x in inputs(1, 4, 2, queries, 300)]

    def run(query, key, value, sinks):
        return by(attention.attend, query, key, value, bands, HALVES, sinks=sinks)

    return run, tensors


def out_and_grads(run, tensors):
    out = run(*tensors)
    return out, *torch.autograd.grad(out.float().square().sum(), tensors)


@pytest.mark.parametrize(
    ("method", "dynamic"),
    [("rerope", False), pytest.param("dual_chunk", True, marks=pytest.mark.slow)],
)
def test_compiles_into_one_graph(method, dynamic):
    torch.compiler.reset()
    for queries in (300, 1):
        run, tensors = graph(method, queries)
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        torch.testing.assert_close(out_and_grads(compiled, tensors), out_and_grads(run, tensors))
        with torch.no_grad():
            torch.testing.assert_close(compiled(*tensors), run(*tensors))


@pytest.mark.parametrize(
    ("queries", "fused"),
    [
        (300, True),
        pytest.param(300, False, marks=pytest.mark.slow),
        pytest.param(1, False, marks=pytest.mark.slow),
    ],
)
def test_the_operator_keeps_its_promises(queries, fused):
    """Schema, fake tensors, autograd registration and what AOT dispatch makes of them."""
    _, tensors = graph(queries=queries)
    bias = None if fused else torch.linspace(-1, 1, 80).view(4, 20).requires_grad_()
    at = torch.arange(300)
    bands = method_bands("rerope", 50, 8, at[300 - queries :], at)
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "operator", lambda *given: asked.append(given) or tensors)
        call = Call(bands, HALVES, 0.3, 0, None if fused else 2.0, tensors[3], bias)
        attention.attend_encoded(*tensors[:3], call, [], "flash" if fused else "reference")
    torch.library.opcheck(attention.operator, *asked, rtol=1e-4, atol=1e-4)


def test_the_blocked_form_is_the_oracle():
    tensors = [x.double().requires_grad_() for x in inputs(2, 4, 2, 50, 70)]
    at = torch.cumsum(torch.randint(1, 4, (70,), generator=torch.Generator().manual_seed(0)), 0)
    mask = torch.rand(2, 1, 50, 70, generator=torch.Generator().manual_seed(0)) > 0.3
    bands = method_bands("leaky", 20, 8, at[20:], at)
    for shown in (mask, mask[:, :, :1], None):
        places = Places(at[20:], at, shown)

        def run(query, key, value, sinks, form, places=places, **more):
            form = partial(form, places=places, **more)
            return by(form, query, key, value, bands, HALVES, sinks=sinks, softcap=3.0)

        whole = out_and_grads(partial(run, form=dense), tensors)
        for rows in (1, 17, 128):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(plain, "ROWS", rows)
                parts = out_and_grads(partial(run, form=plain.attend), tensors)
            torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)


def test_kernels_by_name():
    at = torch.arange(30)
    tensors = inputs(1, 2, 2, 30, 30)[:3]
    bands = method_bands("rerope", 9, 8, at, at)

    def run(kernel="auto", **more):
        return by(partial(attention.attend, kernel=kernel), *tensors, bands, HALVES, **more)

    for kernel in attention.KERNELS:
        torch.testing.assert_close(run(kernel), run(), rtol=1e-5, atol=1e-5)
    for kernel in ("auto", "flex", "reference"):
        torch.testing.assert_close(run(kernel, softcap=1.0), run(softcap=1.0), rtol=1e-5, atol=1e-5)
    assert (run(softcap=1.0) - run()).abs().max() > 1e-3
    with pytest.raises(OptionError, match=r"no soft cap.*'auto'"):
        run("flash", softcap=1.0)
    with pytest.raises(OptionError, match="did you mean 'flash'"):
        run("flsh")
    tensors[0].requires_grad_()
    with pytest.raises(OptionError, match="no gradients on the CPU"):
        run("flex")


MEMORY = """
from functools import partial
from itertools import cycle
from lab.benchmarks.attention import attend
from lab.benchmarks.measuring import peak
run = partial(attend, "rerope", window=64)
print(peak(run, 8, 2048), peak(run, 8, 4096))
"""


@pytest.mark.slow
def test_peak_memory_is_linear():
    """Of a training step in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], check=True, capture_output=True, text=True, env=environment
    )
    short, long = map(float, done.stdout.split())
    assert long < 2.6 * short


@pytest.mark.parametrize("size", [1, 5, 13, 200])
@pytest.mark.parametrize("length", [1, 7, 64, 97])
def test_kernels_see_each_key_once_in_both_directions(length: int, size: int) -> None:
    """Against dense logits, in float64; the last band's rotation is that of no other one."""
    t = torch.arange(length)
    own, grouped, key = turn(t, 8), turn(t // 4 + size, 8), turn(t // 4, 8)
    of_bands = [
        RotatedBand(Around(size), own, own),
        RotatedBand(Ahead(size, 3 * size), key, grouped),
        RotatedBand(Distance(size, 3 * size), grouped, key),
        RotatedBand(Ahead(3 * size, None), own, None),
        RotatedBand(Sinks(3, 3 * size), None, own),
    ]
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, length, 16), (2, 2, length, 16), (2, 2, length, 16)]
    q, k, v = (torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes)
    logits = torch.full((2, 4, length, length), -torch.inf, dtype=torch.float64)
    for band in of_bands:
        shown = band.geometry.sees(t[:, None], t)
        assert not bool((shown & logits[0, 0].isfinite()).any())
        query, keys = HALVES.rotate(q, band.query), HALVES.rotate(k, band.key)
        logits = torch.where(shown, query @ keys.repeat_interleave(2, 1).mT / 4, logits)
    wanted = logits.softmax(-1) @ v.repeat_interleave(2, 1)
    call = Call(of_bands, HALVES, 0.25)
    for attend in (plain.attend, flex.attend, lambda *given: flash.compute(*given)[0]):
        torch.testing.assert_close(attend(q, k, v, call), wanted, atol=1e-6, rtol=0)
