"""Runs kvpress presses on patched models, and reports the results.

Run by: python tests/helpers/presses.py FOLDER, which holds kvpress, installed without dependencies.
A separate process, because kvpress wraps all attention functions of transformers on import.
The model passes on ``cache_position``, which kvpress reads and transformers has dropped.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

import rope_ext
from tests.helpers.checkpoint import save_checkpoint
from tests.helpers.models import tiny_llama

ROOT = Path(__file__).parents[2]
TOKENS = 200
ids = torch.randint(4, 128, (1, TOKENS), generator=torch.Generator().manual_seed(0))


def presses() -> dict[str, Callable[[], Any]]:
    import kvpress

    def snap() -> Any:
        return kvpress.SnapKVPress(0.5, window_size=16)

    return {
        "KnormPress": lambda: kvpress.KnormPress(0.5),
        "SnapKVPress": snap,
        "ExpectedAttentionPress": lambda: kvpress.ExpectedAttentionPress(0.5, 64),
        "KeyRerotationPress": lambda: kvpress.KeyRerotationPress(snap()),
    }


@torch.no_grad()
def pressed(model: Any, press: Any) -> list[torch.Tensor]:
    """Return each layer's scores, and next-token logits with the remaining cache."""
    scorer, found = getattr(press, "press", press), []
    score = scorer.score

    def told(*args: Any, **kwargs: Any) -> torch.Tensor:
        found.append(score(*args, **kwargs))
        return found[-1]

    scorer.score = told
    cache = DynamicCache(config=model.config)
    with press(model):
        model(ids, past_key_values=cache, cache_position=torch.arange(TOKENS))
    assert len(found) == 2, "a press that scores nothing proves nothing"
    at = torch.tensor([[TOKENS]])
    given = {"past_key_values": cache, "position_ids": at, "cache_position": at[0]}
    return [*found, model(ids[:, :1], **given).logits]


def apart(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Return the largest difference, relative to the largest number."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(one, other, strict=True))


def refusal(model: Any, press: Any) -> str:
    try:
        pressed(model, press)
    except rope_ext.CacheError as error:
        return str(error)
    return ""


def by_the_page() -> list[int]:
    """Return the keys left in every layer by the example in the docs, on a small checkpoint."""
    page = (ROOT / "docs" / "engines" / "beside.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(import rope_ext\nimport torch\n.*?)```", page, re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder, "checkpoints", "tiny-512"))
        os.chdir(folder)
        names: dict[str, Any] = {}
        exec(block, names)
        os.chdir(ROOT)
    return [layer.keys.shape[2] for layer in names["cache"].layers]


def main() -> None:
    sys.path.append(sys.argv[1])
    kinds, answers = presses(), {"page": by_the_page()}
    for method in ("yarn", "resonance", "dynamic_yarn"):
        model = rope_ext.patch(tiny_llama(), method, factor=4)
        if method == "dynamic_yarn":
            native = rope_ext.patch(tiny_llama(), method, factor=4, length=TOKENS)
        else:
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                native = AutoModelForCausalLM.from_pretrained(folder).eval()
        answers[method] = {
            name: [apart(pressed(model, press()), pressed(native, press())), None]
            for name, press in kinds.items()
            if (method, name) != ("dynamic_yarn", "KeyRerotationPress")
        }
        for name, found in answers[method].items():
            found[1] = apart(pressed(tiny_llama(), kinds[name]()), pressed(native, kinds[name]()))
    refused = {"dynamic_yarn": ["KeyRerotationPress"], "rerope": list(kinds)}
    for method, names in refused.items():
        model = rope_ext.patch(tiny_llama(), method, factor=4)
        answers[f"refused {method}"] = {name: refusal(model, kinds[name]()) for name in names}
    try:
        with kinds["KnormPress"]()(model):
            rope_ext.patch(model, "self_extend", factor=4, replace=True)
    except rope_ext.CacheError as error:
        answers["patched under a press"] = str(error)
    # kvpress has wrapped the attention function that multiplies queries, too.
    pressed(rope_ext.patch(tiny_llama(), "yarn", factor=4, temperature=1.5), kinds["SnapKVPress"]())
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
