"""What rope_ext's plugins of vLLM and SGLang share: the served method, its tables, and its keys.

Engines rotate queries and keys in the model and cache keys. Under a position method, plugins
replace the model's rotary embedding by :class:`StoredKeys`, which rotates keys to what is cached
and leaves queries alone; attention is that of :mod:`rope_ext.attention.paged`.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig

from rope_ext.attention import paged
from rope_ext.engines.configs import plugin_refusal
from rope_ext.errors import ExportError
from rope_ext.methods import PositionMethod, Rope
from rope_ext.patching import current_patch
from rope_ext.position.map import RotationTable
from rope_ext.saving.folder import read_saved


@dataclass(frozen=True, eq=False)
class Served:
    """A position method with everything that a backend needs."""

    method: PositionMethod  # with every option filled in
    rope: Rope  # the trained embedding
    inv_freq: torch.Tensor  # frequencies of its pairs, float64
    stored: RotationTable  # first rotation, as in the patched model: angles round alike
    bands: list[tuple[Any, RotationTable, RotationTable]]
    """For each band, the visible keys, and further rotations of queries and keys."""
    columns: int  # rotary columns of a head
    scaling: float  # factor of the logits

    def temperature(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Return factors of queries, float32, ``[queries]``; None if all are 1."""
        factors = self.method.query_scaling(positions.double(), self.rope)
        return None if factors is None else factors.float()

    def refuse_pairs(self) -> None:
        """Raise if the tables of the paged kernel cannot hold the method."""
        if self.method.by_pair:
            raise ExportError(
                f"rope_ext serves {self.method.name} on GPUs with the same positions for all "
                f"pairs; patch without kept="
            )


def read_served(config: Mapping[str, Any], engine: str) -> Served | None:
    """Return the position method in the fields of a configuration; None if there is none.

    Raises ExportError if the plugin of ``engine`` does not serve the patch.
    """
    return _read(json.dumps(config, sort_keys=True, default=str), engine)


@functools.lru_cache(maxsize=1)
def _read(config: str, engine: str) -> Served | None:
    fields = json.loads(config)
    with torch.device("cpu"):  # engines build models under the device of the model
        state = current_patch(read_saved(AutoConfig.for_model(**fields)).model)
    if state is None or not state.method.replaces_attention:
        return None
    method = cast(PositionMethod, state.method)
    reason = plugin_refusal(state, engine.lower())
    if reason is not None:
        raise ExportError(
            f"{engine} cannot serve {state.record}: {reason}; load it with rope_ext.from_pretrained"
        )
    (site,) = state.scaled
    inv_freq, number = state.frequencies_of(site)
    table_inv_freq = inv_freq.to(torch.float64 if state.precise else torch.float32)
    stored = method.bands()[-1].key
    rope = state.options.rope(site.rope)
    bands = [
        (
            band.geometry,
            RotationTable(band.query, stored, table_inv_freq),
            RotationTable(band.key, stored, table_inv_freq),
        )
        for band in method.bands()
    ]
    first = RotationTable(stored, 0, table_inv_freq)
    return Served(
        method=method,
        rope=rope,
        inv_freq=inv_freq,
        stored=first,
        bands=bands,
        columns=2 * len(table_inv_freq),
        scaling=number**2,
    )


@functools.lru_cache(maxsize=1)
def paged_tables(served: Served, positions: int, device: str) -> paged.Tables:
    """Compute the tables of a model for the paged kernel, which all of its layers share."""
    temperature = served.temperature(torch.arange(positions, device="cpu"))
    bands = served.method.bands()
    inv_freq = served.inv_freq
    return paged.Tables.from_bands(
        bands=bands, inv_freq=inv_freq, positions=positions, temperature=temperature, device=device
    )


class StoredKeys(nn.Module):
    """Rotates keys to the positions under which they are cached, and no queries."""

    stored: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, tables: paged.Tables) -> None:
        super().__init__()
        self.rotates = tables.rotates_stored
        # Buffers, which torch.compile takes as inputs of its graph.
        for name in ("stored", "cos", "sin"):
            self.register_buffer(name, getattr(tables, name), persistent=False)

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if key is None or not self.rotates:
            return query, key
        columns = 2 * self.cos.shape[1]
        heads = key.view(key.shape[0], -1, columns)
        rotated = paged.rotate_keys(
            heads, positions, stored=self.stored, cos=self.cos, sin=self.sin
        )
        return query, rotated.view(key.shape)
