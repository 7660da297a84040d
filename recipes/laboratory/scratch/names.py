"""The encodings by name."""

from __future__ import annotations

from collections.abc import Mapping

from recipes.laboratory.scratch.base import Positions
from recipes.laboratory.scratch.carope import CARoPE
from recipes.laboratory.scratch.fope import FoPE
from recipes.laboratory.scratch.grape import GrapeAP, GrapeM
from recipes.laboratory.scratch.rope_pp import RopePPEqualCache, RopePPEqualHeads
from recipes.laboratory.scratch.selective_rope import SelectiveRoPE
from recipes.laboratory.scratch.tapa import TAPA

SCRATCH: Mapping[str, type[Positions]] = {
    "fope": FoPE,
    "carope": CARoPE,
    "selective_rope": SelectiveRoPE,
    "grape_m": GrapeM,
    "rope_pp_ec": RopePPEqualCache,
    "rope_pp_eh": RopePPEqualHeads,
    "tapa": TAPA,
    "grape_ap": GrapeAP,
}
"""Models that are trained only if they are asked for."""
