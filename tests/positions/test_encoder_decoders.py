"""Encoder-decoders: a patch of the whole model extends both halves, each by its own formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

import rope_ext
from tests.families.checks import changed, snapshot
from tests.families.zoo import tiny_of
from tests.helpers.both_directions import CLOSE, in_both_directions
from tests.helpers.models import LENGTH
from tests.helpers.positions import METHODS, Family, by_formula

WITH_TOKENS = ("T5GemmaForConditionalGeneration", "T5Gemma2ForConditionalGeneration")
SPEECH = ("DiaForConditionalGeneration", "MoonshineForConditionalGeneration")
EVERY = (*WITH_TOKENS, *SPEECH)
RAISED = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}


def built(name: str) -> Any:
    return tiny_of(getattr(transformers, name))


def tokens(count: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 60, (rows, count), generator=generator)


def inputs(model: nn.Module, count: int = 150, decoded: int = 100) -> dict[str, torch.Tensor]:
    """Longer than the trained length for both halves."""
    read, written = tokens(count), tokens(decoded, seed=1)
    if model.config.model_type == "dia":
        channels = model.config.decoder_config.num_channels
        written = written[..., None].expand(-1, -1, channels)
    if model.config.model_type == "moonshine":
        sound = torch.randn(1, 384 * count, generator=torch.Generator().manual_seed(0))
        return {"input_values": 0.1 * sound, "decoder_input_ids": written}
    return {"input_ids": read, "decoder_input_ids": written}


@torch.no_grad()
def outputs(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the decoder, and states of the encoder."""
    found = model(**inputs(model))
    return found.logits, found.encoder_last_hidden_state


def rotations(model: nn.Module) -> list[Any]:
    """The configurations that both halves read their frequencies from, each once."""
    parts = (model.get_decoder(), model.get_encoder())
    configs = [part.config.get_text_config() for part in parts]
    return list({id(config): config for config in configs}.values())


@pytest.mark.every
@pytest.mark.parametrize("name", EVERY)
def test_both_halves_equal_plain_transformers_with_these_parameters(name: str) -> None:
    model = rope_ext.patch(built(name), "ntk", factor=4)
    plain = built(name)
    for written, config in zip(rotations(model), rotations(plain), strict=True):
        config.rope_parameters = written.rope_parameters
        config.max_position_embeddings = written.max_position_embeddings
    wanted = type(plain)._from_config(plain.config)
    wanted.load_state_dict(plain.state_dict())
    for one, other, before in zip(
        outputs(model), outputs(wanted.eval()), outputs(plain), strict=True
    ):
        torch.testing.assert_close(one, other, atol=0, rtol=0)
        assert float((one - before).abs().max()) > 0.01


@pytest.mark.every
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("method", ["yarn", "dynamic_ntk", "rerope"])
def test_both_halves_are_saved_reloaded_and_restored(
    name: str, method: str, tmp_path: Path
) -> None:
    model = built(name)
    before, first = snapshot(model), outputs(model)
    try:
        rope_ext.patch(model, method, factor=4)
    except rope_ext.UnsupportedModelError as error:
        assert (method != "yarn" and "get_encoder" in str(error)) or "length=" in str(error)
        assert changed(before, snapshot(model)) == set()
        return
    found = outputs(model)
    assert "encoder: " in str(rope_ext.describe(model))
    model.save_pretrained(tmp_path)
    for one, other in zip(outputs(rope_ext.from_pretrained(tmp_path)), found, strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)
    if method == "yarn":
        plain = type(model).from_pretrained(tmp_path)
        for one, other in zip(outputs(plain), found, strict=True):
            torch.testing.assert_close(one, other, atol=0, rtol=0)
    rope_ext.unpatch(model)
    for one, other in zip(outputs(model), first, strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)
    assert not rope_ext.describe(model).method


def test_a_half_can_be_unpatched_from_either_side() -> None:
    model = built(WITH_TOKENS[0])
    before = snapshot(model)
    rope_ext.patch(model, "yarn", factor=4)
    rope_ext.unpatch(model.get_encoder())
    assert changed(before, snapshot(model)) == set()
    with rope_ext.patched(model, "rerope", factor=4):
        assert rope_ext.describe(model.get_encoder()).method == "rerope"
    assert changed(before, snapshot(model)) == set()


PARTS = {
    "T5GemmaForConditionalGeneration": "model.encoder",
    "GlmAsrForConditionalGeneration": "model.audio_tower",
    "LlavaForConditionalGeneration": "model.language_model",
    "LlamaForCausalLM": "model",
}
WHOLE = ("LlavaForConditionalGeneration", "LlamaForCausalLM")  # the part is all that is patched


