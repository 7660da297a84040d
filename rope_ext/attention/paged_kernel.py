# ruff: noqa: ANN001, ANN201, E741
"""The Triton kernels of :mod:`rope_ext.attention.paged`: attention on pages of cached keys.

Each program attends to one split of the keys of a block of queries, band by band, with one online
softmax. Everything that depends on a position is read from tables on the device. Logits, sums and
outputs are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rope_ext.attention.decode_kernel import merged, rotate

LOG2E = tl.constexpr(1.4426950408889634)
"""Exponents are base 2, for which there is an instruction."""
NONE = tl.constexpr(1 << 30)
"""First position of a query that sees no key, so that it never widens a range."""


@triton.jit
def request_of(STARTS, block, requests, BLOCK_Q: tl.constexpr):
    """Find the request of a block; the blocks of request r begin at ``starts[r] // BLOCK_Q + r``.

    Requests may have more blocks there than queries to fill them.
    """
    low = 0
    high = requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(STARTS + middle) // BLOCK_Q + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def attend_band(
    qa, qb, m, l, acc, low, high, pages, K, V, k_page, k_slot, v_page, v_slot, COS, SIN, KEY,
    KEY_STEP, split, factor, softcap, dtype: tl.constexpr,
    ROTATED: tl.constexpr, RELATIVE: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    SIZE: tl.constexpr, SPLITS: tl.constexpr, PAIRS: tl.constexpr, PAIRS2: tl.constexpr,
    DV: tl.constexpr, DV2: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pair = tl.arange(0, PAIRS2)
    column = tl.arange(0, DV2)
    first = tl.min(low)
    last = tl.max(high)
    first = (first // SIZE) * SIZE  # tiles never cross blocks, whose first key is their reference
    tiles = tl.cdiv(tl.maximum(last - first, 0), SIZE)
    each = tl.cdiv(tiles, SPLITS)
    for tile in range(split * each, tl.minimum((split + 1) * each, tiles)):
        n = first + tile * SIZE + tl.arange(0, SIZE)
        there = n < last
        page = tl.load(pages + n // PAGE, there, 0).to(tl.int64)
        slot = n % PAGE
        at = K + page * k_page + slot * k_slot
        shown = there[:, None] & (pair < PAIRS)[None, :]
        a = tl.load(at[:, None] + pair[None, :], shown, 0.0)
        b = tl.load(at[:, None] + (PAIRS + pair)[None, :], shown, 0.0)
        ta = qa
        tb = qb
        if ROTATED:
            if RELATIVE:
                # Keys by their distance from the first of their block, which a small table covers;
                # queries back by the rest.
                block = (first + tile * SIZE) // BLOCK * BLOCK
                row = tl.load(KEY + block)
                cos = tl.load(COS + row * PAIRS + pair, pair < PAIRS, 1.0)
                sin = tl.load(SIN + row * PAIRS + pair, pair < PAIRS, 0.0)
                ta, tb = rotate(qa, qb, cos[None, :], -sin[None, :], tl.float32)
                row = tl.load(KEY_STEP + n, there, 0)
            else:
                row = tl.load(KEY + n, there, 0)
            of = row[:, None] * PAIRS + pair[None, :]
            cos = tl.load(COS + of, shown, 1.0)
            sin = tl.load(SIN + of, shown, 0.0)
            a, b = rotate(a, b, cos, sin, tl.float32)
        s = tl.dot(ta.to(dtype), tl.trans(a.to(dtype)), input_precision=PRECISION)
        s = tl.dot(tb.to(dtype), tl.trans(b.to(dtype)), s, input_precision=PRECISION)
        at = V + page * v_page + slot * v_slot
        shown = there[:, None] & (column < DV)[None, :]
        v = tl.load(at[:, None] + column[None, :], shown, 0.0).to(dtype)
        s *= factor[:, None]
        if HAS_CAP:
            s = softcap * (2 * tl.sigmoid(2 * s / softcap) - 1)
        s *= LOG2E
        s = tl.where((n[None, :] >= low[:, None]) & (n[None, :] < high[:, None]), s, -float("inf"))
        new = tl.maximum(m, tl.max(s, 1))
        least = tl.where(new == -float("inf"), 0.0, new)  # rows without a key so far
        p = tl.exp2(s - least[:, None])
        alpha = tl.exp2(m - least)
        acc = tl.dot(p.to(dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        l = l * alpha + tl.sum(p, 1)
        m = new
    return m, l, acc


@triton.jit(do_not_specialize=["requests"])
def paged_kernel(
    Q, K, V, OUT, LSE, SINKS, PAGES, PAGES_OF, LENGTHS, STARTS, LOW, HIGH, QUERY, KEY, KEY_STEP,
    COS, SIN, TEMPERATURE, requests, scale, softcap, positions, pages_row, q_token, q_head,
    o_token, o_head, k_page, k_head, k_slot, v_page, v_head, v_slot,
    KV: tl.constexpr, GROUPS: tl.constexpr, BLOCK_Q: tl.constexpr, ROWS: tl.constexpr,
    ONE_BLOCK: tl.constexpr, BANDS: tl.constexpr, ROTATED: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr,
    PAIRS: tl.constexpr, PAIRS2: tl.constexpr, DV: tl.constexpr, DV2: tl.constexpr,
    HAS_PAGES_OF: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    request = block if ONE_BLOCK else request_of(STARTS, block, requests, BLOCK_Q)
    start = tl.load(STARTS + request)
    stop = tl.load(STARTS + request + 1)
    begin = 0 if ONE_BLOCK else (block - start // BLOCK_Q - request) * BLOCK_Q
    if begin >= stop - start:
        return
    r = tl.arange(0, ROWS)
    pair = tl.arange(0, PAIRS2)
    column = tl.arange(0, DV2)
    token = begin + r // GROUPS
    group = head * GROUPS + r % GROUPS
    real = (r < BLOCK_Q * GROUPS) & (token < stop - start)
    t = tl.load(LENGTHS + request).to(tl.int32) - (stop - start) + token
    # Drafts may go a few tokens beyond the longest context; nobody reads them.
    t = tl.where(real, tl.minimum(tl.maximum(t, 0), positions - 1), 0)
    token = tl.cast(start + token, tl.int64)
    row = Q + token * q_token + group * q_head
    shown = real[:, None] & (pair < PAIRS)[None, :]
    a = tl.load(row[:, None] + pair[None, :], shown, 0.0)
    b = tl.load(row[:, None] + (PAIRS + pair)[None, :], shown, 0.0)
    factor = tl.full([ROWS], 1.0, tl.float32) * scale
    if HAS_TEMPERATURE:
        factor *= tl.load(TEMPERATURE + t, real, 1.0)
    m = tl.full([ROWS], -float("inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS and SPLITS == 1:  # a sink acts as a key without a value
        m = tl.load(SINKS + group, real, 0.0).to(tl.float32) * LOG2E
        l += 1.0
    acc = tl.zeros([ROWS, DV2], tl.float32)
    pages_of = tl.load(PAGES_OF + request) if HAS_PAGES_OF else request
    pages = PAGES + tl.cast(pages_of, tl.int64) * pages_row
    keys = K + head * k_head
    values = V + head * v_head
    for band in tl.static_range(BANDS):
        low = tl.load(LOW + band * positions + t, real, NONE)
        high = tl.load(HIGH + band * positions + t, real, 0)
        if WINDOW > 0:
            low = tl.maximum(low, t - WINDOW + 1)
        sees = low < high
        low = tl.where(sees, low, NONE)
        high = tl.where(sees, high, 0)
        of = tl.load(QUERY + band * positions + t)[:, None] * PAIRS + pair[None, :]
        cos = tl.load(COS + of, shown, 1.0)
        sin = tl.load(SIN + of, shown, 0.0)
        qa, qb = rotate(a, b, cos, sin, tl.float32)
        if SPLITS == 1:  # otherwise registers are spilled
            qa = qa.to(a.dtype)
            qb = qb.to(a.dtype)
        m, l, acc = attend_band(
            qa, qb, m, l, acc, low, high, pages, keys, values, k_page, k_slot, v_page, v_slot, COS,
            SIN, KEY + band * positions, KEY_STEP + band * positions, split, factor, softcap,
            a.dtype, (ROTATED >> band) & 1, SPLITS > 1, BLOCK, PAGE, SIZE, SPLITS, PAIRS, PAIRS2,
            DV, DV2, HAS_CAP, PRECISION,
        )  # fmt: skip
    total = tl.where(l == 0.0, 1.0, l)
    y = acc / total[:, None]
    shown = real[:, None] & (column < DV)[None, :]
    if SPLITS == 1:
        to = OUT + token * o_token + group * o_head
        tl.store(to[:, None] + column[None, :], y.to(OUT.dtype.element_ty), shown)
    else:
        to = (token * (KV * GROUPS) + group) * SPLITS + split
        tl.store(OUT + to[:, None] * DV + column[None, :], y, shown)
        tl.store(LSE + to, tl.where(l == 0.0, -float("inf"), (m + tl.log2(total)) / LOG2E), real)


@triton.jit(do_not_specialize=["requests"])
def merge_kernel(
    OUT, PARTS, LSE, SINKS, STARTS, requests, o_token, o_head, HEADS: tl.constexpr,
    SPLITS: tl.constexpr, DV: tl.constexpr, DV2: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if token >= tl.load(STARTS + requests):  # padding of a CUDA graph, for which nothing is written
        return
    part = tl.arange(0, SPLITS)
    column = tl.arange(0, DV2)
    at = (token * HEADS + head) * SPLITS + part
    sink = -float("inf")
    if HAS_SINKS:
        sink = tl.load(SINKS + head).to(tl.float32)
    y = merged(PARTS, LSE, at, column, sink, DV)
    tl.store(
        OUT + token * o_token + head * o_head + column, y.to(OUT.dtype.element_ty), column < DV
    )
