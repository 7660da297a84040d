# ruff: noqa: ANN001, ANN201, E741
"""The Triton kernels of :mod:`rope_ext.attention.decode`: split-KV attention of few queries.

Each program attends to a split of every band's keys and writes a partial output and log-sum-exp;
the second kernel merges them. Logits, sums and outputs are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate(a, b, cos, sin, dtype: tl.constexpr):
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)


@triton.jit
def attend_band(
    qa, qb, qr, m, l, acc, low, high, token, heads, krow, vrow, kn, vn, KC, KS, BIAS, origin,
    filled, split, scale, softcap, distances, bias_row,
    ROTATED: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr,
    PAIRS: tl.constexpr, PAIRS2: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    STEP: tl.constexpr, REST: tl.constexpr, REST2: tl.constexpr, REST_AT: tl.constexpr,
    DV: tl.constexpr, DV2: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    pair = tl.arange(0, PAIRS2)
    rest = tl.arange(0, REST2)
    column = tl.arange(0, DV2)
    # A row that sees no key of the band has low = 2**30 and high = 0 and widens nothing.
    first = tl.min(low)
    last = tl.max(high)
    blocks = tl.cdiv(tl.maximum(last - first, 0), SIZE)
    each = tl.cdiv(blocks, SPLITS)
    for block in range(split * each, tl.minimum((split + 1) * each, blocks)):
        n = first + block * SIZE + tl.arange(0, SIZE)
        there = (n < last)[:, None]
        at = krow + n[:, None] * kn
        s = tl.zeros([low.shape[0], SIZE], tl.float32)
        if PAIRS > 0:
            shown = there & (pair < PAIRS)[None, :]
            a = tl.load(at + (FIRST + pair * STEP)[None, :], shown, 0.0)
            b = tl.load(at + (SECOND + pair * STEP)[None, :], shown, 0.0)
            if ROTATED:
                of = (n - origin)[:, None] * PAIRS + pair[None, :]
                cos = tl.load(KC + of, shown, 0.0)
                sin = tl.load(KS + of, shown, 0.0)
                a, b = rotate(a, b, cos, sin, qa.dtype)
            s = tl.dot(qa, tl.trans(a), s, input_precision=PRECISION)
            s = tl.dot(qb, tl.trans(b), s, input_precision=PRECISION)
        if REST > 0:
            c = tl.load(at + (REST_AT + rest)[None, :], there & (rest < REST)[None, :], 0.0)
            s = tl.dot(qr, tl.trans(c), s, input_precision=PRECISION)
        v = tl.load(vrow + n[:, None] * vn + column[None, :], there & (column < DV)[None, :], 0.0)
        s *= scale[:, None]
        if HAS_CAP:
            s = softcap * (2 * tl.sigmoid(2 * s / softcap) - 1)
        if HAS_BIAS:
            distance = tl.minimum(
                tl.maximum((filled + token)[:, None] - n[None, :], 0), distances - 1
            )
            s += tl.load(BIAS + heads[:, None] * bias_row + distance)
        s = tl.where((n[None, :] >= low[:, None]) & (n[None, :] < high[:, None]), s, -float("inf"))
        new = tl.maximum(m, tl.max(s, 1))
        least = tl.where(new == -float("inf"), 0.0, new)  # rows without a key so far
        p = tl.exp(s - least[:, None])
        alpha = tl.exp(m - least)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        l = l * alpha + tl.sum(p, 1)
        m = new
    return m, l, acc


@triton.jit
def split_kernel(
    Q, K, V, LOW, HIGH, ORIGIN, FILLED, QC, QS, KC, KS, TEMPERATURE, BIAS, OUT, LSE, scale, softcap,
    distances, bias_row, qb, qh, qt, kb, kh, kn, vb, vh, vn, range_band, range_row,
    query_band, query_row, key_band, temperature_row, origin_row,
    KV: tl.constexpr, GROUPS: tl.constexpr, TOKENS: tl.constexpr, BANDS: tl.constexpr,
    QUERY_ROTATED: tl.constexpr, KEY_ROTATED: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, PAIRS: tl.constexpr, PAIRS2: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, STEP: tl.constexpr, REST: tl.constexpr,
    REST2: tl.constexpr, REST_AT: tl.constexpr, DV: tl.constexpr, DV2: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, SIZE_ROTATED: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    of_key = tl.program_id(1)
    b = (of_key // KV).to(tl.int64)
    h = of_key % KV
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    pair = tl.arange(0, PAIRS2)
    rest = tl.arange(0, REST2)
    column = tl.arange(0, DV2)
    real = rows < GROUPS * TOKENS
    head = tl.where(real, h * GROUPS + rows // TOKENS, 0)
    token = tl.where(real, rows % TOKENS, 0)
    origin, filled = (
        tl.load(ORIGIN + b * origin_row),
        tl.load(FILLED),
    )  # slots: of position 0, of query 0
    m = tl.full([ROWS], -float("inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DV2], tl.float32)
    factor = tl.full([ROWS], 1.0, tl.float32) * scale
    if HAS_TEMPERATURE:
        factor *= tl.load(TEMPERATURE + b * temperature_row + token)
    qrow = Q + b * qb + head[:, None] * qh + token[:, None] * qt
    shown = real[:, None] & (pair < PAIRS)[None, :]
    a = tl.load(qrow + (FIRST + pair * STEP)[None, :], shown, 0.0)
    c = tl.load(qrow + (SECOND + pair * STEP)[None, :], shown, 0.0)
    qr = tl.load(qrow + (REST_AT + rest)[None, :], real[:, None] & (rest < REST)[None, :], 0.0)
    krow = K + b * kb + h * kh
    vrow = V + b * vb + h * vh
    for band in tl.static_range(BANDS):
        seen = band * range_band + b * range_row + token
        low = tl.load(LOW + seen, real, 1 << 30)
        high = tl.load(HIGH + seen, real, 0)
        qa = a
        qc = c
        if (QUERY_ROTATED >> band) & 1:
            of = band * query_band + b * query_row + (token * PAIRS)[:, None] + pair[None, :]
            cos = tl.load(QC + of, shown, 1.0)
            sin = tl.load(QS + of, shown, 0.0)
            qa, qc = rotate(a, c, cos, sin, a.dtype)
        if band < KEY_ROTATED:  # they come first
            m, l, acc = attend_band(
                qa, qc, qr, m, l, acc, low, high, token, head, krow, vrow, kn, vn,
                KC + band * key_band, KS + band * key_band, BIAS, origin, filled, split, factor,
                softcap, distances, bias_row, True, SIZE_ROTATED, SPLITS, PAIRS, PAIRS2, FIRST,
                SECOND, STEP, REST, REST2, REST_AT, DV, DV2, HAS_BIAS, HAS_CAP, PRECISION,
            )  # fmt: skip
        else:
            m, l, acc = attend_band(
                qa, qc, qr, m, l, acc, low, high, token, head, krow, vrow, kn, vn, KC, KS, BIAS,
                origin, filled, split, factor, softcap, distances, bias_row, False, SIZE, SPLITS,
                PAIRS, PAIRS2, FIRST, SECOND, STEP, REST, REST2, REST_AT, DV, DV2, HAS_BIAS,
                HAS_CAP, PRECISION,
            )  # fmt: skip
    total = tl.where(l == 0.0, 1.0, l)
    to = (of_key * SPLITS + split) * (GROUPS * TOKENS) + rows
    tl.store(
        OUT + to[:, None] * DV + column[None, :], acc / total[:, None],
        real[:, None] & (column < DV)[None, :],
    )  # fmt: skip
    tl.store(LSE + to, tl.where(l == 0.0, -float("inf"), m + tl.log(total)), real)


@triton.jit
def merged(OUT, LSE, at, column, sink, DV: tl.constexpr):
    """Merge the splits ``at`` of one query; ``sink`` acts as a key without a value, -inf: none."""
    lse = tl.load(LSE + at)
    top = tl.maximum(tl.max(lse), sink)
    top = tl.where(top == -float("inf"), 0.0, top)
    weight = tl.exp(lse - top)
    total = tl.sum(weight) + tl.exp(sink - top)
    shown = (column < DV)[None, :] & (at >= 0)[:, None]
    x = tl.load(OUT + at[:, None] * DV + column[None, :], shown, 0.0)
    return tl.sum(x * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)


@triton.jit
def merge_kernel(
    OUT, LSE, SINKS, Y, KV: tl.constexpr, GROUPS: tl.constexpr, TOKENS: tl.constexpr,
    HAS_SINKS: tl.constexpr, DV: tl.constexpr, DV2: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    of_key = tl.program_id(0)
    row = tl.program_id(1)
    b = of_key // KV
    head = (of_key % KV) * GROUPS + row // TOKENS
    part = tl.arange(0, SPLITS)
    column = tl.arange(0, DV2)
    at = (of_key * SPLITS + part) * (GROUPS * TOKENS) + row
    sink = -float("inf")
    if HAS_SINKS:
        sink = tl.load(SINKS + head).to(tl.float32)
    y = merged(OUT, LSE, at, column, sink, DV)
    to = ((b * TOKENS + row % TOKENS) * KV * GROUPS + head) * DV + column
    tl.store(Y + to, y.to(Y.dtype.element_ty), column < DV)