@pytest.mark.parametrize("method", ["yarn", "rerope", "dynamic_ntk", "t5"])
@pytest.mark.parametrize("name", PARTS)
def test_a_part_patched_by_itself_is_saved_with_the_whole(
    name: str, method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = built(name)
    part = model.get_submodule(PARTS[name])
    model.save_pretrained(tmp_path)  # sets architectures and dtype
    before = snapshot(model)
    if "audio" in PARTS[name] and method != "yarn":
        with pytest.raises(rope_ext.UnsupportedModelError, match="token IDs"):
            rope_ext.patch(part, method, factor=4)
        return
    rope_ext.patch(part, method, factor=4)
    for key, parameter in part.named_parameters():
        if "rope_ext" in key:
            nn.init.normal_(parameter)
    model.config.labelled_by = "somebody"  # whatever is set after the patch
    patched = model.config.to_dict()
    model.save_pretrained(tmp_path)
    assert model.config.to_dict() == patched
    del model.config.labelled_by
    again = rope_ext.from_pretrained(tmp_path)
    assert again.config.labelled_by == "somebody"
    if method != "yarn" and name not in WHOLE:  # said, and left out
        assert "is saved without the patch of model.encoder" in caplog.text
        rope_ext.patch(again.get_submodule(PARTS[name]), method, factor=4)
        if method == "t5":
            return
    else:
        assert "is saved without" not in caplog.text
    saved = model.state_dict()
    assert again.state_dict().keys() == saved.keys()
    assert all(torch.equal(value, saved[key]) for key, value in again.state_dict().items())
    one, other = (x.get_submodule(PARTS[name]) for x in (model, again))
    torch.testing.assert_close(one.rotary_emb.inv_freq, other.rotary_emb.inv_freq)
    if "audio" not in PARTS[name]:
        with torch.no_grad():
            found, wanted = (x(input_ids=tokens(150))[0] for x in (other, one))
        torch.testing.assert_close(found, wanted, atol=0, rtol=0)
    rope_ext.unpatch(part)
    assert changed(before, snapshot(model)) == set()


def tower_of(model: Any) -> Any:
    return model.model.audio_tower


def saved_factors(model: Any, folder: Path) -> tuple[float | None, float | None]:
    """What plain transformers reads of the saved model: the factors of its text and its sound."""
    model.save_pretrained(folder)
    config = type(model.config).from_pretrained(folder)
    parts = (config.text_config, config.audio_config)
    return tuple(part.rope_parameters.get("factor") for part in parts)  # type: ignore[return-value]


def test_a_part_and_the_whole_are_patched_and_unpatched_in_any_order(tmp_path: Path) -> None:
    model = built("GlmAsrForConditionalGeneration")
    model.save_pretrained(tmp_path)
    before = snapshot(model)

    def whole(factor: int | None) -> None:
        rope_ext.patch(model, "yarn", factor=factor) if factor else rope_ext.unpatch(model)

    def part(factor: int | None) -> None:
        tower = tower_of(model)
        rope_ext.patch(tower, "yarn", factor=factor) if factor else rope_ext.unpatch(tower)

    orders = [
        [(whole, 2), (part, 3), (whole, None), (part, None)],
        [(whole, 2), (part, 3), (part, None), (whole, None)],
        [(part, 3), (whole, 2), (whole, None), (part, None)],
        [(part, 3), (whole, 2), (part, None), (whole, None)],
    ]
    for order in orders:
        now: dict[Any, int | None] = {whole: None, part: None}
        for change, factor in order:
            change(factor)
            now[change] = factor
            assert saved_factors(model, tmp_path) == (now[whole], now[part])
            if now[whole]:
                with rope_ext.unpatched(model):
                    assert saved_factors(model, tmp_path) == (None, now[part])
                assert saved_factors(model, tmp_path) == (now[whole], now[part])
        assert changed(before, snapshot(model)) == set()
        assert tower_of(model).config is model.config.audio_config


def test_halves_that_read_one_configuration_are_not_confused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = built("MoonshineForConditionalGeneration")
    rope_ext.patch(model.get_encoder(), "yarn", factor=4)
    model.save_pretrained(tmp_path)
    assert "both halves read one configuration" in caplog.text
    again = rope_ext.from_pretrained(tmp_path)
    assert not rope_ext.describe(again).method and not rope_ext.describe(tmp_path).method


def test_an_adapter_does_not_take_the_patch_of_a_part_for_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    peft = pytest.importorskip("peft")
    model = built(WITH_TOKENS[0])
    rope_ext.patch(model.get_encoder(), "rerope", factor=4)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path)
    assert "without the patch of a part" in caplog.text
    assert not (tmp_path / "rope_ext.json").exists()


