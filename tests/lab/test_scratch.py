"""Encodings from scratch only: each against its formula, written as loops over pairs of tokens."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable

import pytest
import torch

from lab.laboratory.model import Size
from lab.laboratory.scratch.base import Positions, Shape
from lab.laboratory.scratch.names import SCRATCH

WIDTH, HEADS, COLUMNS, TOKENS, LENGTH = 24, 2, 8, 7, 400
PAIRS = COLUMNS // 2
BASE = 100.0
SHAPE = Shape(WIDTH, HEADS, COLUMNS, BASE, LENGTH)
THETA = [BASE ** (-p / PAIRS) for p in range(PAIRS)]  # all make a rotation within 400 tokens
Vector = list[float]
Angles = Callable[[Positions, torch.Tensor, int, int], Vector]
"""The angle of every pair at a token, from the inputs of a row, for a head."""


def assert_same(have: torch.Tensor, want: torch.Tensor) -> None:
    """Float64, sums of at most 24 terms of order 1."""
    torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-11)


@pytest.fixture(autouse=True)
def float64():
    """Also of the frequencies, which are float32 otherwise."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def made(name: str, length: int = LENGTH) -> Positions:
    """With random parameters, so that none has an effect by being zero."""
    torch.manual_seed(0)
    positions = SCRATCH[name](SHAPE._replace(length=length))
    with torch.no_grad():
        for p in positions.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return positions


def inputs(name: str) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    heads = HEADS // 2 if name == "rope_pp_eh" else HEADS
    q, k, v = torch.randn(3, 2, heads, TOKENS, COLUMNS)
    return q, k, v, torch.randn(2, TOKENS, WIDTH), torch.arange(TOKENS)[None]


