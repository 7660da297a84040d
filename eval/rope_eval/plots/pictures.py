"""Plots of what methods do: one line per method, and the unpatched model dashed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from rope_eval.plots import style
from rope_ext.advice.describe import require_length
from rope_ext.apply.method import refuse_scaled
from rope_ext.config.record import option_texts
from rope_ext.encodings import Encoding, Heads
from rope_ext.encodings.base import Block
from rope_ext.encodings.rotation import RoPE
from rope_ext.errors import OptionError, nearest
from rope_ext.methods import FrequencyMethod, Method, Rope
from rope_ext.patching import first_site
from rope_ext.rotary.sites import text_config, text_decoder
from rope_ext.saving.folder import model_of

_CHARACTERS = 150  # maximum characters in a legend line
_ROTATING = ("frequency", "position", "rotation")
_POINTS = 4096  # points of a line by distance; more would not be visible
_MARKS = 12  # markers on a line
_BINS = 4  # distance bins per octave
_LEAST = -100.0  # nats: below this, no attention weight is left
_MET: dict[str, Any] = {"color": "#dfe8dc", "linewidth": 0, "zorder": 0}
_THIN: dict[str, Any] = {"color": "#777777", "linewidth": 0.8, "zorder": 0}

Lines = Mapping[str, Method]
"""Methods by legend label; the first is the unpatched model, RoPE as trained."""


def spectrum(axes: Any, rope: Rope, methods: Lines, length: int) -> None:
    """Plot the frequency of every pair, with its wavelength on the right axis."""
    for label, method in methods.items():
        values = method.frequencies(rope, length)
        # Pairs at rest have no place on a logarithmic axis; the legend counts them.
        rest = int((values == 0).sum())
        values = values.where(values > 0, math.nan)
        _line(
            axes,
            lines=methods,
            label=label,
            x=range(len(values)),
            y=values,
            more=f", {rest} at rest" if rest else "",
        )
    turn = 2 * math.pi / rope.length
    axes.axhline(turn, **_THIN)
    axes.annotate(f"one rotation in the trained {rope.length} tokens", (0, turn), (2, -3),
                  textcoords="offset points", va="top", fontsize=8, color="#555555")  # fmt: skip
    axes.set(yscale="log", xlabel="rotary pair, fastest first", ylabel="frequency, radians / token")
    right = axes.secondary_yaxis("right", functions=(_inverse, _inverse))
    right.set_ylabel("wavelength, tokens")


def angles(axes: Any, rope: Rope, methods: Lines, length: int) -> None:
    """Plot the largest angle of each pair at ``length`` tokens, over those seen in training."""
    for label, method in methods.items():
        values = method.span(rope, length) * method.frequencies(rope, length)
        _line(
            axes,
            lines=methods,
            label=label,
            x=range(len(values)),
            y=values.where(values > 0, math.nan),
        )
    bottom, top = axes.dataLim.intervaly
    bottom = bottom / 3
    top = 2 * top
    trained = rope.length * rope.inv_freq
    seen = trained.where(rope.rotations < 1, top)  # a full rotation covers every angle
    met = f"seen in training ({rope.length} tokens; all angles after a full rotation)"
    axes.fill_between(range(len(seen)), bottom, seen, label=met, **_MET)
    axes.set(yscale="log", ylim=(bottom, top), xlabel="rotary pair, fastest first")
    axes.set_ylabel(f"largest angle within {length} tokens, radians")


def decay(axes: Any, rope: Rope, methods: Lines, length: int) -> None:
    """Plot :func:`decay_at` by distance, for methods that rotate: means, and ranges nearby."""
    distance, bins, places = _nearby(length)
    for label, method in methods.items():
        if rotates(rope, method):
            values = decay_at(rope, method, length, distance=distance)
            parts = values.split(bins)
            means = torch.stack([part.mean() for part in parts])
            colour = _line(axes, lines=methods, label=label, x=places, y=means, more=_gap(values))
            _shade(axes, places, parts, colour=colour)
    _by_distance(axes, rope, length, label="tokens (shaded: lowest to highest nearby)")
    axes.set_ylabel("g(x) = 2 \u03a3 cos(x \u03b8), mean nearby")


def biases(axes: Any, rope: Rope, methods: Lines, length: int, heads: int) -> None:
    """Plot the bias of encodings by distance: the median head, and the range of all heads."""
    distance, bins, places = _nearby(length)
    for label, method in methods.items():
        if isinstance(method, Encoding) and not rotates(rope, method):
            bias = bias_at(rope, encoding=method, heads=heads, length=length, distance=distance)
            parts = bias.split(bins, 1)
            middle = torch.stack([part.mean(1).median() for part in parts])
            is_learned = bool(method.initial(Heads(heads, rope.dim, rope.dim)))
            more = ", untrained" if is_learned else ""
            colour = _line(axes, lines=methods, label=label, x=places, y=middle, more=more)
            _shade(axes, places, parts, colour=colour)
    axes.axhline(-math.log(1000), linestyle=":", **_THIN)
    axes.annotate("1/1000 of the weight", (0.01, -math.log(1000)), (0, -2),
                  xycoords=axes.get_yaxis_transform(), textcoords="offset points", va="top",
                  fontsize=8, color="#555555")  # fmt: skip
    _by_distance(axes, rope, length, label="tokens (line: median head; shaded: all heads)")
    bottom, top = axes.dataLim.intervaly
    axes.set_yscale("symlog", linthresh=1)
    axes.set(ylim=(max(1.3 * bottom, _LEAST), max(1.3 * top, 0.3)))
    axes.yaxis.set_major_formatter(style.ticker().FormatStrFormatter("%g"))
    axes.set_ylabel("added to the logit, nats")


def distances(axes: Any, rope: Rope, methods: Lines, length: int) -> None:
    """Plot the distance that a method uses by true distance, from the last token."""
    distance = torch.linspace(0, length - 1, min(length, _POINTS), dtype=torch.float64).round()
    highest = rope.length
    for number, (label, method) in enumerate(methods.items()):
        used = _by_pair(method.distances(rope, length, distance))
        several = ", of all pairs (shaded)" if used.shape[1] > 1 else ""
        colour = _line(
            axes, lines=methods, label=label, x=distance, y=used.amax(1), more=several + _gap(used)
        )
        _shade(axes, places=distance.tolist(), parts=list(used), colour=colour)
        if number:
            highest = max(highest, float(used.nan_to_num(nan=0).max()))
    axes.axhspan(0, rope.length, label=f"seen in training ({rope.length} tokens)", **_MET)
    axes.set(ylim=(0, 1.1 * highest), xlim=(0, length))
    axes.ticklabel_format(style="plain")
    axes.set(xlabel="distance from the last token, tokens", ylabel="effective distance, tokens")
    style.mark_trained(axes, [rope.length], length)


def decay_at(rope: Rope, method: Method, length: int, distance: torch.Tensor) -> torch.Tensor:
    """``g(x) = 2 sum_i cos(x theta_i)``: q.k of two vectors of ones at ``distance`` ``[n]``.

    Su et al. 2021, arXiv 2104.09864, section 3.4.3, without its bound. Scalings of the logits
    (YaRN's temperature, ReRoPE's log n) are left out, since they only multiply a whole line.
    """
    used = _by_pair(method.distances(rope, length, distance))
    angles = used * method.frequencies(rope, length)
    if not isinstance(method, Encoding):
        return 2 * angles.cos().sum(-1)
    query = method.phase(torch.full_like(distance, length - 1))
    key = method.phase(length - 1 - distance)
    if query is not None and key is not None:
        angles = angles + query[:, None] - key[:, None]
    growth = method.growth(angles.shape[1])
    fading = 1.0 if growth is None else torch.exp(distance[:, None] * growth)
    return 2 * (fading * angles.cos()).sum(-1)


def rotates(rope: Rope, method: Method) -> bool:
    """Whether the rotation of queries and keys depends on their position."""
    one = torch.ones(1, dtype=torch.float64)
    return not isinstance(method, Encoding) or bool((method.distances(rope, 2, one) != 0).any())


def bias_at(
    rope: Rope, encoding: Encoding, heads: int, length: int, distance: torch.Tensor
) -> torch.Tensor:
    """The bias that an encoding adds to the logits of the last token, in nats: ``[heads, n]``.

    ``distance`` contains integers below ``length``, as float64, ``[n]``; learned parameters are
    initialized with seed 0.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        learned = encoding.initial(Heads(heads, rope.dim, rope.dim))
    if (encoding.scored() and not encoding.adds()) or encoding.computes_positions():
        raise OptionError(
            f"the logits of {encoding.name} depend on queries and keys; leave {encoding.name} out"
        )
    with torch.no_grad():
        if encoding.scored():
            last = torch.tensor([length - 1])
            nothing = torch.zeros(1, heads, 1, len(distance), dtype=torch.float64)
            block = Block(
                query=nothing[..., :0],
                key=nothing[..., :0],
                content=nothing,
                query_at=last,
                key_at=last - distance.long(),
                visible=torch.ones_like(nothing, dtype=torch.bool),
                scale=1.0,
            )
            return encoding.logits(block, learned)[0, :, 0]
        every = torch.arange(int(distance.max()) + 1, dtype=torch.float64)
        values = encoding.bias(every, heads, learned)
    return distance.new_zeros(1, len(distance)) if values is None else values[:, distance.long()]


