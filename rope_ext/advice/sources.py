"""What `recommend` reads: the vendors' recipes, and numbers of pretrained models.

``vendors.json`` says how the vendors of models extend them, or have extended them (2026). ``make
evidence`` measures two models, with each method's defaults, and ``make evidence-pages`` writes
``evidence.json``: for each model, methods by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
