"""Pictures of what methods do: one line per method, and the unpatched model dashed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from rope_ext.advice import model_of, require_length
from rope_ext.discovery import text_decoder
from rope_ext.drawing import bare, figure_of, require_matplotlib
from rope_ext.errors import OptionError, nearest
from rope_ext.methods import FrequencyMethod, Method, PositionMethod, Rope
from rope_ext.panels import Lines, angles, decay, distances, spectrum
from rope_ext.patching import first_site, refuse_scaled
from rope_ext.records import option_texts

_CHARACTERS = 150  # that fit into a line of the legend


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
