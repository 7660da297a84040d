"""One file per method. Importing it registers it: the order here is that of the README."""

# isort: off
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
from rope_ext.methods.yarn import YaRN
from rope_ext.methods.dynamic_yarn import DynamicYaRN
from rope_ext.methods.ntk import NTK
from rope_ext.methods.dynamic_ntk import DynamicNTK
from rope_ext.methods.pi import PI
from rope_ext.methods.ntk_by_parts import NTKByParts
from rope_ext.methods.llama3 import Llama3
from rope_ext.methods.longrope import LongRoPE
from rope_ext.methods.abf import ABF
from rope_ext.methods.base_truncation import BaseTruncation
from rope_ext.methods.resonance import Resonance
from rope_ext.methods.p_rope import PRoPE
# isort: on

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
