"""The public names, each from the module that defines it; ``__init__.py`` reads this file."""

# ruff: noqa: I001
# fmt: off
from rope_eval.reports.calibration import Calibration as Calibration
from rope_eval.tune.calibrate import calibrate as calibrate
from rope_eval.tune.search import search as search
from rope_ext.advice.describe import (
    Description as Description, Diagnosis as Diagnosis, MethodInfo as MethodInfo,
    PairDiagnosis as PairDiagnosis, SiteDiagnosis as SiteDiagnosis, describe as describe,
    diagnose as diagnose, methods as methods
)
from rope_eval.tune.fitting import fit as fit
from rope_ext.advice.recommend import recommend as recommend
from rope_ext.advice.recommendation import Recommendation as Recommendation
from rope_ext.encodings import (
    ALiBi as ALiBi, CoPE as CoPE, DAPE as DAPE, DeBERTa as DeBERTa, DroPE as DroPE,
    Encoding as Encoding, FIRE as FIRE, FLOATER as FLOATER, KerpleLog as KerpleLog,
    KerplePower as KerplePower, LearnedPositions as LearnedPositions,
    Multiplicative as Multiplicative, NoPE as NoPE, RPE3D as RPE3D, RePo as RePo, RoPE as RoPE,
    SWAN as SWAN, Sandwich as Sandwich, Shaw as Shaw, Sinusoidal as Sinusoidal, T5 as T5,
    TransformerXL as TransformerXL, XPos as XPos
)
from rope_ext.engines import export as export
from rope_ext.engines.base import Export as Export
from rope_ext.errors import (
    AdapterError as AdapterError, AlreadyPatchedError as AlreadyPatchedError,
    AlreadyScaledError as AlreadyScaledError, CacheError as CacheError, ExportError as ExportError,
    LoadError as LoadError, MeasureError as MeasureError, NoRopeError as NoRopeError,
    NotPatchedError as NotPatchedError, OptionError as OptionError, RecordError as RecordError,
    RopeExtError as RopeExtError, UnknownMethodError as UnknownMethodError,
    UnsupportedModelError as UnsupportedModelError
)
from rope_ext.methods import (
    ABF as ABF, BaseTruncation as BaseTruncation, Clipped as Clipped, DPE as DPE,
    DualChunk as DualChunk, DynamicNTK as DynamicNTK, DynamicYaRN as DynamicYaRN,
    FrequencyMethod as FrequencyMethod, LMInfinite as LMInfinite, LaMPE as LaMPE,
    LeakyReRoPE as LeakyReRoPE, Llama3 as Llama3, Llama4 as Llama4, LogN as LogN,
    LongRoPE as LongRoPE, LongRoPE2 as LongRoPE2, MrRoPE as MrRoPE, NTK as NTK,
    NTKByParts as NTKByParts, PI as PI, PRoPE as PRoPE, PositionMethod as PositionMethod,
    ReRoPE as ReRoPE, Resonance as Resonance, SSMax as SSMax, STRING as STRING,
    JetLong as JetLong, SelfExtend as SelfExtend, Temperature as Temperature, YaRN as YaRN,
    YaRNTemperature as YaRNTemperature
)
from rope_ext.patching import (
    patch as patch, patched as patched, unpatch as unpatch, unpatched as unpatched
)
from rope_ext.saving.load import (
    from_pretrained as from_pretrained, load_adapter as load_adapter, save_sidecar as save_sidecar
)
from rope_ext.version import __version__ as __version__
