"""patch, unpatch, patched on loaded models in every state they come in."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import rope_ext
from rope_ext.position.learned import learned
from tests.families.checks import changed, snapshot
from tests.families.zoo import tiny_model
from tests.helpers.models import LENGTH, tiny_llama
from tests.helpers.positions import logits


@pytest.mark.parametrize("name", ["yarn", "dynamic_ntk", "rerope"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])  # gemma3 has sub-configurations
def test_models_of_one_configuration_object_do_not_follow_each_other(
    tmp_path, family: str, name: str
) -> None:
    model = tiny_model(family)
    other = type(model)(model.config)
    model.save_pretrained(tmp_path)  # which notes class and dtype in the configuration
    before = [snapshot(one) for one in (model, other)]
    described = rope_ext.describe(other)
    rope_ext.patch(model, name, factor=4)
    assert not changed(before[1], snapshot(other))
    assert rope_ext.describe(other) == rope_ext.describe(copy.deepcopy(other)) == described
    other.save_pretrained(tmp_path)
    assert rope_ext.describe(tmp_path).method is None
    follower = type(model)(model.config) if name == "yarn" else None
    rope_ext.unpatch(model)
    assert not changed(before[0], snapshot(model)) and model.config is other.config
    if follower is not None:  # which has the scaling that the configuration had
        assert follower.config.get_text_config().max_position_embeddings == 4 * LENGTH


@pytest.mark.parametrize(
    ("family", "name"),
    [("phi3", "rerope"), ("phi3", "dynamic_ntk"), ("blt", "yarn"), ("gemma3", "rerope")],
)
def test_a_model_built_from_the_configuration_of_a_patch_is_refused(ids, family, name) -> None:
    model = tiny_model(family)
    before, plain = snapshot(model), logits(model, ids)
    rope_ext.patch(model, name, factor=4)
    said = logits(model, ids)
    for build in (type(model), AutoModelForCausalLM.from_config):
        with pytest.raises((KeyError, ValueError), match=r"rope_ext\.from_pretrained"):
            build(copy.deepcopy(model.config))
    assert torch.equal(logits(model, ids), said)
    assert rope_ext.describe(model.config).method == name  # which needs no weights
    with rope_ext.unpatched(model):
        AutoModelForCausalLM.from_config(model.config)
    rope_ext.unpatch(model)
    assert not changed(before, snapshot(model)) and torch.equal(logits(model, ids), plain)


@pytest.mark.parametrize("name", ["yarn", "rerope"])
def test_what_is_set_in_the_configuration_under_a_patch_stays(model, name: str) -> None:
    before = model.config
    before.id2label = {0: "no"}
    rope_ext.patch(model, name, factor=4)
    model.config.use_cache = False
    model.config.id2label[1] = "yes"
    model.config.max_position_embeddings = 999  # a field of the patch
    twin = copy.deepcopy(model)
    for one in (model, twin):
        config = rope_ext.unpatch(one).config
        assert config is one.model.config and config.max_position_embeddings == LENGTH
        assert config.use_cache is False and config.id2label == {0: "no", 1: "yes"}
    assert model.config is before and twin.config is not before


@pytest.mark.parametrize("name", ["yarn", "dynamic_ntk", "rerope", "t5"])
def test_unpatched_is_the_original_for_a_while(model, ids, name: str) -> None:
    before = logits(model, ids)
    with rope_ext.unpatched(model) as same:  # nothing to undo
        assert same is model and torch.equal(logits(model, ids), before)
    rope_ext.patch(model, name, factor=4)
    for parameter in learned(model).values():
        torch.nn.init.normal_(parameter)
    patched, described = logits(model, ids), rope_ext.describe(model)
    with pytest.raises(KeyError), rope_ext.unpatched(model):
        assert torch.equal(logits(model, ids), before)
        raise KeyError
    assert torch.equal(logits(model, ids), patched) and rope_ext.describe(model) == described
    with rope_ext.unpatched(model):
        rope_ext.patch(model, "pi", factor=2)  # the earlier patch returns all the same
    assert torch.equal(logits(model, ids), patched)
    rope_ext.unpatch(model)
    assert torch.equal(logits(model, ids), before)


def test_patch_before_and_after_get_peft_model_are_the_same(ids) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=False)

    def adapted(model: torch.nn.Module) -> torch.nn.Module:
        torch.manual_seed(3)
        return get_peft_model(model, config).eval()

    plain = logits(adapted(tiny_llama()), ids)
    before = adapted(rope_ext.patch(tiny_llama(), "yarn", factor=4))
    after = rope_ext.patch(adapted(tiny_llama()), "yarn", factor=4)
    assert torch.equal(logits(before, ids), logits(after, ids))
    assert not torch.allclose(logits(after, ids), plain, atol=1e-2)
    assert after.config.max_position_embeddings == 4 * LENGTH
    for model in (before, after):
        assert torch.equal(logits(rope_ext.unpatch(model), ids), plain)


def test_a_meta_model_is_right_once_materialised(ids) -> None:
    said = logits(rope_ext.patch(tiny_llama(), "yarn", factor=4), ids)
    source = tiny_llama()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(source.config).eval()
    rope_ext.patch(model, "yarn", factor=4)
    model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    assert torch.equal(logits(model, ids), said)
    rope_ext.unpatch(model)


@pytest.mark.parametrize("method", ["yarn", "dynamic_ntk"])
def test_sets_that_stay_are_materialised_too(method: str) -> None:
    """A module with a set for each kind of layer is initialised by us, or not at all."""
    source = tiny_model("gemma3_text")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(source.config))
    rope_ext.patch(source, method, factor=4)
    rope_ext.patch(model, method, factor=4)
    model.to_empty(device="cpu")
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.fill_(-1)  # memory may come with the right values in it by chance
    model._apply(lambda x: x)
    for name, buffer in source.named_buffers():
        if name.endswith("inv_freq"):
            assert torch.equal(model.get_buffer(name), buffer), name
    rope_ext.unpatch(model)
    plain = dict(tiny_model("gemma3_text").named_buffers())
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            assert torch.equal(buffer, plain[name]), name


@pytest.mark.parametrize("offload", ["cpu_offload", "buffers", "device_map"])
@pytest.mark.parametrize("name", ["yarn", "dynamic_ntk"])
def test_accelerate_hooks_stay_in_place(ids, offload: str, name: str) -> None:
    from accelerate import cpu_offload, dispatch_model

    said = logits(rope_ext.patch(tiny_llama(), name, factor=4), ids)
    model = tiny_llama()
    if offload == "device_map":
        model = dispatch_model(model, {"": "cpu"}, force_hooks=True)
    else:
        cpu_offload(model, execution_device="cpu", offload_buffers=offload == "buffers")
    plain = logits(model, ids)
    rope_ext.patch(model, name, factor=4)
    assert torch.equal(logits(model, ids), said)
    assert torch.equal(logits(rope_ext.unpatch(model), ids), plain)


def test_the_configuration_is_kept_true(model) -> None:
    tokenizer = type("Tokenizer", (PreTrainedTokenizerFast,), {"__init__": lambda self: None})()
    tokenizer.model_max_length = LENGTH
    rope_ext.patch(model, "yarn", factor=4, tokenizer=tokenizer)
    assert model.config.max_position_embeddings == 4 * LENGTH == tokenizer.model_max_length
    assert model.config.rope_parameters == {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": LENGTH,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": pytest.approx(1.1386294),
    }
    rope_ext.unpatch(model)
    assert model.config.max_position_embeddings == LENGTH == tokenizer.model_max_length


@pytest.mark.parametrize("mode", ["fixed", "growing"])
def test_dynamic_scaling_counts_from_a_trained_length_given_by_hand(tmp_path, ids, mode) -> None:
    short = ids[:, :60]  # within what the configuration says, beyond what is given
    given = {"factor": 4, "original_max_position_embeddings": 32}
    said = logits(rope_ext.patch(tiny_llama(), "dynamic_ntk", length=60, **given), short)
    model = tiny_llama()
    model.save_pretrained(tmp_path)  # which notes the dtype in the configuration
    before = snapshot(model)
    rope_ext.patch(model, "dynamic_ntk", mode=mode, **given)
    torch.testing.assert_close(logits(model, short), said, atol=1e-4, rtol=0)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(again, short), said, atol=1e-4, rtol=0)
    assert not changed(before, snapshot(rope_ext.unpatch(model)))


def test_a_model_with_windows_only_is_refused_with_the_cure(ids) -> None:
    with pytest.raises(rope_ext.UnsupportedModelError, match="sliding_window = None"):
        rope_ext.patch(tiny_model("mistral"), "yarn", factor=4)
    rope_ext.patch(tiny_model("mistral"), "yarn", factor=4, sliding_layers="scale")
    rope_ext.patch(tiny_model("mistral", sliding_window=None), "yarn", factor=4)


def test_sliding_layers_are_scaled_alike_under_every_temperature(ids) -> None:
    """Within the trained length, ``log_n`` multiplies no query."""
    one, grown = (
        rope_ext.patch(tiny_model("cwm"), "yarn", factor=4, temperature=temperature)
        for temperature in (1.0, "log_n")
    )
    torch.testing.assert_close(
        logits(one, ids[:, :40]), logits(grown, ids[:, :40]), atol=1e-4, rtol=0
    )


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def test_a_scaled_checkpoint_needs_compose_and_then_goes_on_from_there(tmp_path, ids) -> None:
    model = tiny_llama(rope_parameters=dict(LLAMA3))
    model.save_pretrained(tmp_path)  # which notes the dtype in the configuration
    before = snapshot(model)
    loaded = model.model.rotary_emb.inv_freq.clone()
    with pytest.raises(rope_ext.AlreadyScaledError, match=r"'llama3' with factor 2.*compose=True"):
        rope_ext.patch(model, "pi", factor=4)
    rope_ext.patch(model, "pi", factor=4, compose=True)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, loaded / 4)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again, ids), logits(model, ids))
    assert not changed(before, snapshot(rope_ext.unpatch(model)))


def test_compose_keeps_the_softmax_scale_that_latent_attention_reads_from_the_config(
    tmp_path, ids
) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    yarn |= {"original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}
    model = tiny_model("deepseek_v3", rope_parameters=yarn)
    rope_ext.patch(model, "pi", factor=2, compose=True)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(again, ids), logits(model, ids))


@pytest.mark.parametrize("method", ["yarn", "dynamic_yarn", "rerope", "t5", "cope", "repo"])
def test_a_patch_in_inference_mode_leaves_no_inference_tensors(model, method: str) -> None:
    rope_ext.patch(model, "pi", factor=4)
    with torch.inference_mode():
        with rope_ext.unpatched(model):
            pass
        rope_ext.patch(model, method, factor=4, replace=True)
        rope_ext.patch(model, method, factor=8, replace=True)
    assert not any(tensor.is_inference() for tensor in [*model.parameters(), *model.buffers()])
    with torch.inference_mode():
        rope_ext.unpatch(model)
    assert not any(tensor.is_inference() for tensor in model.buffers())


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": YARN},
        {"rope_parameters": YARN | {"original_max_position_embeddings": LENGTH}},
        {"rope_parameters": YARN, "max_position_embeddings": 4 * LENGTH},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"max_position_embeddings": 4 * LENGTH},
    ],
)
def test_a_configuration_changed_after_loading_is_reported_and_not_believed(
    tmp_path, ids, caplog, change: dict
) -> None:
    model, plain = tiny_llama(), tiny_llama()
    model.save_pretrained(tmp_path)  # which notes class and dtype in the configuration
    for name, value in change.items():
        setattr(model.config, name, copy.deepcopy(value))
    before = snapshot(model)
    found, wanted = rope_ext.describe(model), rope_ext.describe(plain)
    assert (found.length, found.target_length, found.configured) == (LENGTH, LENGTH, None)
    assert found.sites == wanted.sites and any("not in force" in note for note in found.notes)
    assert rope_ext.diagnose(model, 200).sites == rope_ext.diagnose(plain, 200).sites
    advice = rope_ext.recommend(model, 200)
    assert advice.trained_length == LENGTH
    assert any("not in force" in reason for reason in advice.reasons)
    for method in ("yarn", "rerope"):
        caplog.clear()
        with rope_ext.patched(plain, method, factor=4):
            said = logits(plain, ids)
        rope_ext.patch(model, method, factor=4)
        assert "not in force" in caplog.text
        assert torch.equal(logits(model, ids), said)
        model.save_pretrained(tmp_path)
        assert torch.equal(logits(rope_ext.from_pretrained(tmp_path), ids), said)
        assert not changed(before, snapshot(rope_ext.unpatch(model)))


def test_the_length_of_a_changed_configuration_counts_if_it_is_given(model) -> None:
    model.config.max_position_embeddings = 4 * LENGTH
    rope_ext.patch(model, "yarn", factor=2, original_max_position_embeddings=4 * LENGTH)
    assert rope_ext.describe(model).target_length == 8 * LENGTH


def test_frequencies_of_a_sub_configuration_changed_after_loading_are_those_loaded() -> None:
    model = tiny_model("gemma3")
    wanted = rope_ext.describe(model)
    model.config.text_config.rope_parameters["full_attention"].update(
        rope_type="linear", factor=4.0
    )
    found = rope_ext.describe(model)
    assert found.sites == wanted.sites and found.length == wanted.length
    assert any("rope_ext.patch(model, 'pi', factor=4.0)" in note for note in found.notes)


@pytest.mark.parametrize("change", [{"factor": 8.0}, {"rope_type": "default"}])
def test_a_scaled_checkpoint_whose_configuration_was_changed_needs_its_length(change) -> None:
    parameters = YARN | {"original_max_position_embeddings": LENGTH // 4}
    model = tiny_llama(rope_parameters=parameters)
    model.config.rope_parameters.update(change)
    for call in (
        lambda: rope_ext.patch(model, "pi", factor=4, compose=True),
        lambda: rope_ext.recommend(model, 200),
    ):
        with pytest.raises(rope_ext.UnsupportedModelError, match="configuration was changed"):
            call()
    found = rope_ext.describe(model)
    assert found.length == LENGTH and any("not in force" in note for note in found.notes)
