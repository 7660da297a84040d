"""Defines position maps, and rotation tables that move queries and keys to a band's positions."""

import dataclasses
import functools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rope_ext.attention import paged
from rope_ext.attention.call import Rotation
from rope_ext.encodings import Encoding
from rope_ext.methods import Band, Map, PositionMethod, Rope
from rope_ext.methods.geometry import Distance, Geometry, Sinks, at, both_ways
from rope_ext.methods.temperature import SSMax, Temperature
from rope_ext.position.layers import Layout
from rope_ext.rotary.context import cached_on_device
from rope_ext.rotary.sites import RotarySite

Origin = int | Tensor
"""A position close to the queries: one for all rows, or one per row, ``[rows, 1]``."""


class RotationTable:
    """Cosines and sines of ``to(t) - stored(t)`` for t = 0, 1, 2, ..., computed once on demand.

    Queries or keys are rotated to ``stored`` already. Angles are computed in the dtype of
    ``inv_freq``, ``[pairs]``.
    """

    cached = "inv_freq"  # of which each device keeps a copy

    def __init__(self, to: Map, stored: Map, inv_freq: Tensor) -> None:
        self.to = to
        self.stored = stored
        self.inv_freq = inv_freq
        self.idle = to is stored or (to == stored and not callable(to))
        self.constant = not callable(to) and not callable(stored)
        self._tables: dict[tuple, tuple[Tensor, Tensor]] = {}

    def at(self, t: Tensor, dtype: torch.dtype, origin: Origin = 0) -> Rotation:
        """For any positions, ``[tokens, pairs]``."""
        if self.idle:
            return None
        t = t.double()
        by = at(self.to, t) - at(self.stored, t)
        angles = by.to(self.inv_freq.dtype) * cached_on_device(self, "inv_freq", t.device)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def between(
        self, first: int, last: int, device: torch.device, dtype: torch.dtype, origin: Origin = 0
    ) -> Rotation:
        """For the positions from ``first`` to ``last - 1``; one row if all are equal."""
        if self.idle:
            return None
        if self.constant:
            first = 0
            last = 1
        table = self._tables.get((device, dtype))
        if table is None or len(table[0]) < last:
            size = last if table is None else max(last, 2 * len(table[0]))
            with torch.inference_mode(False):  # the table outlives inference mode
                table = self.at(torch.arange(size, device=device), dtype)
            assert table is not None, "it is not idle"
            self._tables[device, dtype] = table
        return table[0][first:last], table[1][first:last]


class Decay:
    """Factors ``exp(growth (t - origin))`` instead of cosines: pairs are scaled, not rotated.

    ``growth`` is that of the logarithm per token, ``[pairs]``. Queries and keys have opposite ones,
    so the origin cancels in their products. It must be close to the queries: then the factors of
    queries and of the keys they see are at most :attr:`MOST`, representable in any dtype, and those
    of distant keys vanish. In float64 queries may be :attr:`MOST_SPANS` times as far apart.
    """

    cached = "growth"
    idle = False
    MOST = 16.0
    MOST_SPANS = 250
    _LEAST = 1e-26  # negligible times MOST, and not a subnormal number

    def __init__(self, growth: Tensor) -> None:
        self.growth = growth

    @classmethod
    def span(cls, growth: Tensor) -> int:
        """Maximum distance in tokens between queries that share an origin in their middle."""
        return max(1, math.floor(2 * math.log(cls.MOST) / float(growth.abs().max())))

    def at(self, t: Tensor, dtype: torch.dtype, origin: Origin = 0) -> tuple[Tensor, Tensor]:
        """For any positions, ``[tokens, pairs]``."""
        growth = cached_on_device(self, "growth", t.device)
        numbers = ((t - origin).double().unsqueeze(-1) * growth).exp()
        if dtype != torch.float64:  # keys after the last query: no query sees them
            numbers = numbers.clamp(self._LEAST, 2 * self.MOST).to(dtype)
        return numbers, torch.zeros_like(numbers)

    def between(
        self, first: int, last: int, device: torch.device, dtype: torch.dtype, origin: Origin = 0
    ) -> tuple[Tensor, Tensor]:
        """For the positions from ``first`` to ``last - 1``."""
        return self.at(torch.arange(first, last, device=device), dtype, origin)


class BandRotation(NamedTuple):
    """One band of a method: its visible keys, and the rotations of queries and keys to it."""

    geometry: Geometry
    query: RotationTable | Decay
    key: RotationTable | Decay


BandRotations = list[BandRotation]
"""One entry for each band of a layer."""


