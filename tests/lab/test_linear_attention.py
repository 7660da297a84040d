"""Linear attention: the formula against its fast forms, and which encodings it can have at all."""

from __future__ import annotations

import pytest
import torch

from lab.laboratory.linear import LINEAR, attention, step
from lab.laboratory.model import Size
from rope_ext.encodings.alibi import slopes
from rope_ext.methods.rope import geometric

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
