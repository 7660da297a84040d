"""How the vendors of models extend them, or have extended them: ``vendors.json``.

Looked up in 2026. Configurations that transformers ships as a family's default are cited by file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Recipe:
    """YaRN settings that a vendor publishes for checkpoints that ship unscaled.

    Args:
        models: as the vendor names them.
        model_types: of the text model's configuration.
        configured: ``max_position_embeddings`` of the checkpoints it is for, tokens.
        trained: ``original_max_position_embeddings`` of the recipe, tokens.
        factor: the published one, and the largest.
        source: where it is published.
        note: what else the vendor says.
    """

    models: str
    model_types: list[str]
    configured: list[int]
    trained: int
    factor: float
    source: str
    note: str = ""


@dataclass(frozen=True)
class Shipped:
    """The scaling that a family's published checkpoints already have, in words."""

    models: str
    model_type: str
    rope_type: str
    settings: str
    source: str


_DATA = json.loads(Path(__file__).with_name("vendors.json").read_text(encoding="utf-8"))
RECIPES = tuple(Recipe(**one) for one in _DATA["recipes"])
SHIPPED = tuple(Shipped(**one) for one in _DATA["shipped"])


def recipe_for(model_type: str, configured: int) -> Recipe | None:
    """The vendor's recipe for an unscaled checkpoint of that family and length; None: none."""
    fitting = (r for r in RECIPES if model_type in r.model_types and configured in r.configured)
    return next(fitting, None)


def shipped_with(model_type: str, rope_type: str) -> Shipped | None:
    """The vendor's own scaling of such a checkpoint; None: not in the table."""
    fitting = (s for s in SHIPPED if (s.model_type, s.rope_type) == (model_type, rope_type))
    return next(fitting, None)
