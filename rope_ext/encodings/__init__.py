"""Encodings beside the rotation: one file for each."""

from rope_ext.encodings.alibi import ALiBi
from rope_ext.encodings.base import Encoding, Heads
from rope_ext.encodings.cope import CoPE
from rope_ext.encodings.dape import DAPE
from rope_ext.encodings.fire import FIRE
from rope_ext.encodings.kerple import KerpleLog, KerplePower
from rope_ext.encodings.nope import NoPE
from rope_ext.encodings.rotation import RoPE
from rope_ext.encodings.sandwich import Sandwich
from rope_ext.encodings.t5 import T5

__all__ = [
    "DAPE",
    "FIRE",
    "T5",
    "ALiBi",
    "CoPE",
    "Encoding",
    "Heads",
    "KerpleLog",
    "KerplePower",
    "NoPE",
    "RoPE",
    "Sandwich",
]
