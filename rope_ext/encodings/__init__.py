"""Encodings beside the rotation: one file for each."""

from rope_ext.encodings.alibi import ALiBi
from rope_ext.encodings.base import Encoding, Heads
from rope_ext.encodings.kerple import KerpleLog, KerplePower
from rope_ext.encodings.nope import NoPE
from rope_ext.encodings.t5 import T5

__all__ = ["T5", "ALiBi", "Encoding", "Heads", "KerpleLog", "KerplePower", "NoPE"]
