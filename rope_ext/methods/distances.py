"""Position methods that clip distances, or let tokens share positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from rope_ext.methods.checked import not_none
from rope_ext.methods.geometry import Distance
from rope_ext.methods.kinds import (
    Band,
    LogScaled,
    Method,
    PositionMethod,
    Tempered,
    identity,
)
from rope_ext.methods.registry import register
from rope_ext.methods.rope import Rope, whole_number


@register
@dataclass(frozen=True, kw_only=True)
class ReRoPE(LogScaled):
    """Clips distances at ``window``: ``min(m - n, window)``.

    Use it without fine-tuning, for any length. All tokens beyond the window have the same distance:
    the model finds and uses them, but does not know their order; ``leaky_rerope`` and
    ``self_extend`` keep it. For keys beyond the window, the query is rotated to position ``window``
    and the key is not rotated. A window of at least the text and ``log_n=False`` give the unpatched
    model.

    Args:
        window: tokens; half of the trained length by default.
        log_n: scale queries by the logarithm of the length, as published.
        published: the default window is a quarter of the trained length, as the author used for
            Llama 2 (1024 of 4096); docs/evidence.md compares both.

    Su 2023, kexue.fm/archives/9708.
    """

    name = "rerope"
    paper = "Su 2023, kexue.fm/archives/9708"
    summary = "no fine-tuning, any length; distances are clipped at the window"
    candidate_shares = MappingProxyType({"window": (1 / 8, 1 / 4, 1 / 2, 3 / 4)})

    valid_options = "a window of at most the trained length"

    window: int | None = None
    published: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_tokens("window")
        self.require("published", isinstance(self.published, bool), "True or False")
        if self.window is not None:  # so that equal settings compare equal
            self.set("published", False)

    def resolved(self, rope: Rope) -> ReRoPE:
        share = 4 if self.published else 2
        return replace(self, window=self.window or max(1, rope.length // share))

    def bands(self) -> tuple[Band, ...]:
        window = not_none(self.window)
        return (
            Band(Distance(0, window), identity, identity),
            Band(Distance(window, None), float(window), 0.0),
        )


@register
@dataclass(frozen=True, kw_only=True)
class LeakyReRoPE(LogScaled):
    """Beyond ``window``, distances grow ``k`` times more slowly: ``w + (m - n - w) / k``.

    Like ``rerope``, but distant tokens keep their order. Distances reach the trained length at
    ``factor`` times it, so choose the factor for your longest text.

    Args:
        window: tokens; an eighth of the trained length by default (512 of 4096, as published).
        k: by default chosen so that the largest distance of the extended context becomes that of
            the trained one, ``(factor L - w) / (L - w)``.
        log_n: scale queries by the logarithm of the length, as published.

    Su 2023, kexue.fm/archives/9708.
    """

    name = "leaky_rerope"
    paper = "Su 2023, kexue.fm/archives/9708"
    summary = "like rerope, but distant tokens keep their order"
    candidate_shares = MappingProxyType({"window": (1 / 8, 1 / 4, 1 / 2)})

    valid_options = "a window below the trained length, and k above 1"

    window: int | None = None
    k: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_tokens("window")
        if self.k is not None:
            self.require_number("k", minimum=1)

    def resolved(self, rope: Rope) -> LeakyReRoPE:
        window = self.window or max(1, rope.length // 8)
        k = self.k
        if k is None:
            valid = "smaller than the trained length, or k given"
            self.require_resolved("window", window < rope.length, valid, rope)
            k = (self.target_length(rope) - window) / (rope.length - window)
        return replace(self, window=window, k=float(k))

    def bands(self) -> tuple[Band, ...]:
        w, k = not_none(self.window), not_none(self.k)
        return (
            Band(Distance(0, w), identity, identity),
            Band(Distance(w, None), lambda m: m / k + w - w / k, lambda n: n / k),
        )


@register
@dataclass(frozen=True, kw_only=True)
class SelfExtend(Tempered):
    """Beyond ``window``, groups of tokens share a position.

    The distance there is ``floor(m/G) + w - floor(w/G) - floor(n/G)``. Use it without fine-tuning,
    up to factor 26: beyond that, the default group exceeds the 64 that the authors call reasonable.
    llama.cpp's ``--grp-attn-n`` is another method, under which neighbors lose their distances, too.

    Args:
        window: tokens that keep their exact distances; a quarter of the trained length by default.
        group: tokens that share a position; by default the smallest number with which the largest
            distance is within two thirds of the trained length, as the authors recommend
            (``w + (N - w) / G < 2/3 L``).
        published: no temperature, as in the paper. The default is ``temperature="log_n"``, which is
            better on both bundled checkpoints (docs/temperature.md).

    Jin et al. 2024, arXiv 2401.01325; the rule for ``group`` is from the authors' repository.
    """

    name = "self_extend"
    aliases = ("group_attention",)
    paper = "arXiv 2401.01325"
    summary = "no fine-tuning; exact distances to neighbors, grouped positions beyond"
    candidate_shares = MappingProxyType({"window": (1 / 8, 1 / 4, 3 / 8)})

    valid_options = "a window below the trained length, and a group of at least 2"

    window: int | None = None
    group: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_tokens("window")
        self.require_tokens("group")

    def resolved(self, rope: Rope) -> SelfExtend:
        window = self.window or max(1, rope.length // 4)
        group = self.group
        if group is None:
            room = 2 * rope.length / 3 - window
            valid = "smaller than two thirds of the trained length, or group given"
            self.require_resolved("window", room > 0, valid, rope)
            group = math.floor((self.target_length(rope) - window) / room) + 1
        return replace(self, window=window, group=group)

    def bands(self) -> tuple[Band, ...]:
        w, g = not_none(self.window), not_none(self.group)
        return (
            Band(Distance(0, w), identity, identity),
            Band(Distance(w, None), lambda m: m // g + w - w // g, lambda n: n // g),
        )


# For each of the eight groups of Llama-3-8B (8192 tokens): rotations of its fastest pair within the
# trained context, and the effective length that the authors found, in trained lengths. For 16
# trained lengths, they divide the groups by 4, 4, 2, 16, 32, 32, 16 and 128.
_FOUND = (
    (1303.8, 4.0),
    (252.8, 4.0),
    (49.02, 8.0),
    (9.506, 1.0),
    (1.843, 0.5),
    (0.3574, 0.5),
    (0.0693, 1.0),
    (0.01344, 0.125),
)


@register
@dataclass(frozen=True, kw_only=True)
class DPE(Tempered):
    """Self-Extend with a group size ``S`` for each group of pairs.

    Beyond ``window``, distances are ``floor(m/S) + w - floor(w/S) - floor(n/S)``. Fast pairs have
    seen every angle in training and need small groups. The authors find the sizes with needles, one
    group of pairs at a time; the defaults transfer those of Llama-3-8B, and are a guess for any
    other model. Their choice of the pairs of each head that contribute most is not implemented: all
    pairs are scaled, as in the released example.

    Args:
        window: tokens that keep their exact distances; an eighth of the trained length by default,
            the published 1024 of 8192.
        groups: number of pairs in each group, fastest first; by default eight groups, or as many as
            there are scales, as even as possible.
        scales: group sizes, whole numbers. By default, each group uses the effective length found
            for the group of Llama-3-8B whose fastest pair makes the nearest number of rotations (by
            ratio) within the trained context; S is the target length divided by it.
        published: no temperature, as in the paper. The default is ``temperature="log_n"``, which is
            better on both bundled checkpoints (docs/temperature.md).

    Lu et al. 2025, arXiv 2504.18857; formulas and lists are those of its code.
    """

    name = "dpe"
    paper = "arXiv 2504.18857"
    summary = "no fine-tuning; like self_extend, with one group size per group of pairs"
    allows_factor_one = True
    candidate_shares = MappingProxyType({"window": (1 / 16, 1 / 8, 1 / 4)})

    by_pair = True
    valid_options = "a window below the trained length, and scales of at least 2"

    window: int | None = None
    groups: Sequence[int] | None = None
    scales: Sequence[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_tokens("window")
        for option in ("groups", "scales"):
            given = getattr(self, option)
            if given is None:
                continue
            listed = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
            numbers = tuple(map(whole_number, given)) if listed else (None,)
            holds = None not in numbers
            self.require(option, holds, "a list of whole numbers of at least 1, one per group")
            self.set(option, numbers)  # hashable, safe from later edits
        if self.groups is not None and self.scales is not None:
            alike = len(self.groups) == len(self.scales)
            self.require("scales", alike, f"a list of {len(self.groups)}, one for each of groups")

    def check(self, length: int | None = None) -> None:
        Method.check(self, length)  # which distances were trained depends on the pairs

    def resolved(self, rope: Rope) -> DPE:
        pairs, groups = rope.dim // 2, self.groups
        if groups is None:
            count = 8 if self.scales is None else len(self.scales)
            if self.scales is not None:
                valid = f"a list of at most {pairs} numbers, the pairs of this model"
                self.require("scales", count <= pairs, valid)
            count = min(count, pairs)
            groups = tuple(pairs // count + (i < pairs % count) for i in range(count))
        valid = f"numbers of pairs that make up all {pairs} of this model"
        self.require("groups", sum(groups) == pairs, valid)
        full = replace(self, window=self.window or max(1, rope.length // 8), groups=groups)
        if self.scales is None:
            first = [sum(groups[:i]) for i in range(len(groups))]
            turns = rope.rotations[first].clamp(min=1e-9).tolist()  # some pairs do not rotate
            lengths = [min(_FOUND, key=lambda f, r=r: abs(math.log(f[0] / r)))[1] for r in turns]
            scales = tuple(max(1, math.ceil(self.factor / found)) for found in lengths)
            full = replace(full, scales=scales)
        return full

    def bands(self) -> tuple[Band, ...]:
        w, scales, groups = not_none(self.window), not_none(self.scales), not_none(self.groups)
        of_pair = [s for s, n in zip(scales, groups, strict=True) for _ in range(n)]

        def grouped(t: torch.Tensor) -> torch.Tensor:
            return t.unsqueeze(-1) // torch.tensor(of_pair, dtype=t.dtype, device=t.device)

        def shifted(t: torch.Tensor) -> torch.Tensor:
            return grouped(t) + w - grouped(torch.full_like(t, w))

        return Band(Distance(0, w), identity, identity), Band(Distance(w, None), shifted, grouped)


# Fitted by the authors to Llama-3-8B (8192 tokens): M(l) = c / (1 + exp(-(a l + b))), here in
# trained lengths, and the constant that they use within the trained length.
_SLOPE, _SHIFT, _MOST, _WITHIN = 0.8596, -2.4666, 0.7574, 1536 / 8192


@register
@dataclass(frozen=True, kw_only=True)
class LaMPE(PositionMethod):
    """Keeps the nearest and farthest distances exact and maps those in between to fewer positions.

    For texts of one length: the authors map each text by its length, along a sigmoid that they
    fitted to Llama-3-8B. Here ``length`` fixes the map, so that cached keys keep their positions;
    pass the length of your texts. With ``c = mapped / (length - 1)``, distances from ``head`` on
    are ``floor(c m) - floor(c n)``, shifted to continue at ``head - 1``, and about the last
    ``tail`` before ``length`` grow by one per token again. Cosine and sine are multiplied by
    ``0.1 ln(2) + 1``, as in the authors' code.

    Args:
        length: tokens of the text for which the map is made; the extended context by default.
        head: tokens that keep their exact distances; an eighth of the trained length by default.
            The paper recommends 1/8 to 1/16.
        mapped: M, the number of positions for the whole text; by default from the authors' sigmoid,
            in trained lengths.
        tail: 200 of 8192 tokens by default; moved to the end of the tokens that share a position.

    Zhang et al. 2025, arXiv 2508.02308. Formulas and defaults are those of its code, where decoding
    keeps the map of the prompt.
    """

    name = "lampe"
    paper = "arXiv 2508.02308"
    summary = "no fine-tuning, one text length; exact for nearest and farthest tokens"
    allows_factor_one = True
    candidate_shares = MappingProxyType({"head": (1 / 16, 1 / 8, 1 / 4)})

    valid_options = "fewer positions mapped than there are tokens"

    length: int | None = None
    head: int | None = None
    mapped: int | None = None
    tail: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_tokens("length", minimum=2)
        for option in ("head", "mapped", "tail"):
            self.require_tokens(option)

    def resolved(self, rope: Rope) -> LaMPE:
        trained = rope.length
        length = self.length or max(2, self.target_length(rope))
        share = _WITHIN
        if length >= trained:
            share = _MOST / (1 + math.exp(-(_SLOPE * length / trained + _SHIFT)))
        mapped = self.mapped or max(1, int(share * trained))
        full = replace(
            self,
            length=length,
            head=self.head or max(1, trained // 8),
            mapped=mapped,
            tail=self.tail or max(1, round(trained * 200 / 8192)),
        )
        full.require_resolved("mapped", mapped < length, f"below length={length}", rope)
        return full

    def own_scaling(self, rope: Rope) -> float:
        return 0.1 * math.log(2) + 1.0

    def bands(self) -> tuple[Band, ...]:
        head, length = not_none(self.head), not_none(self.length)
        count, tail, last = not_none(self.mapped), not_none(self.tail), length - 1

        def mapped(t: torch.Tensor) -> torch.Tensor:
            return (t * count / last).floor()

        def place(t: int) -> int:
            return t * count // last

        near = head - 1 - place(head)
        far = min(((place(min(tail, last)) + 1) * last - 1) // count, last)
        shift = last - far - place(last - far) - near
        border = length - far
        if border <= head:
            return (Band(Distance(0, None), identity, identity),)
        return (
            Band(Distance(0, head), identity, identity),
            Band(Distance(border, None), lambda m: m - shift, identity),
            Band(Distance(head, border), lambda m: mapped(m) + near, mapped),
        )
