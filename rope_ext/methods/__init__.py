"""One file per method, registered on import in the order of the documentation."""

# isort: off
from rope_ext.methods.kinds import (
    Band,
    DynamicMethod,
    FrequencyMethod,
    Map,
    Method,
    PositionMethod,
    distances_in_use,
    longrope_table,
    identity,
)
from rope_ext.methods.registry import (
    all_encodings,
    all_methods,
    build_method,
    method_class,
    register,
)
from rope_ext.methods.rope import Rope, geometric, reach
from rope_ext.methods.temperature import Llama4, LogN, SSMax, Temperature, YaRNTemperature
from rope_ext.methods.geometry import ChunkGap, Distance, Queries, Sinks
from rope_ext.methods.yarn import YaRN
from rope_ext.methods.dynamic_yarn import DynamicYaRN
from rope_ext.methods.ntk import NTK
from rope_ext.methods.dynamic_ntk import DynamicNTK
from rope_ext.methods.pi import PI
from rope_ext.methods.mrrope import MrRoPE
from rope_ext.methods.ntk_by_parts import NTKByParts
from rope_ext.methods.llama3 import Llama3
from rope_ext.methods.longrope import LongRoPE
from rope_ext.methods.longrope2 import LongRoPE2
from rope_ext.methods.abf import ABF
from rope_ext.methods.base_truncation import BaseTruncation
from rope_ext.methods.resonance import Resonance
from rope_ext.methods.p_rope import PRoPE
from rope_ext.methods.clipped import Clipped
from rope_ext.methods.rerope import ReRoPE
from rope_ext.methods.leaky_rerope import LeakyReRoPE
from rope_ext.methods.self_extend import SelfExtend
from rope_ext.methods.jet_long import JetLong
from rope_ext.methods.dpe import DPE
from rope_ext.methods.lampe import LaMPE
from rope_ext.methods.dual_chunk import DualChunk
from rope_ext.methods.string import STRING
from rope_ext.methods.lm_infinite import LMInfinite
# isort: on

__all__ = [
    "ABF",
    "DPE",
    "NTK",
    "PI",
    "STRING",
    "Band",
    "BaseTruncation",
    "ChunkGap",
    "Clipped",
    "Distance",
    "DualChunk",
    "DynamicMethod",
    "DynamicNTK",
    "DynamicYaRN",
    "FrequencyMethod",
    "JetLong",
    "LMInfinite",
    "LaMPE",
    "LeakyReRoPE",
    "Llama3",
    "Llama4",
    "LogN",
    "LongRoPE",
    "LongRoPE2",
    "Map",
    "Method",
    "MrRoPE",
    "NTKByParts",
    "PRoPE",
    "PositionMethod",
    "Queries",
    "ReRoPE",
    "Resonance",
    "Rope",
    "SSMax",
    "SelfExtend",
    "Sinks",
    "Temperature",
    "YaRN",
    "YaRNTemperature",
    "all_encodings",
    "all_methods",
    "build_method",
    "distances_in_use",
    "geometric",
    "identity",
    "longrope_table",
    "method_class",
    "reach",
    "register",
]
