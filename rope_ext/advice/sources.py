"""Data that `recommend` reads: vendors' recipes, results on pretrained models, and calibrations.

``vendors.json`` lists how model vendors extend their models (2026). ``make evidence`` measures two
models with each method's defaults, and ``make evidence-pages`` writes
``evidence.json``: for each model, methods by name.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rope_ext.config.record import method_from_json
from rope_ext.errors import MeasureError, OptionError
from rope_ext.methods import Method

NAME, FORMAT = "calibration", 2  # name and format of the file that rope_eval writes


def _read(name: str) -> Any:
    return json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Recipe:
    """YaRN settings published by a vendor for checkpoints that ship unscaled."""

    models: str  # the vendor's names for them
    model_types: list[str]  # model_type of the text model's configuration
    configured: list[int]  # max_position_embeddings of the matching checkpoints
    trained: int  # original_max_position_embeddings of the recipe
    factor: float  # the largest published one
    source: str
    note: str = ""


_VENDORS, _EVIDENCE = _read("vendors.json"), _read("evidence.json")
_RECIPES = tuple(Recipe(**one) for one in _VENDORS["recipes"])
_CANDIDATES = (
    "rerope self_extend leaky_rerope dual_chunk dpe jet_long lampe yarn dynamic_yarn mrrope"
)
"""Methods for use without fine-tuning, ranked by results on the bundled checkpoints."""


def recipe_for(model_type: str, configured: int) -> Recipe | None:
    """Return the vendor's recipe for an unscaled checkpoint of a family and length, or None."""
    fitting = (r for r in _RECIPES if model_type in r.model_types and configured in r.configured)
    return next(fitting, None)


def shipped_with(model_type: str, rope_type: str) -> str:
    """Describe the vendor's own scaling of such a checkpoint; ``""`` if it is not in the table."""
    for one in _VENDORS["shipped"]:
        if (one["model_type"], one["rope_type"]) == (model_type, rope_type):
            return f", as {one['models']}: {one['settings']}; {one['source']}"
    return ""


def sentence(name: str) -> str:
    """Summarize a method's results on each model that it was measured on."""
    parts = []
    for model in _EVIDENCE:
        found, unpatched = model["methods"].get(name, {}), model["methods"]["unpatched"]
        said = []
        if "perplexity" in found:
            said.append(
                f"perplexity {found['perplexity']:g} at twice its length "
                f"(unpatched {unpatched['perplexity']:g})"
            )
        if "passkey" in found:
            said.append(f"{found['passkey'][0]} of {found['passkey'][1]} passkeys there")
        if "within" in found:
            said.append(f"{found['within']} % perplexity within {model['within']} tokens")
        if said:
            parts.append(f"{model['model']}: {', '.join(said)}")
    return "; ".join(parts) or "Not measured on a pretrained model"


def ranked() -> list[str]:
    """Rank methods by passkeys, then by perplexity to one decimal, at twice the trained length."""

    def key(name: str) -> tuple[int, float]:
        found = [model["methods"].get(name, {}) for model in _EVIDENCE]
        passkeys = sum(one["passkey"][0] for one in found if "passkey" in one)
        return -passkeys, sum(round(one["perplexity"], 1) for one in found if "perplexity" in one)

    return sorted(_CANDIDATES.split(), key=key)


class Calibrated(NamedTuple):
    """The method that a calibration found, and the model that it was found for."""

    model: str  # class of the decoder
    trained_length: int
    target_length: int
    method: Method
    sentence: str  # its results, as text


def parsed(text: str) -> dict[str, Any]:
    """Parse the JSON of a calibration; raises ValueError, TypeError or KeyError if malformed."""
    data = json.loads(text)
    if data[NAME] != FORMAT:
        raise ValueError(f"its format is {data[NAME]!r}, not {FORMAT}")
    return data


def read(path: str | os.PathLike[str]) -> str:
    """Read the text of a calibration file, or of the one in a folder."""
    path = Path(path)
    path = path / f"{NAME}.json" if path.is_dir() else path
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise MeasureError(
            f"cannot read the calibration {path}: {reason}; give the file that "
            f"`rope-ext calibrate` wrote"
        ) from None


def unreadable(error: Exception) -> MeasureError:
    """Return the error for text that is not the JSON of a calibration."""
    reason = f"{error} is missing" if isinstance(error, KeyError) else error
    return MeasureError(
        f"this is not what a calibration found ({reason}); give the {NAME}.json that "
        f"`rope-ext calibrate` wrote"
    )


def calibration_for(model: Any, given: Any) -> Calibrated | None:
    """Return the given calibration, or the one in the model's folder, or None."""
    if given is None:
        here = isinstance(model, (str, Path)) and (Path(model) / f"{NAME}.json").is_file()
        try:
            return calibration_for(model, model) if here else None
        except MeasureError:  # it may belong to another program
            return None
    path = isinstance(given, (str, Path))
    if not path and not hasattr(given, "to_json"):
        raise OptionError(
            f"calibration={given!r} is not valid; give what rope_ext.calibrate returned, or its "
            f"file or folder"
        )
    try:
        data = parsed(read(given) if path else given.to_json())
        lengths = data["trained_length"], data["target_length"]
        if any(type(value) is not int for value in lengths):
            raise TypeError(f"trained_length and target_length are {lengths}")
        method = method_from_json(data["method"])
        return Calibrated(str(data["model"]), *lengths, method, str(data["sentence"]))
    except MeasureError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise MeasureError(f"{given if path else NAME}: {unreadable(error)}") from None
