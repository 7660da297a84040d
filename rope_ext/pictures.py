"""Pictures of what methods do: one line per method, and the unpatched model dashed.

Drawn from a configuration alone. Numbers first, each from a trained embedding and a method (None:
unpatched); drawing below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from rope_ext.advice import (
    distances_in_use,
    frequencies_at,
    model_of,
    require_length,
)
from rope_ext.discovery import text_decoder
from rope_ext.drawing import (
    UNPATCHED_STYLE,
    bare,
    figure_of,
    mark_trained,
    require_matplotlib,
    style_of,
    ticker,
)
from rope_ext.errors import OptionError, nearest
from rope_ext.methods import FrequencyMethod, Method, PositionMethod, Rope
from rope_ext.patching import first_site, refuse_scaled
from rope_ext.records import option_texts

_CHARACTERS = 150  # that fit into a line of the legend
_POINTS = 4096  # of a line by distance: more would not be seen
_MARKS = 12  # markers on a line
_BINS = 4  # of distances, to an octave
_MET: dict[str, Any] = {"color": "#dfe8dc", "linewidth": 0, "zorder": 0}

Lines = Mapping[str, Method | None]


def frequencies(rope: Rope, method: Method | None, length: int) -> torch.Tensor:
    """Radians per token of every pair in a sequence of ``length`` tokens: float64, ``[pairs]``."""
    if isinstance(method, FrequencyMethod):
        return frequencies_at(rope, method, length)
    return rope.inv_freq


def largest_angles(rope: Rope, method: Method | None, length: int) -> torch.Tensor:
    """Radians of every pair at the end of ``length`` tokens, as ``diagnose`` counts them.

    Under a position method, at the largest distance in use. Float64, ``[pairs]``.
    """
    end = float(length)
    if isinstance(method, PositionMethod):
        end = distances_in_use(method.resolved(rope).bands(), length)
    return end * frequencies(rope, method, length)


def used_distances(
    rope: Rope, method: Method | None, length: int, distance: torch.Tensor
) -> torch.Tensor:
    """The distances that the last of ``length`` tokens uses in place of the real ones.

    Args:
        rope: the trained embedding.
        method: frequency methods leave distances alone.
        length: tokens.
        distance: from the last token back, whole numbers below ``length``; float64, ``[n]``.

    Returns:
        Tokens, ``[n]``; NaN where a method hides the token.
    """
    if not isinstance(method, PositionMethod):
        return distance
    query = torch.full_like(distance, length - 1)
    used = torch.full_like(distance, math.nan)
    for band in method.resolved(rope).bands():
        found = band.distances(query, query - distance)
        used = torch.where(found.isnan(), used, found)
    return used


def decay_at(
    rope: Rope, method: Method | None, length: int, distance: torch.Tensor
) -> torch.Tensor:
    """``g(x) = 2 sum_i cos(x theta_i)``: q.k of vectors of ones, ``distance`` (``[n]``) apart.

    Su et al. 2021, arXiv 2104.09864, section 3.4.3, without its bound. Scalings of the logits
    (YaRN's temperature, ReRoPE's log n), which multiply whole lines, are left out.
    """
    used = used_distances(rope, method, length, distance)
    return 2 * (used.unsqueeze(-1) * frequencies(rope, method, length)).cos().sum(-1)


def spectrum(axes: Any, rope: Rope, methods: Lines, length: int) -> None:
    """Frequency of every pair, and its wavelength on the right."""
    for label, method in methods.items():
        values = frequencies(rope, method, length)
        rest = int((values == 0).sum())
        values = values.where(values > 0, math.nan)
        _line(axes, methods, label, range(len(values)), values, f", {rest} at rest" * (rest > 0))
    turn = 2 * math.pi / rope.length
    axes.axhline(turn, color="#777777", linewidth=1, zorder=0)
    axes.annotate(f"one turn in the trained {rope.length} tokens", (0, turn), (2, -3),
                  textcoords="offset points", va="top", fontsize=8, color="#555555")  # fmt: skip
    axes.set(yscale="log", xlabel="rotary pair, fastest first", ylabel="frequency, radians / token")
    right = axes.secondary_yaxis("right", functions=(_inverse, _inverse))
    right.set_ylabel("wavelength, tokens")


def angles(axes: Any, rope: Rope, methods: Lines, length: int) -> None:
    """Largest angle of every pair at ``length`` tokens, over the angles met in training."""
    for label, method in methods.items():
        values = largest_angles(rope, method, length)
        values = values.where(values > 0, math.nan)
        _line(axes, methods, label, range(len(values)), values)
    bottom, top = axes.dataLim.intervaly
    bottom, top = bottom / 3, 2 * top
    trained = rope.length * rope.inv_freq
    seen = trained.where(rope.rotations < 1, top)  # a full turn meets every angle there is
    met = f"met in training ({rope.length} tokens; after a full turn, all)"
    axes.fill_between(range(len(seen)), bottom, seen, label=met, **_MET)
    axes.set(yscale="log", ylim=(bottom, top), xlabel="rotary pair, fastest first")
    axes.set_ylabel(f"largest angle within {length} tokens, radians")


def decay(axes: Any, rope: Rope, methods: Lines, length: int) -> None:
    """``g`` by distance."""
    distance = torch.logspace(0, math.log2(max(length - 1, 1)), _POINTS, 2, dtype=torch.float64)
    distance = distance.round().unique()
    # The fast pairs swing with every few tokens: raw lines would hide each other.
    _, sizes = (_BINS * distance.log2()).floor().unique_consecutive(return_counts=True)
    bins = sizes.tolist()
    places = [float(part.mean()) for part in distance.split(bins)]
    for label, method in methods.items():
        values = decay_at(rope, method, length, distance)
        parts = values.split(bins)
        means = torch.stack([part.mean() for part in parts])
        colour = _line(axes, methods, label, places, means, _gap(values))
        low, high = ([float(of(part)) for part in parts] for of in (torch.min, torch.max))
        axes.fill_between(places, low, high, color=colour, alpha=0.1, linewidth=0)
    axes.axhline(0, color="#777777", linewidth=0.8, zorder=0)
    axes.set(xscale="log", xlabel="distance x, tokens (shaded: lowest to highest nearby)")
    axes.set_ylabel("g(x) = 2 \u03a3 cos(x \u03b8), mean nearby")
    axes.xaxis.set_major_locator(ticker().LogLocator(base=2, numticks=14))
    axes.xaxis.set_major_formatter(ticker().FormatStrFormatter("%d"))
    axes.minorticks_off()
    mark_trained(axes, [rope.length], length)


def distances(axes: Any, rope: Rope, methods: Lines, length: int) -> None:
    """Distance in use by distance, from the last token."""
    distance = torch.linspace(0, length - 1, min(length, _POINTS), dtype=torch.float64).round()
    highest = rope.length
    for label, method in methods.items():
        used = used_distances(rope, method, length, distance)
        _line(axes, methods, label, distance, used, _gap(used))
        if method is not None:
            highest = max(highest, float(used.nan_to_num(nan=0).max()))
    axes.axhspan(0, rope.length, label=f"met in training ({rope.length} tokens)", **_MET)
    axes.set(ylim=(0, 1.1 * highest), xlim=(0, length))
    axes.ticklabel_format(style="plain")
    axes.set(xlabel="distance, tokens (from the last one back)", ylabel="distance used, tokens")
    mark_trained(axes, [rope.length], length)


KINDS: dict[str, tuple[Callable[[Any, Rope, Lines, int], None], type[Method], str]] = {
    "spectrum": (spectrum, FrequencyMethod, "frequency of every rotary pair"),
    "angles": (angles, Method, "largest angle of every rotary pair"),
    "decay": (decay, Method, "long-range decay, q\u00b7k of vectors of ones"),
    "distances": (distances, PositionMethod, "distances in use"),
}
"""Of each picture: what draws it, the methods that it can show, and what is in its title."""


def draw(
    kind: str,
    model: nn.Module | PreTrainedConfig | str | Path,
    methods: Sequence[Method],
    path: Path,
    length: int | None = None,
    compose: bool = False,
) -> None:
    """One picture of several methods as a PNG.

    Of a model with sliding layers, the frequencies of its other layers are drawn.

    Args:
        kind: ``spectrum`` of frequencies, largest ``angles`` against those of training, ``decay``
            of q.k by distance, ``distances`` that position methods use in place of the real ones.
        model: loaded and unpatched, or a configuration, folder or Hub id; not changed.
        methods: any for angles and decay, frequency methods for spectrum, position methods for
            distances.
        path: of the PNG.
        length: tokens; by default, the longest that the methods reach.
        compose: draw frequency methods on top of a checkpoint that is scaled already.

    Raises:
        OptionError: an unknown kind, a method that it cannot show, a path or length of no use, or
            options that do not go with the model.
        MeasureError: matplotlib is not installed, or the configuration cannot be loaded.
        AlreadyPatchedError: the model carries a patch.
        NoRopeError, UnsupportedModelError, AlreadyScaledError: as :func:`rope_ext.patch`.
    """
    path = Path(path)
    if kind not in KINDS:
        raise OptionError(
            f"unknown picture {kind!r}{nearest(kind, KINDS) or '.'} Pictures: {', '.join(KINDS)}"
        )
    drawn, shown, title = KINDS[kind]
    for method in methods:
        if not isinstance(method, shown):
            raise OptionError(_cure(kind, method))
    if path.suffix.lower() != ".png" or not path.parent.is_dir():
        raise OptionError(f"cannot write {path}; give a .png file in a folder that exists")
    require_matplotlib()
    built = model_of(model)
    decoder, site = text_decoder(built), first_site(built)
    rope, lines = site.rope, {"unpatched": None}
    factors = sorted({float(method.factor) for method in methods})
    for method in methods:
        if isinstance(method, FrequencyMethod):
            refuse_scaled(decoder, site, method, compose)
        full = method.resolved(rope) if isinstance(method, PositionMethod) else method
        lines[_label(full, factor=len(factors) > 1)] = full
    if length is None:
        length = max([rope.length, *(method.target_length(rope) for method in methods)])
    require_length("length", length)

    figure = figure_of(9.5, 4.8)
    axes = figure.subplots()
    drawn(axes, rope, lines, length)
    bare(axes)
    name = Path(model).name if isinstance(model, (str, Path)) else type(decoder).__name__
    by = f", factor {factors[0]:g}" if len(factors) == 1 else ""
    axes.set_title(f"{name} at {length} tokens{by}: {title}", loc="left", fontsize=11)
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, min(4, _CHARACTERS // (8 + max(map(len, labels)))))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8.5,
                  frameon=False)  # fmt: skip
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise OptionError(f"cannot write {path} ({error}); give another file") from error


def _label(method: Method, factor: bool) -> str:
    texts = [text for text in option_texts(method) if factor or not text.startswith("factor=")]
    return f"{method.name} ({', '.join(texts)})" if texts else method.name


def _cure(kind: str, method: Method) -> str:
    moves = isinstance(method, PositionMethod)
    why = (
        "uses other distances and leaves the frequencies as they are"
        if moves
        else "changes frequencies and leaves distances as they are"
    )
    return (
        f"{method.name} {why}, so {kind} has nothing to show of it; draw "
        f"{'distances' if moves else 'spectrum'}, angles or decay, or leave {method.name} out"
    )


def _line(axes: Any, lines: Lines, label: str, x: Any, y: torch.Tensor, more: str = "") -> str:
    """A line, the first method on top; markers beside those of others. Returns its colour."""
    place = list(lines).index(label)
    style = UNPATCHED_STYLE if place == 0 else style_of(place - 1)
    step = max(len(lines), len(y) // _MARKS)
    marks = (place * step // len(lines), step)
    [line] = axes.plot(x, y.tolist(), label=label + more, linewidth=1.5, markersize=5,
                       markevery=marks, zorder=3 - place / len(lines), **style)  # fmt: skip
    return line.get_color()


def _gap(values: torch.Tensor) -> str:
    return ", gap: not seen" if values.isnan().any() else ""


def _inverse(value: Any) -> Any:
    """Frequency to wavelength, and back."""
    import numpy

    with numpy.errstate(divide="ignore"):
        return 2 * math.pi / value