@dataclass(frozen=True, eq=False)
class PositionMap:
    """A position method with the frequencies of its rotations."""

    method: PositionMethod  # resolved
    rope: Rope  # the trained embedding, after the frequency method if there is one
    frequencies: dict[RotarySite, tuple[Tensor, float]]  # float64, and scaling
    label: str  # the full description of the patch
    precise: bool  # compute angles in float64 instead of float32, which transformers uses
    kernel: str
    include_sliding: bool  # also patch layers with sliding-window attention
    encoding: Encoding  # the method itself, ``bias=``, or one that does nothing
    layers: tuple[int, ...] | str | None = None
    named: str = ""  # a short name of the patch, such as "yarn with layers="
    instead: str = "use a frequency method such as 'yarn'"  # advice for errors

    @property
    def key(self) -> tuple[Any, ...]:
        """Everything that must match to continue a cache."""
        return self.label, self.rope.length, self.precise, self.include_sliding

    @functools.cached_property
    def bands(self) -> tuple[Band, ...]:
        """Bands of the method; keys are cached with the rotation of the last band."""
        return self.method.bands()

    @property
    def window(self) -> int | None:
        """Window in tokens of rotating layers that the encoding does not change; None: no limit."""
        return self.encoding.window_beside()

    @property
    def stored(self) -> Map:
        """The position map with which cached keys are rotated."""
        return self.bands[-1].key

    def inv_freq(self, site: RotarySite, device: torch.device) -> Tensor:
        """Inverse frequencies, float64, ``[pairs]``, cached on the device."""
        return cached_on_device(self._constants[site], "inv_freq", device)

    @functools.cached_property
    def _constants(self) -> dict[RotarySite, SimpleNamespace]:
        return {site: SimpleNamespace(inv_freq=x) for site, (x, _) in self.frequencies.items()}

    @functools.cached_property
    def query_span(self) -> int | None:
        """Maximum distance in tokens between queries that are rotated together; None: no limit."""
        growth = self.encoding.growth(1)
        return None if growth is None else Decay.span(growth)

    @functools.cached_property
    def bands_both_ways(self) -> tuple[Band, ...]:
        """The bands in attention in both directions."""
        return both_ways(self.bands) or ()

    @property
    def causal_only(self) -> str:
        """Why attention in both directions is not defined; empty if it is."""
        method = self.method
        encoding = self.encoding
        why = method.causal_only or encoding.causal_only
        if why:
            return why
        if (encoding.scored() and not encoding.later_keys) or self.query_span is not None:
            return "defines its logits for earlier keys only"
        if self.bands_both_ways:
            return ""
        if any(isinstance(band.geometry, Sinks) for band in self.bands):
            return "shows more first tokens than its window has; choose fewer, or a larger window"
        return "has bands that are defined for earlier keys only"

    def rotations(
        self, layout: Layout, window: int | None = None, both: bool = False
    ) -> BandRotations:
        """Return each band's geometry and the rotations of queries and keys.

        ``window``: for layers that keep the trained rotation and attend to that many tokens.
        ``both``: for attention in both directions.
        """
        rotations = self._rotations.setdefault((layout, window, both), [])  # shared by equal layers
        if rotations:
            return rotations
        bands = self.bands_both_ways if both else self.bands
        inv_freq = self.frequencies[layout.site][0]
        growth = self.encoding.growth(len(inv_freq))
        inv_freq = inv_freq.to(torch.float64 if self.precise else torch.float32)
        if window is not None:
            idle = RotationTable(0, 0, inv_freq)
            rotations.append(BandRotation(Distance(0, window), idle, idle))
        elif growth is not None:
            # Opposite signs, so that only the distance is left in the product of query and key.
            of_query = Decay(growth)
            of_key = Decay(-growth)
            rotations += [BandRotation(band.geometry, of_query, of_key) for band in bands]
        else:
            for band in bands:
                query = RotationTable(band.query, self.stored, inv_freq)
                key = RotationTable(band.key, self.stored, inv_freq)
                rotations.append(BandRotation(band.geometry, query, key))
        return rotations

    @functools.cached_property
    def _tempered(self) -> Temperature | None:
        return self.method.tempered(self.rope)

    @property
    def learned_temperature(self) -> SSMax | None:
        """The temperature, if heads learn its scale; layers apply it to their queries."""
        return self._tempered if isinstance(self._tempered, SSMax) else None

    def temperature(self, t: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return factors of queries at positions ``t``, ``[tokens]``; None if all are 1.

        Excludes :attr:`learned_temperature`.
        """
        if self._tempered is None or isinstance(self._tempered, SSMax):
            return None
        return self._tempered.at(t.double().clamp(min=0)).to(dtype)

    def paged_tables(self, layout: Layout, tokens: int, device: torch.device) -> paged.Tables:
        """Return the tables of the paged kernel for ``tokens`` positions or more.

        Queries are rotated as keys are. Computed again when a request is longer than all before.
        """
        tables = self._paged_tables.get((layout, device))
        if tables is None or tables.positions < tokens:
            size = max(1024, 1 << (tokens - 1).bit_length())
            dtype = torch.float64 if self.precise else torch.float32
            with torch.inference_mode(False):  # the tables outlive inference mode
                tables = paged.Tables.from_bands(
                    bands=self.bands,
                    # Rounded as for the keys that are cached.
                    inv_freq=self.frequencies[layout.site][0].to(dtype),
                    positions=size,
                    temperature=self.temperature(torch.arange(size), torch.float32),
                    device=device,
                    rotated_queries=True,
                )
            self._paged_tables[layout, device] = tables
        return tables

    @functools.cached_property
    def _paged_tables(self) -> dict[tuple[Layout, torch.device], paged.Tables]:
        return {}

    @functools.cached_property
    def _rotations(self) -> dict[tuple[Layout, int | None, bool], BandRotations]:
        return {}

    def __getstate__(self) -> dict[str, Any]:  # fields only: cached bands contain functions
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
