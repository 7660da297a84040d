"""The encodings by name."""

from __future__ import annotations

from collections.abc import Mapping

from lab.laboratory.scratch.base import Positions
from lab.laboratory.scratch.carope import CARoPE
from lab.laboratory.scratch.fope import FoPE
from lab.laboratory.scratch.grape import GrapeAP, GrapeM
from lab.laboratory.scratch.rope_pp import RopePPEqualCache, RopePPEqualHeads
from lab.laboratory.scratch.selective_rope import SelectiveRoPE
from lab.laboratory.scratch.tapa import TAPA

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
"""Models that are trained only if selected."""
