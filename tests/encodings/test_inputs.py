"""Absolute encodings and other rotations, beside what the matrix says of them."""

from __future__ import annotations

import pytest
import torch

import rope_ext
from tests.families.zoo import tiny_model
from tests.helpers.encodings import ALL, dense
from tests.helpers.models import tiny_llama
from tests.helpers.positions import FAMILIES, logits


@pytest.mark.parametrize("kind", ["gemma", "llama"])
def test_the_scale_is_the_size_of_what_the_first_layer_gets(kind: str) -> None:
    model = FAMILIES[kind].model()
    sample = model.get_input_embeddings().weight[torch.arange(64) * 2].double()
    size = sample.square().mean().sqrt() * (8 if kind == "gemma" else 1)  # sqrt of 64 columns
    rope_ext.patch(model, "sinusoidal")
    (scale,) = (b for n, b in model.named_buffers() if n.endswith("rope_ext_input.scale"))
    assert float(scale) == pytest.approx(float(size), rel=1e-3)


def test_a_fading_rotation_holds_at_any_distance_and_in_half_precision(ids) -> None:
    """Where the numbers of single queries and keys would be infinite."""
    model, plain = ALL["xpos"].patch(tiny_llama()), tiny_llama()
    everything = {"attention_mask": torch.ones_like(ids)}
    far = torch.cat((torch.arange(50), torch.arange(3000, 3040)))
    given = {"position_ids": far[None].expand(2, -1), **everything}
    with dense(plain, FAMILIES["llama"], ALL["xpos"], far[None], model):
        right = logits(plain, ids, **given)
    # Angles of 3000 radians are good to 2e-4 in float32.
    torch.testing.assert_close(logits(model, ids, **given), right, atol=5e-3, rtol=0)
    model(ids, **given).logits.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    farther = torch.cat((torch.arange(50), torch.arange(1_000_000, 1_000_040)))
    with pytest.raises(rope_ext.UnsupportedModelError, match="1000040 tokens apart, too far"):
        logits(model, ids, position_ids=farther[None], **everything)
    whole = logits(model, ids)
    half = logits(model.half(), ids)
    assert (half.float() - whole).abs().max() < 0.05  # of half precision itself
    assert logits(model, ids, **given).isfinite().all()


@pytest.mark.parametrize("name", ["learned", "floater"])
def test_a_model_that_runs_its_first_layer_again_is_refused(name: str) -> None:
    with pytest.raises(rope_ext.UnsupportedModelError, match="first layer 6 times in one forward"):
        rope_ext.patch(tiny_model("hrm_text"), name, factor=4)


def test_beyond_the_table_there_is_an_error_that_names_the_cure(ids) -> None:
    model = ALL["learned"].patch(tiny_llama(), length=64)
    logits(model, ids[:, :64])
    said = r"a sequence of 90 tokens goes beyond its 64 positions; patch with extend= and a la"
    with pytest.raises(rope_ext.OptionError, match=said):
        logits(model, ids)
    for name, options, said in (
        ("learned", {"factor": 4, "length": 64}, "a sequence of 256 tokens goes beyond its 64"),
        ("learned", {"factor": 5, "length": 16, "extend": "hierarchical"}, "its 256 positions"),
        ("learned", {"extend": "linear"}, "extend='linear' is not valid; it must be 'hierarch"),
        ("multiplicative", {"factor": 2, "length": 64}, "patch with length=128"),
        ("multiplicative", {"table": "no"}, "must be 'learned' or 'sinusoidal'"),
        ("t5", {"buckets": "offsets", "num_buckets": 8}, "num_buckets=8 .* left out with"),
        ("dape", {"version": 1, "width": 7}, "width=7 .* left out with"),
        ("sinusoidal", {"scale": 0}, "scale=0 is not valid"),
        ("floater", {"into": "last"}, "into='last' is not valid; it must be 'every' or 'first'"),
        ("floater", {"flow": "none"}, "flow='none' is not valid; it must be 'continuous' or 'disc"),
        ("floater", {"flow": "discrete", "step": 0.2}, "step=0.2 is not valid; it must be left"),
        ("xpos", {"scale_base": 1}, "scale_base=1 is not valid"),
        ("3d_rpe", {"chunk": 0}, "chunk=0 is not valid"),
        ("drope", {"c": -1}, "c=-1 is not valid"),
    ):
        with pytest.raises(rope_ext.OptionError, match=said):
            rope_ext.patch(tiny_llama(), name, **options)
