"""Models that are no language models: patched where it is right, else refused in one line."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import rope_ext
from tests.families.zoo import tiny_model, tiny_of
from tests.helpers.models import tiny_llama


class Sentences(nn.Sequential):
    """A model within another one, as in sentence-transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(nn.ModuleDict({"model": model}))
        self.config = model.config

    def forward(self, features: dict) -> torch.Tensor:
        return self[0]["model"](**features)[0]


@pytest.mark.parametrize("name", ["DiaModel", "TimesFm2_5Model", "LasrEncoder", "NeuCodecModel"])
def test_position_methods_refuse_models_without_token_ids(name: str) -> None:
    model = tiny_of(getattr(transformers, name))
    with pytest.raises(rope_ext.UnsupportedModelError, match=r"token IDs.*yarn"):
        rope_ext.patch(model, "rerope", factor=4, original_max_position_embeddings=64)


@pytest.mark.parametrize("name", ["LasrEncoder", "TimesFm2_5Model"])
def test_dynamic_methods_refuse_models_without_token_ids(name: str) -> None:
    model = tiny_of(getattr(transformers, name))
    length = {"original_max_position_embeddings": 64}
    with pytest.raises(rope_ext.UnsupportedModelError, match=r"token IDs.*length=TOKENS"):
        rope_ext.patch(model, "dynamic_ntk", factor=4, **length)
    with rope_ext.patched(model, "dynamic_ntk", factor=4, length=128, **length):
        pass


@pytest.mark.parametrize("method", ["rerope", "dynamic_ntk"])
def test_the_model_within_another_one_is_named(method: str) -> None:
    model = Sentences(tiny_llama())
    with pytest.raises(rope_ext.UnsupportedModelError, match=r"get_submodule\('0\.model'\)"):
        rope_ext.patch(model, method, factor=4)
    inner = model.get_submodule("0.model")
    with rope_ext.patched(inner, method, factor=4):
        pass


def test_the_length_of_a_series_is_not_taken_for_tokens() -> None:
    model = tiny_of(transformers.TimesFm2_5Model, context_length=2048, max_position_embeddings=2048)
    cure = "original_max_position_embeddings=64"
    with pytest.raises(rope_ext.UnsupportedModelError, match=f"2048 points.*{cure}"):
        rope_ext.patch(model, "yarn", factor=4)
    rope_ext.patch(model, "yarn", factor=4, original_max_position_embeddings=64)
    assert rope_ext.describe(model).target_length == 256


@pytest.mark.parametrize("method", ["yarn", "dynamic_ntk"])
def test_two_position_axes(method: str) -> None:
    """A dynamic method equals a fixed one of its length, and precise angles the others."""
    model = tiny_of(transformers.NeoMMEModel)
    ids = torch.randint(3, 100, (2, 150), generator=torch.Generator().manual_seed(0))
    axes = torch.stack((torch.arange(150), torch.arange(150) // 2))[:, None].expand(2, 2, -1)

    def output(**options: object) -> torch.Tensor:
        with rope_ext.patched(model, method, factor=4, **options), torch.no_grad():
            return torch.cat([model(ids)[0], model(ids, position_ids=axes)[0]])

    fixed = output(**({"length": 150} if method == "dynamic_ntk" else {}))
    for options in ({}, {"precise": True}):
        torch.testing.assert_close(output(**options), fixed, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["cohere2", "exaone4", "llama4_text", "muse_glimmer"])
def test_a_model_whose_full_layers_have_no_positions_gains_nothing(name: str, caplog) -> None:
    model, said = tiny_model(name), "no method lengthens their reach"
    assert said in str(rope_ext.describe(model))
    for given in (model, model.config):
        with pytest.raises(rope_ext.UnsupportedModelError, match=said):
            rope_ext.recommend(given, 200)
    rope_ext.patch(model, "yarn", factor=4)
    assert said in caplog.text and said in str(rope_ext.describe(model))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_other_models_are_told_nothing_of_the_kind(name: str, caplog) -> None:
    model = tiny_model(name)
    rope_ext.recommend(model.config, 200)
    rope_ext.patch(model, "yarn", factor=4)
    assert "reach" not in caplog.text and "no positions" not in str(rope_ext.describe(model))


def test_position_methods_with_a_meaning_there_are_recommended_for_an_encoder() -> None:
    found = rope_ext.recommend(tiny_of(transformers.ModernBertForMaskedLM), 200)
    names = [found.method.name, *(method.name for method, _ in found.alternatives)]
    assert "self_extend" in names
    assert not {"dual_chunk", "jet_long"} & {*names}


def test_no_position_method_is_recommended_for_a_bidirectional_configuration() -> None:
    config = tiny_model("gemma2", use_bidirectional_attention=True).config
    assert not rope_ext.recommend(config, 200).method.replaces_attention
