"""The kernels against the dense oracle, and the oracle against loops and torch's own attention."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from rope_ext.attention import bands as plain
from rope_ext.attention import dispatch as attention
from rope_ext.attention import flash, flash_cpu, flex, reference
from rope_ext.attention.call import Call, Pairs, RotatedBand
from rope_ext.attention.reference import Places
from rope_ext.errors import OptionError
from rope_ext.methods.geometry import Distance
from tests.helpers.bands import (
    COLUMNS,
    HALVES,
    LAYOUTS,
    METHODS,
    PERMUTED,
    by,
    compare,
    count,
    inputs,
    method_bands,
    oracle,
    turn,
)

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
    temperature = torch.linspace(0.5, 2, queries) if draw(st.booleans()) else None
    options = {"start": start, "temperature": temperature}
    return tensors if draw(st.booleans()) else tensors[:3], bands, pairs, options


@quick(max_examples=120)
@given(cases())
def test_flash_is_the_oracle(case):
    tensors, bands, pairs, options = case
    compare(flash.attend, tensors, bands, pairs, **options)


@quick(max_examples=40)
@given(cases())
def test_without_gradients_flash_is_the_same(case):
    tensors, bands, pairs, options = case
    sinks = {"sinks": tensors[3]} if len(tensors) > 3 else {}
    out = by(flash.attend, *tensors[:3], bands, pairs, **options, **sinks)
    expected = oracle(tensors, bands, pairs, **options)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


BY_DISTANCE = ("rerope", "leaky, cached", "three", "window", "far only")
biases = st.one_of(st.sampled_from([1, 2, 257]), st.integers(1, 500))


@quick(max_examples=40)
@given(cases(BY_DISTANCE), biases, st.booleans(), st.booleans())
def test_a_bias_by_distance_is_that_of_the_oracle(case, distances, learns, small):
    """And the gradients; the last value stands for all larger distances."""
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(flash_cpu, "ROWS", 7)  # as tiles of many queries are
        check_a_bias(case, distances, learns)


def check_a_bias(case, distances, learns):
    tensors, bands, pairs, options = case
    sinks = len(tensors) > 3
    heads = tensors[0].shape[1]
    bias = torch.randn(heads, distances, generator=torch.Generator().manual_seed(3))
    ours = [x.clone().requires_grad_() for x in (*tensors, bias)]
    exact = [x.double().requires_grad_() for x in (*tensors, bias)]
    ours[-1].requires_grad_(learns)
    temperature = options.pop("temperature")
    outs = []
    for kernel, x in ((attention.attend, ours), (reference.attend, exact)):
        more = {"sinks": x[3] if sinks else None, "bias": x[-1], **options}
        if temperature is not None:
            more["temperature"] = temperature.to(x[0].dtype)
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


@pytest.mark.parametrize("distances", [300, 150])
@pytest.mark.parametrize("loud", [1, 12])
def test_keys_that_a_bias_leaves_without_weight(loud, distances, tokens=300):
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, tokens, 8, generator=generator)
    key = key[:, :2]
    key[:, 0, 7] = loud * query[:, 0, 200]  # of the largest slope
    value = value[:, :2]
    slopes = torch.tensor([1.0, 0.5, 0.1, 0.0])
    bias = -slopes[:, None] * torch.arange(distances)
    bands = [RotatedBand(Distance(0, None), None, None)]
    ours = [x.clone().requires_grad_() for x in (query, key, value)]
    exact = [x.double().requires_grad_() for x in (query, key, value)]
    weight = torch.randn(query.shape, generator=generator)
    found = []
    for kernel, x in ((flash.attend, ours), (reference.attend, exact)):
        out = by(kernel, *x, bands, HALVES, scale=1.0, bias=bias.to(x[0].dtype))
        found.append((out, *torch.autograd.grad(out, x, weight.to(out))))
    for one, expected in zip(*found, strict=True):
        torch.testing.assert_close(one.double(), expected, rtol=1e-3, atol=1e-3)  # products of 200


def test_no_rows_have_no_output():
    empty = torch.zeros(0, 2, 5, 4)
    bands = [RotatedBand(Distance(0, None), None, None)]
    out = by(flash.attend, empty, empty, empty, bands, HALVES, bias=torch.zeros(2, 5))
    assert out.shape == empty.shape


def test_a_bias_by_hand():
    """Two tokens, values 0 and 1: the weight of the second is a logistic function."""
    query = key = torch.zeros(1, 1, 2, 4)
    value = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1).expand(1, 1, 2, 4)
    call = Call(
        [RotatedBand(Distance(0, None), None, None)], HALVES, 1, bias=torch.tensor([[0.5, 2.0]])
    )
    for kernel in (flash.attend, reference.attend):
        out = kernel(query, key, value, call)[0, 0, :, 0]
        torch.testing.assert_close(out, torch.tensor([0.0, 1 / (1 + math.exp(2.0 - 0.5))]))


def test_a_bias_under_chunks_is_left_to_the_oracle():
    at = torch.arange(60)
    tensors = inputs(1, 2, 2, 60, 60)[:3]
    bias = torch.randn(2, 60, generator=torch.Generator().manual_seed(0))
    for method in ("dual_chunk", "lm_infinite"):
        bands = method_bands(method, 9, 8, at, at)
        out = by(attention.attend, *tensors, bands, HALVES, bias=bias)
        expected = by(reference.attend, *tensors, bands, HALVES, bias=bias)
        torch.testing.assert_close(out, expected)
        with pytest.raises(OptionError, match="a bias for bands of distances only"):
            by(partial(attention.attend, kernel="flash"), *tensors, bands, HALVES, bias=bias)


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
    temperature = torch.linspace(0.5, 2, queries)
    for method in ("leaky", "lm_infinite", "dual_chunk", "far only"):
        bands = method_bands(method, 20, 5, at[keys - queries :], at)
        options = {"start": 5, "temperature": temperature, "softcap": softcap}
        if distances is not None:
            options["bias"] = torch.linspace(-1, 1, 4 * distances).view(4, distances)
        out = by(flex.attend, *tensors[:3], bands, PERMUTED, sinks=tensors[3], **options)
        expected = oracle(tensors, bands, PERMUTED, **options)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("queries", "keys"), [(700, 700), (300, 600), (1, 600)])
def test_long_enough_for_many_strips(method, queries, keys):
    at = torch.arange(keys)
    bands = method_bands(method, 150, 8, at[keys - queries :], at)
    compare(flash.attend, inputs(1, 2, 1, queries, keys), bands, HALVES)


@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("queries", [1, 300])
def test_columns_that_do_not_lie_next_to_each_other(which, queries):
    """The kernel takes them for it."""
    at = torch.arange(300)
    tensors = inputs(1, 2, 1, queries, 300)
    place = ["query", "key", "value"].index(which)
    tensors[place] = tensors[place].mT.contiguous().mT
    bands = method_bands("leaky, cached", 100, 8, at[300 - queries :], at)
    compare(flash.attend, tensors, bands, HALVES)


@pytest.mark.parametrize("window", [1024, 1101, 1450])  # of the last, rows hide a step of keys
def test_wide_bands(window):
    at = torch.arange(2400)
    bands = method_bands("rerope", window, 8, at[1400:], at)
    compare(flash.attend, inputs(1, 1, 1, 1000, 2400), bands, HALVES)


def naive(query, key, value, bands, pairs, positions, mask, temperature, softcap, sinks):
    """One logit at a time, the rotation written out."""
    heads, groups = query.shape[1], query.shape[1] // key.shape[1]
    first, second = (torch.arange(COLUMNS)[side] for side in (pairs.first, pairs.second))

    def turned(x, table, at):
        if table is None:
            return x
        cos, sin = (t[at if len(t) > 1 else 0].double() for t in table)
        out = x.clone()
        for p, (a, b) in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
            z = complex(x[a], x[b]) * complex(cos[p], sin[p])
            out[a], out[b] = z.real, z.imag
        return out

    out = query.new_zeros(*query.shape[:3], value.shape[-1])
    for b in range(query.shape[0]):
        for h in range(heads):
            for i, m in enumerate(positions[0].tolist()):
                weights, total = {}, 0.0 if sinks is None else math.exp(sinks[h])
                for j, n in enumerate(positions[1].tolist()):
                    if mask is not None and not mask[b, 0, i, j]:
                        continue
                    for band in bands:
                        if band.geometry.sees(torch.tensor(m), torch.tensor(n)):
                            q = turned(query[b, h, i], band.query, i) * temperature[i]
                            k = turned(key[b, h // groups, j], band.key, j)
                            logit = 0.3 * float(q @ k)
                            weights[j] = math.exp(softcap * math.tanh(logit / softcap))
                for j, weight in weights.items():
                    total_weight = total + sum(weights.values())
                    out[b, h, i] += weight / total_weight * value[b, h // groups, j]
    return out


@pytest.mark.parametrize("pairs", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_the_oracle_is_a_loop_over_keys(method, pairs):
    query, key, value, sinks = (x.double() for x in inputs(2, 2, 1, 5, 11, 6))
    at = torch.tensor([0, 1, 2, 5, 6, 7, 8, 10, 11, 15, 16])
    temperature = torch.linspace(0.5, 2, 5, dtype=torch.float64)
    mask = torch.rand(2, 1, 5, 11, generator=torch.Generator().manual_seed(0)) > 0.3
    bands = method_bands(method, 4, count(pairs), at[-5:], at)
    options = {"temperature": temperature, "softcap": 1.5, "sinks": sinks}
    run = partial(reference.attend, places=Places(at[-5:], at, mask))
    out = by(run, query, key, value, bands, pairs, **options)
    expected = naive(query, key, value, bands, pairs, (at[-5:], at), mask=mask, **options)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_by_hand():
    """Two keys; the far one is met by a quarter turn, which makes its logit that of the near."""
    query = torch.tensor([[1.0, 0.0]]).expand(1, 1, 2, 2)
    key = torch.tensor([[0.0, 1.0], [1.0, 0.0]])[None, None]
    value = torch.tensor([[2.0, 0.0], [0.0, 4.0]])[None, None]
    quarter = torch.tensor([[0.0]]), torch.tensor([[1.0]])
    bands = [RotatedBand(Distance(0, 1), None, None), RotatedBand(Distance(1, None), quarter, None)]
    pairs = Pairs(slice(0, 1), slice(1, 2))
    out = by(flash.attend, query, key, value, bands, pairs, scale=1.0)
    torch.testing.assert_close(out, torch.tensor([[[[2.0, 0.0], [1.0, 2.0]]]]))
    sink = torch.tensor([1.0])  # a third logit of 1: two thirds are left
    out = by(flash.attend, query, key, value, bands, pairs, scale=1.0, sinks=sink)
    torch.testing.assert_close(out[0, 0, 1], torch.tensor([2 / 3, 4 / 3]))


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
@pytest.mark.parametrize("method", ["rerope", "dual_chunk", "lm_infinite", "string"])
def test_half_precision(method, dtype, forward, backward):
    """Against the oracle on the same rounded tensors; 2 to 3 units in the last place of 1."""
    at = torch.arange(400)
    tensors = [x.to(dtype) for x in inputs(1, 4, 2, 400, 400)]
    bands = method_bands(method, 60, 8, at, at)
    compare(flash.attend, tensors, bands, HALVES, forward, backward)
    for x in (by(flash.attend, *tensors[:3], bands, HALVES), *tensors):
        assert x.dtype == dtype


def test_rows_without_any_key_are_zero_and_have_no_gradient():
    tensors = inputs(1, 2, 2, 50, 50)
    bands = method_bands("far only", 20, 8, torch.arange(50), torch.arange(50))
    compare(flash.attend, tensors[:3], bands, HALVES)
    compare(flash.attend, tensors, bands, HALVES)
    for kernel in ("flash", "flex", "reference"):
        out = by(partial(attention.attend, kernel=kernel), *tensors[:3], bands, HALVES)
        assert (out[:, :, :20] == 0).all()
        assert not out.isnan().any()
    for queries in (50, 1):
        query = tensors[0][:, :, :queries]
        assert (by(flash.attend, query, *tensors[1:3], [], HALVES) == 0).all()


def test_gradient_flows_through_the_merge_of_the_bands():
    """Central differences in float64; without the global log-sum-exp they are 5 to 17 % off."""
    query, key, value, sinks = (x.double().requires_grad_() for x in inputs(1, 2, 1, 7, 7))
    at = torch.arange(7)
    for method in ("rerope", "dual_chunk", "lm_infinite"):
        bands = method_bands(method, 3, 8, at, at)

        def run(query, key, value, sinks, bands=bands):
            return by(flash.attend, query, key, value, bands, HALVES, sinks=sinks)

        torch.autograd.gradcheck(run, (query, key, value, sinks), fast_mode=True)


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
    plan, tables = flash.pack_call(Call(bands, HALVES, 0.3))
    torch.library.opcheck(
        torch.ops.rope_ext.bands.default,
        (*tensors, bias, tables, plan, 0, 0.3, None if fused else 2.0, fused),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    run, tensors = graph()
    expected = out_and_grads(run, tensors)
    out = checkpoint(run, *tensors, use_reentrant=reentrant)
    out.square().sum().backward()
    torch.testing.assert_close((out, *(x.grad for x in tensors)), expected)


def test_autocast_casts_as_torchs_own_attention():
    run, tensors = graph()
    exact = out_and_grads(run, tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run(*tensors)
    assert cast.dtype == torch.bfloat16
    torch.testing.assert_close(cast.float(), exact[0], rtol=3e-2, atol=3e-2)
    grads = torch.autograd.grad(cast.float().square().sum(), tensors)
    for grad, expected in zip(grads, exact[1:], strict=True):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, expected, rtol=1e-1, atol=1e-1)


def test_the_blocked_form_is_the_oracle():
    tensors = [x.double().requires_grad_() for x in inputs(2, 4, 2, 50, 70)]
    at = torch.cumsum(torch.randint(1, 4, (70,), generator=torch.Generator().manual_seed(0)), 0)
    mask = torch.rand(2, 1, 50, 70, generator=torch.Generator().manual_seed(0)) > 0.3
    bands = method_bands("leaky", 20, 8, at[20:], at)
    options = {"temperature": torch.linspace(0.5, 2, 50, dtype=torch.float64), "softcap": 3.0}
    for seen in (mask, mask[:, :, :1], None):
        places = Places(at[20:], at, seen)

        def run(query, key, value, sinks, form, places=places, **more):
            form = partial(form, places=places, **more)
            return by(form, query, key, value, bands, HALVES, sinks=sinks, **options)

        whole = out_and_grads(partial(run, form=reference.attend), tensors)
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
    with pytest.raises(OptionError, match="'flash'"):
        run("flex")


MEMORY = """
from functools import partial
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
