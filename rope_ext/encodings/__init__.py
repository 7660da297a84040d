"""Encodings beside the rotation: one file for each."""

from rope_ext.encodings.alibi import ALiBi
from rope_ext.encodings.base import Encoding
from rope_ext.encodings.kerple import KerpleLog, KerplePower
from rope_ext.encodings.nope import NoPE
from rope_ext.encodings.rotation import RoPE
from rope_ext.encodings.t5 import T5

__all__ = ["T5", "ALiBi", "Encoding", "KerpleLog", "KerplePower", "NoPE", "RoPE"]
