"""Plots of what methods do: one line per method, and the unpatched model dashed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn
from transformers import PreTrainedConfig

from rope_eval.plots import methods
from rope_eval.plots.methods import rotates
from rope_eval.plots.style import TITLE, bare, figure_of, require_matplotlib
from rope_ext.advice.building import model_of, require_length
from rope_ext.apply.base import refuse_scaled
from rope_ext.config.record import option_texts
from rope_ext.encodings.rotation import RoPE
from rope_ext.errors import OptionError, nearest
from rope_ext.methods import FrequencyMethod, Method
from rope_ext.patching import first_site
from rope_ext.rotary.sites import text_config, text_decoder

_CHARACTERS = 150  # characters in a line of the legend
_ROTATING = ("frequency", "position", "rotation")


KINDS: dict[str, tuple[Callable[..., None], tuple[str, ...], str]] = {
    "spectrum": (methods.spectrum, ("frequency",), "frequency of every rotary pair"),
    "angles": (methods.angles, _ROTATING, "largest angle of every rotary pair"),
    "decay": (methods.decay, (), "long-range decay, q\u00b7k of vectors of ones"),
    "distances": (methods.distances, ("position",), "effective distances"),
}
"""What draws each kind of plot, the kinds of methods that it can show (none: all), its title."""


def draw(
    kind: str,
    model: nn.Module | PreTrainedConfig | str | Path,
    shown: Sequence[Method],
    path: Path,
    length: int | None = None,
    compose: bool | str = False,
) -> None:
    """Plot several methods and save the plot as a PNG.

    For a model with sliding-window layers, the plot shows the other layers.

    Args:
        kind: ``spectrum``: the frequencies; ``angles``: the largest angles, compared with those
            seen in training; ``decay``: q.k by distance, and the initial biases of encodings (seed
            0); ``distances``: those that position methods use in place of the true ones.
        model: an unpatched model, which is not changed, or a configuration, folder or Hub ID; no
            weights are read.
        shown: frequency methods for ``spectrum``, position methods for ``distances``; encodings
            only for ``decay``.
        path: path of the PNG.
        length: length in tokens; default: the longest target length of the methods.
        compose: apply frequency methods on top of existing RoPE scaling.

    Raises:
        RopeExtError: the kind is unknown or cannot show a method, the path or length is not valid,
            or matplotlib is not installed.
    """
    path = Path(path)
    if kind not in KINDS:
        raise OptionError(
            f"unknown picture {kind!r}{nearest(kind, KINDS) or '.'} Pictures: {', '.join(KINDS)}"
        )
    panel, kinds, title = KINDS[kind]
    for method in shown:
        if kinds and method.kind not in kinds:
            others = [k for k, (_, fits, _) in KINDS.items() if not fits or method.kind in fits]
            raise OptionError(
                f"{kind} cannot show {method.name}; plot {', '.join(others)}, or leave "
                f"{method.name} out"
            )
    if path.suffix.lower() != ".png" or not path.parent.is_dir():
        raise OptionError(f"cannot write {path}; give a .png file in an existing directory")
    require_matplotlib()
    built = model_of(model)
    decoder, site = text_decoder(built), first_site(built)
    rope, lines = site.rope, dict[str, Method](unpatched=RoPE())
    factors = sorted({float(method.factor) for method in shown})
    for method in shown:
        if isinstance(method, FrequencyMethod):
            refuse_scaled(decoder, site, method, compose)
        full = method.resolved(rope)
        texts = option_texts(full)
        texts = [one for one in texts if len(factors) > 1 or not one.startswith("factor=")]
        lines[f"{full.name} ({', '.join(texts)})" if texts else full.name] = full
    if length is None:
        length = max([rope.length, *(method.target_length(rope) for method in shown)])
    require_length("length", length)
    adding = kind == "decay" and not all(rotates(rope, method) for method in shown)
    figure = figure_of(13 if adding else 9.5, 4.8)
    axes, *beside = figure.subplots(1, 1 + adding, squeeze=False)[0]
    panel(axes, rope, lines, length)
    for other in beside:
        heads = text_config(decoder).num_attention_heads
        methods.biases(other, rope, lines, length, heads)
        bare(other)
        other.set_title("biases of encodings", **TITLE)
    bare(axes)
    name = Path(model).name if isinstance(model, (str, Path)) else type(decoder).__name__
    by = f", factor {factors[0]:g}" if len(factors) == 1 else ""
    axes.set_title(f"{name} at {length} tokens{by}: {title}", **TITLE)
    named = [each.get_legend_handles_labels() for each in (axes, *beside)]
    handles, labels = ([*itertools.chain(*parts)] for parts in zip(*named, strict=True))
    columns = max(1, min(4, _CHARACTERS // (8 + max(map(len, labels)))))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8.5,
                  frameon=False)  # fmt: skip
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise OptionError(f"cannot write {path} ({error}); give another file") from error
