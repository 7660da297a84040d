"""What ``recommend`` reads of a calibration: the file that ``rope_eval`` writes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_ext.config.record import method_from_json
from rope_ext.errors import MeasureError, OptionError
from rope_ext.methods import Method

NAME = "calibration"
FORMAT = 2


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
