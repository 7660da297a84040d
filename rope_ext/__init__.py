"""Extend the context of any RoPE model of Hugging Face transformers with one line."""

from rope_ext.describing import Description, MethodInfo, describe, methods
from rope_ext.errors import (
    AlreadyPatchedError,
    AlreadyScaledError,
    CacheError,
    NoRopeError,
    NotPatchedError,
    OptionError,
    RopeExtError,
    UnknownMethodError,
    UnsupportedModelError,
)
from rope_ext.methods import (
    ABF,
    NTK,
    PI,
    BaseTruncation,
    DynamicNTK,
    DynamicYaRN,
    FrequencyMethod,
    Llama3,
    LongRoPE,
    NTKByParts,
    PRoPE,
    Resonance,
    YaRN,
)
from rope_ext.patching import patch, patched, unpatch

__version__ = "0.1.0"

__all__ = [
    "ABF",
    "NTK",
    "PI",
    "AlreadyPatchedError",
    "AlreadyScaledError",
    "BaseTruncation",
    "CacheError",
    "Description",
    "DynamicNTK",
    "DynamicYaRN",
    "FrequencyMethod",
    "Llama3",
    "LongRoPE",
    "MethodInfo",
    "NTKByParts",
    "NoRopeError",
    "NotPatchedError",
    "OptionError",
    "PRoPE",
    "Resonance",
    "RopeExtError",
    "UnknownMethodError",
    "UnsupportedModelError",
    "YaRN",
    "describe",
    "methods",
    "patch",
    "patched",
    "unpatch",
]
