"""Extend the context of RoPE models of Hugging Face transformers with one line.

Public names are imported when they are first used (PEP 562), so that the command line shows its
help without importing torch.
"""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import rope_ext.requirements  # noqa: F401 - before what fails in the words of an old transformers
from rope_ext.command import evaluators as _evaluators
from rope_ext.version import __version__ as __version__

if TYPE_CHECKING:
    from rope_eval.reports.calibration import Calibration
    from rope_eval.tune.calibrate import calibrate
    from rope_eval.tune.search import search
    from rope_ext.advice.describe import Description, MethodInfo, describe, methods
    from rope_ext.advice.diagnose import Diagnosis, PairDiagnosis, SiteDiagnosis, diagnose
    from rope_ext.advice.fitting import fit
    from rope_ext.advice.recommend import Recommendation, recommend
    from rope_ext.encodings import (
        DAPE,
        FIRE,
        FLOATER,
        RPE3D,
        SWAN,
        T5,
        ALiBi,
        CoPE,
        DeBERTa,
        DroPE,
        Encoding,
        KerpleLog,
        KerplePower,
        LearnedPositions,
        Multiplicative,
        NoPE,
        RePo,
        RoPE,
        Sandwich,
        Shaw,
        Sinusoidal,
        TransformerXL,
        XPos,
    )
    from rope_ext.engines import Export, export
    from rope_ext.errors import (
        AdapterError,
        AlreadyPatchedError,
        AlreadyScaledError,
        CacheError,
        ExportError,
        LoadError,
        MeasureError,
        NoRopeError,
        NotPatchedError,
        OptionError,
        RecordError,
        RopeExtError,
        UnknownMethodError,
        UnsupportedModelError,
    )
    from rope_ext.methods import (
        ABF,
        DPE,
        NTK,
        PI,
        STRING,
        BaseTruncation,
        Clipped,
        DualChunk,
        DynamicNTK,
        DynamicYaRN,
        FrequencyMethod,
        LaMPE,
        LeakyReRoPE,
        Llama3,
        Llama4,
        LMInfinite,
        LogN,
        LongRoPE,
        LongRoPE2,
        MrRoPE,
        NTKByParts,
        PositionMethod,
        PRoPE,
        ReRoPE,
        Resonance,
        SelfExtend,
        SSMax,
        Temperature,
        YaRN,
        YaRNTemperature,
    )
    from rope_ext.patching import patch, patched, unpatch, unpatched
    from rope_ext.saving.adapters import load_adapter, save_sidecar
    from rope_ext.saving.load import from_pretrained

_EVALUATORS = {
    "Calibration": "reports.calibration",
    "calibrate": "tune.calibrate",
    "search": "tune.search",
}
"""Modules of ``rope_eval`` by the public names that are found in them."""
_MODULES = (
    *("errors", "methods", "encodings", "patching", "engines"),
    *("saving.adapters", "saving.load"),
    *("advice.describe", "advice.diagnose", "advice.recommend", "advice.fitting"),
)
"""Modules that are searched for all other public names, lower ones first."""

__all__ = [
    "ABF",
    "DAPE",
    "DPE",
    "FIRE",
    "FLOATER",
    "NTK",
    "PI",
    "RPE3D",
    "STRING",
    "SWAN",
    "T5",
    "ALiBi",
    "AdapterError",
    "AlreadyPatchedError",
    "AlreadyScaledError",
    "BaseTruncation",
    "CacheError",
    "Calibration",
    "Clipped",
    "CoPE",
    "DeBERTa",
    "Description",
    "Diagnosis",
    "DroPE",
    "DualChunk",
    "DynamicNTK",
    "DynamicYaRN",
    "Encoding",
    "Export",
    "ExportError",
    "FrequencyMethod",
    "KerpleLog",
    "KerplePower",
    "LMInfinite",
    "LaMPE",
    "LeakyReRoPE",
    "LearnedPositions",
    "Llama3",
    "Llama4",
    "LoadError",
    "LogN",
    "LongRoPE",
    "LongRoPE2",
    "MeasureError",
    "MethodInfo",
    "MrRoPE",
    "Multiplicative",
    "NTKByParts",
    "NoPE",
    "NoRopeError",
    "NotPatchedError",
    "OptionError",
    "PRoPE",
    "PairDiagnosis",
    "PositionMethod",
    "RePo",
    "ReRoPE",
    "Recommendation",
    "RecordError",
    "Resonance",
    "RoPE",
    "RopeExtError",
    "SSMax",
    "Sandwich",
    "SelfExtend",
    "Shaw",
    "Sinusoidal",
    "SiteDiagnosis",
    "Temperature",
    "TransformerXL",
    "UnknownMethodError",
    "UnsupportedModelError",
    "XPos",
    "YaRN",
    "YaRNTemperature",
    "calibrate",
    "describe",
    "diagnose",
    "export",
    "fit",
    "from_pretrained",
    "load_adapter",
    "methods",
    "patch",
    "patched",
    "recommend",
    "save_sidecar",
    "search",
    "unpatch",
    "unpatched",
]


def __getattr__(name: str) -> Any:
    if name in _EVALUATORS:
        value = getattr(_evaluators.require(_EVALUATORS[name]), name)
    elif name in __all__:
        modules = (importlib.import_module(f"rope_ext.{module}") for module in _MODULES)
        value = next(getattr(module, name) for module in modules if hasattr(module, name))
    elif not name.startswith("_") and importlib.util.find_spec(f"rope_ext.{name}") is not None:
        value = importlib.import_module(f"rope_ext.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps ``rope_ext.methods`` the function when the subpackage of that name is imported."""

    @property
    def methods(self) -> Any:
        from rope_ext.advice.describe import methods

        return methods

    @methods.setter
    def methods(self, value: ModuleType) -> None:  # as the import of a subpackage does
        pass


sys.modules[__name__].__class__ = _Package
