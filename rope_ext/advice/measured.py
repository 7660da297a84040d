"""What decides without fine-tuning where no vendor has a recipe: numbers of pretrained models.

``make evidence`` measures them, with each method's defaults, and ``make evidence-pages`` writes
``evidence.json``: for each model, methods by name.
"""

from __future__ import annotations

import json
from pathlib import Path

CANDIDATES = (
    *("rerope", "self_extend", "leaky_rerope", "dual_chunk", "dpe", "lampe"),
    *("yarn", "dynamic_yarn", "mrrope"),
)
"""Methods for use without fine-tuning, best first on the bundled checkpoints."""
_EVIDENCE = json.loads(Path(__file__).with_name("evidence.json").read_text(encoding="utf-8"))


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
    order of ``CANDIDATES``.
    """

    def key(name: str) -> tuple[int, float]:
        found = [model["methods"].get(name, {}) for model in _EVIDENCE]
        passkeys = sum(one["passkey"][0] for one in found if "passkey" in one)
        return -passkeys, sum(round(one["perplexity"], 1) for one in found if "perplexity" in one)

    return sorted(CANDIDATES, key=key)
