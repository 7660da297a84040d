"""What ``recommend`` reads of a calibration: the file that ``rope_eval`` writes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
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
    """The method that a calibration found, and for which model.

    Args:
        model: class of the decoder.
        trained_length: tokens.
        target_length: tokens.
        method: the best one, with its options.
        sentence: its numbers, in words.
    """

    model: str
    trained_length: int
    target_length: int
    method: Method
    sentence: str


def parsed(text: str) -> dict[str, Any]:
    """The JSON of a calibration, whose format is known.

    Raises:
        ValueError, TypeError, KeyError: it is none.
    """
    data = json.loads(text)
    if data[NAME] != FORMAT:
        raise ValueError(f"its format is {data[NAME]!r}, not {FORMAT}")
    return data


def from_json(text: str) -> Calibrated:
    """Read the JSON of a calibration.

    Raises:
        MeasureError: it is none, or of another version.
    """
    try:
        data = parsed(text)
        lengths = {name: _tokens(data, name) for name in ("trained_length", "target_length")}
        model, sentence = str(data["model"]), str(data["sentence"])
        return Calibrated(
            model, **lengths, method=method_from_json(data["method"]), sentence=sentence
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise unreadable(error) from None


def read(path: str | os.PathLike[str]) -> str:
    """The text of a calibration: of that file, or of the one in that folder.

    Raises:
        MeasureError: there is none.
    """
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


def calibration_for(model: Any, given: Any) -> tuple[Calibrated | None, bool]:
    """The calibration that was given, or lies in the model's folder; whether it was given."""
    if isinstance(given, (str, Path)):
        return _read(given), True
    if hasattr(given, "to_json"):
        return from_json(given.to_json()), True
    if given is not None:
        raise OptionError(
            f"calibration={given!r} is not valid; give what rope_ext.calibrate returned, or its "
            f"file or folder"
        )
    if isinstance(model, (str, Path)) and (Path(model) / f"{NAME}.json").is_file():
        try:
            return _read(model), False
        except MeasureError:  # it may be somebody else's
            return None, False
    return None, False


def _read(path: str | Path) -> Calibrated:
    text = read(path)
    try:
        return from_json(text)
    except MeasureError as error:
        raise MeasureError(f"{path}: {error}") from None


def misfit(found: Calibrated, model: str, trained: int, target: int) -> str | None:
    """Why a calibration is not for this model and length."""
    if (found.model, found.trained_length) != (model, trained):
        return (
            f"of {found.model} with {found.trained_length} trained tokens, and this is {model} "
            f"with {trained}"
        )
    if found.target_length < target:
        return f"for {found.target_length} tokens, and target_length={target}"
    return None


def _tokens(data: Mapping[str, Any], name: str) -> int:
    if type(data[name]) is not int:
        raise TypeError(f"{name} is {data[name]!r}")
    return data[name]