def _by_pair(used: torch.Tensor) -> torch.Tensor:
    """Return distances with a dimension for pairs, ``[n, 1 or pairs]``; NaN for masked tokens."""
    return used if used.ndim == 2 else used.unsqueeze(-1)


def _line(axes: Any, lines: Lines, label: str, x: Any, y: torch.Tensor, more: str = "") -> str:
    """Draw a line, earlier methods on top, with shifted markers. Returns its color."""
    place = list(lines).index(label)
    look = style.UNPATCHED_STYLE if place == 0 else style.style_of(place - 1)
    step = max(len(lines), len(y) // _MARKS)
    marks = (place * step // len(lines), step)
    [line] = axes.plot(x, y.tolist(), label=label + more, linewidth=1.5, markersize=5,
                       markevery=marks, zorder=3 - place / len(lines), **look)  # fmt: skip
    return line.get_color()


def _shade(axes: Any, places: Any, parts: Sequence[torch.Tensor], colour: str) -> None:
    low, high = ([float(of(part)) for part in parts] for of in (torch.min, torch.max))
    axes.fill_between(places, low, high, color=colour, alpha=0.1, linewidth=0)


def _gap(values: torch.Tensor) -> str:
    return ", gap: hidden" if values.isnan().any() else ""


def _nearby(length: int) -> tuple[torch.Tensor, list[int], list[float]]:
    """Return all distances, the sizes of their bins, and the position of each bin."""
    end = math.log2(max(length - 1, 1))
    distance = torch.logspace(0, end, _POINTS, 2, dtype=torch.float64).round().unique()
    # Fast pairs oscillate every few tokens, so raw lines would hide each other.
    _, sizes = (_BINS * distance.log2()).floor().unique_consecutive(return_counts=True)
    bins = sizes.tolist()
    return distance, bins, [float(part.mean()) for part in distance.split(bins)]


def _by_distance(axes: Any, rope: Rope, length: int, label: str) -> None:
    axes.axhline(0, **_THIN)
    axes.set(xscale="log", xlabel=f"distance x, {label}")
    axes.xaxis.set_major_locator(style.ticker().LogLocator(base=2, numticks=14))
    axes.xaxis.set_major_formatter(style.ticker().FormatStrFormatter("%d"))
    axes.minorticks_off()
    style.mark_trained(axes, [rope.length], length)


def _inverse(value: Any) -> Any:
    import numpy

    with numpy.errstate(divide="ignore"):
        return 2 * math.pi / value


KINDS: dict[str, tuple[Callable[..., None], tuple[str, ...], str]] = {
    "spectrum": (spectrum, ("frequency",), "frequency of every rotary pair"),
    "angles": (angles, _ROTATING, "largest angle of every rotary pair"),
    "decay": (decay, (), "long-range decay, q\u00b7k of vectors of ones"),
    "distances": (distances, ("position",), "effective distances"),
}
"""For each kind of plot: its function, supported kinds of methods (none: all), and title."""


def draw(
    kind: str,
    model: nn.Module | PreTrainedConfig | str | Path,
    shown: Sequence[Method],
    path: Path,
    length: int | None = None,
    compose: bool | str = False,
    trained_length: int | None = None,
) -> None:
    """Plot several methods as a PNG; no weights are read.

    ``kind`` is one of ``KINDS``. For a model with sliding-window layers, the plot shows the other
    layers. ``length`` is in tokens, by default the longest target length of the methods;
    ``compose`` applies frequency methods on top of existing RoPE scaling. ``trained_length``, in
    tokens, overrides that of the configuration.

    Raises:
        RopeExtError: the kind is unknown or cannot show a method, the path or length is not valid,
            or matplotlib is not installed.
    """
    path = Path(path)
    _require_kind(kind, shown)
    style.require_png(path)
    style.require_matplotlib()
    built = model_of(model)
    decoder = text_decoder(built)
    site = first_site(built, length=trained_length)
    rope = site.rope
    for method in shown:
        if isinstance(method, FrequencyMethod):
            refuse_scaled(decoder, site, method, compose=compose)
    lines = _labelled(rope, shown)
    if length is None:
        length = max([rope.length, *(method.target_length(rope) for method in shown)])
    require_length("length", length)
    panel, _, title = KINDS[kind]
    # Encodings that do not rotate have no decay; their biases get a panel beside it.
    adding = kind == "decay" and not all(rotates(rope, method) for method in shown)
    figure = style.figure_of(13 if adding else 9.5, 4.8)
    axes, *beside = figure.subplots(1, 1 + adding, squeeze=False)[0]
    panel(axes, rope, lines, length)
    for other in beside:
        heads = text_config(decoder).num_attention_heads
        biases(other, rope, lines, length=length, heads=heads)
        style.bare(other)
        other.set_title("biases of encodings", **style.TITLE)
    style.bare(axes)
    name = Path(model).name if isinstance(model, (str, Path)) else type(decoder).__name__
    factors = _factors(shown)
    by = f", factor {factors[0]:g}" if len(factors) == 1 else ""
    axes.set_title(f"{style.literal(name)} at {length} tokens{by}: {title}", **style.TITLE)
    _add_legend(figure, (axes, *beside))
    try:
        figure.savefig(path, dpi=130, metadata={"Software": style.MARK})
    except OSError as error:
        raise OptionError(f"cannot write {path} ({error}); give another file") from error


def _require_kind(kind: str, shown: Sequence[Method]) -> None:
    """Raise OptionError if there is no such kind of plot, or it cannot show one of the methods."""
    if kind not in KINDS:
        raise OptionError(
            f"unknown picture {kind!r}{nearest(kind, KINDS) or '.'} Pictures: {', '.join(KINDS)}"
        )
    _, kinds, _ = KINDS[kind]
    for method in shown:
        if kinds and method.kind not in kinds:
            others = [k for k, (_, fits, _) in KINDS.items() if not fits or method.kind in fits]
            raise OptionError(
                f"{kind} cannot show {method.name}; plot {', '.join(others)}, or leave it out"
            )


def _factors(shown: Sequence[Method]) -> list[float]:
    return sorted({float(method.factor) for method in shown})


def _labelled(rope: Rope, shown: Sequence[Method]) -> dict[str, Method]:
    """Return the unpatched model and the methods with all their options, by legend label.

    A factor that all methods share is in the title of the plot, and in no label.
    """
    lines = dict[str, Method](unpatched=RoPE())
    several = len(_factors(shown)) > 1
    for method in shown:
        full = method.resolved(rope)
        texts = [one for one in option_texts(full) if several or not one.startswith("factor=")]
        lines[f"{full.name} ({', '.join(texts)})" if texts else full.name] = full
    return lines


def _add_legend(figure: Any, panels: Sequence[Any]) -> None:
    """Add one legend below all panels, in as many columns as its longest label allows."""
    handles = []
    labels = []
    for axes in panels:
        of_panel, texts = axes.get_legend_handles_labels()
        handles += of_panel
        labels += texts
    columns = max(1, min(4, _CHARACTERS // (8 + max(map(len, labels)))))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8.5,
                  frameon=False)  # fmt: skip