def as_complex(x: torch.Tensor) -> list[complex]:
    """Pairs of columns, each half the columns apart."""
    values = x.tolist()
    return [complex(values[p], values[p + len(values) // 2]) for p in range(len(values) // 2)]


def product(q: list[complex], k: list[complex]) -> float:
    return sum((a * b.conjugate()).real for a, b in zip(q, k, strict=True))


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def of_grape_m(positions: Positions, x: torch.Tensor, t: int, head: int) -> Vector:
    return [t * math.exp(value) for value in positions.log_theta.tolist()]


def of_carope(positions: Positions, x: torch.Tensor, t: int, head: int) -> Vector:
    constant = math.log(math.exp(1 / THETA[1] - 1) - 1)
    found = [0.0] * PAIRS
    for u in range(t + 1):
        z = dot(x[u].tolist(), positions.weight[:, head].tolist()) + constant
        f = 1 / (math.log(1 + math.exp(z)) + 1)
        found = [angle + f**p for p, angle in enumerate(found)]
    return found


def of_selective_rope(positions: Positions, x: torch.Tensor, t: int, head: int) -> Vector:
    projection = positions.up.weight @ positions.down.weight

    def normal(u: int) -> torch.Tensor:
        parts = x[u].split(WIDTH // HEADS)
        return torch.cat([part / math.sqrt((part * part).sum()) for part in parts])

    found = [0.0] * PAIRS
    for u in range(t + 1):
        gate = (positions.gate.weight @ normal(u) + positions.gate.bias)[head].item()
        for p in range(PAIRS):
            column = head * PAIRS + p
            taps = positions.conv.weight[column, 0].tolist()
            convolved = sum(
                taps[3 - back] * (projection[column] @ normal(u - back)).item()
                for back in range(min(4, u + 1))
            )
            step = convolved + math.exp(positions.bias[head, 0, p].item())
            found[p] += THETA[p] * step / (1 + math.exp(-gate))
    return found


ROTATIONS: dict[str, Angles] = {
    "grape_m": of_grape_m,
    "carope": of_carope,
    "selective_rope": of_selective_rope,
}


def rotated_logit(name: str, positions: Positions, q, k, x, i: int, j: int, head: int) -> float:
    angles = [ROTATIONS[name](positions, x, t, head) for t in (i, j)]
    turned = [
        [z * cmath.exp(1j * angle) for z, angle in zip(as_complex(vector), angle, strict=True)]
        for vector, angle in zip((q[head, i], k[head, j]), angles, strict=True)
    ]
    return product(*turned) / math.sqrt(COLUMNS)


def fope_logit(positions: Positions, q, k, x, i: int, j: int, head: int) -> float:
    kept = [theta for theta in THETA if theta >= 2 * math.pi / positions.shape.length]
    series = min(len(kept), COLUMNS // 4)

    def at(t: int, vector: torch.Tensor) -> list[complex]:
        found = []
        for p, z in enumerate(as_complex(vector)):
            cos = sin = 1.0
            if p < series:
                of_cos, of_sin = (table[head, :, p].tolist() for table in tables(positions))
                cos = sum(c * math.cos(t * w) for c, w in zip(of_cos, kept, strict=True))
                sin = sum(s * math.sin(t * w) for s, w in zip(of_sin, kept, strict=True))
            found.append(z * complex(cos, sin))
        return found

    return product(at(i, q[head, i]), at(j, k[head, j])) / math.sqrt(COLUMNS)


def tables(positions: Positions) -> tuple[torch.Tensor, torch.Tensor]:
    return positions.get_buffer("of_cos"), positions.get_buffer("of_sin")


def tapa_logit(positions: Positions, q, k, x, i: int, j: int, head: int) -> float:
    half = COLUMNS // 2
    a, b = q[head, i].tolist(), k[head, j].tolist()
    content, phase = (
        dot(a[part], b[part]) / math.sqrt(half) for part in (slice(half), slice(half, None))
    )
    return content * math.cos(2 * math.pi * (i - j) ** 0.1 * phase)


def grape_ap_logit(positions: Positions, q, k, x, i: int, j: int, head: int) -> float:
    weight = positions.probe.weight[8 * head : 8 * head + 8]
    asking, bias = as_complex(weight @ x[i]), 0.0
    for step in range(j + 1, i + 1):
        p = weight @ x[step]
        passed = as_complex(p / math.sqrt((p * p).mean()))
        passed = [z * cmath.exp(-1j * step) for z in passed]
        bias -= math.log(1 + math.exp(-product(asking, passed) / 8))
    slope = 2 ** (-8 * (head + 1) / HEADS)
    return dot(q[head, i].tolist(), k[head, j].tolist()) / math.sqrt(COLUMNS) + slope * bias


def rope_pp_logit(positions: Positions, q, k, x, i: int, j: int, head: int) -> float:
    own, imaginary = divmod(head, 2)
    total = 0j
    for a, b, theta in zip(as_complex(q[own, i]), as_complex(k[own, j]), THETA, strict=True):
        total += a * b.conjugate() * cmath.exp(1j * (i - j) * theta)
    return (total.imag if imaginary else total.real) / math.sqrt(COLUMNS)


def logit(name: str, *given) -> float:
    if name in ROTATIONS:
        return rotated_logit(name, *given)
    others = {"fope": fope_logit, "tapa": tapa_logit, "grape_ap": grape_ap_logit}
    return others.get(name, rope_pp_logit)(*given)


def formula(name: str, positions: Positions, q, k, v, x) -> torch.Tensor:
    """The output, one pair of tokens at a time."""
    times = 2 if name.startswith("rope_pp") else 1
    found = torch.zeros(len(q), times * q.shape[1], *v.shape[2:])
    for row in range(len(q)):
        for head in range(found.shape[1]):
            for i in range(TOKENS):
                given = (positions, q[row], k[row], x[row])
                weights = [math.exp(logit(name, *given, i, j, head)) for j in range(i + 1)]
                for j, weight in enumerate(weights):
                    found[row, head, i] += weight / sum(weights) * v[row, head // times, j]
    return found


@torch.no_grad()
@pytest.mark.parametrize("name", SCRATCH)
def test_attention_is_the_formula(name: str) -> None:
    positions, (q, k, v, x, t) = made(name), inputs(name)
    assert_same(positions(q, k, v, x, t), formula(name, positions, q, k, v, x))


def built(name: str, heads: int = 4) -> torch.nn.Module:
    return Size(width=32, layers=2, heads=heads).build(name, 0, 64)


@pytest.mark.parametrize("name", SCRATCH)
def test_a_model_learns_all_of_its_parameters_and_sees_no_later_token(name: str) -> None:
    model, ids = built(name), torch.arange(40)[None]
    before = model(input_ids=ids, labels=ids)
    before.loss.backward()
    silent = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []
    other = model(input_ids=torch.cat((ids[:, :-1], ids[:, :1]), 1)).logits
    torch.testing.assert_close(other[:, :-1], before.logits[:, :-1], rtol=0, atol=1e-6)
