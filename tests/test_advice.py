"""Advice: hand-computed cases, and that what is recommended is accepted and reaches its target."""

from __future__ import annotations

import ast
import errno
import functools
import html
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoConfig, LlamaConfig, Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

import rope_ext
from rope_ext.advice.describe import write_card
from rope_ext.advice.evidence import ranked, sentence
from rope_ext.cli import app
from rope_ext.methods import all_methods
from tests.families.zoo import tiny_model
from tests.helpers.models import LENGTH, tiny_llama

LLAMA_2 = {
    "hidden_size": 256,
    "num_attention_heads": 2,  # 128 columns each, base 10000 by default
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "vocab_size": 32,
    "max_position_embeddings": 4096,
}
model = functools.cache(tiny_llama)
family = functools.cache(tiny_model)


def llama_2() -> LlamaConfig:
    return LlamaConfig(**LLAMA_2)


def accepted(recommendation: rope_ext.Recommendation, model: torch.nn.Module) -> int:
    """The length that the recommended call makes of ``model``, tokens."""
    eval(recommendation.call, {"rope_ext": rope_ext, "model": model})
    try:
        return rope_ext.describe(model).target_length
    finally:
        rope_ext.unpatch(model)


def test_llama_2_has_18_pairs_that_never_turn_fully_and_critical_dimension_92() -> None:
    [site] = rope_ext.diagnose(llama_2(), 8192).sites
    # 2 ceil(64 log_10000(4096 / 2 pi)) = 2 ceil(45.03), arXiv 2310.05209
    assert site.critical_dimension == 2 * math.ceil(64 * math.log(4096 / 2 / math.pi, 1e4)) == 92
    slow = [i for i, pair in enumerate(site.pairs) if pair.rotations < 1]
    assert slow == list(range(46, 64))
    assert [i for i, pair in enumerate(site.pairs) if pair.before.startswith("out")] == slow
    last = site.pairs[63]
    assert last.wavelength_before == pytest.approx(2 * math.pi * 1e4 ** (126 / 128))  # 54410
    assert last.rotations == pytest.approx(0.07528, rel=1e-3)  # 4096 / 54410
    assert last.angle_before == pytest.approx(2 * last.trained_angle)
    assert all(pair.before == "in distribution" for pair in diagnosed(llama_2(), 4096))


def diagnosed(model: object, length: int) -> tuple[rope_ext.PairDiagnosis, ...]:
    [site] = rope_ext.diagnose(model, length).sites
    return site.pairs


@pytest.mark.parametrize(
    ("method", "out"),
    # NTK divides the slowest pair alone by the whole factor: those between stay too fast.
    [("pi", []), ("yarn", []), ("dynamic_yarn", []), ("ntk", list(range(46, 63)))],
)
def test_pairs_out_of_distribution_under_frequency_methods(method: str, out: list[int]) -> None:
    model = tiny_llama(**LLAMA_2)
    rope_ext.patch(model, method, factor=4)
    pairs = diagnosed(model, 4 * 4096)
    assert [i for i, pair in enumerate(pairs) if pair.after.startswith("out")] == out
    assert sum(pair.before.startswith("out") for pair in pairs) == 18
    if method != "dynamic_yarn":  # which grows with the sequence
        assert any(pair.after.startswith("out") for pair in diagnosed(model, 8 * 4096))


