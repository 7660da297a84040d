"""What the measurements see of attention: weights against other code and hand counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import rope_ext
from lab import attention
from lab.attention import FIRST, by_distance, evenly
from rope_eval.plots.style import figure_of
from tests.families.zoo import tiny_model
from tests.helpers.models import tiny_llama
from tests.helpers.positions import FAMILIES, GEOMETRIES, METHODS, by_formula, patch

TOKENS = 90
EDGES = (0, 1, 2, 4, 8, 16, 32, 64, 90)
EXACT = {"atol": 1e-5, "rtol": 0}  # weights in float32, their sums over 90 keys


@pytest.fixture
def row() -> tuple[int, ...]:
    ids = torch.randint(3, 128, (TOKENS,), generator=torch.Generator().manual_seed(1))
    return tuple(ids.tolist())


@pytest.fixture(autouse=True)
def few_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last 20 tokens, a few at a time."""
    monkeypatch.setattr(attention, "QUERIES", 20)
    monkeypatch.setattr(attention, "WEIGHTS_AT_ONCE", 7 * 4 * TOKENS)  # 7 queries of 4 heads


def weights_of(model: nn.Module, row: tuple[int, ...]) -> list[torch.Tensor]:
    """What transformers itself returns, ``[tokens, tokens]`` of every layer: mean over heads."""
    with torch.no_grad():
        given = model(torch.tensor([row]), output_attentions=True, use_cache=False).attentions
    return [layer[0].double().mean(0) for layer in given]


def counted(weights: torch.Tensor) -> list[float]:
    """Shares of the bins and of the first tokens, one by one."""
    shares = [0.0] * len(EDGES)
    for query in range(TOKENS - 20, TOKENS):
        for key in range(query + 1):
            place = -1
            if key >= FIRST:
                place = next(i for i, edge in enumerate(EDGES[1:]) if query - key < edge)
            shares[place] += float(weights[query, key]) / 20
    return shares


def looked(model: nn.Module, *rows: tuple[int, ...]) -> list[list[float]]:
    seen = by_distance(model, rows, EDGES)
    return torch.cat((seen.shares, seen.first.unsqueeze(1)), 1).tolist()


def assert_alike(found: list[list[float]], wanted: list[list[float]]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), **EXACT)


@pytest.mark.parametrize("method", [None, "yarn", "dynamic_ntk"])
@pytest.mark.parametrize("kind", ["llama", "cohere", "gpt_neox", "phi3", "diffllama"])
def test_attention_is_what_transformers_returns(kind: str, method: str | None, row) -> None:
    model = tiny_model(kind)  # a layer of diffllama attends twice
    if method:
        rope_ext.patch(model, method, factor=4)
    model.set_attn_implementation("eager")
    right = [counted(layer) for layer in weights_of(model, row)]
    assert_alike(looked(model, row), right)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("llama", name) for name in GEOMETRIES), ("cohere", "rerope"), ("gpt_neox", "dpe")],
)
def test_attention_under_position_methods_is_that_of_the_formula(kind, name: str, row) -> None:
    model = FAMILIES[kind].model()
    plain = looked(model, row)
    with by_formula(model, FAMILIES[kind], name, torch.arange(TOKENS)[None], **METHODS[name]):
        right = [counted(layer) for layer in weights_of(model, row)]
    patch(model, name)
    assert_alike(looked(model, row), right)
    assert (torch.tensor(plain) - torch.tensor(right)).abs().max() > 0.003


def test_even_attention_by_hand() -> None:
    model = tiny_llama(num_hidden_layers=1)
    nn.init.zeros_(model.model.layers[0].self_attn.q_proj.weight)
    seen = by_distance(model, [tuple(range(3, 13))], (0, 1, 2, 4, 8, 10))  # 10 queries: 0 to 9
    itself = sum(1 / (n + 1) for n in range(4, 10)) / 10
    before = sum(1 / (n + 1) for n in range(5, 10)) / 10
    two = (1 / 7 + 2 / 8 + 2 / 9 + 2 / 10) / 10  # of the queries at 6, 7, 8 and 9
    four = (1 / 9 + 2 / 10) / 10
    assert seen.shares[0].tolist() == pytest.approx([itself, before, two, four, 0])
    first = (4 + sum(4 / (n + 1) for n in range(4, 10))) / 10
    assert seen.first.tolist() == pytest.approx([first])
    assert evenly(seen.edges).tolist() == pytest.approx([itself, before, two, four, 0])


def test_it_is_drawn_with_a_line_for_every_method(checkpoint: Path, tmp_path: Path) -> None:
    drawn = {}

    def draw(axes, lines, within, trained) -> None:
        drawn.update(lines=lines, within=within, trained=trained)

    words = [str(checkpoint), "--method", "yarn,rerope", "--output", str(tmp_path / "one.png")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "draw", draw)
        attention.main([*words, "--text", __file__, "--windows", "1"])
    lines = drawn["lines"]
    assert list(lines) == ["unpatched", "yarn", "rerope"]
    assert drawn["trained"] == drawn["within"].edges[-1] == 128
    shares = [found.shares for found in lines.values()]
    assert all(found.edges[-1] == 512 for found in lines.values())
    assert not torch.allclose(shares[0], shares[1], atol=1e-3)
    figure = figure_of(4, 3)
    attention.draw(figure.subplots(), **drawn)
    assert (tmp_path / "one.png").stat().st_size > 1000
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    with pytest.raises(rope_ext.OptionError, match=r"give a \.png file"):
        attention.main([*words[:-1], str(other)])
    assert other.read_text() == "mine"
