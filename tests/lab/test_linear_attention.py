"""Linear attention: the formula against its fast forms, and which encodings it can have at all."""

from __future__ import annotations

import pytest
import torch

from lab.laboratory.linear import LINEAR, attention, step
from lab.laboratory.model import Size
from rope_ext.encodings import Encoding, Heads
from rope_ext.encodings.alibi import slopes
from rope_ext.encodings.scores import Block
from rope_ext.methods import build_method
from rope_ext.methods.kinds import PositionMethod
from rope_ext.methods.rope import Rope, geometric

HEADS, TOKENS, COLUMNS = 4, 50, 8
THETA = geometric(10000.0, COLUMNS)
SLOPES = slopes(HEADS)


def assert_same(have, want) -> None:
    """Float64 sums of 50 terms of order 1 in another order differ by 1e-14, gradients by 1e-13."""
    torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-11)


def inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    made = torch.randn(3, 2, HEADS, TOKENS, COLUMNS, dtype=torch.float64)
    return [x.clone().requires_grad_() for x in made]


def formula(q, k, v, name: str) -> torch.Tensor:
    """Equation 19 of arXiv 2104.09864, with decay: all pairs of tokens, rotations as matrices."""
    rotates, decays = LINEAR[name]
    phi_q, phi_k = (torch.where(x > 0, x + 1, x.exp()) for x in (q, k))
    tokens, columns = q.shape[-2:]
    at, angle = torch.arange(tokens), geometric(10000.0, columns)
    cos, sin = (torch.diag_embed(f(at[:, None] * angle)) for f in (torch.cos, torch.sin))
    rotation = torch.cat((torch.cat((cos, -sin), -1), torch.cat((sin, cos), -1)), -2)
    rotated = [torch.einsum("tij,bhtj->bhti", rotation, x) for x in (phi_q, phi_k)]
    apart = at[:, None] - at
    weight = torch.exp(-SLOPES[:, None, None] * apart) if decays else torch.ones(tokens, tokens)
    weight = torch.where(apart < 0, 0.0, weight)
    above = weight * torch.einsum("bhid,bhjd->bhij", *(rotated if rotates else (phi_q, phi_k)))
    below = weight * torch.einsum("bhid,bhjd->bhij", phi_q, phi_k)
    return torch.einsum("bhij,bhjd->bhid", above, v) / below.sum(-1, keepdim=True)


@pytest.mark.parametrize("chunk", [1, 16, 50, 128])
@pytest.mark.parametrize("name", LINEAR)
def test_chunks_are_the_formula_and_so_are_their_gradients(name: str, chunk: int) -> None:
    q, k, v = inputs()
    rotates, decays = LINEAR[name]
    angles = torch.arange(TOKENS)[:, None] * THETA if rotates else None
    want = formula(q, k, v, name)
    have = attention(q, k, v, angles, SLOPES if decays else None, chunk)
    assert_same(have, want)
    direction = torch.randn_like(want)
    of_want, of_have = (torch.autograd.grad(x, (q, k, v), direction) for x in (want, have))
    assert_same(of_have, of_want)


@pytest.mark.parametrize("name", LINEAR)
def test_steps_from_a_state_are_the_formula(name: str) -> None:
    q, k, v = inputs()
    rotates, decays = LINEAR[name]
    want, state = formula(q, k, v, name), None
    for t in range(TOKENS):
        at = (t * THETA if rotates else None), (SLOPES if decays else None)
        have, state = step(state, q[:, :, t], k[:, :, t], v[:, :, t], *at)
        assert_same(have, want[:, :, t])
    assert state is not None and state.products.shape == (2, HEADS, COLUMNS, COLUMNS)


def test_a_rotated_denominator_passes_through_zero() -> None:
    # phi is 1 in the first column and 0 in the others: the denominator is the sum of cos(i - j).
    q = torch.full((1, HEADS, TOKENS, COLUMNS), -800.0, dtype=torch.float64)
    q[..., 0] = 0
    v = torch.ones_like(q)
    below = torch.arange(TOKENS).double().cos().cumsum(0)
    assert below.min() < 0 < below.max()
    # Eq. 19 has the sum of cosines over their number: the weights of its values do not sum to 1.
    want = below / (torch.arange(TOKENS) + 1)
    have = formula(q, q, v, "linear_rope")[0, 0, :, 0]
    assert_same(have, want)
    assert have.abs().max() <= 1


