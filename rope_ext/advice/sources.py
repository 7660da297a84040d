"""What `recommend` reads: the vendors' recipes, numbers of pretrained models, a calibration.

``vendors.json`` says how the vendors of models extend them, or have extended them (2026). ``make
evidence`` measures two models, with each method's defaults, and ``make evidence-pages`` writes
``evidence.json``: for each model, methods by name.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_ext.config.record import method_from_json
from rope_ext.errors import MeasureError, OptionError
from rope_ext.methods import Method

NAME, FORMAT = "calibration", 2  # of the file that rope_eval writes


def _read(name: str) -> Any:
    return json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Recipe:
    """YaRN settings that a vendor publishes for checkpoints that ship unscaled."""

    models: str  # as the vendor names them
    model_types: list[str]  # of the text model's configuration
    configured: list[int]  # max_position_embeddings of the checkpoints that it is for
    trained: int  # original_max_position_embeddings of the recipe
    factor: float  # the largest that is published
    source: str
    note: str = ""


_VENDORS, _EVIDENCE = _read("vendors.json"), _read("evidence.json")
_RECIPES = tuple(Recipe(**one) for one in _VENDORS["recipes"])
_CANDIDATES = (
    *("rerope", "self_extend", "leaky_rerope", "dual_chunk", "dpe", "jet_long", "lampe"),
    *("yarn", "dynamic_yarn", "mrrope"),
)
"""Methods for use without fine-tuning, best first on the bundled checkpoints."""


def recipe_for(model_type: str, configured: int) -> Recipe | None:
    """The vendor's recipe for an unscaled checkpoint of that family and length; None: none."""
    fitting = (r for r in _RECIPES if model_type in r.model_types and configured in r.configured)
    return next(fitting, None)


def shipped_with(model_type: str, rope_type: str) -> str:
    """The vendor's own scaling of such a checkpoint, in words; ``""``: not in the table."""
    for one in _VENDORS["shipped"]:
        if (one["model_type"], one["rope_type"]) == (model_type, rope_type):
            return f", as {one['models']}: {one['settings']}; {one['source']}"
    return ""


def sentence(name: str) -> str:
    """Say what a method does to each model that it was measured on."""
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
    """Names: most passkeys first, then by perplexity, both at twice the trained length.

    Perplexity counts to one decimal, as its intervals are no narrower; equal methods are in the
    order of ``_CANDIDATES``.
    """

    def key(name: str) -> tuple[int, float]:
        found = [model["methods"].get(name, {}) for model in _EVIDENCE]
        passkeys = sum(one["passkey"][0] for one in found if "passkey" in one)
        return -passkeys, sum(round(one["perplexity"], 1) for one in found if "perplexity" in one)

    return sorted(_CANDIDATES, key=key)


@dataclass(frozen=True)
class Calibrated:
    """The method that a calibration found, and for which model."""

    model: str  # class of the decoder
    trained_length: int
    target_length: int
    method: Method
    sentence: str  # its numbers, in words

    def misfit(self, model: str, trained: int, target: int) -> str | None:
        """Why it is not for this model and length."""
        if (self.model, self.trained_length) != (model, trained):
            return (
                f"of {self.model} with {self.trained_length} trained tokens, and this is {model} "
                f"with {trained}"
            )
        if self.target_length < target:
            return f"for {self.target_length} tokens, and target_length={target}"
        return None


def parsed(text: str) -> dict[str, Any]:
    """The JSON of a calibration; raises a ValueError, TypeError or KeyError if it is none."""
    data = json.loads(text)
    if data[NAME] != FORMAT:
        raise ValueError(f"its format is {data[NAME]!r}, not {FORMAT}")
    return data


def read(path: str | os.PathLike[str]) -> str:
    """The text of a calibration: of that file, or of the one in that folder."""
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
    """The error for a text that is not the JSON of a calibration."""
    reason = f"{error} is missing" if isinstance(error, KeyError) else error
    return MeasureError(
        f"this is not what a calibration found ({reason}); give the {NAME}.json that "
        f"`rope-ext calibrate` wrote"
    )


def calibration_for(model: Any, given: Any) -> Calibrated | None:
    """The calibration that was given, or is in the model's folder."""
    if given is None:
        here = isinstance(model, (str, Path)) and (Path(model) / f"{NAME}.json").is_file()
        try:
            return calibration_for(model, model) if here else None
        except MeasureError:  # it may be somebody else's
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
