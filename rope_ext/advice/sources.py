"""Data that `recommend` reads: vendors' recipes, published and own results, and calibrations.

``vendors.json`` lists how model vendors extend their models (2026), and methods with published
results, the best ones first. ``make evidence`` measures two models with each method's defaults, and
``make evidence-pages`` writes ``evidence.json``: for each model, methods by name.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rope_ext.config.record import method_from_json
from rope_ext.errors import MeasureError, OptionError

NAME, FORMAT = "calibration", 2  # name and format of the file that rope_eval writes


def _read(name: str) -> Any:
    return json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


_VENDORS, _EVIDENCE = _read("vendors.json"), _read("evidence.json")
PUBLISHED: dict[str, dict[str, str]] = _VENDORS["published"]
_RECIPES = [SimpleNamespace(**one) for one in _VENDORS["recipes"]]
_CANDIDATES = (
    "rerope self_extend leaky_rerope dual_chunk dpe jet_long lampe yarn dynamic_yarn mrrope"
)
"""Methods for use without fine-tuning, ranked by results on the bundled checkpoints."""


def recipe_for(model_type: str, configured: int) -> Any:
    """Return the vendor's YaRN recipe for an unscaled checkpoint of a family and length, or None.

    ``trained`` is its ``original_max_position_embeddings``, ``factor`` the largest published one.
    """
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


@contextmanager
def calibration_in(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Read a calibration file, or the one in a folder; bad data in the block is a MeasureError."""
    file = Path(path)
    file = file / f"{NAME}.json" if file.is_dir() else file
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data[NAME] != FORMAT:
            raise ValueError(f"its format is {data[NAME]!r}, not {FORMAT}")
        yield data
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise MeasureError(
            f"cannot read the calibration {file}: {reason}; give the file that "
            f"`rope-ext calibrate` wrote"
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise MeasureError(
            f"{path}: this is not what a calibration found ({reason}); give the {NAME}.json that "
            f"`rope-ext calibrate` wrote"
        ) from None


def calibration_for(model: Any, given: Any) -> Any:
    """Return the given calibration, or the one in the model's folder, or None."""
    if given is None:
        here = isinstance(model, (str, Path)) and (Path(model) / f"{NAME}.json").is_file()
        try:
            return calibration_for(model, model) if here else None
        except MeasureError:  # it may belong to another program
            return None
    if not isinstance(given, (str, Path)):
        if not hasattr(given, "to_json"):
            raise OptionError(
                f"calibration={given!r} is not valid; give what rope_ext.calibrate returned, or "
                f"its file or folder"
            )
        return given
    with calibration_in(given) as data:
        lengths = data["trained_length"], data["target_length"]
        if any(type(value) is not int for value in lengths):
            raise TypeError(f"trained_length and target_length are {lengths}")
        method = method_from_json(data["method"])
        return SimpleNamespace(**data | {"method": method, "sentence": str(data["sentence"])})
