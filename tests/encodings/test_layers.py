"""A patch on some of the layers: these are as under it, the others as they were trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rope_ext
from tests.families.zoo import tiny_model
from tests.helpers.positions import EXACT, TOLD, WIDE, Family, logits


def of_first_layer(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """What its attention returns."""
    seen: list[torch.Tensor] = []
    attention = model.model.layers[0].self_attn
    attention.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    logits(model, ids)
    return seen[0]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rerope", {"window": 5, "attention_factor": 1.3}),
        ("rerope", {"window": 5, "frequency": rope_ext.NTK(factor=2)}),
        ("yarn", {"sliding_layers": "keep"}),
    ],
    ids=str,
)
def test_sliding_layers_that_are_not_scaled_stay_as_they_were(name, options, ids) -> None:
    """Where they share the rotary module, to which the numbers of the others are written."""
    family = Family("gemma2", mapped=(1,))
    model, plain = family.model(), family.model()
    rope_ext.patch(model, name, factor=2, **options)
    torch.testing.assert_close(of_first_layer(model, ids), of_first_layer(plain, ids), **EXACT)


def test_layers_that_stay_keep_the_softmax_scale_of_the_checkpoint(ids) -> None:
    """Of one that has its temperature there, and not on cosine and sine."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0}
    yarn |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 16}
    model, plain = (tiny_model("deepseek_v3", rope_parameters=dict(yarn)) for _ in range(2))
    given = {"factor": 2, "compose": True, "attention_factor": 1.3}
    rope_ext.patch(model, "pi", layers=[1], **given)
    torch.testing.assert_close(of_first_layer(model, ids), of_first_layer(plain, ids), **EXACT)


def test_kinds_of_layers_keep_their_own_rotation_within_the_window(ids) -> None:
    model = tiny_model("gemma3_text")  # one rotary module with a base for each kind
    said = logits(model, ids)
    given = {**WIDE["self_extend"], **TOLD, "sliding_layers": "scale"}
    rope_ext.patch(model, "self_extend", factor=4, **given)
    torch.testing.assert_close(logits(model, ids), said, **EXACT)


def test_vectors_for_values_have_their_columns(ids) -> None:
    """In latent attention, a head has fewer columns of values than of queries."""
    found = []
    for name in ("shaw", "nope"):
        model = rope_ext.patch(tiny_model("deepseek_v3"), name)
        with torch.no_grad():
            for key, value in model.named_parameters():
                if "rope_ext" in key:
                    value.zero_()
        found.append(logits(model, ids))
    torch.testing.assert_close(*found, **EXACT)


def test_layers_that_do_not_rotate_or_see_a_window_are_not_chosen() -> None:
    windowed = Family("gemma2").model()  # the first
    with pytest.raises(rope_ext.OptionError, match=r"in layers 1, and 0 .* sliding_layers='scale'"):
        rope_ext.patch(windowed, "nope", layers=[0])
    rope_ext.patch(windowed, "nope", layers=[0], sliding_layers="scale")
    smollm = Family("smollm3").model()  # the second rotates nothing
    with pytest.raises(rope_ext.OptionError, match="in layers 0, and 1 is asked for"):
        rope_ext.patch(smollm, "alibi", layers=[1])
