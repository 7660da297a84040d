"""Every family under every kind of method, cache and window: cached logits are recomputed ones.

The oracle is the same patched model without any cache; for maps under which nothing is far, it is
the unpatched model, which has never seen our masks.

Not the whole grid, which takes ten times as long: every family meets half of the methods, each
under one of its windows and through one of the caches (two where there are three windows). Which
ones changes with the family, so that every method meets every cache under every window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Cache, StaticCache

import rope_ext
from tests.families.zoo import LENGTH, NotBuildable, model_types, tiny_model

pytestmark = pytest.mark.slow

PROMPT, TOTAL = 74, 77  # beyond the trained 64, so that dynamic methods have something to do
SHORT, LONG = 16, 300  # windows: within the prompt, beyond everything and beyond a static cache
PADDING = 21
AGREES = 1e-4  # float32 sums in another order; logits are of size 5
WINDOWS = (  # configuration fields that hold a window
    "sliding_window",
    "sliding_window_size",
    "attention_window_size",
    "attention_chunk_size",
)
POSITIONS: dict[str, dict[str, Any]] = {  # small enough that every band matters
    "rerope": {"window": 5},
    "leaky_rerope": {"window": 5, "k": 3.0},
    "self_extend": {"window": 7, "group": 3},
    "dual_chunk": {"chunk": 20, "local": 7},
    "dpe": {"window": 7, "scales": (2, 3)},
    "lampe": {"length": 72, "head": 6, "mapped": 23, "tail": 9},
    "string": {"shift": 11, "window": 3},
    "lm_infinite": {"window": 9, "sinks": 3},
}
TOLD = {"original_max_position_embeddings": 1999}  # or such a map would extend nothing
NOTHING_FAR: dict[str, dict[str, Any]] = {  # by dense turns, by chunks
    "rerope": {"window": 999, "log_n": False, **TOLD},
    "dual_chunk": {"chunk": 999, "local": 7, "attention_factor": 1, **TOLD},
}
METHODS: list[tuple[str, dict[str, Any]]] = [
    *POSITIONS.items(),
    *NOTHING_FAR.items(),
    *((name, {}) for name in ("yarn", "dynamic_ntk", "dynamic_yarn")),
]
UNPROVEN = {  # not even unpatched do all of their caches do what recomputing does
    "blt",
    "deepseek_v4",
    "minimax",
    "recurrent_gemma",  # it returns none
    "moshi",  # its cache keeps to the window, its attention does not
    "zaya",  # static ones
}


@dataclass(frozen=True)
class Way:
    """One way to feed a prompt and some more tokens through a cache."""

    first: tuple[int, ...]
    static: bool = False
    padded: bool = False

    def cache(self, model: nn.Module) -> Cache | None:
        """None: the model makes its own."""
        if not self.static:
            return None
        return StaticCache(config=model.config, max_cache_len=TOTAL + PADDING + 12)


WAYS = {
    "dynamic": Way((PROMPT,)),
    "static": Way((PROMPT,), static=True),
    "chunked": Way((66, 3, 5)),
    "chunked static": Way((66, 3, 5), static=True),
    "padded": Way((PROMPT,), padded=True),
    "padded static": Way((PROMPT,), static=True, padded=True),
}


def tokens() -> torch.Tensor:
    return torch.randint(3, 128, (2, TOTAL), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def recomputed(model: nn.Module) -> torch.Tensor:
    return model(input_ids=tokens(), use_cache=False).logits


@torch.no_grad()
def cached(model: nn.Module, way: Way) -> torch.Tensor:
    """Logits of :func:`tokens`, where padded of the second row less its last ``PADDING``.

    A padded row holds the same tokens further to the right, so that its prompt is shorter.
    """
    ids, cache, said, begin = tokens(), way.cache(model), [], 0
    positions = torch.arange(TOTAL).expand(2, -1)
    mask = torch.ones(2, TOTAL, dtype=torch.long)
    if way.padded:
        ids[1] = ids[1].roll(PADDING)
        ids[1, :PADDING] = 0
        mask[1, :PADDING] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for size in (*way.first, *[1] * (TOTAL - PROMPT)):
        end = begin + size
        output = model(
            input_ids=ids[:, begin:end],
            attention_mask=mask[:, :end] if way.padded else None,
            position_ids=positions[:, begin:end],
            past_key_values=cache,
            use_cache=True,
        )
        cache, begin = output.past_key_values, end
        said.append(output.logits)
    return torch.cat(said, 1)


def distance(said: torch.Tensor, right: torch.Tensor, way: Way) -> float:
    """Largest difference of a logit of a token that is not padding."""
    if not way.padded:
        return float((said - right).abs().max())
    first = (said[0] - right[0]).abs().max()
    return float(first.max((said[1, PADDING:] - right[1, :-PADDING]).abs().max()))


def models(family: str) -> list[tuple[str, nn.Module]]:
    """The family under every window that it can have; all that it has are set alike."""
    try:
        model = tiny_model(family)
    except NotBuildable as error:
        pytest.skip(str(error))
    config = model.config.get_text_config(decoder=True)
    names = [name for name in WINDOWS if getattr(config, name, None)]
    if not names:
        return [("none", model)]
    found = []
    for label, window in (("none", None), ("short", SHORT), ("long", LONG)):
        try:
            model = tiny_model(family, **dict.fromkeys(names, window))
            recomputed(model)
        except (NotBuildable, ValueError):  # layers that slide need a window
            assert window is None
            continue
        found.append((label, model))
    return found


def patched(model: nn.Module, name: str, options: dict[str, Any]) -> Any:
    """Under the method, in layers with a window only if in others it is refused; None: refused."""
    for layers in ("auto", "scale"):
        try:
            rope_ext.patch(model, name, factor=4, sliding_layers=layers, **options)
            return layers
        except rope_ext.UnsupportedModelError:
            continue
        except rope_ext.NoRopeError:
            return None
    return None


def right(model: nn.Module, name: str, options: dict[str, Any], layers: str, way: Way) -> Any:
    """Logits without a cache; a sequence keeps the frequencies that its first forward gives it."""
    if not name.startswith("dynamic"):
        return recomputed(model)
    rows = []
    for row, padding in enumerate((0, PADDING if way.padded else 0)):
        length = way.first[0] - padding
        rope_ext.unpatch(model)
        if length > LENGTH:  # else it stays as it was trained
            rope_ext.patch(model, name, factor=4, sliding_layers=layers, length=length)
        rows.append(recomputed(model)[row])
        if length <= LENGTH:
            rope_ext.patch(model, name, factor=4, sliding_layers=layers)
    rope_ext.patch(model, name, factor=4, sliding_layers=layers, replace=True, **options)
    return torch.stack(rows)


def chosen(number: int, window: int, windows: int) -> list[tuple[int, list[str]]]:
    """Of one window of a family the methods (indices of :data:`METHODS`), and the ways of each.

    Args:
        number: of the family.
        window: which of its windows.
        windows: how many there are.
    """
    methods = [i for i in range(len(METHODS)) if (i + number) % (2 * windows) == window]
    names, turns = list(WAYS), 1 + (windows == 3)  # else they are too few for all the caches
    first = number // (2 * windows)
    return [
        (i, [names[(turns * place + turn + first) % len(names)] for turn in range(turns)])
        for place, i in enumerate(methods)
    ]


def test_the_choice_covers_what_it_should() -> None:
    for windows in (1, 2, 3):
        met = set()
        for number in range(2 * windows * len(WAYS)):
            parts = [chosen(number, window, windows) for window in range(windows)]
            assert sum(map(len, parts)) >= len(METHODS) // 2
            for window, part in enumerate(parts):
                met |= {(window, i, way) for i, ways in part for way in ways}
        assert len(met) == windows * len(METHODS) * len(WAYS)


@pytest.mark.parametrize("family", model_types())
def test_cached_logits_are_recomputed_ones(family: str) -> None:
    wrong, number, made = {}, model_types().index(family), models(family)
    for place, (window, model) in enumerate(made):
        native, proven = None, {}
        for index, ways in chosen(number, place, len(made)):
            name, options = METHODS[index]
            layers = patched(model, name, options)
            if layers is None:
                continue
            if native is None:
                rope_ext.unpatch(model)
                native = recomputed(model)
                patched(model, name, options)
            for label in ways:
                way, far = WAYS[label], options not in NOTHING_FAR.values()
                if label not in proven:
                    rope_ext.unpatch(model)
                    proven[label] = works(model, way, native)
                    assert proven[label] or family in UNPROVEN, (window, label)
                    patched(model, name, options)
                if not proven[label]:
                    continue
                expected = right(model, name, options, layers, way) if far else native
                off = distance(cached(model, way), expected, way)
                if not off <= AGREES:
                    wrong[window, name, label] = off
            rope_ext.unpatch(model)
    assert wrong == {}


def works(model: nn.Module, way: Way, native: torch.Tensor) -> bool:
    """Whether the unpatched model decodes through that cache as it recomputes."""
    try:
        return distance(cached(model, way), native, way) <= AGREES
    except Exception:  # whatever transformers raises, there is nothing to compare
        return False
