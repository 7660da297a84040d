"""The method that an entry of transformers' ``rope_parameters`` describes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rope_ext.methods import FrequencyMethod, LongRoPE, YaRN, method_class
from rope_ext.methods.temperature import yarn_factor

METHODS: Mapping[str, str] = {
    "yarn": "yarn",
    "llama3": "llama3",
    "linear": "pi",
    "dynamic": "dynamic_ntk",
    "longrope": "longrope",
}
"""Names of methods by ``rope_type``."""
_SAME_NAMES = {
    "yarn": ("beta_fast", "beta_slow", "truncate"),
    "llama3": ("low_freq_factor", "high_freq_factor"),
}
"""Options of methods that entries store under the same name."""


def method_of(entry: Mapping[str, Any], factor: float) -> FrequencyMethod | None:
    """The method that computes an entry; None: no method does.

    Args:
        entry: of ``rope_parameters``.
        factor: extension factor, which not every entry holds.

    Raises:
        KeyError, TypeError, RopeExtError: the entry is incomplete, or its values are not valid.
    """
    kind = entry["rope_type"]
    if kind not in METHODS:
        return None
    options: dict[str, Any] = {
        name: entry[name] for name in _SAME_NAMES.get(kind, ()) if entry.get(name) is not None
    }
    cls: Any = method_class(METHODS[kind])
    if cls is LongRoPE:
        long, short = tuple(entry["long_factor"]), tuple(entry["short_factor"])
        # Equal tables serve every length.
        options |= {"long_factor": long, "short_factor": None if short == long else short}
    given = entry.get("attention_factor")
    if cls in (LongRoPE, YaRN) and given is not None:
        usual = cls is YaRN and math.isclose(given, yarn_factor(factor))
        options["attention_factor"] = None if usual else given
    return cls(factor=factor, **options)
