"""Position encodings other than RoPE, one file for each."""

from rope_ext.encodings.alibi import ALiBi as ALiBi
from rope_ext.encodings.base import Encoding as Encoding
from rope_ext.encodings.base import Heads as Heads
from rope_ext.encodings.base import InputEncoding as InputEncoding
from rope_ext.encodings.cope import CoPE as CoPE
from rope_ext.encodings.dape import DAPE as DAPE
from rope_ext.encodings.deberta import DeBERTa as DeBERTa
from rope_ext.encodings.drope import DroPE as DroPE
from rope_ext.encodings.fire import FIRE as FIRE
from rope_ext.encodings.floater import FLOATER as FLOATER
from rope_ext.encodings.kerple import KerpleLog as KerpleLog
from rope_ext.encodings.kerple import KerplePower as KerplePower
from rope_ext.encodings.learned import LearnedPositions as LearnedPositions
from rope_ext.encodings.multiplicative import Multiplicative as Multiplicative
from rope_ext.encodings.nope import NoPE as NoPE
from rope_ext.encodings.repo import RePo as RePo
from rope_ext.encodings.rotation import RoPE as RoPE
from rope_ext.encodings.rpe_3d import RPE3D as RPE3D
from rope_ext.encodings.sandwich import Sandwich as Sandwich
from rope_ext.encodings.shaw import Shaw as Shaw
from rope_ext.encodings.sinusoidal import Sinusoidal as Sinusoidal
from rope_ext.encodings.swan import SWAN as SWAN
from rope_ext.encodings.t5 import T5 as T5
from rope_ext.encodings.transformer_xl import TransformerXL as TransformerXL
from rope_ext.encodings.xpos import XPos as XPos
