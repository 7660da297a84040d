"""Fields of ``config.json`` for programs that do not read ``rope_parameters``.

mlx-lm, transformers 4 and older converters read ``rope_theta`` and ``rope_scaling``. Without these
fields, they fall back to a default base and no scaling, and silently drop the patch. So the fields
either describe the patch, or store a sentence instead of the base, which makes the reader fail.

transformers 5 prefers ``rope_scaling`` to ``rope_parameters`` if both exist, and reads the base
from it, so these fields never change what it builds.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from rope_ext.config.record import OLDER
from rope_ext.errors import CURE
from rope_ext.methods.temperature import yarn_factor
from rope_ext.rotary.sites import PatchTarget, text_config

STOP = "rope_ext: extended by rope_parameters, which this program does not read"
"""Written instead of the base, for readers that cannot compute the patch."""

_THETA, _SCALING = OLDER
_ALL = ("default", "linear", "yarn", "llama3", "longrope")
READ: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "olmo2", "olmoe"), _ALL),
        **dict.fromkeys(("granite", "granitemoe", "smollm3", "seed_oss", "dots1"), _ALL),
        **dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), ("default", "linear", "llama3")),
        **dict.fromkeys(("mixtral", "qwen2_moe", "starcoder2", "cohere", "gemma"), ("default",)),
        **dict.fromkeys(("ernie4_5", "hunyuan_v1_dense", "phi3", "nemotron"), ("default",)),
    }
)
"""For each family, the values of ``rope_type`` that mlx-lm 0.32.2 builds from the older fields."""


def older_fields(place: PatchTarget, native: bool, is_dynamic: bool) -> dict[str, Any]:
    """Return the older fields for the configuration of a patched model.

    Args:
        place: where the patch was applied; its configuration already describes the patch.
        native: whether transformers builds the patch from ``rope_parameters``.
        is_dynamic: whether frequencies depend on the sequence length.

    Returns:
        ``rope_theta``, and ``rope_scaling`` where transformers 5 may read it.
    """
    config = text_config(place.decoder)
    parameters = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        return {_THETA: STOP if native else CURE}  # the older fields describe only one embedding
    if not native:
        refused = {_SCALING: copy.deepcopy(parameters)}
        return {_THETA: CURE, **(refused if parameters.get("rope_type") == CURE else {})}
    scaling = None if is_dynamic else _rope_scaling(config, parameters)
    if scaling is None or any(site.baked for site in place.sites):
        return {_THETA: STOP}
    fields = {_THETA: STOP}
    if parameters["rope_type"] in READ.get(config.model_type, ()):
        fields = {_THETA: parameters["rope_theta"]}
    return fields if parameters["rope_type"] == "default" else {**fields, _SCALING: scaling}


def _rope_scaling(config: Any, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a ``rope_scaling`` that mlx-lm and transformers interpret equally, or None.

    See ``mlx_lm/models/rope_utils.py`` in mlx-lm 0.32.2, which ignores ``attention_factor``,
    ``truncate`` and ``partial_rotary_factor``.
    """
    kind, given = parameters["rope_type"], parameters.get("attention_factor")
    scaling = copy.deepcopy(dict(parameters))
    if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
        return None
    if kind in ("default", "linear", "llama3"):
        return scaling
    if kind == "yarn":
        factor = parameters["factor"]
        if not parameters.get("truncate", True) or parameters.get("mscale_all_dim") or factor <= 1:
            return None
        usual = yarn_factor(factor)
        if given is not None and not math.isclose(given, usual, rel_tol=1e-9):
            # mlx-lm computes (0.1 mscale ln(factor) + 1) / 1.
            scaling |= {"mscale": (given - 1) / (usual - 1), "mscale_all_dim": 0}
        return scaling
    if kind == "longrope" and parameters["short_factor"] == parameters["long_factor"]:
        length = parameters["original_max_position_embeddings"]
        factor = config.max_position_embeddings / length
        computed = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
        if given is None or math.isclose(computed, given, rel_tol=1e-6):
            return scaling
    return None
