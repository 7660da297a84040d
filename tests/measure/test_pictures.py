"""Pictures: the numbers behind them against hand-computed cases, and that something is drawn."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import image
from transformers import LlamaConfig

import rope_ext
from rope_eval.plots import methods as panels
from rope_eval.plots import pictures
from rope_eval.plots.attention import (
    Resultants,
    Shares,
    by_distance,
    choose_windows,
    octaves,
    resultants,
)
from rope_eval.plots.numbers import decay_at, frequencies, largest_angles, used_distances
from rope_eval.plots.style import figure_of
from rope_ext.methods import Method, Rope
from rope_ext.saving import checkpoints as models
from tests.helpers.checkpoint import TRAINED, save_checkpoint
from tests.helpers.models import tiny_llama

ROPE = Rope.geometric(10000, 16, 128)  # 8 pairs; the first 3 turn fully: 128, 40.5, 12.8, 4.05
model = functools.cache(tiny_llama)
TEXT = [Path(__file__)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("tiny")))


def distances_of(method: Method | None, length: int, *distance: int) -> list[float]:
    asked = torch.tensor(distance, dtype=torch.float64)
    return used_distances(ROPE, method, length, asked).tolist()


def test_the_spectrum_of_pi_is_divided_and_the_unpatched_one_is_as_trained() -> None:
    theta = 10000 ** -(torch.arange(8, dtype=torch.float64) / 8)
    torch.testing.assert_close(frequencies(ROPE, None, 512), theta)
    torch.testing.assert_close(frequencies(ROPE, rope_ext.PI(factor=4), 512), theta / 4)
    assert frequencies(ROPE, rope_ext.ReRoPE(factor=4), 512).equal(ROPE.inv_freq)


def test_the_spectrum_of_a_dynamic_method_is_that_at_the_length() -> None:
    dynamic = rope_ext.DynamicYaRN(factor=4)
    torch.testing.assert_close(frequencies(ROPE, dynamic, 128), ROPE.inv_freq)
    yarn = frequencies(ROPE, rope_ext.YaRN(factor=2), 256)
    torch.testing.assert_close(frequencies(ROPE, dynamic, 256), yarn)


def test_largest_angles() -> None:
    assert largest_angles(ROPE, None, 512)[0] == 512  # the fastest turns by one radian a token
    assert largest_angles(ROPE, rope_ext.PI(factor=4), 512).tolist() == pytest.approx(
        (128 * ROPE.inv_freq).tolist()
    )
    rerope = largest_angles(ROPE, rope_ext.ReRoPE(factor=4, window=20), 512)
    assert rerope.tolist() == (21 * ROPE.inv_freq).tolist()  # distances 0 to 20


def test_decay() -> None:
    none = torch.zeros(1, dtype=torch.float64)
    assert decay_at(ROPE, None, 512, none).item() == 16  # twice the pairs
    at = torch.tensor([5.0, 40.0], dtype=torch.float64)
    by_hand = [2 * sum(math.cos(x * 10 ** (-i / 2)) for i in range(8)) for x in (5, 40)]
    assert decay_at(ROPE, None, 512, at).tolist() == pytest.approx(by_hand)
    assert decay_at(ROPE, rope_ext.PI(factor=4), 512, 4 * at).tolist() == pytest.approx(by_hand)
    near, far = decay_at(ROPE, rope_ext.ReRoPE(factor=4, window=5), 512, at).tolist()
    assert near == far == pytest.approx(by_hand[0])


@given(window=st.integers(1, 60), distance=st.integers(0, 199))
@settings(max_examples=50, deadline=None)
def test_rerope_stops_at_its_window(window: int, distance: int) -> None:
    method = rope_ext.ReRoPE(factor=4, window=window)
    assert distances_of(method, 200, distance) == [min(distance, window)]


@pytest.mark.parametrize(
    ("method", "distance", "used"),
    [
        (None, 150, 150),
        (rope_ext.YaRN(factor=4), 150, 150),
        # floor(199 / 10) + 20 - floor(20 / 10) = 37 for the query, less floor(n / 10)
        (rope_ext.SelfExtend(factor=4, window=20, group=10), 19, 19),
        (rope_ext.SelfExtend(factor=4, window=20, group=10), 20, 37 - 17),  # n = 179
        (rope_ext.SelfExtend(factor=4, window=20, group=10), 155, 37 - 4),  # n = 44
        (rope_ext.LeakyReRoPE(factor=4, window=20, k=5), 120, 40),  # 20 + 100 / 5
        (rope_ext.STRING(factor=1.5, shift=50, window=10), 120, 80),
        # Chunks of 32: the query is the 8th token (place 7) of the chunk from 192 on.
        (rope_ext.DualChunk(factor=4, chunk=40, local=8), 7, 7),
        (rope_ext.DualChunk(factor=4, chunk=40, local=8), 8, 8),  # place 31; 7 + 32 - 31
        (rope_ext.DualChunk(factor=4, chunk=40, local=8), 40, 40 - 31),  # n = 159, two chunks back
        (rope_ext.LMInfinite(factor=4, window=30, sinks=2), 29, 29),
        (rope_ext.LMInfinite(factor=4, window=30, sinks=2), 30, None),
        (rope_ext.LMInfinite(factor=4, window=30, sinks=2), 198, 30),  # the second sink
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_distances_in_use_of_the_last_of_200_tokens(
    method: Method | None, distance: int, used: float | None
) -> None:
    [found] = distances_of(method, 200, distance)
    assert math.isnan(found) if used is None else found == used


METHODS = {
    "spectrum": [rope_ext.YaRN(factor=4), rope_ext.PRoPE(factor=4)],  # zero frequencies too
    "angles": [rope_ext.YaRN(factor=4), rope_ext.PRoPE(factor=4), rope_ext.SelfExtend(factor=4)],
    "decay": [rope_ext.YaRN(factor=4), rope_ext.LMInfinite(factor=4)],
    "distances": [rope_ext.DualChunk(factor=4), rope_ext.LMInfinite(factor=2)],
    "weighted-decay": [rope_ext.YaRN(factor=4), rope_ext.LMInfinite(factor=4)],
    "attention": [rope_ext.YaRN(factor=4), rope_ext.ReRoPE(factor=4)],
}


def reading(kind: str, checkpoint: str) -> dict[str, Any]:
    """What a picture that reads a text needs beside a loaded model."""
    if pictures.KINDS[kind].measure is None:
        return {}
    return {"text": TEXT, "tokenizer": models.load_tokenizer(checkpoint), "windows": 1}


@pytest.mark.parametrize("kind", pictures.KINDS)
def test_a_picture_is_drawn_and_the_model_left_alone(kind, checkpoint: str, tmp_path: Path) -> None:
    model = models.load_model(checkpoint)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    path = tmp_path / "one.png"
    pictures.draw(kind, model, METHODS[kind], path, **reading(kind, checkpoint))
    pixels = image.imread(path)
    assert pixels.shape[0] > 500 and pixels.shape[1] > 1000
    for wanted in ((0.0, 0.45, 0.7), (0.84, 0.37, 0.0)):  # of the first and second method
        assert (abs(pixels[..., :3] - wanted).max(-1) < 0.02).any()
    assert all(before[name].equal(buffer) for name, buffer in model.named_buffers())
    assert model.config._attn_implementation == "sdpa"


def test_lines_have_a_legend_and_the_length_is_what_methods_reach(monkeypatch, tmp_path) -> None:
    found = []
    drawn = pictures.KINDS["distances"]

    def spy(axes: object, rope: Rope, lines: dict, length: int) -> None:
        found.extend((*lines, length))
        drawn.draw(axes, rope, lines, length)

    monkeypatch.setitem(pictures.KINDS, "distances", replace(drawn, draw=spy))
    methods = [rope_ext.ReRoPE(factor=4), rope_ext.SelfExtend(factor=8)]
    config = LlamaConfig(max_position_embeddings=128, num_hidden_layers=1, hidden_size=64)
    pictures.draw("distances", config, methods, tmp_path / "one.png")
    # Self-Extend: (1024 - 32) / (2/3 * 128 - 32) = 18.6
    extend = "self_extend (factor=8, window=32, group=19)"
    assert found == ["unpatched", "rerope (factor=4, window=64)", extend, 1024]


# --- pictures of a model with weights ------------------------------------------------------------


def measured(monkeypatch, kind: str, checkpoint: str, path: Path) -> tuple[dict, Any]:
    """The lines of a picture, and what its panel gets to draw."""
    found, drawn = [], pictures.KINDS[kind]

    def spy(axes: object, *given: Any) -> None:
        found.extend(given)
        drawn.draw(axes, *given)

    monkeypatch.setitem(pictures.KINDS, kind, replace(drawn, draw=spy))
    pictures.draw(kind, checkpoint, METHODS["attention"], path, text=TEXT, windows=2)
    _, lines, length, what = found
    assert length == 4 * TRAINED
    return lines, what


def test_attention_is_that_of_the_model_under_each_method(
    monkeypatch, checkpoint: str, tmp_path: Path
) -> None:
    lines, found = measured(monkeypatch, "attention", checkpoint, tmp_path / "one.png")
    model, tokenizer = models.load_model(checkpoint), models.load_tokenizer(checkpoint)
    text, edges = choose_windows(tokenizer, TEXT, 4 * TRAINED, 2), octaves(TRAINED, 4 * TRAINED)
    assert list(found) == [*lines, panels.TRAINED]
    seen = [by_distance(model, text.at(4 * TRAINED), edges)]
    for method in METHODS["attention"]:
        with rope_ext.patched(model, method):
            seen.append(by_distance(model, text.at(4 * TRAINED), edges))
    seen.append(by_distance(model, text.at(TRAINED), edges[:-2]))
    for shown, right in zip(found.values(), seen, strict=True):
        assert shown.shares.equal(right.shares) and shown.edges == right.edges
    assert not torch.allclose(seen[0].shares, seen[1].shares, atol=1e-3)


def test_mean_queries_and_keys_are_those_within_the_trained_length(
    monkeypatch, checkpoint: str, tmp_path: Path
) -> None:
    _, found = measured(monkeypatch, "weighted-decay", checkpoint, tmp_path / "one.png")
    text = choose_windows(models.load_tokenizer(checkpoint), TEXT, TRAINED, 2)
    right = resultants(models.load_model(checkpoint), text.at(TRAINED))
    assert found.weights.equal(right.weights) and found.query.equal(right.query)


def test_the_panel_of_attention_by_hand() -> None:
    shares = torch.tensor([[0.1, 0.2, 0.3, 0.2], [0.1, 0.1, 0.1, 0.5]])
    found = {"unpatched": Shares((0, 1, 2, 4, 8), shares, torch.tensor([0.2, 0.2]))}
    axes = figure_of(4, 4).subplots()
    panels.attention(axes, Rope.geometric(10000, 16, 4), {"unpatched": None}, 8, found)
    [line] = axes.get_lines()[:1]
    assert line.get_ydata() == pytest.approx([0.1, 0.15, 0.2, 0.35])
    assert line.get_label() == "unpatched: 20% on the first 4 tokens, 35% beyond 4"
    assert line.get_xdata()[-1] == pytest.approx(math.sqrt(4 * 8))


def test_the_panel_of_weighted_decay_by_hand() -> None:
    weights = torch.zeros(2, 8, dtype=torch.complex128)
    weights[0, 0], weights[1, 0] = 1, 0.5j  # two heads, the pair that turns by 1 a token
    lengths = torch.tensor([0.5, 0.25])
    axes = figure_of(4, 4).subplots()
    lines = {"unpatched": None, "pi": rope_ext.PI(factor=4)}
    panels.weighted_decay(axes, ROPE, lines, 512, Resultants(weights, lengths, lengths))
    first = [float(line.get_ydata()[0]) for line in axes.get_lines()[:2]]
    by_hand = [(math.cos(x) - 0.5 * math.sin(x)) / 2 for x in (1, 0.25)]
    assert first == pytest.approx(by_hand)
    assert "queries 0.38, keys 0.38" in axes.get_xlabel()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": [Path("missing.txt")]}, r"cannot read the text missing\.txt"),
        ({"length": 10**6}, "a window of 1000000 is to be measured"),
        ({"windows": 0}, "windows=0"),
        ({"kind": "decay"}, "decay does not use a text; plot weighted-decay or attention"),
        ({"model": LlamaConfig()}, "needs weights; give a model, folder or Hub ID"),
        ({"model": str(Path(__file__).parents[1])}, "cannot load the configuration of '.*tests'"),
        ({"loaded": True}, "give tokenizer="),
        ({"method": rope_ext.PI(factor=4)}, None),
    ],
    ids=str,
)
def test_mistakes_show_before_weights_are_read(
    monkeypatch, checkpoint: str, tmp_path: Path, change: dict, message: str | None
) -> None:
    given = {"kind": "attention", "model": checkpoint, "text": TEXT} | change
    method = given.pop("method", rope_ext.YaRN(factor=4))
    if given.pop("loaded", False):
        given["model"] = models.load_model(checkpoint)
    monkeypatch.setattr(
        models, "load_model", lambda *given, **more: pytest.fail("weights were read")
    )
    wanted = pytest.fail.Exception if message is None else rope_ext.RopeExtError
    with pytest.raises(wanted, match=message or "were read"):
        pictures.draw(given.pop("kind"), given.pop("model"), [method], tmp_path / "x.png", **given)


def test_a_patched_model_is_refused(checkpoint: str, tmp_path: Path) -> None:
    model, tokenizer = models.load_model(checkpoint), models.load_tokenizer(checkpoint)
    pi = rope_ext.patch(model, "pi", factor=4) and rope_ext.PI(factor=4)
    for kind in ("attention", "weighted-decay"):
        with pytest.raises(rope_ext.AlreadyPatchedError, match="unpatch"):
            pictures.draw(kind, model, [pi], tmp_path / "x.png", tokenizer=tokenizer)


# --- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "method", "message"),
    [
        ("spectra", rope_ext.PI(factor=4), "did you mean 'spectrum'"),
        ("histogram", rope_ext.PI(factor=4), "Pictures: spectrum, angles, decay, distances"),
        ("distances", rope_ext.PI(factor=4), "pi changes frequencies.*plot spectrum, angles or"),
        ("spectrum", rope_ext.ReRoPE(factor=4), "rerope changes distances.*plot distances,"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_drawn(kind: str, method: Method, message: str, tmp_path: Path) -> None:
    with pytest.raises(rope_ext.OptionError, match=message):
        pictures.draw(kind, model(), [method], tmp_path / "one.png")
    assert not list(tmp_path.iterdir())


def test_where_and_of_what_nothing_can_be_drawn(tmp_path: Path) -> None:
    pi = rope_ext.PI(factor=4)
    for path in (tmp_path / "one.svg", tmp_path / "missing" / "one.png"):
        with pytest.raises(rope_ext.OptionError, match=r"give a \.png file in an existing dir"):
            pictures.draw("angles", model(), [pi], path)
    with pytest.raises(rope_ext.OptionError, match="length=0 is not valid"):
        pictures.draw("angles", model(), [pi], tmp_path / "one.png", length=0)
    with (
        rope_ext.patched(model(), pi),
        pytest.raises(rope_ext.AlreadyPatchedError, match="unpatch"),
    ):
        pictures.draw("angles", model(), [pi], tmp_path / "one.png")
    scaled = LlamaConfig(
        max_position_embeddings=512,
        num_hidden_layers=1,
        hidden_size=64,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    )
    with pytest.raises(rope_ext.AlreadyScaledError, match="compose=True"):
        pictures.draw("angles", scaled, [pi], tmp_path / "one.png")
    pictures.draw("angles", scaled, [pi], tmp_path / "one.png", compose=True)
    assert (tmp_path / "one.png").stat().st_size > 10_000
