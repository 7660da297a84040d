"""Plots of what methods do: one line per method, and the unpatched model dashed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from rope_eval.plots import attention, methods
from rope_eval.plots.methods import Lines, rotates
from rope_eval.plots.style import TITLE, bare, figure_of, require_matplotlib
from rope_eval.tasks.perplexity import Windows
from rope_ext.advice.describe import require_length
from rope_ext.apply.base import refuse_scaled
from rope_ext.config.record import option_texts
from rope_ext.encodings.rotation import RoPE
from rope_ext.errors import OptionError, nearest
from rope_ext.methods import FrequencyMethod, Method, Rope
from rope_ext.patching import first_site, patched
from rope_ext.rotary.sites import text_config, text_decoder
from rope_ext.saving import checkpoints as models
from rope_ext.saving.drafts import may_replace
from rope_ext.saving.folder import model_of

_CHARACTERS = 150  # characters in a line of the legend
_ROTATING = ("frequency", "position", "rotation")


def _shares(
    model: nn.Module, rope: Rope, lines: Lines, text: Windows, length: int, compose: bool | str
) -> dict[str, attention.Shares]:
    """Shares by label, and those of the unpatched model within its trained length."""
    edges, found = attention.octaves(rope.length, length), {}
    for number, (label, method) in enumerate(lines.items()):
        with patched(model, method, compose=compose) if number else nullcontext():
            found[label] = attention.by_distance(model, text.at(length), edges)
    if rope.length < length:
        inner = edges[: edges.index(rope.length) + 1]
        found[methods.TRAINED] = attention.by_distance(model, text.at(rope.length), inner)
    return found


@dataclass(frozen=True)
class Kind:
    """A kind of plot.

    Args:
        draw: takes axes, the trained embedding, the lines, the length, and the measurement.
        shows: kinds of methods that it can show; None for all.
        title: title of the plot.
        measure: measures the model on a text; None if the plot needs no weights.
        beside: draws encodings without a rotation, in separate axes.
    """

    draw: Callable[..., None]
    shows: tuple[str, ...] | None
    title: str
    measure: Callable[..., Any] | None = None
    beside: Callable[..., None] | None = None


KINDS = {
    "spectrum": Kind(methods.spectrum, ("frequency",), "frequency of every rotary pair"),
    "angles": Kind(methods.angles, _ROTATING, "largest angle of every rotary pair"),
    "decay": Kind(
        *(methods.decay, None, "long-range decay, q\u00b7k of vectors of ones"),
        beside=methods.biases,
    ),
    "distances": Kind(methods.distances, ("position",), "effective distances"),
    "attention": Kind(
        *(methods.attention, None, f"attention of the last {attention.QUERIES} tokens", _shares)
    ),
}
"""Kinds of plots by name."""
_MARK = "rope-ext plot"
"""In the metadata of every plot, which may be replaced."""


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
            * ``decay``: q.k by distance, and the initial biases of encodings (seed 0);
            * ``distances``: the distances that position methods use in place of the true ones;
            * ``attention``: attention weights by distance on a text.
        model: an unpatched model, which is not changed, or a configuration, folder or Hub ID. Only
            ``attention`` needs weights.
        methods: frequency methods for ``spectrum``, position methods for ``distances``; encodings
            only for ``decay`` and ``attention``.
        path: path of the PNG.
        length: length in tokens; default: the longest target length of the methods.
        compose: apply frequency methods on top of existing RoPE scaling.
        text: files, folders or datasets; default: the Python standard library.
        windows: maximum number of text windows.
        device: device for weights that are loaded here.
        tokenizer: tokenizer of a loaded model, for ``attention``.

    Raises:
        RopeExtError: the kind is unknown or cannot show a method, the path or length is not valid,
            matplotlib is not installed, or what is needed cannot be loaded.
    """
    path = Path(path)
    if kind not in KINDS:
        raise OptionError(
            f"unknown picture {kind!r}{nearest(kind, KINDS) or '.'} Pictures: {', '.join(KINDS)}"
        )
    picture = KINDS[kind]
    for method in methods:
        if picture.shows is not None and method.kind not in picture.shows:
            others = [
                k for k, other in KINDS.items() if method.kind in (other.shows or (method.kind,))
            ]
            raise OptionError(
                f"{kind} cannot show {method.name}; plot {', '.join(others)}, or leave "
                f"{method.name} out"
            )
    if path.suffix.lower() != ".png" or not path.parent.is_dir():
        raise OptionError(f"cannot write {path}; give a .png file in an existing directory")
    if not may_replace(path, _MARK):
        raise OptionError(f"{path} exists, and rope-ext plot did not write it; give another file")
    require_matplotlib()
    if picture.measure is None and text is not None:
        raise OptionError(f"{kind} does not use a text; plot attention, or leave the text out")
    built = model_of(model)
    decoder, site = text_decoder(built), first_site(built)
    rope, lines = site.rope, dict[str, Method](unpatched=RoPE())
    factors = sorted({float(method.factor) for method in methods})
    for method in methods:
        if isinstance(method, FrequencyMethod):
            refuse_scaled(decoder, site, method, compose)
        full = method.resolved(rope)
        texts = option_texts(full)
        texts = [one for one in texts if len(factors) > 1 or not one.startswith("factor=")]
        lines[f"{full.name} ({', '.join(texts)})" if texts else full.name] = full
    if length is None:
        length = max([rope.length, *(method.target_length(rope) for method in methods)])
    require_length("length", length)
    measured = []
    if picture.measure is not None:
        read = isinstance(model, (str, Path))
        if read:
            tokenizer = models.load_tokenizer(str(model))
        elif tokenizer is None:
            raise OptionError(
                f"{kind} needs weights and a text; give a folder or Hub ID, or a model and "
                f"tokenizer="
            )
        chosen = attention.choose_windows(tokenizer, text or (), length, windows)
        loaded = models.load_model(str(model), device=device) if read else built
        measured = [picture.measure(loaded, rope, lines, chosen, length, compose)]

    adding = [] if picture.beside is None else [m for m in methods if not rotates(rope, m)]
    figure = figure_of(13 if adding else 9.5, 4.8)
    axes, *beside = figure.subplots(1, 1 + bool(adding), squeeze=False)[0]
    picture.draw(axes, rope, lines, length, *measured)
    if beside and picture.beside is not None:
        heads = text_config(decoder).num_attention_heads
        picture.beside(beside[0], rope, lines, length, heads)
        bare(beside[0])
        beside[0].set_title("biases of encodings", **TITLE)
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
        figure.savefig(path, dpi=130, metadata={"Software": _MARK})
    except OSError as error:
        raise OptionError(f"cannot write {path} ({error}); give another file") from error
