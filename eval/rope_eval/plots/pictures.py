"""Plots of what methods do: one line per method, and the unpatched model dashed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from rope_eval.plots.attention import (
    QUERIES,
    Resultants,
    Shares,
    by_distance,
    choose_windows,
    octaves,
    resultants,
)
from rope_eval.plots.methods import (
    TRAINED,
    Biases,
    Lines,
    angles,
    attention,
    biases,
    decay,
    distances,
    spectrum,
    weighted_decay,
)
from rope_eval.plots.numbers import bias_at, rotates
from rope_eval.plots.style import TITLE, bare, figure_of, require_matplotlib
from rope_eval.tasks.perplexity import Windows
from rope_ext.advice.building import model_of, require_length
from rope_ext.apply.base import refuse_scaled
from rope_ext.config.record import option_texts
from rope_ext.encodings import Encoding, Heads
from rope_ext.errors import OptionError, nearest
from rope_ext.methods import FrequencyMethod, Method, Rope
from rope_ext.patching import first_site, patched
from rope_ext.position.learned import DistanceBias
from rope_ext.rotary.sites import text_config, text_decoder
from rope_ext.saving import checkpoints as models
from rope_ext.saving.load import from_pretrained

_CHARACTERS = 150  # characters in a line of the legend
_STRETCH = 4096  # tokens per window for mean queries and keys, at most the trained length


_ROTATING = ("frequency", "position", "rotation")


def _resultants(
    model: nn.Module, rope: Rope, methods: Lines, text: Windows, length: int, compose: bool | str
) -> Resultants:
    return resultants(model, text.at(length))


def _shares(
    model: nn.Module, rope: Rope, methods: Lines, text: Windows, length: int, compose: bool | str
) -> dict[str, Shares]:
    """Shares by label, and those of the unpatched model within its trained length."""
    edges, found = octaves(rope.length, length), {}
    for label, method in methods.items():
        under = nullcontext() if method is None else patched(model, method, compose=compose)
        with under:
            found[label] = by_distance(model, text.at(length), edges)
    if rope.length < length:
        inner = edges[: edges.index(rope.length) + 1]
        found[TRAINED] = by_distance(model, text.at(rope.length), inner)
    return found


@dataclass(frozen=True)
class Kind:
    """A kind of plot.

    Args:
        draw: takes axes, the trained embedding, the lines, the length, and the measurement.
        shows: kinds of methods that it can show; None for all.
        title: title of the plot.
        measure: measures the model on a text; None if the plot needs no weights.
        stretch: tokens per window of text, given the trained length and ``length``.
        beside: draws encodings without a rotation, in separate axes.
    """

    draw: Callable[..., None]
    shows: tuple[str, ...] | None
    title: str
    measure: Callable[..., Any] | None = None
    stretch: Callable[[int, int], int] = lambda trained, length: length
    beside: Callable[..., None] | None = None


KINDS = {
    "spectrum": Kind(spectrum, ("frequency",), "frequency of every rotary pair"),
    "angles": Kind(angles, _ROTATING, "largest angle of every rotary pair"),
    "decay": Kind(decay, None, "long-range decay, q\u00b7k of vectors of ones", beside=biases),
    "distances": Kind(distances, ("position",), "effective distances"),
    "weighted-decay": Kind(
        weighted_decay,
        _ROTATING,
        "long-range decay of its mean queries and keys",
        _resultants,
        lambda trained, length: min(trained, _STRETCH),
    ),
    "attention": Kind(attention, None, f"attention of the last {QUERIES} tokens", _shares),
}
"""Kinds of plots by name."""


def draw(
    kind: str,
    model: nn.Module | PreTrainedConfig | str | Path,
    methods: Sequence[Method],
    path: Path,
    length: int | None = None,
    compose: bool | str = False,
    text: Sequence[Path | str] | None = None,
    windows: int = 4,
    device: str = "auto",
    tokenizer: Any = None,
) -> None:
    """Plot several methods and save the plot as a PNG.

    For a model with sliding-window layers, the plot shows the other layers.

    Args:
        kind: one of

            * ``spectrum``: the frequencies;
            * ``angles``: the largest angles, compared with those seen in training;
            * ``decay``: q.k by distance, and the biases of encodings: trained ones if the folder
              was saved with that encoding, otherwise initial ones (seed 0);
            * ``distances``: the distances that position methods use in place of the true ones;
            * ``weighted-decay``: decay of the model's mean queries and keys on a text
              (:class:`rope_eval.plots.attention.Resultants`);
            * ``attention``: attention weights by distance on a text.
        model: an unpatched model, which is not changed, or a configuration, folder or Hub ID. Only
            the last two kinds need weights.
        methods: frequency methods for ``spectrum``, position methods for ``distances``; encodings
            only for ``decay`` and ``attention``.
        path: path of the PNG.
        length: length in tokens; default: the longest target length of the methods.
        compose: apply frequency methods on top of existing RoPE scaling.
        text: files, folders or datasets; default: the Python standard library.
        windows: maximum number of text windows.
        device: device for weights that are loaded here.
        tokenizer: tokenizer of a loaded model, for the last two kinds.

    Raises:
        OptionError: the kind is unknown or cannot show a method, the path or length is not valid,
            or options do not apply to the model or the kind.
        MeasureError: matplotlib is not installed, the configuration, weights or text cannot be
            loaded, or the text is too short.
        AlreadyPatchedError: the model is patched.
        NoRopeError, UnsupportedModelError, AlreadyScaledError: as for :func:`rope_ext.patch`.
    """
    path = Path(path)
    if kind not in KINDS:
        raise OptionError(
            f"unknown picture {kind!r}{nearest(kind, KINDS) or '.'} Pictures: {', '.join(KINDS)}"
        )
    picture = KINDS[kind]
    for method in methods:
        if picture.shows is not None and method.kind not in picture.shows:
            raise OptionError(_cure(kind, method))
    if path.suffix.lower() != ".png" or not path.parent.is_dir():
        raise OptionError(f"cannot write {path}; give a .png file in an existing directory")
    require_matplotlib()
    if picture.measure is None and text is not None:
        raise OptionError(
            f"{kind} does not use a text; plot weighted-decay or attention, or leave the text out"
        )
    built = model_of(model)
    decoder, site = text_decoder(built), first_site(built)
    rope, lines = site.rope, dict[str, Method | None](unpatched=None)
    factors = sorted({float(method.factor) for method in methods})
    for method in methods:
        if isinstance(method, FrequencyMethod):
            refuse_scaled(decoder, site, method, compose)
        full = method.resolved(rope)
        lines[_label(full, factor=len(factors) > 1)] = full
    if length is None:
        length = max([rope.length, *(method.target_length(rope) for method in methods)])
    require_length("length", length)
    measured = []
    if picture.measure is not None:
        stretch = picture.stretch(rope.length, length)
        chosen = choose_windows(tokenizer or _tokenizer(kind, model), text or (), stretch, windows)
        read = isinstance(model, (str, Path))
        loaded = models.load_model(str(model), device=device) if read else built
        measured = [picture.measure(loaded, rope, lines, chosen, stretch, compose)]

    adding = [] if picture.beside is None else [m for m in methods if not rotates(rope, m)]
    figure = figure_of(13 if adding else 9.5, 4.8)
    axes, *beside = figure.subplots(1, 1 + bool(adding), squeeze=False)[0]
    picture.draw(axes, rope, lines, length, *measured)
    if beside and picture.beside is not None:
        added = _biases(model, text_config(decoder).num_attention_heads, rope, length)
        (others,) = beside
        picture.beside(others, rope, lines, length, added)
        bare(others)
        others.set_title("biases of encodings", **TITLE)
    bare(axes)
    name = Path(model).name if isinstance(model, (str, Path)) else type(decoder).__name__
    by = f", factor {factors[0]:g}" if len(factors) == 1 else ""
    axes.set_title(f"{name} at {length} tokens{by}: {picture.title}", **TITLE)
    named = [each.get_legend_handles_labels() for each in (axes, *beside)]
    handles, labels = ([*itertools.chain(*parts)] for parts in zip(*named, strict=True))
    columns = max(1, min(4, _CHARACTERS // (8 + max(map(len, labels)))))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8.5,
                  frameon=False)  # fmt: skip
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise OptionError(f"cannot write {path} ({error}); give another file") from error


def _biases(model: Any, heads: int, rope: Rope, length: int) -> Biases:
    """Biases of encodings: trained if the checkpoint was saved with them, otherwise initial."""
    saved, layers = None, []
    if isinstance(model, (str, Path)):
        record = models.saved_under(models.load_config(str(model)))
        saved = None if record is None else record.encoding
    if saved is not None:
        loaded = from_pretrained(str(model))
        found = [module for module in loaded.modules() if isinstance(module, DistanceBias)]
        layers = [dict(module.named_parameters()) for module in found]

    def added(encoding: Encoding, distance: torch.Tensor) -> tuple[torch.Tensor, str]:
        same = saved is not None and replace(encoding, factor=saved.factor) == saved
        given = layers if same else [None]
        every = [bias_at(rope, encoding, heads, length, distance, one) for one in given]
        learns = bool(encoding.initial(Heads(heads, rope.dim, rope.dim), rope))
        return torch.cat(every), (", trained" if same else ", untrained") * learns

    return added


def _tokenizer(kind: str, model: Any) -> Any:
    if isinstance(model, (str, Path)):
        return models.load_tokenizer(str(model))
    if isinstance(model, nn.Module):
        raise OptionError(f"{kind} uses a text; give tokenizer=, or a folder instead of a model")
    raise OptionError(f"{kind} needs weights; give a model, folder or Hub ID, not a configuration")


def _label(method: Method, factor: bool) -> str:
    texts = [text for text in option_texts(method) if factor or not text.startswith("factor=")]
    return f"{method.name} ({', '.join(texts)})" if texts else method.name


def _cure(kind: str, method: Method) -> str:
    moves = method.replaces_attention
    if method.kind in ("encoding", "rotation"):
        return (
            f"{method.name} changes neither frequencies nor distances, so {kind} cannot show it; "
            f"plot decay, or leave {method.name} out"
        )
    why = (
        "changes distances but not frequencies"
        if moves
        else "changes frequencies but not distances"
    )
    return (
        f"{method.name} {why}, so {kind} cannot show it; plot "
        f"{'distances' if moves else 'spectrum'}, angles or decay, or leave {method.name} out"
    )
