"""Position encodings other than RoPE, one file for each."""

from rope_ext.encodings.alibi import ALiBi
from rope_ext.encodings.base import Encoding, Heads
from rope_ext.encodings.cope import CoPE
from rope_ext.encodings.dape import DAPE
from rope_ext.encodings.deberta import DeBERTa
from rope_ext.encodings.drope import DroPE
from rope_ext.encodings.fire import FIRE
from rope_ext.encodings.floater import FLOATER
from rope_ext.encodings.inputs import InputEncoding
from rope_ext.encodings.kerple import KerpleLog, KerplePower
from rope_ext.encodings.learned import LearnedPositions
from rope_ext.encodings.multiplicative import Multiplicative
from rope_ext.encodings.nope import NoPE
from rope_ext.encodings.repo import RePo
from rope_ext.encodings.rotation import RoPE
from rope_ext.encodings.rpe_3d import RPE3D
from rope_ext.encodings.sandwich import Sandwich
from rope_ext.encodings.shaw import Shaw
from rope_ext.encodings.sinusoidal import Sinusoidal
from rope_ext.encodings.swan import SWAN
from rope_ext.encodings.t5 import T5
from rope_ext.encodings.transformer_xl import TransformerXL
from rope_ext.encodings.xpos import XPos

__all__ = [
    "DAPE",
    "FIRE",
    "FLOATER",
    "RPE3D",
    "SWAN",
    "T5",
    "ALiBi",
    "CoPE",
    "DeBERTa",
    "DroPE",
    "Encoding",
    "Heads",
    "InputEncoding",
    "KerpleLog",
    "KerplePower",
    "LearnedPositions",
    "Multiplicative",
    "NoPE",
    "RePo",
    "RoPE",
    "Sandwich",
    "Shaw",
    "Sinusoidal",
    "TransformerXL",
    "XPos",
]