@pytest.mark.parametrize(
    ("method", "distances"),
    [
        (rope_ext.ReRoPE(factor=4, window=20), 21),  # 0 to 20
        # k = 2: 20 + (255 - 20) / 2
        (rope_ext.LeakyReRoPE(factor=4, window=20, k=2), 138.5),
        # floor(255 / 5) + 20 - floor(20 / 5) - 0
        (rope_ext.SelfExtend(factor=4, window=20, group=5), 68),
        (rope_ext.DualChunk(factor=4, chunk=40, local=8), 41),
        (rope_ext.STRING(factor=1.5, shift=50, window=10), 216),  # 255 - 50 + 10
        (rope_ext.LMInfinite(factor=4, window=30), 31),  # sinks sit at the window
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_distances_in_use_under_position_methods(method: object, distances: float) -> None:
    with rope_ext.patched(model(), method):
        [site] = rope_ext.diagnose(model(), 256).sites
    assert (site.distances_before, site.distances_after) == (256, distances)
    new = {pair.after for pair in site.pairs if pair.rotations < 1}
    assert new == {"in distribution" if distances <= LENGTH else "out of distribution"}


def test_sliding_layers_never_leave_their_window() -> None:
    gemma = family("gemma3_text")
    local, full = sorted(
        rope_ext.diagnose(gemma, 256).sites, key=lambda site: site.distances_before
    )
    assert (local.distances_before, full.distances_before) == (16, 256)
    assert {pair.before for pair in local.pairs} == {"in distribution"}
    assert "out of distribution" in {pair.before for pair in full.pairs}


@pytest.mark.parametrize(
    ("target", "finetune", "name", "reason"),
    [
        (8192, False, ranked(2)[0], "perplexity 7.50 at twice its length"),
        (16384, False, ranked(4)[0], "perplexity 8.53 at four times its length"),
        (131000, True, "yarn", "section 4.1"),  # no multiple of hundredths
        (262144, True, "yarn", "beyond the published 32"),
    ],
)
def test_the_method_follows_the_factor(target: int, finetune: bool, name: str, reason: str) -> None:
    found = rope_ext.recommend(llama_2(), target, finetune)
    assert found.method.name == name
    assert reason in " ".join(found.reasons) and reason in str(found)
    assert all(re.search(r"arXiv|kexue|docs/", text) for text in found.reasons[:1])
    assert found.call in str(found) and found.factor == found.method.factor
    assert target <= 4096 * found.factor < target + 41  # tokens of a hundredth
    assert len(str(found).splitlines()) <= 14  # and the command's next one


@pytest.mark.parametrize("target", [16384, 131072])
def test_the_order_is_that_of_the_measurements(target: int) -> None:
    order = ranked(target / 4096)
    if target == 131072:  # groups of 72 tokens are more than its authors call reasonable
        order = sorted(order, key="self_extend".__eq__)
    found = rope_ext.recommend(llama_2(), target)
    named = [found.method.name, *(method.name for method, _ in found.alternatives)]
    assert named[: len(order)] == order
    assert (found.serve, found.engines) == (rope_ext.YaRN(factor=target // 4096), ENGINES)
    for name in order:
        assert sentence(name, target / 4096) in found.full()
    # All that the model accepts are listed, each once.
    every = {cls.name for cls in all_methods()} - {"longrope", "string"}  # a table, up to twice
    assert set(named) == every and len(named) == len(every)
    assert all(f"'{name}'" in found.full() for name in every)


ENGINES = ("vllm", "sglang", "llama.cpp", "ollama", "transformers", "mlx")


@pytest.mark.parametrize("engine", ENGINES)
def test_for_an_engine_only_what_it_runs(engine: str) -> None:
    found = rope_ext.recommend(llama_2(), 16384, engine=engine)
    assert found.method == rope_ext.YaRN(factor=4) and found.serve is None
    assert f"for {engine}" in str(found)
    for method in (found.method, *(method for method, _ in found.alternatives)):
        with rope_ext.patched(tiny_llama(**LLAMA_2), method) as patched:
            assert rope_ext.export(patched, engine).command


def qwen3(length: int) -> Qwen3Config:
    return Qwen3Config(**LLAMA_2 | {"max_position_embeddings": length})


def test_the_recipe_of_the_vendor_comes_first_where_it_fits() -> None:
    found = rope_ext.recommend(qwen3(40960), 131072)
    assert found.call == (
        "rope_ext.patch(model, 'yarn', factor=4, original_max_position_embeddings=32768)"
    )
    assert found.serve == found.method and "huggingface.co/Qwen/Qwen3-8B" in found.reasons[0]
    assert rope_ext.recommend(qwen3(40960), 65536).method == rope_ext.YaRN(factor=2)
    assert rope_ext.recommend(qwen3(40960), 131072, engine="vllm").call == found.call
    for length, target in ((40960, 131073), (8192, 32768)):  # beyond it, and another checkpoint
        other = rope_ext.recommend(qwen3(length), target)
        assert other.method.name == ranked(4)[0] and other.trained_length == length


def test_what_ships_scaled_is_named() -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    # Few pairs: methods with positions of their own for each are checked over all of the length.
    given = {"max_position_embeddings": 131072, "rope_parameters": rope, "hidden_size": 256}
    found = rope_ext.recommend(LlamaConfig(**LLAMA_2 | given), 262144)
    assert "as Llama 3.1 to 3.3: llama3, factor 8 on 8192" in found.reasons[-1]
    assert "131072 (scaled from 8192) -> 262144" in str(found)


def test_a_patch_that_was_saved_untrained_is_not_taken_for_training(tmp_path: Path) -> None:
    """Its folder has the fields of a checkpoint that was trained so."""
    rope_ext.patch(tiny_llama(), "yarn", factor=4).save_pretrained(tmp_path)
    found = rope_ext.recommend(tmp_path, 8 * LENGTH)
    assert f"{4 * LENGTH} (scaled from {LENGTH}) -> {8 * LENGTH}" in str(found)
    assert "whether it was trained" in str(found) and "was trained with" not in str(found)
    with pytest.raises(rope_ext.OptionError) as refused:
        rope_ext.recommend(AutoConfig.from_pretrained(tmp_path), 2 * LENGTH)
    assert "trained on" not in str(refused.value)


@pytest.mark.parametrize("engine", [None, "vllm"])
def test_more_than_untrained_methods_carry_ends_in_training_or_another_checkpoint(engine) -> None:
    for times, refused in ((32, False), (33, True), (256, True)):
        if refused:
            with pytest.raises(rope_ext.OptionError, match=r"train it .* another\b.*checkpoint"):
                rope_ext.recommend(llama_2(), times * 4096, engine=engine)
        else:
            rope_ext.recommend(llama_2(), times * 4096, engine=engine)
    trained = rope_ext.recommend(llama_2(), 256 * 4096, finetune=True, engine=engine)
    assert "another checkpoint" in str(trained)


@pytest.mark.parametrize("form", [{}, {"engine": "vllm"}, {"finetune": True}])
def test_every_form_has_the_reason_and_the_warnings(form: dict) -> None:
    """Of what is served, not of what runs here: position methods need no larger base."""
    text = str(rope_ext.recommend(llama_2(), 8 * 4096, **form))
    _, _, about = text.partition("'yarn'")
    assert "the base 10000 is below" in about
    assert "2309.00071" in about
    assert ("train it" in about) is not form.get("finetune", False)


def test_a_model_that_was_measured_is_judged_by_its_own_numbers() -> None:
    """Those of the other model would put another method first, and are another factor's."""
    shape = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9}
    own = LlamaConfig(**shape, num_key_value_heads=3, max_position_embeddings=8192, vocab_size=32)
    found = str(rope_ext.recommend(own, 4 * 8192))
    assert "SmolLM2" in found and "gemma" not in found and "four times its length" in found
    larger = LlamaConfig(**shape, num_key_value_heads=3, max_position_embeddings=4096)
    assert "gemma" in str(rope_ext.recommend(larger, 4 * 4096))


def model_with(**methods: Any) -> dict[str, Any]:
    named = {name: {"at": {"2": numbers}} for name, numbers in methods.items()}
    return {"model": "a", "trained": 8, "within": 8, "methods": named}


def numbers(perplexity: float, found: int, decoded: bool) -> dict[str, Any]:
    passkey = {"found": found, "of": 20, "decoded": decoded}
    return {"perplexity": perplexity, "passkey": passkey}


def test_what_was_decoded_counts_and_what_was_not_measured_comes_last() -> None:
    """Scores after a lead-in are higher than what a model writes by itself."""
    scored = model_with(
        unpatched=numbers(99, 0, True),
        rerope=numbers(7.5, 20, False),
        yarn=numbers(7.6, 12, True),
        dual_chunk=numbers(7.4, 3, True),
    )
    assert ranked(2, [scored])[:3] == ["yarn", "dual_chunk", "rerope"]
    assert "not decoded" in sentence("rerope", 2, [scored])
    assert "not decoded" not in sentence("yarn", 2, [scored])
    old = model_with(
        unpatched=numbers(99, 0, False),
        rerope=numbers(7.5, 20, False),
        yarn=numbers(7.6, 12, False),
    )
    assert ranked(2, [old])[:2] == ["rerope", "yarn"]


def test_patch_takes_a_recommendation() -> None:
    small = tiny_llama()
    found = rope_ext.recommend(small, 4 * LENGTH)
    described = rope_ext.describe(rope_ext.patch(small, found))
    assert (described.method, described.target_length) == (found.method.name, 4 * LENGTH)
    qwen = Qwen3ForCausalLM(qwen3(40960))
    rope_ext.patch(qwen, rope_ext.recommend(qwen, 131072))
    assert rope_ext.describe(qwen).length == 32768
    scaled = tiny_llama(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
    rope_ext.patch(scaled, rope_ext.recommend(scaled, 2 * LENGTH, finetune=True))
    assert rope_ext.describe(scaled).target_length == 2 * LENGTH


FAMILIES = ["falcon", "gemma3_text", "phi3", "deepseek_v3"]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_families_accept_what_is_recommended(model_type: str) -> None:
    for target in (100 if model_type in ("falcon", "phi3") else 32 * LENGTH,):
        found = rope_ext.recommend(family(model_type), target)
        assert accepted(found, family(model_type)) >= target
        refuses = model_type == "falcon"  # docs/FAMILIES.md
        assert isinstance(found.method, rope_ext.PositionMethod) is not refuses
        assert ("left out" in " ".join(found.reasons)) is refuses


@pytest.mark.parametrize("method", ["rerope", "dynamic_yarn"])
def test_a_folder_saved_under_a_patch_is_advised_without_it_and_diagnosed_with_it(
    tmp_path, method
) -> None:
    """What it was saved as cannot be built without weights; the record tells what it was."""
    rope_ext.patch(tiny_llama(), method, factor=2).save_pretrained(tmp_path)
    found, told = rope_ext.recommend(tmp_path, 640), f"saved under rope_ext.patch(model, '{method}'"
    assert found.method == rope_ext.recommend(family("llama"), 640).method
    assert found.trained_length == LENGTH and told in str(found)
    diagnosis = rope_ext.diagnose(tmp_path, 2 * LENGTH)
    assert diagnosis.method is not None and diagnosis.method.startswith(method)
    config = AutoConfig.from_pretrained(tmp_path)
    before = config.to_dict()
    rope_ext.recommend(config, 640)
    assert config.to_dict() == before


def test_on_a_checkpoint_that_is_scaled_already() -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    scaled = tiny_llama(rope_parameters=rope)
    found = rope_ext.recommend(scaled, 128, finetune=True)
    assert found.call == "rope_ext.patch(model, 'yarn', factor=2, compose=True)"
    assert "rope_type 'linear' with factor 2.0" in found.reasons[-1]
    assert accepted(found, scaled) == 128
    assert "compose" not in rope_ext.recommend(scaled, 640).call  # distances are not scaled
    own = {"rope_type": "yarn", "original_max_position_embeddings": LENGTH // 2}
    yarn = tiny_llama(rope_parameters=rope | own)
    call = "rope_ext.patch(model, 'yarn', factor=8, compose='raise')"
    for options in ({"engine": "vllm"}, {"finetune": True}):
        found = rope_ext.recommend(yarn, 4 * LENGTH, **options)
        assert found.call == call and "'yarn', factor=4, compose=True" in found.full()
        assert accepted(found, yarn) == 4 * LENGTH
    found = rope_ext.recommend(yarn, 4 * LENGTH)
    assert found.method.replaces_attention and found.compose is True
    assert f"serve with vllm, sglang, llama.cpp, ollama, transformers, mlx\n  {call}" in str(found)
    # Nothing goes on top of the dynamic type, so its own factor grows.
    dynamic = tiny_llama(rope_parameters=rope | {"rope_type": "dynamic"})
    found = rope_ext.recommend(dynamic, 640)
    assert found.call == "rope_ext.patch(model, 'dynamic_ntk', factor=10, compose='raise')"
    assert accepted(found, dynamic) == 640


def test_the_trained_length_can_be_given_as_for_patch() -> None:
    """A configuration may have the length of a recipe, as Qwen2.5 does."""
    claims = tiny_llama(max_position_embeddings=16 * LENGTH)
    with pytest.raises(rope_ext.OptionError, match="use it unpatched"):
        rope_ext.recommend(claims, 4 * LENGTH)
    given = {"original_max_position_embeddings": LENGTH}
    found = rope_ext.recommend(claims, 4 * LENGTH, **given)
    assert found.trained_length == LENGTH and found.factor == 4
    assert f"original_max_position_embeddings={LENGTH}" in found.call
    assert accepted(found, claims) == 4 * LENGTH
    with pytest.raises(rope_ext.OptionError, match="original_max_position_embeddings=0"):
        rope_ext.recommend(claims, 4 * LENGTH, original_max_position_embeddings=0)


@pytest.mark.parametrize("function", ["describe", "diagnose", "export", "recommend", "unpatch"])
def test_what_is_no_model_of_transformers_is_refused_as_patch_does(function: str) -> None:
    more = {"diagnose": (100,), "recommend": (100,), "export": ("vllm",)}.get(function, ())
    with pytest.raises(rope_ext.NoRopeError, match="Linear is not a transformers model"):
        getattr(rope_ext, function)(torch.nn.Linear(2, 2), *more)


@pytest.mark.parametrize("name", ["model", "a 'b': \"c\" #d"])
def test_a_card_is_read_as_written_whatever_the_names(tmp_path, name: str, monkeypatch) -> None:
    folder = tmp_path / name
    rope_ext.patch(tiny_llama(), "yarn", factor=4).save_pretrained(folder)
    monkeypatch.chdir(folder)
    before = write_card(".", base=f"owner/{name}").read_text()
    text = ModelCard(before)
    assert text.data.to_dict()["base_model"] == f"owner/{name}"
    [call] = re.findall(r"from_pretrained\((.*)\)", before)
    assert ast.literal_eval(call) == name and f"# {name}\n" in before
    [command] = [line for line in before.splitlines() if line.startswith("vllm serve")]
    assert shlex.split(command)[2] == name
    with monkeypatch.context() as full, pytest.raises(OSError, match="No space"):
        full.setattr(Path, "replace", no_space)
        write_card(folder)
    assert (folder / "README.md").read_text() == before


def no_space(path: Path, target: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


NAME = "a```<script>alert(1)</script>[x](javascript:y)\x1b[31m"
"""A folder's name that would be HTML or a link, end a block, or color a terminal."""


def results(folder: Path) -> dict[str, Any]:
    """What notebooks show, by the command that prints it."""
    place = str(folder)
    patched = rope_ext.patch(tiny_llama(), "yarn", factor=4)
    patched.save_pretrained(folder)
    return {
        f"describe {shlex.quote(place)}": rope_ext.describe(place),
        f"diagnose {shlex.quote(place)} --length 512": rope_ext.diagnose(place, 512),
        f"recommend {shlex.quote(place)} --length 512": rope_ext.recommend(place, 512),
        f"export {shlex.quote(place)} --engine vllm": rope_ext.export(place, "vllm"),
    }


def test_a_notebook_shows_what_the_command_line_prints(tmp_path: Path) -> None:
    for line, result in results(tmp_path / NAME).items():
        printed = CliRunner().invoke(app, shlex.split(line)).stdout
        begin, shown, end = re.fullmatch(
            "(<pre [^<>]*>)(.*)(</pre>)", result._repr_html_(), re.DOTALL
        ).groups()
        assert html.unescape(shown) == printed.rstrip("\n"), line
        assert (begin.count(">"), end) == (1, "</pre>")
        assert not {"<", ">", "\x1b"} & set(shown)  # no markup, so all of it is text


def test_ipython_takes_the_same_block(tmp_path: Path) -> None:
    formatters = pytest.importorskip("IPython.core.formatters")
    formatter = formatters.DisplayFormatter()
    for result in results(tmp_path / "model").values():
        shown, _ = formatter.format(result)
        assert shown["text/html"] == result._repr_html_()