def test_unpatching_the_whole_names_the_part_that_is_patched() -> None:
    model = built("GlmAsrForConditionalGeneration")
    rope_ext.patch(tower_of(model), "yarn", factor=2)
    with pytest.raises(rope_ext.NotPatchedError, match=r"model\.model\.audio_tower"):
        rope_ext.unpatch(model)


def test_describe_names_an_encoder_of_sound_that_can_be_patched_by_itself() -> None:
    model = built("GlmAsrForConditionalGeneration")
    assert "rope_ext.patch(model.model.audio_tower" in str(rope_ext.describe(model))
    rope_ext.patch(model, "yarn", factor=4)
    assert "rope_ext.patch(model.model.audio_tower" in str(rope_ext.describe(model))
    rope_ext.patch(model.model.audio_tower, "yarn", factor=2)
    assert rope_ext.describe(model.model.audio_tower).target_length == 2 * LENGTH


def test_a_rotary_module_is_no_model() -> None:
    with pytest.raises(rope_ext.UnsupportedModelError, match="pass the model"):
        rope_ext.patch(built("LlamaForCausalLM").model.rotary_emb, "yarn", factor=2)


@pytest.mark.parametrize("name", ["self_extend", "string"])
def test_position_methods_equal_their_formula_in_both_halves(name: str) -> None:
    model, given = built(WITH_TOKENS[0]).double(), METHODS[name]
    read, written = tokens(90), tokens(80, seed=1)
    log_n = LENGTH if name == "self_extend" else None
    encoder, places = model.get_encoder(), torch.arange(90)[None]
    with (
        torch.no_grad(),
        in_both_directions(encoder, name, places, 0 * places, log_n=log_n, **given),
    ):
        states = encoder(read)[0]
    family = Family("t5gemma", mapped=(1,), crosses=True)  # the other layer has a window
    whole = {"encoder_outputs": BaseModelOutput(states), "decoder_input_ids": written}
    places = torch.arange(80)[None]
    with torch.no_grad(), by_formula(model.get_decoder(), family, name, places, **given):
        wanted = model(**whole).logits
    rope_ext.patch(model, name, factor=4, attention_factor=1, **given)
    with torch.no_grad():
        found = model(input_ids=read, decoder_input_ids=written)
    torch.testing.assert_close(found.encoder_last_hidden_state, states, **CLOSE)
    torch.testing.assert_close(found.logits, wanted, **CLOSE)


def test_position_methods_equal_their_formula_in_a_decoder_that_hears() -> None:
    model, given = built("MoonshineForConditionalGeneration").double(), METHODS["self_extend"]
    asked = inputs(model, decoded=80)
    heard = model.get_encoder()(asked.pop("input_values").double())
    asked["encoder_outputs"] = heard
    family, places = Family("moonshine", neighbours=True, crosses=True), torch.arange(80)[None]
    with torch.no_grad(), by_formula(model.get_decoder(), family, "self_extend", places, **given):
        wanted = model(**asked).logits
    rope_ext.patch(model, "self_extend", factor=4, attention_factor=1, **given)
    with torch.no_grad():
        torch.testing.assert_close(model(**asked).logits, wanted, **CLOSE)


CALLS: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 4},
    "self_extend": {"factor": 4, "window": 7},
    "t5": {},
    "dual_chunk": {"factor": 4, "chunk": 20, "local": 7},  # of the decoder alone
}


@pytest.mark.every
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("method", CALLS)
def test_generation_continues_what_a_forward_computes(method: str, side: str) -> None:
    model = rope_ext.patch(built(WITH_TOKENS[0]), method, **CALLS[method])
    read = tokens(150, rows=2)
    mask = torch.ones_like(read)
    mask[1, slice(0, 50) if side == "left" else slice(100, 150)] = 0
    given = {"input_ids": read, "attention_mask": mask}
    made = model.generate(**given, **RAISED, output_logits=True, return_dict_in_generate=True)
    fed = {"decoder_input_ids": made.sequences[:, :-1]}
    with torch.no_grad():
        whole = model(**given, **fed).logits
        alone = model(
            input_ids=read[1:][mask[1:] == 1][None], decoder_input_ids=made.sequences[1:, :-1]
        )
    torch.testing.assert_close(torch.stack(made.logits, 1), whole, **CLOSE)
    torch.testing.assert_close(alone.logits, whole[1:], **CLOSE)
    found = model.generate(
        **given, **RAISED, num_beams=2, output_scores=True, return_dict_in_generate=True
    )
    with torch.no_grad():
        whole = model(**given, decoder_input_ids=found.sequences[:, :-1]).logits
    of_tokens = whole.log_softmax(-1).gather(-1, found.sequences[:, 1:, None])
    torch.testing.assert_close(found.sequences_scores, of_tokens.mean((1, 2)), **CLOSE)


