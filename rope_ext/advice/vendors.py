"""How the vendors of models extend them, or have extended them: ``vendors.json``, from 2026."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


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


_DATA = json.loads(Path(__file__).with_name("vendors.json").read_text(encoding="utf-8"))
RECIPES = tuple(Recipe(**one) for one in _DATA["recipes"])


def recipe_for(model_type: str, configured: int) -> Recipe | None:
    """The vendor's recipe for an unscaled checkpoint of that family and length; None: none."""
    fitting = (r for r in RECIPES if model_type in r.model_types and configured in r.configured)
    return next(fitting, None)


def shipped_with(model_type: str, rope_type: str) -> str:
    """The vendor's own scaling of such a checkpoint, in words; ``""``: not in the table."""
    for one in _DATA["shipped"]:
        if (one["model_type"], one["rope_type"]) == (model_type, rope_type):
            return f", as {one['models']}: {one['settings']}; {one['source']}"
    return ""
