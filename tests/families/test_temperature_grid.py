"""Every family either has its queries multiplied, provably, or refuses a temperature by name."""

from __future__ import annotations

import pytest
import torch

import rope_ext
from rope_ext.position import queries
from rope_ext.rotary.sites import text_decoder
from tests.families.zoo import LENGTH, NotBuildable, model_types, tiny_model

pytestmark = pytest.mark.slow

OPTIONS = {"factor": 4, "original_max_position_embeddings": LENGTH}


def scaled(model_type: str) -> tuple[str, float]:
    """``"refused"``, or how; the largest error of the queries that reach the attention.

    Every query that a layer hands on under a temperature is compared with the one that it got,
    times the formula at its position.
    """
    model = tiny_model(model_type)
    ids = torch.randint(3, 100, (1, LENGTH + 9), generator=torch.Generator().manual_seed(0))
    temperature = rope_ext.LogN(length=LENGTH, scale=2)
    for more in ({}, {"sliding_layers": "scale"}):
        try:
            rope_ext.patch(model, "pi", **OPTIONS, **more, temperature=temperature)
            break
        except rope_ext.NoRopeError:
            return "no rotation", 0.0
        except rope_ext.UnsupportedModelError as error:
            reason = str(error)
    else:
        assert type(text_decoder(model)).__name__ in reason
        return "refused", 0.0
    t = torch.arange(LENGTH + 9, dtype=torch.float64)
    tau = 1 + 2 * ((t + 1).log() / torch.tensor(float(LENGTH)).log() - 1).clamp(min=0)
    worst, calls, handed = 0.0, 0, queries.by_position

    def compared(view, sequences, module, query):
        nonlocal worst, calls
        out = handed(view, sequences, module, query)
        right = query * tau[None, None, :, None]
        worst, calls = max(worst, float((out - right).abs().max())), calls + 1
        return out

    queries.by_position = compared
    try:
        with torch.no_grad():
            model(input_ids=ids)
    finally:
        queries.by_position = handed
    views = [m for m in model.modules() if isinstance(m.__dict__.get("config"), queries.View)]
    assert calls >= len(views) > 0
    rope_ext.unpatch(model)
    assert not [m for m in model.modules() if isinstance(m.__dict__.get("config"), queries.View)]
    return "scaled", worst


REFUSED = {
    "axk2",
    "blt",
    "deepseek_v32",
    "doge",
    "dots3_note",
    "dots3_note_text",
    "falcon",
    "glm_moe_dsa",
    "gpt_neox_japanese",
    "hy_v4",
    "phimoe",
    "qwen4_exp",
    "qwen4_exp_text",
}


def test_every_family_has_its_queries_multiplied_or_says_why_not() -> None:
    refused, wrong = set(), {}
    for model_type in model_types():
        try:
            how, error = scaled(model_type)
        except NotBuildable:
            continue
        if how == "refused":
            refused.add(model_type)
        elif error > 1e-5:
            wrong[model_type] = error
    assert wrong == {}
    assert refused == REFUSED
