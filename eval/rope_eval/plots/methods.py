"""Draws each plot into given axes: one line per method, the unpatched model first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch

from rope_eval.plots.attention import FIRST, Resultants, Shares, evenly
from rope_eval.plots.numbers import (
    by_pair,
    decay_at,
    frequencies,
    largest_angles,
    rotates,
    used_distances,
)
from rope_eval.plots.style import UNPATCHED_STYLE, mark_trained, style_of, ticker
from rope_ext.encodings import Encoding
from rope_ext.methods import Method, Rope

_POINTS = 4096  # points of a line by distance; more would not be visible
_MARKS = 12  # markers on a line
_BINS = 4  # distance bins per octave
_TICKS = 18  # labelled ticks; if there are more, every other one is labelled
_LEAST = -100.0  # nats: below this, no attention weight is left
_MET: dict[str, Any] = {"color": "#dfe8dc", "linewidth": 0, "zorder": 0}

TRAINED = "within the trained length"
"""Label of the unpatched model within its trained length."""

Biases = Callable[[Encoding, torch.Tensor], tuple[torch.Tensor, str]]
"""Maps an encoding and distances ``[n]`` to biases ``[heads of all layers, n]`` and a note."""

Lines = Mapping[str, Method | None]
"""The methods by legend label; None is the unpatched model."""


def spectrum(axes: Any, rope: Rope, methods: Lines, length: int) -> None:
    """Plot the frequency of every pair, with its wavelength on the right axis."""
    for label, method in methods.items():
        values = frequencies(rope, method, length)
        rest = int((values == 0).sum())
        values = values.where(values > 0, math.nan)
        _line(axes, methods, label, range(len(values)), values, f", {rest} at rest" * (rest > 0))
    turn = 2 * math.pi / rope.length
    axes.axhline(turn, color="#777777", linewidth=1, zorder=0)
    axes.annotate(f"one rotation in the trained {rope.length} tokens", (0, turn), (2, -3),
                  textcoords="offset points", va="top", fontsize=8, color="#555555")  # fmt: skip
    axes.set(yscale="log", xlabel="rotary pair, fastest first", ylabel="frequency, radians / token")
    right = axes.secondary_yaxis("right", functions=(_inverse, _inverse))
    right.set_ylabel("wavelength, tokens")


def angles(axes: Any, rope: Rope, methods: Lines, length: int) -> None:
    """Plot the largest angle of each pair at ``length`` tokens, over those seen in training."""
    for label, method in methods.items():
        values = largest_angles(rope, method, length)
        values = values.where(values > 0, math.nan)
        _line(axes, methods, label, range(len(values)), values)
    bottom, top = axes.dataLim.intervaly
    bottom, top = bottom / 3, 2 * top
    trained = rope.length * rope.inv_freq
    seen = trained.where(rope.rotations < 1, top)  # a full rotation covers every angle
    met = f"seen in training ({rope.length} tokens; all angles after a full rotation)"
    axes.fill_between(range(len(seen)), bottom, seen, label=met, **_MET)
    axes.set(yscale="log", ylim=(bottom, top), xlabel="rotary pair, fastest first")
    axes.set_ylabel(f"largest angle within {length} tokens, radians")


def decay(axes: Any, rope: Rope, methods: Lines, length: int) -> None:
    """Plot ``g`` by distance for methods that rotate."""
    distance, bins, places = _nearby(length)
    for label, method in methods.items():
        if not rotates(rope, method):
            continue
        values = decay_at(rope, method, length, distance)
        parts = values.split(bins)
        means = torch.stack([part.mean() for part in parts])
        colour = _line(axes, methods, label, places, means, _gap(values))
        low, high = ([float(of(part)) for part in parts] for of in (torch.min, torch.max))
        axes.fill_between(places, low, high, color=colour, alpha=0.1, linewidth=0)
    axes.axhline(0, color="#777777", linewidth=0.8, zorder=0)
    axes.set(xscale="log", xlabel="distance x, tokens (shaded: lowest to highest nearby)")
    axes.set_ylabel("g(x) = 2 \u03a3 cos(x \u03b8), mean nearby")
    _octave_ticks(axes)
    mark_trained(axes, [rope.length], length)


def biases(axes: Any, rope: Rope, methods: Lines, length: int, added: Biases) -> None:
    """Plot the bias of encodings by distance: the median head, and the range of all heads."""
    distance, bins, places = _nearby(length)
    for label, method in methods.items():
        if not isinstance(method, Encoding) or rotates(rope, method):
            continue
        heads, more = added(method, distance)
        parts = heads.split(bins, 1)
        middle = torch.stack([part.mean(1).median() for part in parts])
        colour = _line(axes, methods, label, places, middle, more)
        low, high = ([float(of(part)) for part in parts] for of in (torch.min, torch.max))
        axes.fill_between(places, low, high, color=colour, alpha=0.1, linewidth=0)
    axes.axhline(0, color="#777777", linewidth=0.8, zorder=0)
    axes.axhline(-math.log(1000), color="#777777", linewidth=0.8, linestyle=":", zorder=0)
    axes.annotate("1/1000 of the weight", (0.01, -math.log(1000)), (0, -2),
                  xycoords=axes.get_yaxis_transform(), textcoords="offset points", va="top",
                  fontsize=8, color="#555555")  # fmt: skip
    axes.set(xscale="log", xlabel="distance x, tokens (line: median head; shaded: all heads)")
    bottom, top = axes.dataLim.intervaly
    axes.set_yscale("symlog", linthresh=1)
    axes.set(ylim=(max(1.3 * bottom, _LEAST), max(1.3 * top, 0.3)))
    axes.yaxis.set_major_formatter(ticker().FormatStrFormatter("%g"))
    axes.set_ylabel("added to the logit, nats")
    _octave_ticks(axes)
    mark_trained(axes, [rope.length], length)


def weighted_decay(axes: Any, rope: Rope, methods: Lines, length: int, weights: Resultants) -> None:
    """Plot the logits of mean queries and keys by distance, averaged over heads.

    As in ``decay``, scalings of the logits are left out, since they only multiply a whole line.
    """
    distance, bins, places = _nearby(length)
    for label, method in methods.items():
        used = used_distances(rope, method, length, distance)
        heads = weights.logits(used, frequencies(rope, method, length))
        near = torch.stack([part.mean(1) for part in heads.split(bins, 1)], 1)
        colour = _line(axes, methods, label, places, near.mean(0), _gap(used))
        if method is None:
            low, high = (near.quantile(share, 0).tolist() for share in (0.25, 0.75))
            axes.fill_between(places, low, high, color=colour, alpha=0.1, linewidth=0,
                              label=f"{label}, the middle half of the heads")  # fmt: skip
    axes.axhline(0, color="#777777", linewidth=0.8, zorder=0)
    of_query, of_key = (float(part.nanmean()) for part in (weights.query, weights.key))
    alike = f"mean resultant length: queries {of_query:.2f}, keys {of_key:.2f} (1: all parallel)"
    axes.set(xscale="log", xlabel=f"distance x, tokens\n{alike}")
    axes.set_ylabel("logit of mean query and key,\nmean over heads and nearby")
    _octave_ticks(axes)
    mark_trained(axes, [rope.length], length)


def attention(
    axes: Any, rope: Rope, methods: Lines, length: int, shares: Mapping[str, Shares]
) -> None:
    """Plot shares of attention by octave of distance, over those of uniform attention."""
    edges = shares["unpatched"].edges
    borders = [max(edge, 0.5) for edge in edges]  # the first bin is the token itself
    places = [math.sqrt(low * high) for low, high in pairwise(borders)]
    for label in methods:
        found = shares[label]
        more = f": {found.first.mean():.0%} on the first {FIRST} tokens"
        if rope.length < length:
            beyond = found.shares[:, edges.index(rope.length) :].sum(1).mean()
            more += f", {beyond:.0%} beyond {rope.length}"
        _line(axes, methods, label, places, found.shares.mean(0), more)
    if TRAINED in shares:
        values = shares[TRAINED].shares.mean(0).tolist()
        axes.plot(places[: len(values)], values, label=f"unpatched at {rope.length} tokens",
                  color="#333333", linestyle=":", linewidth=1.5, zorder=1)  # fmt: skip
    even = "uniform attention"
    axes.stairs(evenly(edges).tolist(), borders, fill=True, label=even, color="#eeeeee", zorder=0)
    axes.set(xscale="log", xlim=(borders[0], borders[-1]), xlabel="distance, tokens")
    axes.set_ylabel("share of attention between two ticks,\nmean over layers and heads")
    axes.set_xticks(borders, [str(edge) for edge in edges])
    for tick in axes.get_xticklabels()[len(edges) % 2 :: 2] if len(edges) > _TICKS else ():
        tick.set_visible(False)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(ticker().PercentFormatter(1, decimals=0))
    mark_trained(axes, [rope.length], length)


def distances(axes: Any, rope: Rope, methods: Lines, length: int) -> None:
    """Plot the distance that a method uses by true distance, from the last token."""
    distance = torch.linspace(
        0, length - 1, min(length, _POINTS), dtype=torch.float64, device="cpu"
    ).round()
    highest = rope.length
    for label, method in methods.items():
        used = by_pair(used_distances(rope, method, length, distance))
        low, high = used.amin(1), used.amax(1)
        several = ", of all pairs (shaded)" if used.shape[1] > 1 else ""
        colour = _line(axes, methods, label, distance, high, several + _gap(used))
        axes.fill_between(distance.tolist(), low.tolist(), high.tolist(), color=colour, alpha=0.1,
                          linewidth=0)  # fmt: skip
        if method is not None:
            highest = max(highest, float(used.nan_to_num(nan=0).max()))
    axes.axhspan(0, rope.length, label=f"seen in training ({rope.length} tokens)", **_MET)
    axes.set(ylim=(0, 1.1 * highest), xlim=(0, length))
    axes.ticklabel_format(style="plain")
    axes.set(xlabel="distance from the last token, tokens", ylabel="effective distance, tokens")
    mark_trained(axes, [rope.length], length)


def _line(axes: Any, lines: Lines, label: str, x: Any, y: torch.Tensor, more: str = "") -> str:
    """Draw a line, earlier methods on top, with shifted markers. Returns its color."""
    place = list(lines).index(label)
    style = UNPATCHED_STYLE if place == 0 else style_of(place - 1)
    step = max(len(lines), len(y) // _MARKS)
    marks = (place * step // len(lines), step)
    [line] = axes.plot(x, y.tolist(), label=label + more, linewidth=1.5, markersize=5,
                       markevery=marks, zorder=3 - place / len(lines), **style)  # fmt: skip
    return line.get_color()


def _gap(values: torch.Tensor) -> str:
    return ", gap: hidden" if values.isnan().any() else ""


def _nearby(length: int) -> tuple[torch.Tensor, list[int], list[float]]:
    """All distances, the sizes of their bins, and where each bin is drawn."""
    distance = torch.logspace(
        0, math.log2(max(length - 1, 1)), _POINTS, 2, dtype=torch.float64, device="cpu"
    )
    distance = distance.round().unique()
    # Fast pairs oscillate every few tokens, so raw lines would hide each other.
    _, sizes = (_BINS * distance.log2()).floor().unique_consecutive(return_counts=True)
    bins = sizes.tolist()
    return distance, bins, [float(part.mean()) for part in distance.split(bins)]


def _octave_ticks(axes: Any) -> None:
    axes.xaxis.set_major_locator(ticker().LogLocator(base=2, numticks=14))
    axes.xaxis.set_major_formatter(ticker().FormatStrFormatter("%d"))
    axes.minorticks_off()


def _inverse(value: Any) -> Any:
    """Convert frequency to wavelength, or back."""
    import numpy

    with numpy.errstate(divide="ignore"):
        return 2 * math.pi / value
