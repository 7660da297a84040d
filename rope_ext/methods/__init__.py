"""One file per method, registered on import in the order of the documentation."""

# isort: off
from rope_ext.methods.kinds import DynamicMethod as DynamicMethod
from rope_ext.methods.kinds import FrequencyMethod as FrequencyMethod, Method as Method
from rope_ext.methods.kinds import PositionMethod as PositionMethod, all_encodings as all_encodings
from rope_ext.methods.kinds import all_methods as all_methods, build_method as build_method
from rope_ext.methods.kinds import longrope_table as longrope_table
from rope_ext.methods.kinds import method_class as method_class, register as register
from rope_ext.methods.rope import Rope as Rope, extended_length as extended_length
from rope_ext.methods.rope import geometric as geometric
from rope_ext.methods.temperature import Llama4 as Llama4, LogN as LogN, SSMax as SSMax
from rope_ext.methods.temperature import Temperature as Temperature
from rope_ext.methods.temperature import YaRNTemperature as YaRNTemperature
from rope_ext.methods.geometry import Band as Band, ChunkGap as ChunkGap, Distance as Distance
from rope_ext.methods.geometry import Map as Map, Queries as Queries, Sinks as Sinks
from rope_ext.methods.geometry import identity as identity
from rope_ext.methods.yarn import YaRN as YaRN
from rope_ext.methods.dynamic_yarn import DynamicYaRN as DynamicYaRN
from rope_ext.methods.ntk import NTK as NTK
from rope_ext.methods.dynamic_ntk import DynamicNTK as DynamicNTK
from rope_ext.methods.pi import PI as PI
from rope_ext.methods.mrrope import MrRoPE as MrRoPE
from rope_ext.methods.ntk_by_parts import NTKByParts as NTKByParts
from rope_ext.methods.llama3 import Llama3 as Llama3
from rope_ext.methods.longrope import LongRoPE as LongRoPE
from rope_ext.methods.longrope2 import LongRoPE2 as LongRoPE2
from rope_ext.methods.abf import ABF as ABF
from rope_ext.methods.base_truncation import BaseTruncation as BaseTruncation
from rope_ext.methods.resonance import Resonance as Resonance
from rope_ext.methods.p_rope import PRoPE as PRoPE
from rope_ext.methods.clipped import Clipped as Clipped
from rope_ext.methods.rerope import ReRoPE as ReRoPE
from rope_ext.methods.leaky_rerope import LeakyReRoPE as LeakyReRoPE
from rope_ext.methods.self_extend import SelfExtend as SelfExtend
from rope_ext.methods.jet_long import JetLong as JetLong
from rope_ext.methods.dpe import DPE as DPE
from rope_ext.methods.lampe import LaMPE as LaMPE
from rope_ext.methods.dual_chunk import DualChunk as DualChunk
from rope_ext.methods.string import STRING as STRING
from rope_ext.methods.lm_infinite import LMInfinite as LMInfinite
# isort: on
