"""A patch on some of the layers: these are as under it, the others as they were trained."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import SmolLM3Config, SmolLM3ForCausalLM

import rope_ext
from rope_ext.config.record import Record
from rope_ext.patching import current_patch
from tests.families.checks import changed, snapshot
from tests.helpers.biases import dense, parameters, patch
from tests.helpers.models import tiny_llama
from tests.helpers.positions import (
    EXACT,
    Family,
    by_formula,
    decoded,
    logits,
)

LAST = {  # of two layers the second
    "llama": Family("llama", mapped=(1,)),
    "qwen3": Family("qwen3", mapped=(1,)),
    "mistral": Family("mistral", {"sliding_window": None}, mapped=(1,)),
    "gemma2": Family("gemma2", {}, {"sliding_layers": "scale"}, mapped=(1,)),
    "gpt_neox": Family("gpt_neox", mapped=(1,)),
}


def test_nope_in_some_layers_of_llama_is_smollm3(ids) -> None:
    """Whose layers without a rotation are transformers' own."""
    model = tiny_llama(num_hidden_layers=4)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    names += ("num_attention_heads", "num_key_value_heads", "pad_token_id", "rope_parameters")
    names += ("rms_norm_eps", "tie_word_embeddings")
    values = {name: getattr(model.config, name) for name in names}
    config = SmolLM3Config(**values, no_rope_layer_interval=2)
    smollm = SmolLM3ForCausalLM(config).eval()
    smollm.load_state_dict(model.state_dict())
    before = logits(model, ids)
    rope_ext.patch(model, "nope", layers="every 2nd")
    torch.testing.assert_close(logits(model, ids), logits(smollm, ids), **EXACT)
    assert (logits(model, ids) - before).abs().max() > 0.1


SLOW = [pytest.mark.slow]
FAST = [("gemma2", "t5")]
CASES = [(kind, name) for kind in LAST for name in ("alibi", "t5")]


@pytest.mark.parametrize(
    ("kind", "name"), [pytest.param(*c, marks=[] if c in FAST else SLOW) for c in CASES]
)
def test_the_other_layers_rotate_as_trained(kind: str, name: str, ids) -> None:
    family = LAST[kind]
    model, plain = family.model(), family.model()
    patch(model, name, layers=[1], **family.options)
    tokens = torch.arange(90)[None]
    with dense(plain, family, name, tokens, parameters(model)):
        right = logits(plain, ids)
    torch.testing.assert_close(logits(model, ids), right, **EXACT)
    torch.testing.assert_close(decoded(model, ids, [40, 1, 1, 48]), right, **EXACT)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("yarn", {"factor": 4}),
        pytest.param("nope", {}, marks=SLOW),
        pytest.param("kerple_log", {}, marks=SLOW),
        pytest.param("rerope", {"factor": 4, "attention_factor": 1.2}, marks=SLOW),
        pytest.param("rerope", {"factor": 2, "frequency": rope_ext.NTK(factor=2)}, marks=SLOW),
    ],
    ids=str,
)
def test_saved_reloaded_described_and_taken_back(name: str, options: dict, ids, tmp_path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path)  # which writes into the configuration
    before, plain = snapshot(model), logits(model, ids)
    rope_ext.patch(model, name, layers=[1], **options)
    want = logits(model, ids)
    assert not torch.equal(want, plain)
    assert "layers: 1; the others keep the rotation as it was trained" in str(
        rope_ext.describe(model)
    )
    assert "layers=[1]" in current_patch(model).record.call()
    assert all(".1." in key for key in parameters(model))
    model.save_pretrained(tmp_path)
    again = rope_ext.from_pretrained(tmp_path)
    assert torch.equal(logits(again, ids), want)
    assert current_patch(again).record.same(current_patch(model).record)
    rope_ext.unpatch(model)
    assert changed(before, snapshot(model)) == set() and torch.equal(logits(model, ids), plain)


@pytest.mark.parametrize(
    "options", [{"attention_factor": 1.3}, {"frequency": rope_ext.NTK(factor=2)}], ids=str
)
def test_sliding_layers_beside_a_position_method_stay_as_they_were(options, ids) -> None:
    """Where they share the rotary module, to which the numbers of the others are written."""
    family = Family("gemma2", mapped=(1,))
    model, plain = family.model(), family.model()
    rope_ext.patch(model, "rerope", factor=2, window=5, **options)
    seen: list[torch.Tensor] = []
    for one in (model, plain):
        attention = one.model.layers[0].self_attn
        attention.register_forward_hook(lambda module, args, output: seen.append(output[0]))
        logits(one, ids)
    torch.testing.assert_close(*seen, **EXACT)


def test_layers_that_do_not_rotate_or_see_a_window_are_not_chosen() -> None:
    windowed = Family("gemma2").model()  # the first
    with pytest.raises(rope_ext.OptionError, match=r"in layers 1, and 0 .* sliding_layers='scale'"):
        rope_ext.patch(windowed, "nope", layers=[0])
    rope_ext.patch(windowed, "nope", layers=[0], sliding_layers="scale")
    smollm = Family("smollm3").model()  # the second rotates nothing
    with pytest.raises(rope_ext.OptionError, match="in layers 0, and 1 is asked for"):
        rope_ext.patch(smollm, "alibi", layers=[1])


@pytest.mark.slow
def test_a_position_method_on_one_layer_is_the_papers_there(ids) -> None:
    family = LAST["llama"]
    model, plain = family.model(), family.model()
    rope_ext.patch(model, "rerope", factor=4, window=5, layers=[1])
    with by_formula(plain, family, "rerope", torch.arange(90)[None], window=5):
        right = logits(plain, ids)
    torch.testing.assert_close(logits(model, ids), right, **EXACT)


def test_a_record_from_before_layers_and_biases_has_neither() -> None:
    model = rope_ext.patch(tiny_llama(), "rerope", factor=4)
    data = copy.deepcopy(current_patch(model).record.to_json())
    data["version"] = 2
    del data["arguments"]["bias"], data["arguments"]["layers"]
    assert Record.from_json(data, "a folder") == current_patch(model).record
    data = current_patch(model).record.to_json()
    data["arguments"] |= {"bias": {"name": "yarn", "factor": 4}}
    with pytest.raises(rope_ext.RecordError, match="is no encoding"):
        Record.from_json(data, "a folder")


@pytest.mark.parametrize("name", ["nope", "kerple_log", "sinusoidal"])
def test_frequencies_under_what_turns_nothing_are_refused(name: str) -> None:
    with pytest.raises(rope_ext.OptionError, match=f"{name} does not rotate"):
        rope_ext.patch(tiny_llama(), name, frequency=rope_ext.NTK(factor=8))
    rope_ext.patch(tiny_llama(), "xpos", frequency=rope_ext.NTK(factor=8))
