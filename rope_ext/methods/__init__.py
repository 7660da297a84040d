"""Methods are registered on import; the order of these imports is that of the README."""

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
from rope_ext.methods.geometry import ChunkGap, Distance, Sinks
from rope_ext.methods.interpolation import (
    NTK,
    PI,
    DynamicNTK,
    DynamicYaRN,
    Llama3,
    MrRoPE,
    NTKByParts,
    YaRN,
)
from rope_ext.methods.longrope import LongRoPE, LongRoPE2
from rope_ext.methods.retrained import ABF, BaseTruncation, Clipped, PRoPE, Resonance
from rope_ext.methods.distances import DPE, LaMPE, LeakyReRoPE, ReRoPE, SelfExtend
from rope_ext.methods.chunks import DualChunk, LMInfinite, STRING
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
