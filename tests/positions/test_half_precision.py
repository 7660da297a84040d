"""Logits in half precision: as exact as torch's own attention, on every path.

The model is built so that nothing but its attention rounds. Queries and keys are whole numbers that
bfloat16 and float16 represent, no pair rotates (by less than float64 resolves, in fact), and the
logits of the model are the output of its attention.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import rope_ext
from rope_ext.position.install import Installed
from tests.helpers.encodings import parameters
from tests.helpers.graphs import static
from tests.helpers.models import tiny_llama
from tests.helpers.positions import decoded, logits, padded

HEADS, KV_HEADS, COLUMNS, VOCABULARY = 4, 2, 16, 64
LENGTHS, STEPS = (48, 41), [30, 15, 1, 1, 1]  # of two rows; of the pieces that a cache is given
MODERATE, LARGE, BEYOND = 3, 60, 110  # products up to 144, about 20,000, and beyond float16
METHODS: dict[str, dict[str, Any]] = {  # a temperature would round the queries of every kernel
    "rerope": {"window": 5, "log_n": False},
    "self_extend": {"window": 8, "group": 4, "published": True},
    "dual_chunk": {"chunk": 20, "local": 8, "attention_factor": 1},
    "lm_infinite": {"window": 9, "sinks": 3},
    "string": {"shift": 12, "window": 3, "attention_factor": 1},
    "alibi": {},
    "shaw": {"clip": 7},
    "deberta": {"clip": 7},
    "transformer_xl": {},
    "cope": {"positions": 16},
    "dape": {},
    "fire": {"threshold": 20.0},
}
SLOW = pytest.mark.slow
Rows = list[torch.Tensor]


def model_of(most: int) -> nn.Module:
    """A layer with entries of queries and keys up to ``most``; its logits are its attention."""
    width = HEADS * COLUMNS
    model = tiny_llama(
        num_hidden_layers=1,
        vocab_size=width,
        hidden_size=VOCABULARY + width,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=COLUMNS,
    )
    generator = torch.Generator().manual_seed(0)
    decoder = model.model
    layer = decoder.layers[0]
    attention = layer.self_attn
    with torch.no_grad():
        decoder.embed_tokens.weight.copy_(torch.eye(width, VOCABULARY + width))
        for linear in (attention.q_proj, attention.k_proj):
            drawn = torch.randint(-most, most + 1, linear.weight.shape, generator=generator)
            linear.weight.copy_(drawn)
        attention.v_proj.weight.normal_(generator=generator)
        attention.o_proj.weight.zero_()[VOCABULARY:] = torch.eye(width)
        layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()[:, VOCABULARY:] = torch.eye(width)
        decoder.rotary_emb.inv_freq.fill_(1e-30)
    layer.input_layernorm = layer.post_attention_layernorm = decoder.norm = nn.Identity()
    return model


def patched(most: int, name: str, dtype: torch.dtype, **more: Any) -> nn.Module:
    model = rope_ext.patch(model_of(most), name, factor=2, **METHODS[name], **more)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in parameters(model).items():
            if key.endswith((".key", ".query", ".u", ".v")):  # are added to whole numbers
                drawn = torch.randint(-2, 3, parameter.shape, generator=generator)
                parameter.copy_(drawn)
    return model.to(dtype)


def alone(model: nn.Module, rows: Rows) -> Rows:
    return [logits(model, row[None])[0] for row in rows]


def in_steps(model: nn.Module, rows: Rows) -> Rows:
    pieces = [[len(row) - sum(STEPS[1:]), *STEPS[1:]] for row in rows]
    return [decoded(model, row[None], x)[0] for row, x in zip(rows, pieces, strict=True)]


def together(model: nn.Module, rows: Rows, cache: Any = None, gradients: bool = False) -> Rows:
    """Padded on the left, in steps; ``gradients`` choose another path for a few tokens."""
    tokens, mask, positions = padded(rows, "left")
    cache, begin, found = cache or DynamicCache(config=model.config), 0, []
    sizes = [tokens.shape[1] - sum(STEPS[1:]), *STEPS[1:]]
    for count in sizes:
        piece = slice(begin, begin + count)
        begin += count
        given = {"attention_mask": mask[:, :begin], "position_ids": positions[:, piece]}
        with torch.set_grad_enabled(gradients and count < STEPS[0]):
            out = model(tokens[:, piece], past_key_values=cache, **given).logits
            found.append(out.detach())
    out = torch.cat(found, 1)
    return [x[-len(row) :] for x, row in zip(out, rows, strict=True)]


def masked(model: nn.Module, rows: Rows) -> Rows:
    """With a mask of four dimensions, which may have any shape."""
    sizes = [len(row) for row in rows]
    masks = [torch.ones(1, 1, n, n, dtype=torch.bool).tril() for n in sizes]
    return [
        logits(model, row[None], attention_mask=mask, use_cache=False)[0]
        for row, mask in zip(rows, masks, strict=True)
    ]


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """The operations of a graph, run as they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Installed, "traceable", lambda self: True)
        yield


def every_path(most: int, name: str, dtype: torch.dtype) -> dict[str, float]:
    """The error of each path."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in LENGTHS]
    model = patched(most, name, dtype)
    found = {
        "alone": alone(model, rows),
        "in steps": in_steps(model, rows),
        "padded": together(model, rows),
        "padded, gradients": together(model, rows, gradients=True),
        "masked": masked(model, rows),
        "dense": alone(patched(most, name, dtype, kernel="reference"), rows),
    }
    with traced():
        found["graph"] = together(model, rows, static(model))
        found["graph, gradients"] = together(model, rows, static(model), gradients=True)
        found["graph, alone"] = alone(model, rows)
    exact = alone(copy.deepcopy(model).double(), rows)
    return {path: error(said, exact) for path, said in found.items()}


def error(found: Rows, exact: Rows) -> float:
    found, exact = torch.cat(found).double(), torch.cat(exact)
    return float((found - exact).norm() / exact.norm())


def own_error(most: int, dtype: torch.dtype) -> float:
    """That of torch's own attention."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in LENGTHS]
    model = model_of(most).to(dtype)
    return error(alone(model, rows), alone(copy.deepcopy(model).double(), rows))


@pytest.mark.parametrize(
    ("name", "dtype", "sizes"),
    [
        ("rerope", torch.bfloat16, [LARGE]),
        *(
            pytest.param(name, dtype, [MODERATE, LARGE, BEYOND], marks=SLOW)
            for dtype in (torch.bfloat16, torch.float16)
            for name in METHODS
        ),
    ],
)
def test_every_path_is_as_exact_as_torch(name: str, dtype: torch.dtype, sizes: list[int]) -> None:
    """Where one key has all of the weight nothing rounds, so the bar is that of several keys."""
    least = own_error(MODERATE, dtype)
    for most in sizes:
        errors = every_path(most, name, dtype)
        bar = 2 * max(least, own_error(most, dtype))
        assert {path: one for path, one in errors.items() if not one <= bar} == {}, (most, bar)
