"""The data of a position map on a model: the frequencies and positions of every rotation."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from rope_ext.encodings import Encoding
from rope_ext.methods import Band, Map, PositionMethod, Rope
from rope_ext.methods.geometry import Distance
from rope_ext.methods.temperature import SSMax
from rope_ext.position.layers import Layout
from rope_ext.position.tables import BandRotations, Decay, RotationTable
from rope_ext.rotary.device_cache import cached_on_device
from rope_ext.rotary.sites import RotarySite


@dataclass(frozen=True, eq=False)
class PositionMap:
    """A method with the frequencies that it rotates by.

    Args:
        method: the position method, fully resolved.
        rope: the trained embedding, after the frequency method if there is one.
        frequencies: inverse frequencies (float64) and scaling of each site.
        label: the full description of the patch.
        precise: compute angles in float64 instead of float32, which transformers uses.
        kernel: see :func:`rope_ext.attention.attend`.
        include_sliding: also patch layers with sliding-window attention.
        encoding: adds a bias to the logits; None for no bias.
        layers: see :class:`rope_ext.options.Options`; None for all layers with RoPE.
        named: a short name of the patch, such as "yarn with layers=".
        instead: advice for errors: how to patch and keep the model's own attention function.
    """

    method: PositionMethod
    rope: Rope
    frequencies: dict[RotarySite, tuple[torch.Tensor, float]]
    label: str
    precise: bool
    kernel: str
    include_sliding: bool
    encoding: Encoding | None = None
    layers: tuple[int, ...] | str | None = None
    named: str = ""
    instead: str = "use a frequency method such as 'yarn'"

    @property
    def key(self) -> tuple[Any, ...]:
        """Everything that has to match before a cache can be continued."""
        return self.label, self.rope.length, self.precise, self.include_sliding

    @functools.cached_property
    def bands(self) -> tuple[Band, ...]:
        """The bands of the method; keys are cached with the rotation of the last one."""
        return self.method.bands()

    @property
    def window(self) -> int | None:
        """Tokens that rotating layers beside those of an encoding attend to; None: all."""
        return None if self.encoding is None else self.encoding.window_beside()

    @property
    def stored(self) -> Map:
        """The position map that cached keys are rotated with."""
        return self.bands[-1].key

    def inv_freq(self, site: RotarySite, device: torch.device) -> torch.Tensor:
        """Inverse frequencies, float64, ``[pairs]``, cached on the device."""
        return cached_on_device(self._constants[site], "inv_freq", device)

    @functools.cached_property
    def _constants(self) -> dict[RotarySite, SimpleNamespace]:
        return {site: SimpleNamespace(inv_freq=x) for site, (x, _) in self.frequencies.items()}

    @functools.cached_property
    def reach(self) -> int | None:
        """Largest distance between queries that are rotated together, tokens; None: no limit."""
        growth = None if self.encoding is None else self.encoding.growth(1)
        return None if growth is None else Decay.reach(growth)

    def rotations(self, layout: Layout, window: int | None = None) -> BandRotations:
        """For each band, its geometry and the rotations of queries and keys.

        With ``window``, of layers that keep the trained rotation and attend to so many tokens.
        """
        if (layout, window) not in self._rotations:
            self._rotations[layout, window] = self._made(layout, window)
        return self._rotations[layout, window]

    def _made(self, layout: Layout, window: int | None) -> BandRotations:
        inv_freq, pair = self.frequencies[layout.site][0], layout.pair
        growth = None if self.encoding is None else self.encoding.growth(len(inv_freq))
        inv_freq = inv_freq[pair].to(torch.float64 if self.precise else torch.float32)
        if window is not None:
            idle = RotationTable(0, 0, inv_freq, pair)
            return [(Distance(0, window), idle, idle)]
        if growth is not None:
            of_query, of_key = Decay(growth[pair]), Decay(-growth[pair])
            return [(band.geometry, of_query, of_key) for band in self.bands]

        def table(to: Map) -> RotationTable:
            return RotationTable(to, self.stored, inv_freq, pair)

        return [(band.geometry, table(band.query), table(band.key)) for band in self.bands]

    @property
    def computes_positions(self) -> bool:
        """Whether layers rotate by positions that they compute from their hidden states."""
        return self.encoding is not None and self.encoding.computes_positions()

    def phase(self, t: torch.Tensor) -> torch.Tensor | None:
        """Phase that the encoding adds to all pairs of a token, radians."""
        return None if self.encoding is None else self.encoding.phase(t)

    @functools.cached_property
    def learned_temperature(self) -> SSMax | None:
        """The temperature, if every head learns a number; layers apply it to their queries."""
        made = self.method.tempered(self.rope)
        return made if isinstance(made, SSMax) else None

    def temperature(self, t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """The factors on the queries at positions ``t``, ``[tokens]``; None if all are 1.

        Without those of :attr:`learned_temperature`.
        """
        if self.learned_temperature is not None:
            return None
        made = self.method.query_scaling(t.double().clamp(min=0), self.rope)
        return None if made is None else made.to(dtype)

    @functools.cached_property
    def _rotations(self) -> dict[tuple[Layout, int | None], BandRotations]:
        return {}

    def __getstate__(self) -> dict[str, Any]:  # fields only: cached bands hold functions
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
