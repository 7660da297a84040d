r"""Plot the attention of a model on a text: its share in each octave of distance.

    python -m lab.attention MODEL --method yarn,rerope --factor 4 --text FILE --output attention.png

Attention kernels do not return weights. So queries and keys are captured right before attention,
patched or not, and the weights of the last few queries are computed densely: memory is linear in
the length. One line per method, and one for the unpatched model.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

import rope_ext
from rope_eval.data.prompts import Frame
from rope_eval.plots import style
from rope_eval.tasks.perplexity import Perplexity
from rope_ext.command.arguments import parse_length, split
from rope_ext.command.terminal import clean_errors
from rope_ext.errors import UnsupportedModelError
from rope_ext.patching import first_site
from rope_ext.position.attend import NAME
from rope_ext.position.steps import Dense
from rope_ext.rotary.context import attending
from rope_ext.rotary.sites import evaluating, sees_window, text_config, text_decoder
from rope_ext.saving import checkpoints

FIRST = 4
"""Number of initial tokens that act as attention sinks (arXiv 2309.17453, section 3)."""

QUERIES = 256
"""Number of queries at the end of a window whose attention weights are measured."""

WEIGHTS_AT_ONCE = 2**24  # attention weights in memory at a time


@dataclass(frozen=True, eq=False)
class Shares:
    """How the last tokens of some windows distribute their attention over distances.

    Args:
        edges: edges of the distance bins in tokens, ``[bins + 1]``.
        shares: share of the attention in each bin, float64, ``[layers, bins]``: the mean over
            windows, queries and heads, without the first tokens.
        first: share of the first tokens and of learned sinks, if any, ``[layers]``. With ``shares``
            it adds up to 1.
    """

    edges: tuple[int, ...]
    shares: torch.Tensor
    first: torch.Tensor


def octaves(trained: int, length: int) -> tuple[int, ...]:
    """Octave edges for distances up to ``length``; the trained length is one of them."""
    octaves = {round(trained * 2.0**k) for k in range(-trained.bit_length(), length.bit_length())}
    return tuple(sorted({0, 1, length} | {edge for edge in octaves if 0 < edge < length}))


def evenly(edges: Sequence[int]) -> torch.Tensor:
    """Share of each bin under uniform attention, float64, ``[bins]``."""
    tokens = edges[-1]
    visible = torch.arange(max(0, tokens - QUERIES), tokens, dtype=torch.float64)[:, None] + 1
    keys = torch.minimum(torch.tensor(edges), (visible - FIRST).clamp(min=0)).diff()
    return (keys / visible).mean(0)


@torch.no_grad()
def by_distance(model: nn.Module, rows: Sequence[tuple[int, ...]], edges: Sequence[int]) -> Shares:
    """Average attention of the last :data:`QUERIES` tokens of every row, by distance.

    Sliding-window layers are left out.

    Args:
        model: a model, patched or not.
        rows: token IDs, all rows of the same length.
        edges: edges of the bins, from :func:`octaves`.

    Raises:
        UnsupportedModelError: the layers do not use transformers' attention interface.
    """
    decoder = text_decoder(model)
    device = cast(PreTrainedModel, model).device
    layers: dict[nn.Module, list[torch.Tensor]] = {}
    inner = torch.tensor(edges[1:-1])

    def look(module: nn.Module, dense: Dense, window: int | None) -> None:
        heads, tokens = dense.query.shape[1:3]
        # Cross attention: its keys have no distance from the query.
        across = tokens != dense.key.shape[2]
        if across or sees_window(text_config(decoder), module, window):
            return
        total = torch.zeros(len(edges), dtype=torch.float64)
        layers.setdefault(module, []).append(total)
        places = torch.arange(tokens)
        size = max(1, WEIGHTS_AT_ONCE // (heads * tokens))
        first = max(0, tokens - QUERIES)
        for start in range(first, tokens, size):
            queries = slice(start, min(start + size, tokens))
            given = dense.weights(queries)[0].mean(0).cpu().double() / (tokens - first)
            distance = (places[queries, None] - places).clamp(min=0)
            # right: the trained length itself, an edge, is the first distance beyond it.
            place = torch.bucketize(distance, inner, right=True)
            # Sinks take attention at any distance, so they have a place of their own.
            place[:, :FIRST] = len(edges) - 1
            total.index_add_(0, place.flatten(), given.flatten())
            total[-1] += (len(given) / (tokens - first)) - given.sum()  # share of learned sinks

    with evaluating(decoder), attending(decoder, NAME, look):
        for row in rows:
            decoder(input_ids=torch.tensor([row], device=device), use_cache=False)
    if not layers:
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: cannot observe its attention layers, because they do not "
            f"use transformers' attention interface"
        )
    shares = torch.stack([torch.stack(calls).mean(0) for calls in layers.values()])
    return Shares(tuple(edges), shares[:, :-1], shares[:, -1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="directory or Hub ID")
    parser.add_argument("--method", default="yarn", help="comma-separated names")
    parser.add_argument("--factor", type=float, default=4.0)
    parser.add_argument("--length", help="tokens; default: factor times the trained length")
    parser.add_argument("--text", action="append", default=[], help="default: Python's library")
    parser.add_argument("--windows", type=int, default=4, help="maximum number of text windows")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path, required=True, help="the .png file")
    args = parser.parse_args(arguments)
    style.require_png(args.output)
    tokenizer = checkpoints.load_tokenizer(args.model)
    model = checkpoints.load_model(args.model, device=args.device)
    trained = first_site(model).rope.length
    length = parse_length(args.length) if args.length else round(args.factor * trained)
    task = Perplexity(text=tuple(args.text), windows=args.windows)
    text = task.choose(Frame.from_tokenizer(tokenizer, "no"), (length,), 0, option="--length")
    edges = octaves(trained, length)
    lines = dict[str, Shares]()
    for name in ("unpatched", *split(args.method)):
        plain = name == "unpatched"
        with nullcontext() if plain else rope_ext.patched(model, name, factor=args.factor):
            lines[name] = by_distance(model, text.at(length), edges)
    inner = edges[: edges.index(trained) + 1] if trained < length else edges
    # What the model does where it was trained, which the other lines should come near.
    within = by_distance(model, text.at(inner[-1]), inner)
    figure = style.figure_of(9.5, 4.8)
    axes = figure.subplots()
    draw(axes, lines, within, trained=trained)
    title = f"{Path(args.model).name}: attention of the last {QUERIES} of {length} tokens"
    axes.set_title(title, **style.TITLE)
    style.legend_below(figure, axes)
    figure.savefig(args.output, dpi=130, metadata={"Software": style.MARK})
    print(f"wrote {args.output}")


def draw(axes: Any, lines: dict[str, Shares], within: Shares, trained: int) -> None:
    """Plot shares by distance relative to uniform attention; the unpatched model comes first."""
    edges = lines["unpatched"].edges
    borders = [max(edge, 0.5) for edge in edges]  # the first bin is the token itself
    places = [math.sqrt(low * high) for low, high in pairwise(borders)]
    for place, (name, found) in enumerate(lines.items()):
        label = f"{name}: {found.first.mean():.0%} on the first {FIRST} tokens"
        if trained < edges[-1]:
            beyond = found.shares[:, edges.index(trained) :].sum(1).mean()
            label += f", {beyond:.0%} beyond {trained}"
        look = style.style_of(place - 1) if place else style.UNPATCHED_STYLE
        axes.plot(places, found.shares.mean(0).tolist(), label=label, **look)
    values = within.shares.mean(0).tolist()
    axes.plot(places[: len(values)], values, label=f"unpatched at {within.edges[-1]} tokens",
              color="#333333", linestyle=":", zorder=1)  # fmt: skip
    axes.stairs(evenly(edges).tolist(), borders, fill=True, label="uniform attention",
                color="#eeeeee", zorder=0)  # fmt: skip
    axes.set(xscale="log", xlim=(borders[0], borders[-1]), xlabel="distance, tokens")
    axes.set_ylabel("share of attention between two ticks,\nmean over layers and heads")
    axes.set_xticks(borders, [str(edge) for edge in edges], rotation=45)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(style.ticker().PercentFormatter(1, decimals=0))
    style.bare(axes)
    style.mark_trained(axes, [trained], edges[-1])


if __name__ == "__main__":
    with clean_errors():
        main()