@pytest.mark.parametrize("name", LINEAR)
def test_the_laboratorys_model_computes_the_formula(name: str) -> None:
    model = Size(width=32, layers=1, heads=HEADS).build(name, 0, 16).double()
    seen = {}
    for key, module in model.named_modules():
        if key.endswith(("q_proj", "k_proj", "v_proj", "o_proj")):
            part = key[-6]
            module.register_forward_hook(lambda m, x, y, part=part: seen.update({part: (x[0], y)}))
            if part in "qk":  # initialized near 0, where phi is hardly curved
                module.get_parameter("weight").data *= 20
    model(input_ids=torch.arange(TOKENS).expand(2, -1))
    q, k, v = (seen[part][1].unflatten(-1, (HEADS, COLUMNS)).transpose(1, 2) for part in "qkv")
    assert_same(seen["o"][0], formula(q, k, v, name).transpose(1, 2).flatten(2))


# A state that is linear in the values must carry everything that queries from t on need of the keys
# before t: it has at least as many columns as that block of the weights has rank. Without
# positions, that is the columns of phi, here two.


def weights(name: str, tokens: int, **options) -> torch.Tensor:
    """``<R_i phi(q_i), R_j phi(k_j)>`` times the exponential of what is added to the logit.

    Of one head with two columns; learned parameters are random, but KERPLE's, which are 1 and 1/2.
    """
    heads = Heads(8 if name == "transformer_xl" else 2, 2, 2)  # of which its sinusoids' number is
    rope = Rope.geometric(100.0, 2, 128)
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, heads.count, tokens, 2, dtype=torch.float64)
    at = torch.arange(tokens)
    i, j = at[:, None].double(), at.double()
    method, factor, fade = build_method(name, **options), torch.ones(()), torch.ones(())
    used = (i - j)[..., None]
    if isinstance(method, PositionMethod):
        method = method.resolved(rope)
        used = sum(band.distances(i, j).nan_to_num(0) for band in method.bands())
    angle = (used * method.frequencies(rope, tokens))[..., 0]
    if isinstance(method, Encoding):
        if method.computes_positions():
            given = method.initial_positions(16, 1)
            learned = {key: torch.randn_like(value).double() for key, value in given.items()}
            z = method.places(torch.randn(1, tokens, 16).double(), j[None], learned)[0, 0]
            angle = z[:, None] - z
        if (phase := method.phase(j)) is not None:
            angle = angle + phase[:, None] - phase
        if (growth := method.growth(1)) is not None:
            fade = torch.exp((i - j) * growth)
        factor = torch.exp(_added(method, heads, rope, q, k))
    (a, b), (c, d) = ((torch.nn.functional.elu(x[0, 0]) + 1).unbind(-1) for x in (q, k))
    a, b = a[:, None], b[:, None]
    return fade * factor * (angle.cos() * (a * c + b * d) + angle.sin() * (a * d - b * c))


def _added(method: Encoding, heads: Heads, rope: Rope, q, k) -> torch.Tensor:
    """What it adds to the logits of the first head."""
    tokens, scale = q.shape[-2], 2**-0.5
    torch.manual_seed(1)
    learned = {
        key: torch.randn_like(value).double() if value.ndim > 1 else value.double()
        for key, value in (method.initial(heads, rope) | method.constants(heads, q.device)).items()
    }
    at = torch.arange(tokens)
    apart = (at[:, None] - at).clamp(min=0)
    if not method.scored():
        if method.name.startswith("kerple"):
            learned = {"r1": torch.ones(heads.count), "r2": torch.full((heads.count,), 0.5)}
        bias = method.bias(at.double(), heads.count, rope, learned)
        return torch.zeros(()) if bias is None else bias[0, apart]
    of_content = method.name in ("dape", "cope")  # others only add to it
    content = q @ k.mT * scale if of_content else q.new_zeros(1, heads.count, tokens, tokens)
    block = Block(q, k, content, at, at, at[:, None] >= at, scale)
    scores = method.scores(heads.count, rope, learned)
    assert scores is not None
    return (scores.logits(block) - content)[0, 0]


def columns(name: str, tokens: int, within: float = 1e-10, **options) -> int:
    """Columns of a state that reproduces the weights, to a share of the largest singular value."""
    block = weights(name, tokens, **options)[tokens // 2 :, : tokens // 2]
    values = torch.linalg.svdvals(block)
    return int((values > within * values[0]).sum())
