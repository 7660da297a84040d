"""One file per method; importing them here registers them, in the order of the README."""

from rope_ext.methods.base import (
    DynamicMethod,
    FrequencyMethod,
    Rope,
    all_methods,
    build_method,
    geometric,
    longrope_table,
    method_class,
)
from rope_ext.methods.yarn import YaRN  # isort: skip
from rope_ext.methods.dynamic_yarn import DynamicYaRN  # isort: skip
from rope_ext.methods.ntk import NTK  # isort: skip
from rope_ext.methods.dynamic_ntk import DynamicNTK  # isort: skip
from rope_ext.methods.pi import PI  # isort: skip
from rope_ext.methods.ntk_by_parts import NTKByParts  # isort: skip
from rope_ext.methods.llama3 import Llama3  # isort: skip
from rope_ext.methods.longrope import LongRoPE  # isort: skip
from rope_ext.methods.abf import ABF  # isort: skip
from rope_ext.methods.base_truncation import BaseTruncation  # isort: skip
from rope_ext.methods.resonance import Resonance  # isort: skip
from rope_ext.methods.p_rope import PRoPE  # isort: skip

__all__ = [
    "ABF",
    "NTK",
    "PI",
    "BaseTruncation",
    "DynamicMethod",
    "DynamicNTK",
    "DynamicYaRN",
    "FrequencyMethod",
    "Llama3",
    "LongRoPE",
    "NTKByParts",
    "PRoPE",
    "Resonance",
    "Rope",
    "YaRN",
    "all_methods",
    "build_method",
    "geometric",
    "longrope_table",
    "method_class",
]