def test_what_both_halves_learn_is_saved(tmp_path: Path) -> None:
    model = rope_ext.patch(built(WITH_TOKENS[0]), "yarn", factor=4, bias="t5")
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "rope_ext" in name:
                value.copy_(torch.randn(value.shape))
    model.save_pretrained(tmp_path)
    for one, other in zip(outputs(rope_ext.from_pretrained(tmp_path)), outputs(model), strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)


def test_an_encoder_that_is_refused_stays_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    model = built("MoonshineForConditionalGeneration")
    before = outputs(model)[1]
    rope_ext.patch(model, "rerope", factor=4)
    assert "encoder" in caplog.text and "encoder" in str(rope_ext.describe(model))
    assert torch.equal(outputs(model)[1], before)


def test_one_trained_length_is_not_taken_for_halves_of_two() -> None:
    model = built("DiaForConditionalGeneration")
    model.config.encoder_config.max_position_embeddings = 32
    model = type(model)._from_config(model.config)
    with pytest.raises(rope_ext.OptionError, match="32 and 64"):
        rope_ext.patch(model, "yarn", factor=4, original_max_position_embeddings=64)
    rope_ext.patch(model, "yarn", factor=4)
    assert rope_ext.describe(model).target_length == 4 * 64
    assert rope_ext.describe(model.get_encoder()).target_length == 4 * 32


@pytest.mark.parametrize("method", ["yarn", "self_extend"])
@pytest.mark.parametrize("hidden", [slice(0, 50), slice(100, 150), slice(70, 72)])
def test_padding_that_the_encoder_finds_by_itself_is_that_of_a_mask(
    method: str, hidden: slice
) -> None:
    model = rope_ext.patch(built(WITH_TOKENS[0]), method, factor=4)
    ids, mask = tokens(150, rows=2), torch.ones(2, 150, dtype=torch.long)
    mask[1, hidden] = 0
    ids = torch.where(mask == 1, ids, model.config.encoder.pad_token_id)
    with torch.no_grad():
        found = model.get_encoder()(ids)[0]
        wanted = model.get_encoder()(ids, attention_mask=mask)[0]
    torch.testing.assert_close(found[mask == 1], wanted[mask == 1], **CLOSE)


@pytest.mark.parametrize("name", (WITH_TOKENS[0], SPEECH[1]))
def test_halves_that_were_patched_one_by_one_are_undone_and_replaced_together(name: str) -> None:
    model = built(name)
    before = outputs(model)
    wanted = outputs(rope_ext.patch(built(name), "yarn", factor=2))

    def equal(to: tuple[torch.Tensor, torch.Tensor]) -> bool:
        return all(map(torch.equal, outputs(model), to))

    rope_ext.patch(model.get_encoder(), "ntk", factor=4)
    assert rope_ext.describe(model).model == type(model.get_encoder()).__name__
    rope_ext.patch(model.get_decoder(), "pi", factor=3)
    by_halves = outputs(model)
    with rope_ext.unpatched(model):
        assert equal(before)
    assert equal(by_halves)
    with pytest.raises(rope_ext.OptionError):
        rope_ext.patch(model, "yarn", length=10**9, replace=True)
    with pytest.raises(rope_ext.RopeExtError):  # found while it is applied
        rope_ext.patch(model, "longrope", factor=2, long_factor=[1.0] * 5, replace=True)
    assert equal(by_halves)
    rope_ext.patch(model, "yarn", factor=2, replace=True)
    assert equal(wanted)
    rope_ext.unpatch(model)
    assert equal(before)
    with pytest.raises(rope_ext.NotPatchedError):
        rope_ext.unpatch(model)


def test_a_folder_does_not_say_that_its_encoder_accepts_the_method(tmp_path: Path) -> None:
    model = rope_ext.patch(built(SPEECH[1]), "self_extend", factor=4, **METHODS["self_extend"])
    model.save_pretrained(tmp_path)
    notes = [note for note in rope_ext.describe(tmp_path).notes if note.startswith("encoder:")]
    assert all("if it accepts" in note for note in notes) and notes
