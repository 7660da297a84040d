"""Builds the training command, which several commands print."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

RECIPE = "recipes/own_model_yarn_lora.yaml"
ON_CPU = ("--use_cpu", "true", "--quantize", "false", "--optim", "adamw_torch")
"""Settings that a GPU recipe needs on a CPU."""


def training_command(
    model: str,
    method: str,
    trained: int,
    target: int,
    *,
    options: Mapping[str, Any] | str | None = None,
    compose: bool = False,
    text: str | None = None,
    cpu: bool = False,
) -> list[str]:
    """Return the command that checks whether training fits, and prints the training command.

    ``options`` are those of the method, or a file of ``rope-ext calibrate``; ``text`` evaluates the
    result, and None is Python's library. ``cpu``: there is no GPU.
    """
    words = ["python", "-m", "recipes.memory", RECIPE, "--model", model, "--method", method]
    words += ["--original_max_position_embeddings", str(trained), "--target_length", str(target)]
    if options:
        given = options if isinstance(options, str) else json.dumps(dict(options))
        words += ["--method_options", given]
    words += ["--compose", "true"] if compose else []
    words += ["--eval_dataset", text] if text and not text.startswith("hf:") else []
    return [*words, *(ON_CPU if cpu else ("--card", "24"))]
